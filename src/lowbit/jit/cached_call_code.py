"""The machine code behind jit.cached_call, and the records that it reads."""

from __future__ import annotations

import time
from ctypes import Structure, c_float, c_int32, c_int64
from typing import Any

from lowbit.isa.types import Int, f32, f64, s32, s64
from lowbit.isa.value import Value
from lowbit.jit import threads
from lowbit.jit.area import entered
from lowbit.jit.entry import call_size, template_copy
from lowbit.jit.function import Bit, Function, Words
from lowbit.jit.objects import (
    DTYPE_BITS,
    WRITEABLE,
    Array,
    Float,
    PyObject,
    Single,
    Tuple,
    none,
    record_of,
    words,
)

SAME, ARRAY, OUTPUT, COPIED, REAL, INTEGER, COUNT = range(7)
MOST_AXES = 2
_STALL = int(threads.STALL * 1e9)  # nanoseconds
_EQUAL = 2  # Py_EQ


class Record(Structure):
    """What is bound: how many words, pairs of a slot and its offset in the scratch, and checks
    follow; which argument is the output, or -1, else what makes one, with what arguments, or
    NumPy's own function and its dtype and shape; whether the GIL is kept; threads, and where
    stands what starts them; the scratch that calls share, or 0 for the stack."""

    _fields_ = (
        *words("words", "moves", "checks", "array_type", "output", "output_slot", "make",
               "arguments", "maker", "dtype", "ndim"),
        ("shape", c_int64 * MOST_AXES),
        *words("keeps_gil", "threads", "starter", "shared", "scratch_bytes"),
    )  # fmt: skip


class CheckRecord(Structure):
    """What is asked of one argument, by its kind. `place`: a slot, or an offset in the scratch.
    `low`, `high`: limits, of reals by their bits; of arrays, the bytes around the first element."""

    _fields_ = (
        *words("kind", "place", "type", "value", "low", "high", "dtype", "ndim"),
        ("shape", c_int64 * MOST_AXES), ("strides", c_int64 * MOST_AXES),
    )  # fmt: skip


class SharedScratch(Structure):
    """Memory for one call at a time: whether it is taken, and its address."""

    _fields_ = words("taken", "address")


class _Time(Structure):
    """struct timespec."""

    _fields_ = words("seconds", "rest")


def lowbit_cached_call(k: Function, self: Tuple, args: Words, given: Int) -> Int:
    """The output; None where something does not fit, and nothing has happened; 0 for an error."""
    record = record_of(k, self, Record)
    k.return_unless(given.equals(record.checks), none)
    start, begun = k.register(k.index(0)), k.register(k.index(0))
    for _ in k.when(record.threads > 1):
        starter = k.view(threads.Starter, record.starter)
        start.value = k.load_atomic(starter.at("function"), "monotonic")
        begun.value = k.call(_nanoseconds)
        k.return_if(start.value.equals(0), none)
        k.return_unless(begun.value < starter.until, none)
    slots = template_copy(k, record, k.stack(call_size(record)))
    scratch, on_stack = k.register(k.index(0)), record.shared.equals(0)
    shared = k.view(SharedScratch, record.shared)
    for _ in k.when(on_stack):
        scratch.value = k.address(k.stack(record.scratch_bytes))
    for _ in k.otherwise():
        k.return_unless(k.replace(shared.at("taken"), 0, 1, "acquire"), none)
        scratch.value = shared.address
    answer = k.call(_answer, record, args, slots, scratch.value, start.value, begun.value)
    for _ in k.unless(on_stack):
        k.store_atomic(shared.at("taken"), 0, "release")
    return answer


def _answer(
    k: Function, record: Record, args: Words, slots: Words, scratch: Int, start: Int, begun: Int
) -> Int:
    """Compare, and run: what the function returns."""
    moves = record.end + record.words
    for i in k.range(0, record.moves):
        slots[moves[i * 2]] = scratch + moves[i * 2 + 1]
    checks = moves + record.moves * 2
    for i in k.range(0, record.checks):
        k.return_unless(k.call(_fits, record, checks, args, i, slots, scratch), none)
    output = k.call(_output, record, args, slots)
    for _ in k.unless(output.equals(0)):
        k.call(_run, record, slots, start, begun)
    return output


def _fits(
    k: Function, record: Record, first: Words, args: Words, i: Int, slots: Words,
    scratch: Int,
) -> Bit:  # fmt: skip
    """Whether an argument passes its check; it fills its slot or its place in the scratch."""
    checks = k.view(CheckRecord, first)
    value, check = args[i], checks[i]
    kind, target = check.kind, scratch + check.place
    for _ in k.when(kind.equals(SAME)):
        k.returns(k.call(_is_same, value, check))
    for _ in k.when(kind.equals(REAL)):
        k.returns(k.call(_is_real, value, check, target))
    for _ in k.when(kind.equals(INTEGER)):
        k.returns(k.call(_is_integer, value, check, target))
    for _ in k.when(kind.equals(COUNT)):
        k.returns(k.call(_is_count, value, check, record.starter))
    k.return_unless(k.call(_is_like, value, check, record.array_type), False)
    data = k.view(Array, value).data
    for _ in k.when(kind.equals(COPIED)):
        k.copy(target, data, check.high)
        k.returns(True)
    slots[check.place] = data
    for _ in k.when(kind.equals(OUTPUT)):
        for j in k.range(0, i):
            k.return_if(k.call(_overlaps, data, check, args[j], checks[j]), False)
    return True


def _type_of(k: Function, value: Value) -> Value:
    return k.view(PyObject, value).type


