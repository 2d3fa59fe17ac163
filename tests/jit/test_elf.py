"""Object files are put into memory without LLVM, and by LLVM where they need more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lowbit.isa import SETS, host
from lowbit.isa.types import F32Pointer, Int
from lowbit.jit import compile as compiler
from lowbit.jit import elf
from lowbit.jit.builder import Builder
from lowbit.jit.entry import bound
from lowbit.jit.kernel import kernel

Words = Callable[..., list[str]]

pytestmark = pytest.mark.skipif(not host.is_linux_x86(), reason="LLVM puts code into memory here")


@kernel
def polynomial(k: Builder, x: F32Pointer, n: Int) -> None:
    """With constants in memory and a function of the C library (fmaf, on the generic set)."""
    for i in k.range(0, n):
        value = (x + i).load(4)
        (x + i).store((value * 1.25 + 0.1) * value)


def run(code: bytes) -> np.ndarray:
    x = np.linspace(-2, 2, 64, dtype=np.float32)
    loaded = compiler.Loaded(code, "polynomial", SETS["generic"])
    bound(loaded, 1, ("x", "n"), {}, {"x": x, "n": 15})()
    return x


@pytest.fixture
def code() -> bytes:
    return compiler.object_code(polynomial.ir(SETS["generic"]), SETS["generic"])


def test_llvm_links_what_needs_more(code: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    here = run(code)
    monkeypatch.setattr(elf, "_VALUES", {})
    with pytest.raises(elf.Unknown, match="a relocation of type"):
        elf.ObjectFile(code)
    assert (run(code) == here).all()
    assert len(np.unique(here)) > 32


def test_zeros_that_are_written_lie_on_pages_of_their_own() -> None:
    """Two functions of one file share a counter, which starts at zero."""
    text = """
@counter = internal global i64 0
define i64 @count() {
  %old = load i64, ptr @counter
  %new = add i64 %old, 3
  store i64 %new, ptr @counter
  ret i64 %new
}
"""
    address = elf.ObjectFile(compiler.object_code(text, SETS["generic"])).placed("count")
    count = ctypes.CFUNCTYPE(ctypes.c_int64)(address)
    assert [count() for _ in range(3)] == [3, 6, 9]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "r-xp"


def test_functions_that_are_nowhere_are_named() -> None:
    text = "declare void @nowhere_else()\ndefine void @f() { call void @nowhere_else() ret void }"
    code = compiler.object_code(text, SETS["generic"])
    with pytest.raises(ValueError, match="nowhere_else"):
        compiler.Loaded(code, "f", SETS["generic"])


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"no object file, but long enough to be one"])
def test_what_is_no_object_file_is_refused(code: bytes) -> None:
    with pytest.raises(elf.Unknown):
        elf.ObjectFile(code)


@pytest.mark.deep
def test_llvm_is_not_loaded_for_programs_that_are_kept(words: Words) -> None:
    code = """
import sys
import numpy as np
import lowbit
a, b = np.ones((33, 70), np.uint8), np.ones((70, 17), np.int8)
assert (lowbit.matmul(a, b, threads=2) == 70).all()
assert (lowbit.gemm(a.astype("f4"), b.astype("f4")) == 70).all()
print(*(name for name in sys.modules if name.startswith(("llvmlite.", "logging", "tempfile"))))
"""
    words(code)  # fills the cache
    assert set(words(code)) <= {"llvmlite._version"}
