"""Files of the cache: private, sealed, written whole or not at all, and removed when unused."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.jit import sealed_files
from lowbit.jit.sealed_files import PART_SECONDS, REFRESH_SECONDS, UNUSED_SECONDS, read, write

CONTENT = b"\x7fELF" + bytes(range(256))
NAME = "0123456789abcdef" * 2 + "01234567.o"
OTHER_NAME = "f" * 40 + ".o"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An entry in a folder of a process that has not looked for unused entries yet."""
    sealed_files._remove_unused_once.cache_clear()
    sealed_files._warn.cache_clear()
    path = tmp_path / "deep" / "cache" / NAME
    write(path, CONTENT)
    return path


def set_age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def test_content_comes_back(path: Path) -> None:
    assert read(path) == CONTENT
    write(path, b"")
    assert read(path) == b""
    assert read(path.with_name(OTHER_NAME)) is None


def flip_a_byte(data: bytes) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte of the content": flip_a_byte,
    "a byte of the digest": lambda data: data[:20] + bytes([data[20] ^ 0x80]) + data[21:],
    "truncated": lambda data: data[: len(data) // 2],
    "only the magic": lambda data: data[: len(sealed_files._MAGIC)],
    "half of the magic": lambda data: data[:7],
    "empty": lambda data: b"",
    "another magic": lambda data: b"lowbit cache 9\n" + data[len(sealed_files._MAGIC) :],
    "foreign": lambda data: b"\x7fELF" * 1000,
    "something appended": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_read(path: Path, damage: str) -> None:
    good = path.read_bytes()
    path.write_bytes(DAMAGES[damage](good))
    assert read(path) is None
    write(path, CONTENT)
    assert path.read_bytes() == good


def test_a_file_in_the_place_of_another_is_not_read(path: Path) -> None:
    other = path.with_name(OTHER_NAME)
    other.write_bytes(path.read_bytes())
    assert read(other) is None


NEEDS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
OTHERS: dict[str, Callable[[Path], None]] = {
    "for the group": lambda path: path.chmod(0o770),
    "for all": lambda path: path.chmod(0o707),
    "for all, sticky": lambda path: path.chmod(0o1777),
    "of nobody": lambda path: os.chown(path, 65534, 65534),
}
kinds_of_others = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=NEEDS_ROOT if "of" in k else ()) for k in OTHERS]
)


@kinds_of_others
def test_a_folder_that_others_may_write_is_not_used(path: Path, kind: str) -> None:
    """Neither read nor written, and the user is told so once."""
    other = path.with_name(OTHER_NAME)
    OTHERS[kind](path.parent)
    expected = r"cache of compiled kernels .* is not used"
    with pytest.warns(RuntimeWarning, match=expected) as warnings:
        contents = [read(path), write(other, CONTENT), read(other)]
    assert contents == [None] * 3
    assert len(warnings) == 1
    assert str(path.parent) in str(warnings[0].message)
    assert not other.exists()


@kinds_of_others
def test_a_file_that_others_may_write_is_replaced(path: Path, kind: str) -> None:
    OTHERS[kind](path)
    assert read(path) is None
    write(path, CONTENT)
    assert read(path) == CONTENT
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o022, 0o002, 0])
def test_a_new_folder_is_private_and_one_of_ours_is_used(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "new" / NAME
    before = os.umask(umask)
    try:
        write(path, CONTENT)
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    assert read(path) == CONTENT


def test_a_file_that_is_a_folder_is_no_obstacle(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)
    assert read(path) is None
    write(path, CONTENT)
    assert list(path.parent.iterdir()) == [path], "a part was left behind"


def test_a_folder_that_cannot_be_made_means_no_files(tmp_path: Path) -> None:
    """A file stands where the folder would be: that stops even root."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / NAME
    write(path, CONTENT)
    assert read(path) is None


@pytest.mark.parametrize("call", ["replace", "fdopen"])
def test_a_write_that_fails_leaves_nothing_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Renaming is refused, or the disk is full."""

    def refuse(*arguments: object) -> None:
        if isinstance(arguments[0], int):
            os.close(arguments[0])
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(sealed_files.os, call, refuse)
    write(path.with_name(OTHER_NAME), CONTENT)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_in_use_stays_young(path: Path) -> None:
    """Times of access are not asked: many file systems keep none."""
    set_age(path, REFRESH_SECONDS / 2)
    assert read(path) == CONTENT
    assert age(path) > REFRESH_SECONDS / 3, "a read wrote without need"
    set_age(path, UNUSED_SECONDS * 2)
    assert read(path) == CONTENT
    assert age(path) < 60


def test_what_nobody_used_is_removed_by_the_next_process_that_writes(path: Path) -> None:
    folder = path.parent
    ages = {
        "a" * 40 + ".o": UNUSED_SECONDS + 60,
        "a" * 40 + ".ir": UNUSED_SECONDS + 60,
        "b" * 40 + ".o": UNUSED_SECONDS - 60,
        "abcdefgh.part": PART_SECONDS + 60,
        "tmpab_12345": PART_SECONDS + 60,  # as lowbit's parts were called once
        "ijklmnop.part": PART_SECONDS - 60,
        "somebody's notes.txt": UNUSED_SECONDS * 9,
        "tmp": UNUSED_SECONDS * 9,
    }
    for name, seconds in ages.items():
        (folder / name).write_bytes(b"anything")
        set_age(folder / name, seconds)
    (folder / ("c" * 40 + ".o")).mkdir()
    set_age(folder / ("c" * 40 + ".o"), UNUSED_SECONDS * 2)
    sealed_files._remove_unused_once.cache_clear()
    write(path, CONTENT)
    assert {file.name for file in folder.iterdir()} == {
        NAME, "b" * 40 + ".o", "c" * 40 + ".o", "ijklmnop.part", "somebody's notes.txt", "tmp",
    }  # fmt: skip


def test_a_folder_that_can_only_be_read_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where marking a file as used is refused. (Root may write everywhere.)"""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise PermissionError(30, "read-only file system")

    set_age(path, UNUSED_SECONDS)
    monkeypatch.setattr(sealed_files.os, "utime", refuse)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert read(path) == CONTENT
        write(path.with_name(OTHER_NAME), CONTENT)
    finally:
        path.parent.chmod(0o700)
    assert list(path.parent.iterdir()) == [path]