def _is_same(k: Function, value: Int, check: CheckRecord) -> Bit:
    """The object, or an equal one of the type, if there is one."""
    k.return_if(value.equals(check.value), True)
    k.return_unless(_type_of(k, value).equals(check.type), False)
    equal = k.constant(_EQUAL, s32)
    answer = k.call("PyObject_RichCompareBool", value, check.value, equal, returns=s32)
    for _ in k.when(answer < 0):
        k.call("PyErr_Clear", returns=None)
    return answer > 0


def _is_count(k: Function, value: Int, check: CheckRecord, starter: threads.Starter) -> Bit:
    """None, where a function, or else what starts threads, tells the number that is expected."""
    k.return_unless(value.equals(k.external("_Py_NoneStruct")), False)
    for _ in k.when(check.value.equals(0)):
        k.returns(starter.threads.equals(check.low))
    return k.call(check.value, returns=s32).to(s64).equals(check.low)


def _is_like(k: Function, value: Int, check: CheckRecord, array_type: Int) -> Bit:
    """An array of this type, shape and strides, which may be written if it is the output."""
    k.return_unless(_type_of(k, value).equals(array_type), False)
    array: Any = k.view(Array, value)
    same_type = (array.dtype.code & DTYPE_BITS).equals(check.dtype)
    k.return_unless(same_type & array.ndim.to(s64).equals(check.ndim), False)
    for _ in k.when(check.kind.equals(OUTPUT)):
        k.return_if((array.flags & WRITEABLE).equals(0), False)
    for i in k.range(0, check.ndim):
        same_size = array.dimensions[i].equals(check.shape[i])
        k.return_unless(same_size & array.strides[i].equals(check.strides[i]), False)
    return True


def _overlaps(
    k: Function, output: Int, check: CheckRecord, other: Int, its_check: CheckRecord
) -> Bit:
    """Whether an argument is an array that shares memory with the output, whose data are there, and
    is not replaced by it. `value` of its check: it may be."""
    k.return_unless(its_check.kind.equals(ARRAY) | its_check.kind.equals(COPIED), False)
    data = k.view(Array, other).data
    for _ in k.when(its_check.value > 0):
        k.return_if(data.equals(output), False)
    begins_before = data + its_check.low < output + check.high
    return begins_before & (output + check.low < data + its_check.high)


def _is_real(k: Function, value: Int, check: CheckRecord, target: Int) -> Bit:
    """A number of this type and magnitude. `value` of the check: it is a float32."""
    k.return_unless(_type_of(k, value).equals(check.type), False)
    number = k.register(k.constant(0.0, f64))
    for _ in k.when(check.value.equals(0)):
        number.value = k.view(Float, value).value
    for _ in k.otherwise():
        number.value = k.view(Single, value).value.to(f64)
    # Bits of numbers that are not negative are in the order of the numbers, and NaN's come last.
    magnitude = number.value.bits(s64) & (2**63 - 1)
    k.return_if(magnitude < check.low, False)
    k.return_unless(magnitude < check.high, False)
    k.view(c_float, target)[0] = number.value.to(f32)
    return True


def _is_integer(k: Function, value: Int, check: CheckRecord, target: Int) -> Bit:
    """An integer of this type within limits. `value` of the check: what is added."""
    k.return_unless(_type_of(k, value).equals(check.type), False)
    place = k.view(c_int32, target)  # where first stands whether it has more than 64 bits
    number = k.call("PyLong_AsLongLongAndOverflow", value, target)
    k.return_unless(place[0].equals(0), False)
    k.return_if((number < check.low) | (number > check.high), False)
    place[0] = (number + check.value).to(s32)
    return True


def _output(k: Function, record: Record, args: Words, slots: Words) -> Int:
    """The array that the result belongs in, a new reference. 0: none can be made."""
    for _ in k.unless(record.output < 0):
        given = args[record.output]
        k.call("Py_IncRef", given, returns=None)
        k.returns(given)
    fresh = k.register(k.index(0))
    for _ in k.when(record.maker.equals(0)):
        fresh.value = k.call("PyObject_CallObject", record.make, record.arguments)
    for _ in k.otherwise():
        k.call("Py_IncRef", record.dtype, returns=None)  # which the function takes
        axes, shape, flags = record.ndim.to(s32), record.at("shape"), k.constant(0, s32)
        fresh.value = k.call(
            record.maker, record.array_type, record.dtype, axes, shape, 0, 0, flags, 0
        )
    for _ in k.unless(fresh.value.equals(0)):
        slots[record.output_slot] = k.view(Array, fresh.value).data
    return fresh.value


def _run(k: Function, record: Record, shared: Words, start: Int, begun: Int) -> None:
    """Run the kernel. Several threads that took too long are not started so again."""
    for _ in k.unless(record.keeps_gil.equals(0)):
        k.call(entered, shared)
        k.returns()
    state = k.call("PyEval_SaveThread")
    for _ in k.when(record.threads > 1):
        count = record.threads.to(s32)
        k.call(start, entered, shared, count, k.constant(0, s32), returns=None)
        for _ in k.unless(k.call(_nanoseconds) - begun < _STALL):
            starter = k.view(threads.Starter, record.starter)
            k.store_atomic(starter.at("function"), 0, "monotonic")
    for _ in k.otherwise():
        k.call(entered, shared)
    k.call("PyEval_RestoreThread", state, returns=None)


def _nanoseconds(k: Function) -> Int:
    """By the monotonic clock."""
    now = k.variable(_Time)
    clock = k.constant(time.CLOCK_MONOTONIC, s32)
    k.call("clock_gettime", clock, now, returns=s32)
    return now.seconds * 1_000_000_000 + now.rest
