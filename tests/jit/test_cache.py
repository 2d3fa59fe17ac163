"""The disk cache: entries are reused, checked, and never in the way."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lowbit
from lowbit.isa import InstructionSet, active, available, get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import cache, entry
from lowbit.jit import compile as compiler
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import Kernel


def squares(k: Builder, out: S32Pointer, n: Int, *, factor: int = 1) -> None:
    """out[i] = factor · i²."""
    for i in k.range(0, n):
        (out + i).store((i * i * factor).to(s32))


def cubes(k: Builder, out: S32Pointer, n: Int) -> None:
    """out[i] = i³."""
    for i in k.range(0, n):
        (out + i).store((i * i * i).to(s32))


def run(factor: int = 1) -> list[int]:
    """What a new Kernel object of the text computes: nothing is left in memory by others."""
    out = np.full(5, -1, np.int32)
    Kernel(squares).program(active(), factor=factor)(1, out.ctypes.data, len(out))
    return out.tolist()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet, in a process that can enter kernels already."""
    entry._entry()
    path = tmp_path / "deep" / "cache"
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(path))
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sets that something was really compiled for, while the test runs."""
    seen: list[str] = []
    original = compiler.object_code

    def counting(ir_text: str, isa: InstructionSet) -> bytes:
        seen.append(isa.name)
        return original(ir_text, isa)

    monkeypatch.setattr(compiler, "object_code", counting)
    return seen


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_an_entry_is_written_and_reused(folder: Path, compiled: list[str]) -> None:
    assert run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 1
    assert len(entries(folder)) == 1
    assert run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 1


def test_one_kernel_object_compiles_once_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("no folder")
    kernel = Kernel(squares)
    programs = {kernel.program(active()) for _ in range(3)}
    assert len(programs) == len(compiled) == 1


def test_another_process_does_not_compile_again(folder: Path) -> None:
    script = """
import sys
import numpy as np
from lowbit.jit import compile as compiler
if sys.argv[1] == "warm":
    def refuse(*args):
        raise AssertionError("compiled again")
    compiler.object_code = refuse
import lowbit
print(lowbit.matmul(np.full((2, 3), 2, np.uint8), np.full((3, 1), -5, np.int8)).tolist())
"""
    for state in ("cold", "warm"):
        done = subprocess.run(
            [sys.executable, "-c", script, state], capture_output=True, text=True, check=False
        )
        assert done.stdout == "[[-30], [-30]]\n", done.stderr


def _flip_a_byte(data: bytes) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte of the code": _flip_a_byte,
    "a byte of the digest": lambda data: data[:20] + bytes([data[20] ^ 0x80]) + data[21:],
    "truncated": lambda data: data[: len(data) // 2],
    "only the magic": lambda data: data[:16],
    "half of the magic": lambda data: data[:7],
    "empty": lambda data: b"",
    "another magic": lambda data: b"lowbit object 9\n" + data[16:],
    "foreign": lambda data: b"\x7fELF" * 1000,
    "something appended": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(folder: Path, compiled: list[str], damage: str) -> None:
    run()
    (path,) = entries(folder)
    good = path.read_bytes()
    path.write_bytes(DAMAGES[damage](good))
    assert cache.read(path) is None
    assert run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 2
    assert path.read_bytes() == good


def test_an_entry_of_another_kernel_is_rebuilt(folder: Path, compiled: list[str]) -> None:
    """Valid ones, one in the place of the other: of other static arguments, of another name."""
    assert run(1) == [0, 1, 4, 9, 16]
    assert run(3) == [0, 3, 12, 27, 48]
    first, second = entries(folder)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert run(1) == [0, 1, 4, 9, 16]
    assert run(3) == [0, 3, 12, 27, 48]
    assert len(compiled) == 4
    assert (first.read_bytes(), second.read_bytes()) == (one, other)


def test_an_entry_without_the_function_is_rebuilt(folder: Path, compiled: list[str]) -> None:
    run()
    (path,) = entries(folder)
    good = path.read_bytes()
    cache.write(path, compiler.object_code(Kernel(cubes).ir(active()), active()))
    assert cache.read(path) is not None
    assert run() == [0, 1, 4, 9, 16]
    assert path.read_bytes() == good


@pytest.fixture
def no_warning_yet() -> None:
    cache._warn.cache_clear()


NEEDS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
OTHERS: dict[str, Callable[[Path], None]] = {
    "for the group": lambda path: path.chmod(0o770),
    "for all": lambda path: path.chmod(0o707),
    "for all, sticky": lambda path: path.chmod(0o1777),
    "of nobody": lambda path: os.chown(path, 65534, 65534),
}


@pytest.mark.usefixtures("no_warning_yet")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=NEEDS_ROOT if "of" in k else ()) for k in OTHERS]
)
def test_a_folder_that_others_may_write_is_not_used(
    folder: Path, compiled: list[str], kind: str
) -> None:
    """Neither read nor written, and the user is told so once."""
    run()
    (path,) = entries(folder)
    path.unlink()
    OTHERS[kind](folder)
    with pytest.warns(RuntimeWarning, match=r"cache of compiled kernels .* is not used") as told:
        assert run() == run() == [0, 1, 4, 9, 16]
    assert len(told) == 1
    assert str(folder) in str(told[0].message)
    assert len(compiled) == 3
    assert entries(folder) == []


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=NEEDS_ROOT if "of" in k else ()) for k in OTHERS]
)
def test_an_entry_that_others_may_write_is_rebuilt(
    folder: Path, compiled: list[str], kind: str
) -> None:
    run()
    (path,) = entries(folder)
    OTHERS[kind](path)
    assert run() == run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 2
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o022, 0o002, 0])
def test_a_new_folder_is_private_and_one_of_ours_is_used(
    folder: Path, compiled: list[str], umask: int
) -> None:
    before = os.umask(umask)
    try:
        run()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    run()
    assert len(compiled) == 1


def test_an_entry_that_is_a_folder_is_no_obstacle(folder: Path, compiled: list[str]) -> None:
    run()
    (path,) = entries(folder)
    path.unlink()
    (path / "inside").mkdir(parents=True)
    assert run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 2
    assert entries(folder) == [path], "a temporary file was left behind"


def test_a_folder_that_cannot_be_written_means_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """A file stands where the folder would be: that stops even root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file"))
    assert run() == run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 2


