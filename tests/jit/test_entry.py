"""Entering machine code: what is accepted as an argument, and what both ways of entering do."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from lowbit.isa import get
from lowbit.isa.types import Int, S32Pointer
from lowbit.jit import entry
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel


@kernel
def negate(k: Builder, x: S32Pointer, y: S32Pointer, n: Int, stride: Int) -> None:
    """y[i] = -x[i * stride] for i < n."""
    for i in k.range(0, n):
        (y + i).store(0 - (x + i * stride).load())


WAYS = pytest.mark.parametrize("way", [entry.enter(), entry._through_ctypes])


def _address() -> int:
    return negate.program(get("generic"))._address


@WAYS
def test_arrays_addresses_and_negative_numbers(way: entry.Enter) -> None:
    x = np.arange(10, dtype=np.int32)
    y = np.full(12, 77, np.int32)
    way(_address(), 0, 1, x[9:], y[1:], 10, -1)
    np.testing.assert_array_equal(y, [77, *(-x[::-1]), 77])
    way(_address(), 0, 1, x.ctypes.data, y.ctypes.data + 4, 10, 1)
    np.testing.assert_array_equal(y, [77, *-x, 77])


@WAYS
def test_none_is_zero(way: entry.Enter) -> None:
    way(_address(), 0, 1, None, None, None, None)  # no element is touched


@WAYS
def test_other_arguments_are_refused(way: entry.Enter) -> None:
    y = np.zeros(1, np.int32)
    for wrong in ("text", 1.5, 2**70):
        with pytest.raises((TypeError, OverflowError, struct.error)):
            way(_address(), 0, 1, wrong, y, 0, 1)


def test_the_fast_way_is_taken_here() -> None:
    assert entry.enter() is not entry._through_ctypes


def test_arguments_are_not_leaked() -> None:
    x, y = np.zeros(4, np.int32), np.zeros(4, np.int32)
    before = sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(None)
    for _ in range(1000):
        entry.enter()(_address(), 0, 1, x, y, 4, 1)
    after = sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(None)
    assert after[:2] == before[:2]
    assert abs(after[2] - before[2]) < 100
