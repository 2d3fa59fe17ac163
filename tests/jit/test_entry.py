"""The compiled function through which Python enters kernels."""

from __future__ import annotations

import gc
import struct
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer
from lowbit.jit import entry
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import Kernel, Program, kernel


@kernel
def negate(k: Builder, x: S32Pointer, y: S32Pointer, n: Int, stride: Int) -> None:
    """y[i] = -x[i * stride] for i < n."""
    # By items: a thread that comes late to any other loop runs it once more, after the call.
    for i in k.parallel(n):
        (y + i).store(0 - (x + i * stride).load())


@pytest.fixture
def program() -> Program:
    """A new Program of the kernel."""
    return Kernel(negate.text).program(get("generic"))


THREADS = pytest.mark.parametrize("threads", [1, 2, 5])


@THREADS
def test_arrays_addresses_and_negative_numbers(program: Program, threads: int) -> None:
    x = np.arange(10, dtype=np.int32)
    y = np.full(12, 77, np.int32)
    program(threads, x[9:], y[1:], 10, -1)
    np.testing.assert_array_equal(y, [77, *(-x[::-1]), 77])
    program(threads, x.ctypes.data, y.ctypes.data + 4, np.int64(10), 1)
    np.testing.assert_array_equal(y, [77, *-x, 77])


@THREADS
def test_parameters_are_bound_by_name(program: Program, threads: int) -> None:
    x, y = np.arange(10, dtype=np.int32), np.full(12, 77, np.int32)
    backwards = program.bind(threads, ("n", "y"), stride=-1, x=x[9:])
    backwards(10, y[1:])
    np.testing.assert_array_equal(y, [77, *(-x[::-1]), 77])
    y[:] = 77
    backwards(3, y)
    np.testing.assert_array_equal(y, [-9, -8, -7, *[77] * 9])
    y[:] = 77
    program.bind(threads, (), x=None, y=None, n=0, stride=None)()
    program.bind(threads, (), x=x, y=y[2:], n=np.int64(10), stride=1)()
    np.testing.assert_array_equal(y, [77, 77, *-x])


@pytest.mark.deep
def test_what_is_bound_stays_alive(program: Program) -> None:
    x, y = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    gone = weakref.ref(x)
    call = program.bind(1, ("y",), x=x, n=4, stride=1)
    del x
    gc.collect()
    assert gone() is not None
    call(y)
    assert y.tolist() == [0, -1, -2, -3]
    del call
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("varying", "fixed"),
    [
        (("x", "y"), {"n": 1}),
        (("x", "y"), {"n": 1, "stride": 1, "other": 1}),
        (("x", "y", "y"), {"n": 1, "stride": 1}),
        (("x", "y", "n"), {"n": 1, "stride": 1}),
    ],
)
def test_parameters_that_do_not_fit(varying: tuple[str, ...], fixed: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="missing"):
        negate.program(get("generic")).bind(1, varying, **fixed)


@THREADS
def test_none_is_zero(program: Program, threads: int) -> None:
    program(threads, None, None, None, None)  # no element is touched


@THREADS
def test_other_arguments_are_refused(program: Program, threads: int) -> None:
    y = np.zeros(1, np.int32)
    for wrong in ("text", 1.5, 2**70, ""):
        with pytest.raises((TypeError, OverflowError, struct.error)):
            program(threads, wrong, y, 0, 1)
        with pytest.raises((TypeError, OverflowError, struct.error)):
            program.bind(threads, ("y",), x=wrong, n=0, stride=1)(y)


@THREADS
@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (0, 0, 0, 0, 0)])
def test_a_wrong_number_of_arguments_is_refused(
    program: Program, threads: int, arguments: tuple[int, ...]
) -> None:
    with pytest.raises(TypeError, match="wrong number of arguments"):
        program(threads, *arguments)


def test_an_unknown_layout_of_objects_is_refused(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "layout_is_known", lambda: False)
    entry._entry.cache_clear()
    with pytest.raises(RuntimeError, match="keeps its objects as lowbit does not know"):
        program(1, None, None, 0, 1)
    monkeypatch.undo()
    program(1, None, None, 0, 1)


@THREADS
def test_arguments_are_not_leaked(program: Program, threads: int) -> None:
    x, y = np.zeros(4, np.int32), np.zeros(4, np.int32)
    call = program.bind(threads, ("x", "y"), n=4, stride=1)
    before = sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(None)
    for _ in range(1000):
        call(x, y)
    after = sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(None)
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) < 100


@pytest.mark.deep
def test_a_wrong_number_is_refused_beside_numba(run_python: Callable[..., Any]) -> None:
    """Numba tells LLVM its own meaning of some of Python's names."""
    pytest.importorskip("numba")
    done = run_python(
        "import numba, numba.core.typing, numba.np.ufunc\n"
        "import numpy as np, lowbit\n"
        "numba.njit(lambda x: x)(1)\n"
        "from lowbit.isa import get\n"
        "from lowbit.kernels.cpu.rows.select import keep_greatest\n"
        "try:\n"
        "    keep_greatest.program(get('generic'))(1, 2, 3)\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "wrong number of arguments" in done.stdout
