"""Files appear whole or not at all, with the mode they had, where links lead to."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lowbit.cli.application import opened
from lowbit.registry.files import naming_file, replacing


def _write(path: Path, content: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(content)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(failure: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_calls_leave_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "refused")))
    with pytest.raises(OSError, match="refused"):
        _write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=f"too large: '{path}'"):
            _write(path, bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_device_is_named(tmp_path: Path) -> None:
    """By files that are written in place, too: records and pages of the command line."""
    for write in (_in_place, _through_the_command_line):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write("/dev/full")
    with pytest.raises(OSError, match="elsewhere") as caught, naming_file(tmp_path):
        raise OSError("elsewhere")
    assert caught.value.filename is None


def _in_place(path: str) -> None:
    with naming_file(path), open(path, "w") as file:
        file.write("text")


def _through_the_command_line(path: str) -> None:
    with opened(path) as stream:
        assert stream is not None
        stream.write("text")


def test_content_is_synced_before_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def noted(descriptor: int) -> None:
        calls.append((os.path.isdir(f"/proc/self/fd/{descriptor}"), path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    _write(path)
    assert calls == [(False, False), "replace", (True, True)]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o444])
def test_the_mode_is_that_of_the_old_file(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    _write(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_of_a_new_file_is_the_usual_one(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        _write(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for content in (b"1", b"2"):  # the first time the link leads to nothing
        for name, to in (("near", "there/file"), ("far", "near")):
            (tmp_path / name).unlink(missing_ok=True)
            (tmp_path / name).symlink_to(to)
        _write(tmp_path / "far", content)
        assert (tmp_path / "far").is_symlink()
        assert (tmp_path / "near").is_symlink()
        assert (tmp_path / "there" / "file").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["far", "near", "there"]
    assert os.listdir(tmp_path / "there") == ["file"]


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    for name in ("pipe", "folder", "circle"):
        with pytest.raises(OSError, match="not a regular file"):
            _write(tmp_path / name)
    with pytest.raises(OSError, match="not a regular file"):
        _write(Path("/dev/full"))
    with pytest.raises(FileNotFoundError):
        _write(tmp_path / "none" / "file")
    assert sorted(os.listdir(tmp_path)) == ["circle", "folder", "pipe"]


@pytest.mark.parametrize("name", ["a.b[c]token*", "ü" * 127, "x" * 255])
def test_unusual_names(name: str, tmp_path: Path) -> None:
    (tmp_path / f".{name[:50]}.0123.unfinished").write_bytes(b"")  # not one of ours
    _write(tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"new"
    assert len(os.listdir(tmp_path)) == 2


_KILLED = """
import os, signal, sys
from lowbit.registry.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_what_killed_writers_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.b[c]token*"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
    killed, alive = writers
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(os.listdir(tmp_path)) == 2
    _write(path)
    assert len(os.listdir(tmp_path)) == 2  # the file, and that of the writer that lives
    alive.communicate()
    assert alive.returncode == 0
    assert path.read_bytes() == b"half"
    assert os.listdir(tmp_path) == [path.name]


def test_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(20):
                _write(path, bytes([number]) * 1000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(path.read_bytes())) == 1
    assert os.listdir(tmp_path) == ["file"]
