"""What a process decides once, in processes of their own: what is imported, the instruction set."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from lowbit.isa import SETS, available

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
Words = Callable[..., list[str]]

# Every value of both types, odd sizes, a strided operand; prints the set that ran and the sums.
PRODUCTS = """
import hashlib
import numpy as np
import lowbit
from lowbit.product.dispatch import active_kernel
digest = hashlib.sha256()
every = np.arange(256, dtype=np.uint8)
for m, n, k in [(1, 1, 1), (3, 129, 17), (65, 15, 127), (256, 33, 256)]:
    rng = np.random.default_rng(m)
    a = rng.permutation(np.resize(every, m * k)).reshape(m, k)
    b = rng.permutation(np.resize(every, 2 * k * n)).reshape(k, 2 * n)[:, ::-2].view(np.int8)
    for left in (a, a.view(np.int8)):
        for threads in (1, 2):
            sums = lowbit.matmul(left, b, threads=threads)
            assert (sums == left.astype(np.int64) @ b).all()
            digest.update(sums.tobytes())
print(active_kernel()[1], digest.hexdigest())
"""


def test_importing_lowbit_imports_nothing_else(words: Words) -> None:
    code = "import sys, lowbit; print(*sorted(sys.modules))"
    loaded = words(code)
    assert [name for name in loaded if name.startswith("lowbit")] == ["lowbit"]
    assert not {"numpy", "llvmlite", "ml_dtypes", "torch"} & set(loaded)


@pytest.mark.deep
def test_a_product_imports_no_framework(words: Words) -> None:
    code = PRODUCTS + "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    assert not {"torch", "numba", "rich", "triton", "typer"} & set(words(code))


def test_public_names_are_there_whatever_was_imported_first(words: Words) -> None:
    """No module of the package takes the place of a function."""
    code = """
import importlib, pkgutil, types
import lowbit
for found in pkgutil.iter_modules(lowbit.__path__, "lowbit."):
    if found.name not in ("lowbit.__main__", "lowbit.torch"):
        importlib.import_module(found.name)
assert set(lowbit.__all__) == {*lowbit._MODULES, "__version__"} <= set(dir(lowbit))
print(*(name for name in lowbit.__all__ if isinstance(getattr(lowbit, name), types.ModuleType)))
try:
    lowbit.nothing
except AttributeError as error:
    print(error)
"""
    assert " ".join(words(code)) == "module 'lowbit' has no attribute 'nothing'"


@pytest.mark.deep
def test_every_forced_set_gives_the_same_integers(words: Words) -> None:
    results = {name: words(PRODUCTS, LOWBIT_ISA=name) for name in ("", *available())}
    used = {name: result[0] for name, result in results.items()}
    assert used == {name: name or available()[0] for name in results}
    assert len({result[1] for result in results.values()}) == 1


@pytest.mark.parametrize("forced", ["sse9", "AVX2", "avx2 "])
def test_an_unknown_forced_set_is_told(run_python: RunPython, forced: str) -> None:
    done = run_python(PRODUCTS, LOWBIT_ISA=forced)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ValueError: LOWBIT_ISA={forced}: no instruction set is called")
    assert all(name in last for name in SETS)
    assert not done.stdout


@pytest.mark.parametrize("forced", sorted(SETS.keys() - set(available())))
def test_a_forced_set_that_the_machine_lacks_is_told(run_python: RunPython, forced: str) -> None:
    done = run_python(PRODUCTS, LOWBIT_ISA=forced)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"RuntimeError: LOWBIT_ISA={forced}: instruction set {forced!r} cannot run here: "
    )
    assert last.endswith(f"this machine has: {', '.join(available())}")
    assert not done.stdout


# One that nobody knows, one that this machine lacks: the tests above name all of them.
@pytest.mark.deep("bench matmul 8x8:8x8-amx", "bench matmul 8x8:8x8-sse9")
@pytest.mark.parametrize("forced", ["sse9", *sorted(SETS.keys() - set(available()))[:1]])
@pytest.mark.parametrize("command", ["info", "bench matmul 8x8:8x8"])
def test_the_command_line_says_it_in_one_line(
    run_python: RunPython, forced: str, command: str
) -> None:
    pytest.importorskip("typer")
    code = f"import sys; sys.argv[1:] = {command.split()!r}; from lowbit.cli import main; main()"
    done = run_python(code, LOWBIT_ISA=forced)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert f"LOWBIT_ISA={forced}: " in line


def test_many_calls_do_not_grow(words: Words) -> None:
    """Addresses, plans, slots: nothing is kept for a call."""
    code = """
import resource, numpy as np, lowbit
b = lowbit.pack(np.ones((64, 32), np.int8)); a = np.ones((2, 64), np.uint8)
def many(n):
    for _ in range(n): lowbit.matmul(a, b)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
many(20000); before = many(20000); print(many(200000) - before)
"""
    assert int(words(code)[0]) < 1024  # KiB


@pytest.mark.deep
def test_compiling_gives_its_memory_back(words: Words) -> None:
    """Of what LLVM allocates for a program nothing is left, but for its machine code."""
    code = """
import ctypes, gc
from lowbit.isa import get
from lowbit.jit import compile as compiler
from lowbit.jit.kernel import kernel
from lowbit.isa.types import F32Pointer, Int

@kernel
def polynomial(k, x: F32Pointer, n: Int):
    for i in k.range(0, n):
        value = (x + i).load()
        for power in range(200):
            value = value * value + float(power)
        (x + i).store(value)

class Heap(ctypes.Structure):  # mallinfo2
    _fields_ = [(f"word{i}", ctypes.c_size_t) for i in range(10)]
    used = property(lambda self: self.word4 + self.word7)

libc = ctypes.CDLL(None)
if not hasattr(libc, "mallinfo2"):
    print(0)
    raise SystemExit
libc.mallinfo2.restype = Heap
text = polynomial.ir(get("generic"))

def used_after(times):
    for _ in range(times):
        compiler.object_code(text, get("generic"))
    gc.collect()
    return libc.mallinfo2().used

used_after(5)
print((used_after(5) - used_after(25)) // -20)
"""
    assert int(words(code)[0]) < 8192  # bytes a program; 100,000 if LLVM's passes are kept