def test_a_rename_that_fails_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise PermissionError(13, "not here")

    monkeypatch.setattr(cache.os, "replace", refuse)
    assert run() == [0, 1, 4, 9, 16]
    assert entries(folder) == []


def test_what_changes_the_name_of_an_entry(folder: Path) -> None:
    one, other = available()[0], "generic"
    parts = [(one, 1), (one, 2), (other, 1)]
    names = {cache.entry(squares, *p) for p in parts}
    names.add(cache.entry(cubes, one, 1))
    assert len(names) == 4
    assert cache.entry(squares, one, 1) == cache.entry(squares, one, 1)
    assert all(name.parent == folder for name in names)


@pytest.mark.skipif(len(available()) < 2, reason="there is only one instruction set here")
def test_each_set_and_each_static_argument_has_its_own_entry(
    folder: Path, compiled: list[str]
) -> None:
    kernel = Kernel(squares)
    programs = [
        kernel.program(get(name), factor=factor) for name in available() for factor in (1, 3)
    ]
    assert len(set(programs)) == len(entries(folder)) == len(compiled) == 2 * len(available())
    for factor in (1, 3):
        assert run(factor) == [factor * i * i for i in range(5)]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("elsewhere", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_of_a_kernel_from_elsewhere_counts(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.py"
    source = "NUMBER = {}\ndef text(k, out):\n    out.store(k.index(NUMBER))\n"
    path.write_text(source.format(1))
    module = _module(path)
    first = cache.entry(module.text)
    assert cache.entry(module.text) == first
    path.write_text(source.format(2))
    assert cache.entry(_module(path).text) != first


def test_the_source_of_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folders that generate code, and of no others."""
    copy = tmp_path / "lowbit"
    assert lowbit.__file__
    shutil.copytree(Path(lowbit.__file__).parent, copy)
    monkeypatch.setattr(lowbit, "__file__", str(copy / "__init__.py"))
    digest = cache._source_digest.__wrapped__
    before = digest()
    with (copy / "cli.py").open("a") as file:
        file.write("\n# more\n")
    assert digest() == before
    seen = {before}
    for name in ("isa/avx2.py", "jit/emit.py", "kernels/cpu/integer/product.py"):
        with (copy / name).open("a") as file:
            file.write("\n# more\n")
        seen.add(digest())
    monkeypatch.setattr(compiler, "VERSION", "another LLVM")
    seen.add(digest())
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOWBIT_CACHE_DIR": "/one", "XDG_CACHE_HOME": "/two", "HOME": "/three"}, "/one"),
        ({"XDG_CACHE_HOME": "/two", "HOME": "/three"}, "/two/lowbit"),
        ({"HOME": "/three"}, "/three/.cache/lowbit"),
    ],
)
def test_where_the_folder_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("LOWBIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == Path(expected)


RACER = """
import hashlib, sys
import numpy as np
import lowbit
a = np.arange(33 * 70, dtype=np.uint8).reshape(33, 70)
b = np.arange(70 * 19, dtype=np.uint8).view(np.int8).reshape(70, 19)
print("ready", flush=True)
sys.stdin.readline()
assert (lowbit.matmul(a, b) == a.astype(int) @ b.astype(int)).all()
print("right", flush=True)
"""


def test_processes_that_compile_the_same_at_once_all_succeed(folder: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate()[0] for racer in racers] == ["right\n"] * 3
    assert entries(folder), "nothing was kept"
    assert all(cache.read(path) for path in entries(folder))
