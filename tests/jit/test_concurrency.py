"""Kernels at work beside other threads, another runtime, a fork: results stay, nobody waits."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from lowbit.isa import active
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel

NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)
NEEDS_FORK = pytest.mark.skipif(sys.platform != "linux", reason="fork is used on Linux")

Words = Callable[..., list[str]]

# A product cut into many items, checked; then what ran it.
PRODUCT = """
import os, sys
import numpy as np
import lowbit
from lowbit.jit import threads
rng = np.random.default_rng(0)
a = rng.integers(0, 256, (129, 200)).astype(np.uint8)
b = rng.integers(-128, 128, (200, 333)).astype(np.int8)
exact = a.astype(np.int64) @ b
def check(count):
    assert (lowbit.matmul(a, b, threads=count) == exact).all(), count
"""


def test_more_threads_than_cores(words: Words) -> None:
    code = (
        PRODUCT
        + """
for count in (2, 3, 8, 40):
    check(count)
print("torch" in sys.modules)
"""
    )
    assert words(code) == ["False"]


@pytest.mark.parametrize("odd", ["", "many", "0", "-3"])
def test_an_odd_omp_num_threads_is_no_obstacle(words: Words, odd: str) -> None:
    code = PRODUCT + "check(None)\nprint(threads.max_threads() >= 1)"
    assert words(code, OMP_NUM_THREADS=odd) == ["True"]


def test_omp_num_threads_is_obeyed_without_torch(words: Words) -> None:
    code = "from lowbit.jit import threads; print(threads.max_threads())"
    assert [words(code, OMP_NUM_THREADS=n) for n in ("1", "3", "3,2")] == [["1"], ["3"], ["3"]]


@pytest.mark.deep
@NEEDS_TORCH
def test_the_openmp_runtime_of_torch_serves(words: Words) -> None:
    """Also when torch is imported after the first product."""
    code = (
        PRODUCT
        + """
check(2)
before = threads.runtime()
import torch
check(2)
print(before.replace(" ", "-"), threads.runtime())
for count in (1, 2, 3):
    torch.set_num_threads(count)
    assert threads.max_threads() == count
    check(None)
    check(8)
"""
    )
    before, after = words(code)
    assert before == "threads-of-its-own"
    assert "omp" in after


FORKED = """
check(2)
for _ in range(3):
    child = os.fork()
    if not child:
        try:
            check(2)
            check(5)
            print(threads.runtime().replace(" ", "-"), flush=True)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    check(2)
"""


@pytest.mark.deep
@NEEDS_FORK
@NEEDS_TORCH
def test_a_child_of_fork_computes_where_openmp_ran(words: Words) -> None:
    assert words("import torch" + PRODUCT + FORKED) == ["threads-of-its-own"] * 3


@NEEDS_FORK
def test_a_child_of_fork_computes_where_own_threads_ran(words: Words) -> None:
    assert words(PRODUCT + FORKED) == ["threads-of-its-own"] * 3


@pytest.mark.deep
@NEEDS_FORK
@NEEDS_TORCH
def test_a_child_that_imports_torch_itself_uses_its_runtime(words: Words) -> None:
    names = words(PRODUCT + FORKED.replace("check(5)", "import torch; check(5)"))
    assert len(names) == 3
    assert all("omp" in name for name in names), names


# Children of a process that compiles all the while, which must compile and run themselves.
FORKED_WHILE_COMPILING = """
import os, signal, sys, threading, time
import llvmlite.binding as llvm
import numpy as np
from lowbit.isa import active
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit import compile as compiler
from lowbit.jit.kernel import kernel

@kernel
def scaled(k, out: S32Pointer, n: Int, *, factor: int) -> None:
    for i in k.range(0, n):
        (out + i).store((i * factor).to(s32))

def check(factor):
    out = np.zeros(4, np.int32)
    scaled.program(active(), factor=factor)(2, out, len(out))
    assert out.tolist() == [0, factor, 2 * factor, 3 * factor]

original, inside, stop = compiler.object_code, threading.Event(), threading.Event()

def slowly(ir_text, isa):
    code = original(ir_text, isa)
    if threading.current_thread() is not threading.main_thread():
        inside.set()
        time.sleep(0.1)
    return code

def compile_on():
    for factor in range(1000, 2000):
        if not stop.is_set():
            check(factor)

def parse_on():
    while not stop.is_set():
        llvm.parse_assembly("define void @f() {{ ret void }}")

compiler.object_code = slowly
others = [threading.Thread(target={target}) for _ in range(2)]
for other in others:
    other.start()
for factor in range(5):
    if {target} is compile_on:
        inside.clear()
        inside.wait()
    child = os.fork()
    if not child:
        signal.alarm(30)  # its end, if it hangs
        try:
            check(factor)
        except BaseException:
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
stop.set()
for other in others:
    other.join()
"""


@NEEDS_FORK
@pytest.mark.parametrize("target", ["compile_on", "parse_on"])
def test_a_fork_while_another_thread_is_inside_of_llvm(words: Words, target: str) -> None:
    code = FORKED_WHILE_COMPILING.format(target=target)
    assert words(code) == ["0"] * 5


@kernel
def long_chain(k: Builder, out: S32Pointer, steps: Int) -> None:
    """A chain of multiplications that no compiler shortens, once for each of eight items."""
    for item in k.parallel(k.index(8)):
        state = k.register(item.to(s32))
        for _ in k.range(0, steps):
            state.value = (state.value ^ 0x55) * 1664525 + 1013904223
        (out + item).store(state.value)


@pytest.mark.parametrize("count", [1, 2])
def test_the_gil_is_released(count: int) -> None:
    """Another thread counts on while a kernel runs.

    With so long a switch interval it could not, unless the kernel's thread let go of the GIL.
    """
    counted, stop = [0], threading.Event()

    def count_on() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # lets go of the GIL

    program, out = long_chain.program(active()), np.zeros(8, np.int32)
    other, interval = threading.Thread(target=count_on), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        other.start()
        progress = []
        while not any(progress) and len(progress) < 20:
            before = counted[0]
            program(count, out.ctypes.data, 1 << 23)
            progress.append(counted[0] - before)
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
    assert any(progress), "the other thread stood still while the kernel ran"


def test_many_python_threads_enter_one_program() -> None:
    """Each call has counters of its own, so calls at the same time do not share items."""
    program, steps = long_chain.program(active()), 1000
    expected = np.zeros(8, np.int32)
    program(1, expected.ctypes.data, steps)
    wrong: list[np.ndarray] = []

    def call_often(count: int) -> None:
        for _ in range(50):
            out = np.zeros(8, np.int32)
            program(count, out.ctypes.data, steps)
            if (out != expected).any():
                wrong.append(out)

    callers = [threading.Thread(target=call_often, args=(1 + i % 4,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
