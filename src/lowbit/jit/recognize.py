"""How a call that was seen before goes from Python to machine code at once.

Checking the arguments of a call and preparing it takes microseconds, as long as a small product.
Both depend on little: types, shapes, strides, and which objects the other arguments are. So a call
that has been checked once leaves a callable that compares just these, in machine code, and, where
nothing differs, computes. Where something does it returns None, and nothing has happened.

It is made as `jit.entry` makes its callables, and reads more of NumPy's arrays than that: their
dimensions, strides, type and flags (`PyArrayObject_fields`, numpy/ndarraytypes.h), and the number
in a float. Whether objects are laid out so is asked once, of real ones; where they are not, no call
is recognized.

Sources: Python's C API reference, "Common Object Structures"; NumPy's, "Array Structure".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa import get
from lowbit.jit.builder import COUNTERS
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded
from lowbit.jit.entry import BYTES_AT, HEADER, TUPLE_AT, method_of
from lowbit.numerics.float32 import BEYOND

_NAME = "lowbit_recognize"
_FACTS, _CHECK = 11, 10  # words of a record before the slots, and of a check
_SAME, _ARRAY, _OUTPUT, _REAL, _INTEGER, _COUNT = range(6)
_MOST_AXES = 2
_WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE
_BEYOND_BITS = f"0x{struct.pack('>d', BEYOND).hex()}"  # as LLVM writes a double
MOST_SCRATCH = 1 << 16  # bytes that a call may take from its thread's stack

_DATA, _NDIM, _DIMENSIONS, _STRIDES = (HEADER + 8 * i for i in range(4))
_DESCR, _FLAGS = HEADER + 40, HEADER + 48


class Same(NamedTuple):
    """The argument must be this very object."""

    value: Any

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return _SAME, id(self.value)


class Array(NamedTuple):
    """An array of the shape, strides and type of this one; its address fills a slot.

    `written`: it is the output, which may be written and shares no memory with other arrays.
    """

    like: npt.NDArray[Any]
    slot: str
    written: bool = False

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        like = self.like
        shape, strides = ((*each, 0, 0)[:_MOST_AXES] for each in (like.shape, like.strides))
        spans = [(n - 1) * step for n, step in zip(like.shape, like.strides, strict=True)]
        low = sum(span for span in spans if span < 0)
        high = sum(span for span in spans if span > 0) + like.itemsize
        kind = _OUTPUT if self.written else _ARRAY
        return (kind, places[self.slot], like.ndim, *shape, *strides, id(like.dtype), low, high)


class Real(NamedTuple):
    """A Python float within float32, which is put there into the scratch."""

    offset: int

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return _REAL, self.offset


class Integer(NamedTuple):
    """A Python int from `low` to `high`, which is put there into the scratch, `shift` added."""

    offset: int
    low: int
    high: int
    shift: int = 0

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return _INTEGER, self.offset, self.low, self.high, self.shift


class Count(NamedTuple):
    """The argument must be None, and a function, int (), must return a number."""

    function: int
    expected: int

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return _COUNT, id(None), self.function, self.expected


Check = Same | Array | Real | Integer | Count


@dataclass(frozen=True)
class Fresh:
    """Where no output is given: what makes one, of what arguments, and the slot of its address."""

    make: Callable[..., npt.NDArray[Any]]
    arguments: tuple[Any, ...]
    slot: str


def recognizer(
    loaded: Loaded,
    names: Sequence[str],
    words: Mapping[str, int],
    scratch: Mapping[str, int],
    scratch_bytes: int,
    checks: Sequence[Check],
    fresh: Fresh | None = None,
    kept: Any = None,
) -> Callable[..., Any] | None:
    """A function of one argument for each check: the output, or None if one does not fit.

    It runs a kernel of parameters `names` in one thread: those in `words` hold these numbers, those
    in `scratch` the addresses of memory that belongs to the call, `scratch_bytes` in all, at these
    offsets; checks and `fresh` fill others. None, instead of a function, where Python's objects are
    of unknown layout, the scratch is too large for a stack, or an array has too many axes.
    """
    arrays = [check.like for check in checks if isinstance(check, Array)]
    if scratch_bytes > MOST_SCRATCH or any(one.ndim > _MOST_AXES for one in arrays):
        return None
    if not _arrays_are_known():
        return None
    places = {name: place for place, name in enumerate(names)}
    made = (id(fresh.make), id(fresh.arguments), places[fresh.slot]) if fresh else (0, 0, 0)
    facts = (loaded.address, len(names) + COUNTERS, len(checks), scratch_bytes, len(scratch),
             id(np.ndarray), id(float), id(int), *made)  # fmt: skip
    slots = [words.get(name, 0) for name in names] + [0] * COUNTERS
    moved = [word for name, offset in scratch.items() for word in (places[name], offset)]
    checked = [(*check.words(places), *[0] * _CHECK)[:_CHECK] for check in checks]
    record = [*facts, *slots, *moved, *(word for check in checked for word in check)]
    make, method = _entry()
    known = [check.value for check in checks if isinstance(check, Same)]
    known += [one.dtype for one in arrays]
    return make(method, (struct.pack(f"{len(record)}q", *record), loaded, fresh, kept, known), None)


@cache
def _entry() -> tuple[Callable[..., Any], int]:
    return method_of(_NAME, load(_NAME, get("generic"), lambda: _IR, HEADER))


@cache
def _arrays_are_known() -> bool:
    """Whether arrays and floats hold what the compiled function reads where it looks."""
    word, half = ctypes.c_ssize_t.from_address, ctypes.c_int.from_address

    def axes(place: int, count: int) -> tuple[int, ...]:
        start = word(place).value
        return tuple(word(start + 8 * i).value for i in range(count))

    def known(view: npt.NDArray[Any]) -> bool:
        at = id(view)
        return (
            half(at + _NDIM).value == view.ndim
            and axes(at + _DIMENSIONS, view.ndim) == view.shape
            and axes(at + _STRIDES, view.ndim) == view.strides
            and word(at + _DESCR).value == id(view.dtype)
            and bool(half(at + _FLAGS).value & _WRITEABLE) == view.flags.writeable
        )

    memory, frozen = np.zeros((4, 6), np.uint8), np.zeros(3, np.float32)
    frozen.flags.writeable = False
    number = 1 / 3
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], frozen
    return all(map(known, views)) and (
        ctypes.c_double.from_address(id(number) + HEADER).value == number
    )


# `self` is a tuple that begins with the record: eleven facts, slots, pairs of a slot and its offset
# in the scratch, checks. An output's memory is compared with that of every array before it.
_IR = f"""
@_Py_NoneStruct = external global i8
declare i64 @PyLong_AsLongLongAndOverflow(ptr, ptr)
declare ptr @PyObject_CallObject(ptr, ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare double @llvm.fabs.f64(double)

define private i64 @word(ptr %at, i64 %index) alwaysinline {{
  %place = getelementptr i64, ptr %at, i64 %index
  %value = load i64, ptr %place
  ret i64 %value
}}
define private i64 @member(ptr %object, i64 %offset) alwaysinline {{
  %place = getelementptr i8, ptr %object, i64 %offset
  %value = load i64, ptr %place
  ret i64 %value
}}
define private i1 @fits(ptr %value, ptr %check, i64 %array) {{
  %type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %is_array = icmp eq i64 %type, %array
  br i1 %is_array, label %type_fits, label %no
type_fits:
  %descr = call i64 @member(ptr %value, i64 {_DESCR})
  %descr_wanted = call i64 @word(ptr %check, i64 7)
  %same_descr = icmp eq i64 %descr, %descr_wanted
  %ndim_at = getelementptr i8, ptr %value, i64 {_NDIM}
  %ndim_half = load i32, ptr %ndim_at
  %ndim = sext i32 %ndim_half to i64
  %ndim_wanted = call i64 @word(ptr %check, i64 2)
  %same_ndim = icmp eq i64 %ndim, %ndim_wanted
  %flags_at = getelementptr i8, ptr %value, i64 {_FLAGS}
  %flags = load i32, ptr %flags_at
  %writeable = and i32 %flags, {_WRITEABLE}
  %may_be_written = icmp ne i32 %writeable, 0
  %kind = call i64 @word(ptr %check, i64 0)
  %is_input = icmp eq i64 %kind, {_ARRAY}
  %may = or i1 %may_be_written, %is_input
  %both = and i1 %same_descr, %same_ndim
  %all = and i1 %both, %may
  br i1 %all, label %axes, label %no
axes:
  %dimensions_word = call i64 @member(ptr %value, i64 {_DIMENSIONS})
  %strides_word = call i64 @member(ptr %value, i64 {_STRIDES})
  %dimensions = inttoptr i64 %dimensions_word to ptr
  %strides = inttoptr i64 %strides_word to ptr
  br label %axis
axis:
  %i = phi i64 [ 0, %axes ], [ %next_i, %axis_fits ]
  %more = icmp slt i64 %i, %ndim
  br i1 %more, label %look, label %yes
look:
  %size = call i64 @word(ptr %dimensions, i64 %i)
  %size_index = add i64 %i, 3
  %size_wanted = call i64 @word(ptr %check, i64 %size_index)
  %same_size = icmp eq i64 %size, %size_wanted
  %stride = call i64 @word(ptr %strides, i64 %i)
  %stride_index = add i64 %i, {3 + _MOST_AXES}
  %stride_wanted = call i64 @word(ptr %check, i64 %stride_index)
  %same_stride = icmp eq i64 %stride, %stride_wanted
  %same = and i1 %same_size, %same_stride
  br i1 %same, label %axis_fits, label %no
axis_fits:
  %next_i = add i64 %i, 1
  br label %axis
yes:
  ret i1 true
no:
  ret i1 false
}}
define private i1 @apart(ptr %output, ptr %check, ptr %value, ptr %other) {{
  %kind = call i64 @word(ptr %other, i64 0)
  %is_array = icmp eq i64 %kind, {_ARRAY}
  br i1 %is_array, label %compare, label %yes
compare:
  %a = call i64 @member(ptr %output, i64 {_DATA})
  %a_low = call i64 @word(ptr %check, i64 8)
  %a_high = call i64 @word(ptr %check, i64 9)
  %b = call i64 @member(ptr %value, i64 {_DATA})
  %b_low = call i64 @word(ptr %other, i64 8)
  %b_high = call i64 @word(ptr %other, i64 9)
  %a_begin = add i64 %a, %a_low
  %a_end = add i64 %a, %a_high
  %b_begin = add i64 %b, %b_low
  %b_end = add i64 %b, %b_high
  %before = icmp ule i64 %a_end, %b_begin
  %behind = icmp ule i64 %b_end, %a_begin
  %apart = or i1 %before, %behind
  ret i1 %apart
yes:
  ret i1 true
}}

define ptr @{_NAME}(ptr %self, ptr %args, i64 %given) {{
entry:
  %bytes_word = call i64 @member(ptr %self, i64 {TUPLE_AT})
  %bytes = inttoptr i64 %bytes_word to ptr
  %record = getelementptr i8, ptr %bytes, i64 {BYTES_AT}
  %words = call i64 @word(ptr %record, i64 1)
  %count = call i64 @word(ptr %record, i64 2)
  %scratch_bytes = call i64 @word(ptr %record, i64 3)
  %moves = call i64 @word(ptr %record, i64 4)
  %array = call i64 @word(ptr %record, i64 5)
  %template = getelementptr i64, ptr %record, i64 {_FACTS}
  %pairs = getelementptr i64, ptr %template, i64 %words
  %pair_words = shl i64 %moves, 1
  %checks = getelementptr i64, ptr %pairs, i64 %pair_words
  %overflow = alloca i32
  %slots = alloca i64, i64 %words, align 64
  %scratch = alloca i8, i64 %scratch_bytes, align 64
  %size = shl i64 %words, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %slots, ptr %template, i64 %size, i1 false)
  %right = icmp eq i64 %given, %count
  br i1 %right, label %move, label %miss
move:
  %m = phi i64 [ 0, %entry ], [ %next_m, %moved ]
  %more_moves = icmp slt i64 %m, %moves
  br i1 %more_moves, label %moved, label %next
moved:
  %pair_at = shl i64 %m, 1
  %place_m = call i64 @word(ptr %pairs, i64 %pair_at)
  %offset_at = or i64 %pair_at, 1
  %offset_m = call i64 @word(ptr %pairs, i64 %offset_at)
  %target_m = getelementptr i8, ptr %scratch, i64 %offset_m
  %slot_m = getelementptr i64, ptr %slots, i64 %place_m
  store ptr %target_m, ptr %slot_m
  %next_m = add i64 %m, 1
  br label %move
next:
  %i = phi i64 [ 0, %move ], [ %following, %passed ]
  %result = phi ptr [ null, %move ], [ %result_so_far, %passed ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %done_checks
look:
  %value_at = getelementptr ptr, ptr %args, i64 %i
  %value = load ptr, ptr %value_at
  %check_index = mul i64 %i, {_CHECK}
  %check = getelementptr i64, ptr %checks, i64 %check_index
  %kind = call i64 @word(ptr %check, i64 0)
  %first = call i64 @word(ptr %check, i64 1)
  switch i64 %kind, label %same [ i64 {_ARRAY}, label %matrix
                                  i64 {_OUTPUT}, label %matrix
                                  i64 {_REAL}, label %real
                                  i64 {_INTEGER}, label %integer
                                  i64 {_COUNT}, label %count_none ]
same:
  %identity = ptrtoint ptr %value to i64
  %is_same = icmp eq i64 %identity, %first
  br i1 %is_same, label %passed, label %miss
count_none:
  %argument = ptrtoint ptr %value to i64
  %is_none = icmp eq i64 %argument, %first
  br i1 %is_none, label %ask_count, label %miss
ask_count:
  %function_word = call i64 @word(ptr %check, i64 2)
  %function = inttoptr i64 %function_word to ptr
  %told = call i32 %function()
  %told_word = sext i32 %told to i64
  %expected_count = call i64 @word(ptr %check, i64 3)
  %as_expected = icmp eq i64 %told_word, %expected_count
  br i1 %as_expected, label %passed, label %miss
matrix:
  %fits = call i1 @fits(ptr %value, ptr %check, i64 %array)
  br i1 %fits, label %fitting, label %miss
fitting:
  %data = call i64 @member(ptr %value, i64 {_DATA})
  %slot = getelementptr i64, ptr %slots, i64 %first
  store i64 %data, ptr %slot
  %is_output = icmp eq i64 %kind, {_OUTPUT}
  br i1 %is_output, label %compare, label %passed
compare:
  %j = phi i64 [ 0, %fitting ], [ %next_j, %is_apart ]
  %others = icmp slt i64 %j, %i
  br i1 %others, label %other, label %passed
other:
  %other_at = getelementptr ptr, ptr %args, i64 %j
  %other_value = load ptr, ptr %other_at
  %other_index = mul i64 %j, {_CHECK}
  %other_check = getelementptr i64, ptr %checks, i64 %other_index
  %apart = call i1 @apart(ptr %value, ptr %check, ptr %other_value, ptr %other_check)
  br i1 %apart, label %is_apart, label %miss
is_apart:
  %next_j = add i64 %j, 1
  br label %compare
real:
  %real_type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %float_type = call i64 @word(ptr %record, i64 6)
  %is_float = icmp eq i64 %real_type, %float_type
  br i1 %is_float, label %float, label %miss
float:
  %number_at = getelementptr i8, ptr %value, i64 {HEADER}
  %number = load double, ptr %number_at
  %magnitude = call double @llvm.fabs.f64(double %number)
  %within = fcmp olt double %magnitude, {_BEYOND_BITS}
  br i1 %within, label %rounded, label %miss
rounded:
  %narrow = fptrunc double %number to float
  %real_at = getelementptr i8, ptr %scratch, i64 %first
  store float %narrow, ptr %real_at
  br label %passed
integer:
  %int_type = call i64 @member(ptr %value, i64 {HEADER - 8})
  %long_type = call i64 @word(ptr %record, i64 7)
  %is_int = icmp eq i64 %int_type, %long_type
  br i1 %is_int, label %int, label %miss
int:
  %whole = call i64 @PyLong_AsLongLongAndOverflow(ptr %value, ptr %overflow)
  %beyond = load i32, ptr %overflow
  %fine = icmp eq i32 %beyond, 0
  %low = call i64 @word(ptr %check, i64 2)
  %high = call i64 @word(ptr %check, i64 3)
  %shift = call i64 @word(ptr %check, i64 4)
  %not_less = icmp sge i64 %whole, %low
  %not_more = icmp sle i64 %whole, %high
  %inside = and i1 %not_less, %not_more
  %good = and i1 %inside, %fine
  br i1 %good, label %shifted, label %miss
shifted:
  %sum = add i64 %whole, %shift
  %short = trunc i64 %sum to i32
  %int_at = getelementptr i8, ptr %scratch, i64 %first
  store i32 %short, ptr %int_at
  br label %passed
passed:
  %result_so_far = phi ptr [ %result, %same ], [ %result, %ask_count ], [ %result, %fitting ],
                           [ %value, %compare ], [ %result, %rounded ], [ %result, %shifted ]
  %following = add i64 %i, 1
  br label %next
done_checks:
  %given_output = icmp ne ptr %result, null
  br i1 %given_output, label %keep, label %create
keep:
  call void @Py_IncRef(ptr %result)
  br label %run
create:
  %make_word = call i64 @word(ptr %record, i64 8)
  %arguments_word = call i64 @word(ptr %record, i64 9)
  %fresh_place = call i64 @word(ptr %record, i64 10)
  %make = inttoptr i64 %make_word to ptr
  %arguments = inttoptr i64 %arguments_word to ptr
  %fresh = call ptr @PyObject_CallObject(ptr %make, ptr %arguments)
  %failed = icmp eq ptr %fresh, null
  br i1 %failed, label %error, label %created
created:
  %fresh_data = call i64 @member(ptr %fresh, i64 {_DATA})
  %fresh_slot = getelementptr i64, ptr %slots, i64 %fresh_place
  store i64 %fresh_data, ptr %fresh_slot
  br label %run
run:
  %output = phi ptr [ %result, %keep ], [ %fresh, %created ]
  %kernel_word = call i64 @word(ptr %record, i64 0)
  %kernel = inttoptr i64 %kernel_word to ptr
  %state = call ptr @PyEval_SaveThread()
  call void %kernel(ptr %slots)
  call void @PyEval_RestoreThread(ptr %state)
  ret ptr %output
miss:
  call void @Py_IncRef(ptr @_Py_NoneStruct)
  ret ptr @_Py_NoneStruct
error:
  ret ptr null
}}
"""
