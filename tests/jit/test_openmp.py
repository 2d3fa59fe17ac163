"""Which OpenMP runtime is PyTorch's, among several: decoys built here, and the real ones."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Words = Callable[..., list[str]]

NEEDS_GCC = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("gcc") is None, reason="gcc builds the decoys"
)

# A runtime that says which one it is, and a library that uses one as libtorch does.
RUNTIME = """
int omp_get_max_threads(void) {{ return {number}; }}
void GOMP_parallel(void (*f)(void *), void *data, unsigned threads, unsigned flags) {{ f(data); }}
"""
LIBTORCH = """
int omp_get_max_threads(void);
void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
static void nothing(void *data) {}
int used(void) { GOMP_parallel(nothing, 0, 1, 0); return omp_get_max_threads(); }
"""
RUNTIMES = {"libgomp-aaaa.so.1": 2, "libgomp.so.1": 3, "libgomp-zzzz.so.1": 4, "libiomp5.so": 5}

# Loads libraries, then says which runtime libtorch uses, which one is found, and whose address.
ASK = """
import ctypes, sys
for argument in sys.argv[1:]:
    path, _, scope = argument.partition("=")
    last = ctypes.CDLL(path, ctypes.RTLD_GLOBAL if scope else ctypes.RTLD_LOCAL)
    if "torch" in path:
        libtorch = last
from lowbit.jit import openmp
name, address = openmp.of_torch()
own = ctypes.CDLL(openmp._file_of(address))
same = ctypes.cast(own.GOMP_parallel, ctypes.c_void_p).value == address
print(libtorch.used(), own.omp_get_max_threads(), name, same)
"""


def _compile(source: str, target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_suffix(".c")
    file.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-o", str(target), str(file), *options]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runtimes, and a libtorch linked to libgomp.so.1 with and without a table of jumps."""
    folder = tmp_path_factory.mktemp("libraries")
    for name, number in RUNTIMES.items():
        _compile(RUNTIME.format(number=number), folder / name, f"-Wl,-soname,{name}")
    _compile(
        RUNTIME.format(number=6), folder / "other" / "libgomp.so.1", "-Wl,-soname,libgomp.so.1"
    )
    linked = ("-L", str(folder), "-l:libgomp.so.1", f"-Wl,-rpath,{folder}")
    for kind in ("plt", "no-plt"):
        _compile(LIBTORCH, folder / kind / "libtorch_cpu.so", f"-f{kind}", "-O1", *linked)
    return folder


ORDERS = {
    "alone": ["plt/libtorch_cpu.so"],
    "first": ["plt/libtorch_cpu.so", "libgomp-aaaa.so.1", "libgomp-zzzz.so.1", "libiomp5.so"],
    "last": ["libgomp-aaaa.so.1", "libgomp-zzzz.so.1", "libiomp5.so", "plt/libtorch_cpu.so"],
    "last, without PLT": ["libgomp-aaaa.so.1", "libiomp5.so", "no-plt/libtorch_cpu.so"],
    "after one of its own's name": ["other/libgomp.so.1", "plt/libtorch_cpu.so"],
    "after one for all": ["libgomp-zzzz.so.1", "libiomp5.so=all", "plt/libtorch_cpu.so"],
    "before one for all": ["plt/libtorch_cpu.so", "libiomp5.so=all"],
}


@NEEDS_GCC
@pytest.mark.parametrize("preload", ["", "libiomp5.so"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_runtime_that_libtorch_calls(
    words: Words, libraries: Path, order: str, preload: str
) -> None:
    paths = [str(libraries / name) for name in ORDERS[order]]
    first = str(libraries / preload) if preload else ""
    used, found, name, same = words(ASK, *paths, LD_PRELOAD=first)
    assert (used, same) == (found, "True")
    numbers = {**RUNTIMES, "libgomp.so.1": 6 if "its own's" in order else 3}
    assert RUNTIMES.get(name) is not None
    assert preload or numbers[name] == int(used)


# Other runtimes beside PyTorch's; which is whose shows in the number of threads that is set.
BESIDE = """
import ctypes, sys
import numpy as np
import lowbit
from lowbit.jit import openmp, threads
a = np.ones((300, 200), np.uint8)
b = np.ones((200, 250), np.int8)
for step in sys.argv[1:]:
    if step == "product":
        assert (lowbit.matmul(a, b, threads=2) == 200).all()
    else:
        __import__(step)
import torch
torch.set_num_threads(3)
assert (lowbit.matmul(a, b, threads=2) == 200).all()
name, address = threads._runtime()
used = openmp._file_of(address)
others = [path for path in openmp._mapped("libgomp") + openmp._mapped("libiomp5") if path != used]
count = lambda path: ctypes.CDLL(path).omp_get_max_threads()
print(len(others), count(used), *(count(path) == 3 for path in others))
"""


@pytest.mark.deep
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="no scikit-learn")
@pytest.mark.parametrize(
    "steps",
    [
        ("sklearn.cluster", "torch"),
        ("torch", "sklearn.cluster"),
        ("product", "sklearn.cluster", "product", "torch", "product"),
    ],
    ids=" ".join,
)
def test_beside_scikit_learn(words: Words, steps: tuple[str, ...]) -> None:
    others, count, *same = words(BESIDE, *steps, OMP_NUM_THREADS="2")
    if others == "0":
        pytest.skip("scikit-learn and PyTorch share one runtime here")
    assert count == "3"
    assert set(same) == {"False"}
