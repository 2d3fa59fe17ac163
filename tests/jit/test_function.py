"""Functions of machine code that are no kernels: their statements, structures, calls, atomics."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from lowbit.isa import get
from lowbit.isa.types import Int, s64
from lowbit.jit.function import Bit, Function, Int32, Words, compiled, function_ir


class Pair(ctypes.Structure):
    _fields_ = (
        ("flag", ctypes.c_int32),
        ("numbers", ctypes.c_int64 * 2),
        ("others", ctypes.POINTER(ctypes.c_int64)),
        ("next", ctypes.c_int64),
    )


def _entered(text: Callable[..., Any], *kinds: Any) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(compiled(text).address)


def collatz(k: Function, start: Int) -> Int:
    """How many steps it takes to 1; -1 where it starts below that."""
    k.return_if(start < 1, -1)
    number, steps = k.register(start), k.register(k.index(0))
    for _ in k.loop():
        k.return_if(number.value.equals(1), lambda k: steps.value)
        for _ in k.unless((number.value & 1).equals(0)):
            number.value = number.value * 3 + 1
        for _ in k.otherwise():
            number.value = number.value >> 1
        steps.value = steps.value + 1
    return k.index(0)


def test_loops_branches_and_early_returns() -> None:
    run = _entered(collatz, ctypes.c_int64)
    assert [run(n) for n in (1, 6, 27, 0, -5)] == [0, 8, 111, -1, -1]


def _is_last(k: Function, pair: Pair) -> Bit:
    return pair.next.equals(0)


def summed(k: Function, first: Pair, count: Int32, out: Words) -> Int:
    """The sum of what `count` pairs hold and point to, if the last has no next one."""
    total, pairs = k.register(k.index(0)), k.view(Pair, first)
    for i in k.range(0, count.to(s64)):
        pair = pairs[i]
        total.value = total.value + pair.numbers[0] + pair.numbers[1] + pair.others[0]
        total.value = total.value + pair.flag.to(s64)
        pair.numbers[1] = i
        pair.flag = 7
    out[0] = total.value
    for _ in k.when(k.call(_is_last, pairs[count.to(s64) - 1])):
        k.returns(k.call("labs", total.value))
    return k.index(0)


def test_structures_are_those_of_python() -> None:
    further = (ctypes.c_int64 * 1)(-1000)
    pairs = (Pair * 2)(Pair(1, (2, 3), further, 1), Pair(-4, (5, 6), further, 0))
    out = ctypes.c_int64()
    run = _entered(summed, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    assert run(ctypes.addressof(pairs), 2, ctypes.addressof(out)) == 1987
    assert out.value == -1987
    assert [(p.flag, *p.numbers) for p in pairs] == [(7, 2, 0), (7, 5, 1)]
    assert run(ctypes.addressof(pairs), 1, ctypes.addressof(out)) == 0


class Counter(ctypes.Structure):
    _fields_ = (("calls", ctypes.c_int64),)


def counted(k: Function, number: Words) -> Int:
    """How many calls there were before; 5 becomes 6, any other number is added to."""
    for _ in k.unless(k.replace(number.at(0), 5, 6, "acquire")):
        k.fetch("add", number.at(0), 10, "release")
    for _ in k.otherwise():
        k.store_atomic(number.at(1), k.load_atomic(number.at(0), "acquire"), "release")
    return k.fetch("add", k.shared(Counter).at("calls"), 1, "seq_cst")


def test_atomics_and_memory_that_calls_share() -> None:
    numbers = (ctypes.c_int64 * 2)(5, 0)
    run = _entered(counted, ctypes.c_void_p)
    assert [run(ctypes.addressof(numbers)) for _ in range(2)] == [0, 1]
    assert list(numbers) == [16, 6]


def misplaced(k: Function, number: Int) -> Int:
    for _ in k.when(number > 0):
        pass
    changed = number + 1
    for _ in k.otherwise():
        pass
    return changed


def test_otherwise_follows_a_branch() -> None:
    with pytest.raises(RuntimeError, match="does not follow"):
        function_ir(misplaced)


def left(k: Function, number: Int) -> Int:
    for _ in k.when(number > 0):
        return number
    return number + 1


def test_a_body_is_left_by_returns_alone() -> None:
    with pytest.raises(RuntimeError, match="left by break or return"):
        function_ir(left)


def test_parallel_regions_are_of_kernels() -> None:
    function = Function(get("generic"), "alone", [])
    with pytest.raises(TypeError, match="kernels only"):
        function.parallel(function.index(1))
    with pytest.raises(TypeError, match="kernels only"):
        function.thread()
