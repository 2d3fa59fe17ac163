"""The cache on disk: what is compiled is compiled once, whatever changes of the source."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lowbit
from lowbit.isa import InstructionSet, active, available, get
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import cache, entry, sealed_files
from lowbit.jit import compile as compiler
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import Kernel


def squares(k: Builder, out: S32Pointer, n: Int, *, factor: int = 1) -> None:
    """out[i] = factor · i²."""
    for i in k.range(0, n):
        (out + i).store((i * i * factor).to(s32))


def negative_squares(k: Builder, out: S32Pointer, n: Int, *, factor: int = 1) -> None:
    """out[i] = -factor · i²."""
    for i in k.range(0, n):
        (out + i).store((i * i * -factor).to(s32))


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


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels whose IR was built, while the test runs."""
    seen: list[str] = []
    original = Kernel.ir

    def counting(self: Kernel, isa: InstructionSet, /, **static: object) -> str:
        seen.append(self.name)
        return original(self, isa, **static)

    monkeypatch.setattr(Kernel, "ir", counting)
    return seen


@pytest.fixture
def in_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file's kernels count as lowbit's own, which the digest of its source covers."""
    monkeypatch.setattr(cache, "is_known", lambda text: True)


def change_the_source(monkeypatch: pytest.MonkeyPatch, digest: bytes = b"another") -> None:
    monkeypatch.setattr(cache, "_source_digest", lambda: digest)


def entries(folder: Path, suffix: str = "") -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))


def test_a_kernel_from_elsewhere_is_found_by_its_ir(
    folder: Path, compiled: list[str], built: list[str]
) -> None:
    assert run() == run() == [0, 1, 4, 9, 16]
    assert (len(compiled), len(built)) == (1, 2)
    assert [path.suffix for path in entries(folder)] == [".o"]


@pytest.mark.usefixtures("in_source")
def test_a_kernel_of_this_package_is_found_by_its_source(
    folder: Path, compiled: list[str], built: list[str]
) -> None:
    assert run() == run() == [0, 1, 4, 9, 16]
    assert (len(compiled), len(built)) == (1, 1)
    assert [path.suffix for path in entries(folder)] in ([".ir", ".o"], [".o", ".ir"])


@pytest.mark.usefixtures("in_source")
def test_a_source_that_builds_the_same_ir_compiles_nothing(
    folder: Path, compiled: list[str], built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    change_the_source(monkeypatch)
    assert run() == run() == [0, 1, 4, 9, 16]
    assert (len(compiled), len(built)) == (1, 2)
    assert (len(entries(folder, ".ir")), len(entries(folder, ".o"))) == (2, 1)


@pytest.mark.usefixtures("in_source", "folder")
def test_a_source_that_builds_another_ir_is_compiled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    change_the_source(monkeypatch)
    monkeypatch.setattr(squares, "__code__", negative_squares.__code__)
    assert run() == [0, -1, -4, -9, -16]
    change_the_source(monkeypatch, b"a third")
    assert run() == [0, -1, -4, -9, -16]
    assert len(compiled) == 2


@pytest.mark.usefixtures("folder")
def test_what_llvm_is_told_counts(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of the target: an object of another LLVM, or of other options, is not used."""
    run()
    target = compiler.target(active())
    others = {
        "version": "another LLVM",
        "features": target.features + ",-sse4a",
        "optimization": 1,
        "passes": 2,
        "vectorize": True,
    }
    for count, (field, value) in enumerate(others.items(), 2):
        changed = dataclasses.replace(target, **{field: value})
        monkeypatch.setattr(compiler, "target", lambda isa, changed=changed: changed)
        assert run() == run() == [0, 1, 4, 9, 16]
        assert len(compiled) == count, field


def test_one_kernel_object_compiles_once_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("no folder")
    kernel = Kernel(squares)
    programs = {kernel.program(active()) for _ in range(3)}
    assert len(programs) == len(compiled) == 1


@pytest.mark.deep
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


