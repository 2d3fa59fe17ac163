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
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa import get
from lowbit.jit import threads
from lowbit.jit.builder import COUNTERS, counters
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded, immortal
from lowbit.jit.entry import HEADER, method_of
from lowbit.jit.recognizing import (
    ARRAY,
    CHECK,
    COPIED,
    COUNT,
    DESCR,
    DIMENSIONS,
    DTYPE,
    DTYPE_BITS,
    FLAGS,
    INTEGER,
    IR,
    MOST_AXES,
    NAME,
    NDIM,
    OUTPUT,
    REAL,
    SAME,
    STRIDES,
    WRITEABLE,
)
from lowbit.jit.workspace import aligned_empty
from lowbit.numerics.float32 import BEYOND

_NEW_FROM_DESCR = 94  # PyArray_NewFromDescr's place in the table of NumPy's C interface
_MOST_OF_STACK = 1 << 14  # bytes that a call may take from its thread's stack
MOST_SCRATCH = 1 << 20  # bytes that it may take in all: more than that, from one memory for all


class Same(NamedTuple):
    """The argument must be this very object, or, `by_value`, of its type and equal to it."""

    value: Any
    by_value: bool = False

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return SAME, id(self.value), id(type(self.value)) if self.by_value else 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What it tells apart."""
        kind = type(self.value)
        return (kind, *self.value) if kind is list else (kind, self.value)


class Array(NamedTuple):
    """An array of the shape, strides and type of this one; its address fills a slot.

    `written`: it is the output, which may be written and shares no memory with other arrays.
    """

    like: npt.NDArray[Any]
    slot: str
    written: bool = False

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        like = self.like
        shape, strides = ((*each, 0, 0)[:MOST_AXES] for each in (like.shape, like.strides))
        spans = [(n - 1) * step for n, step in zip(like.shape, like.strides, strict=True)]
        low = sum(span for span in spans if span < 0)
        high = sum(span for span in spans if span > 0) + like.itemsize
        kind = OUTPUT if self.written else ARRAY
        dtype = _dtype_word(like.dtype)
        return (kind, places[self.slot], like.ndim, *shape, *strides, dtype, low, high)


class Copied(NamedTuple):
    """An array like this one, contiguous, which is copied there into the scratch, so that what
    lies behind it may be read."""

    like: npt.NDArray[Any]
    offset: int

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        _, _, *others = Array(self.like, "").words(defaultdict(int))
        return COPIED, self.offset, *others


class Real(NamedTuple):
    """A number of type `kind`, one of REALS, of a magnitude from `least` to below `most`, within
    float32, which is put there into the scratch."""

    offset: int
    least: float = 0.0
    most: float = BEYOND
    kind: type = float

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        limits = struct.unpack("2q", struct.pack("2d", self.least, self.most))
        return REAL, self.offset, *limits, id(self.kind), int(self.kind is np.float32)


class Integer(NamedTuple):
    """An integer of type `kind`, Python's or one of NumPy's, from `low` to `high`, which is put
    there into the scratch, `shift` added."""

    offset: int
    low: int
    high: int
    shift: int = 0
    kind: type = int

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return INTEGER, self.offset, self.low, self.high, self.shift, id(self.kind)


class Count(NamedTuple):
    """The argument must be None, and a function, int (), must return a number. Without a function
    that must be how many threads there were when jit.threads chose what starts them."""

    function: int
    expected: int

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        return COUNT, id(None), self.function, self.expected


Check = Same | Array | Copied | Real | Integer | Count


REALS = float, np.float64, np.float32


def constant(value: Any) -> Same | None:
    """The check of an argument that counts by its value: a number, a name, some of these. None: it
    is something else, as an array, whose numbers can change.

    What is equal and of one type must mean the same. Of a list a copy is compared."""
    if value is None:
        return Same(None)
    known = type(value) in (int, float, str, tuple) or isinstance(value, np.number)
    if type(value) is list:
        return Same(list(value), by_value=True)
    return Same(value, by_value=True) if known else None


def thread_check(wanted: int | None, most: int | None) -> Check:
    """The check of a number of threads that was `wanted`. most: how many threads there were, where
    that had a part in what was chosen."""
    if most is not None:
        return Count(threads.counter(), most)
    return constant(wanted) or Same(wanted)


def signature(checks: Sequence[Check]) -> tuple[Any, ...]:
    """What these checks tell apart, which is the same for calls that are alike."""
    return tuple(
        check.key if isinstance(check, Same) else check.words(defaultdict(int)) for check in checks
    )


@dataclass(frozen=True)
class Fresh:
    """Where no output is given: what makes one, of what arguments, and the slot of its address.

    What `np.empty` would make of a shape and a dtype is made by NumPy's C interface."""

    make: Callable[..., npt.NDArray[Any]]
    arguments: tuple[Any, ...]
    slot: str

    def words(self, places: Mapping[str, int]) -> tuple[int, ...]:
        whole = id(self.make), id(self.arguments), places[self.slot]
        maker = _array_maker() if self.make is np.empty else 0
        if not maker or len(self.arguments[0]) != MOST_AXES:
            return *whole, 0, 0, 0, 0, 0
        shape, dtype = self.arguments
        return *whole, maker, id(dtype), len(shape), *shape