def cut_off(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.usefixtures("in_source")
@pytest.mark.parametrize("suffix", [".ir", ".o"])
def test_a_damaged_entry_is_rebuilt(folder: Path, compiled: list[str], suffix: str) -> None:
    """Of either level; how files may be damaged, tests/jit/test_sealed_files.py tries."""
    run()
    (path,) = entries(folder, suffix)
    good = path.read_bytes()
    path.write_bytes(cut_off(good))
    assert run() == [0, 1, 4, 9, 16]
    assert path.read_bytes() == good
    assert len(compiled) == (2 if suffix == ".o" else 1)


@pytest.mark.usefixtures("in_source")
@pytest.mark.parametrize("suffix", [".ir", ".o"])
def test_an_entry_of_another_kernel_is_rebuilt(folder: Path, suffix: str) -> None:
    """Valid ones, one in the place of the other: of other static arguments, of another name."""
    assert run(1) == [0, 1, 4, 9, 16]
    assert run(3) == [0, 3, 12, 27, 48]
    first, second = entries(folder, suffix)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert run(1) == [0, 1, 4, 9, 16]
    assert run(3) == [0, 3, 12, 27, 48]
    assert (first.read_bytes(), second.read_bytes()) == contents


@pytest.mark.usefixtures("in_source")
@pytest.mark.parametrize("name", ["", "../../etc/passwd", "0" * 40 + ".o", "\xff"])
def test_an_entry_that_names_no_object_is_rebuilt(
    folder: Path, compiled: list[str], name: str
) -> None:
    """Sealed rightly, so that only what it says is wrong."""
    run()
    (path,) = entries(folder, ".ir")
    good = path.read_bytes()
    sealed_files.write(path, name.encode("latin-1"))
    assert run() == [0, 1, 4, 9, 16]
    assert path.read_bytes() == good
    assert len(compiled) == 1


def test_an_entry_without_the_function_is_rebuilt(folder: Path, compiled: list[str]) -> None:
    run()
    (path,) = entries(folder)
    good = path.read_bytes()
    sealed_files.write(path, compiler.object_code(Kernel(cubes).ir(active()), active()))
    assert sealed_files.read(path) is not None
    assert run() == [0, 1, 4, 9, 16]
    assert path.read_bytes() == good


def test_a_folder_that_cannot_be_written_means_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """A file stands where the folder would be: that stops even root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "file"))
    assert run() == run() == [0, 1, 4, 9, 16]
    assert len(compiled) == 2


def test_what_changes_the_name_of_an_entry(folder: Path) -> None:
    one, other = available()[0], "generic"
    parts = [("squares", one, 1), ("squares", one, 2), ("squares", other, 1), ("cubes", one, 1)]
    names = {cache.source_entry(*p) for p in parts}
    assert len(names) == 4
    assert cache.source_entry(*parts[0]) in names
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


@pytest.mark.usefixtures("folder")
def test_the_file_of_a_kernel_from_elsewhere_counts(tmp_path: Path, compiled: list[str]) -> None:
    """Also what it imports: its IR is built each time."""
    path = tmp_path / "elsewhere.py"
    source = """
from lowbit.isa.types import S64Pointer
NUMBER = {}
def text(k, out: S64Pointer):
    out.store(k.index(NUMBER))
"""
    for number, count in ((7, 1), (8, 2), (8, 2)):
        path.write_text(source.format(number))
        out = np.zeros(1, np.int64)
        Kernel(_module(path).text).program(active())(1, out)
        assert (out[0], len(compiled)) == (number, count)


def test_code_is_made_of_what_the_digest_covers() -> None:
    """Kernels and their tools import nothing else, except from rooms that make no code."""
    root = Path(lowbit.__file__).parent
    imported = re.compile(r"^\s*(?:from|import) lowbit\.(\w+)", re.MULTILINE)
    for room in cache.CODE_FOLDERS:
        for path in (root / room).rglob("*.py"):
            if "triton" not in path.parts:  # whose compiler has a cache of its own
                rooms = set(imported.findall(path.read_text()))
                assert rooms <= {*cache.CODE_FOLDERS, "registry"}, path


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


@pytest.mark.deep
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
    assert all(sealed_files.read(path) for path in entries(folder))