def recognizer(
    loaded: Loaded,
    names: Sequence[str],
    words: Mapping[str, int],
    scratch: Mapping[str, int],
    scratch_bytes: int,
    checks: Sequence[Check],
    fresh: Fresh | None = None,
    kept: Any = None,
    brief: bool = False,
    thread_count: int = 1,
) -> Callable[..., Any] | None:
    """A function of one argument for each check: the output, or None if one does not fit.

    It runs a kernel of parameters `names`: those in `words` hold these numbers, those in `scratch`
    the addresses of memory that belongs to the call, `scratch_bytes` in all, at these offsets;
    checks and `fresh` fill others. If `brief`, the GIL is kept: to give it back and take it again
    would be a good part of the call. It also returns None where jit.threads is to choose what
    starts several threads, or another call has taken the memory that calls share. None, instead of
    a function, where Python's objects are of unknown layout, the scratch is too large, or an array
    has too many axes.
    """
    arrays = [check.like for check in checks if isinstance(check, Array | Copied)]
    if scratch_bytes > MOST_SCRATCH or any(one.ndim > MOST_AXES for one in arrays):
        return None
    if not arrays_are_known():
        return None
    places = {name: place for place, name in enumerate(names)}
    made = fresh.words(places) if fresh else (0,) * 8
    facts = (loaded.address, len(names) + COUNTERS, len(checks), scratch_bytes, len(scratch),
             id(np.ndarray), *made, brief, thread_count, threads.starter_at(),
             _shared_scratch() if scratch_bytes > _MOST_OF_STACK else 0)  # fmt: skip
    slots = [words.get(name, 0) for name in names] + [*counters(thread_count)]
    moved = [word for name, offset in scratch.items() for word in (places[name], offset)]
    checked = [(*check.words(places), *[0] * CHECK)[:CHECK] for check in checks]
    record = [*facts, *slots, *moved, *(word for check in checked for word in check)]
    make, method = _entry()
    known = [check.value for check in checks if isinstance(check, Same)]
    packed = struct.pack(f"{len(record)}q", *record)
    return make(method, (packed, loaded, fresh, kept, known), __name__)


_taken = immortal((ctypes.c_int64 * 2)())  # whether a call has the shared scratch, and its address
if hasattr(os, "register_at_fork"):  # the thread that has it is not in the child
    os.register_at_fork(after_in_child=partial(_taken.__setitem__, 0, 0))


@cache
def _shared_scratch() -> int:
    _taken[1] = immortal(aligned_empty((MOST_SCRATCH,), np.uint8)).ctypes.data
    return ctypes.addressof(_taken)


def _dtype_word(dtype: np.dtype[Any]) -> int:
    """What two equal dtypes of numbers have in common, as the compiled function reads it."""
    return ctypes.c_int64.from_address(id(dtype) + DTYPE).value & DTYPE_BITS


@cache
def _entry() -> tuple[Callable[..., Any], int]:
    return method_of(NAME, load(NAME, get("generic"), lambda: IR, HEADER))


@cache
def arrays_are_known() -> bool:
    """Whether arrays and floats hold what the compiled function reads where it looks."""
    word, half = ctypes.c_ssize_t.from_address, ctypes.c_int.from_address

    def axes(place: int, count: int) -> tuple[int, ...]:
        start = word(place).value
        return tuple(word(start + 8 * i).value for i in range(count))

    def known(view: npt.NDArray[Any]) -> bool:
        at = id(view)
        return (
            half(at + NDIM).value == view.ndim
            and axes(at + DIMENSIONS, view.ndim) == view.shape
            and axes(at + STRIDES, view.ndim) == view.strides
            and word(at + DESCR).value == id(view.dtype)
            and bool(half(at + FLAGS).value & WRITEABLE) == view.flags.writeable
        )

    def known_dtype(dtype: np.dtype[Any]) -> bool:
        letters = ctypes.string_at(id(dtype) + DTYPE, 3)
        number = half(id(dtype) + DTYPE + 4).value
        return (letters.decode(), number) == (
            f"{dtype.kind}{dtype.char}{dtype.byteorder}", dtype.num
        )  # fmt: skip

    memory, frozen = np.zeros((4, 6), np.uint8), np.zeros(3, np.float32)
    frozen.flags.writeable = False
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], frozen
    number, wide, single = 1 / 3, np.float64(1 / 3), np.float32(1 / 3)
    return (
        all(map(known, views))
        and all(known_dtype(np.dtype(name)) for name in ("uint8", "int8", "<f4", ">f4"))
        and all(
            ctype.from_address(id(real) + HEADER).value == real
            for ctype, real in (
                (ctypes.c_double, number), (ctypes.c_double, wide), (ctypes.c_float, single)
            )
        )
    )  # fmt: skip


@cache
def _array_maker() -> int:
    """The address of PyArray_NewFromDescr; 0 where it does not make what it should."""
    try:
        table = _capsule(np._core._multiarray_umath._ARRAY_API, None)  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        return 0
    address = (ctypes.c_void_p * (_NEW_FROM_DESCR + 1)).from_address(table)[_NEW_FROM_DESCR] or 0
    integer, place = ctypes.c_ssize_t, ctypes.c_void_p
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, place, ctypes.c_int, place, place,
                             place, ctypes.c_int, place)(address)  # fmt: skip
    dtype = np.dtype(np.float32)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # the call takes one
    made = make(np.ndarray, id(dtype), 2, (integer * 2)(3, 5), None, None, 0, None)
    good = type(made) is np.ndarray and (made.shape, made.dtype) == ((3, 5), dtype)
    return address if good and made.flags.c_contiguous and made.flags.owndata else 0


def _capsule(capsule: Any, name: Any) -> int:
    """The pointer that a PyCapsule holds. ValueError: it is of another name."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name)
