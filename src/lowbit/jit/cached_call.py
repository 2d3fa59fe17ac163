"""How a call that was seen before goes from Python to machine code at once.

Checking the arguments of a call and preparing it takes microseconds, as long as a small product.
Both depend on little: types, shapes, strides, and which objects the other arguments are. So a call
that has been checked once leaves a callable that compares just these, in machine code, and, where
nothing differs, computes. Where something does it returns None, and nothing has happened.

It is made as `jit.entry` makes its callables, and reads more of objects than that. Whether they are
laid out so (jit.objects) is asked once, of real ones; where they are not, no call is cached.

Source: NumPy's C API reference, "Array API".
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

from lowbit.jit import threads
from lowbit.jit.area import area
from lowbit.jit.cached_call_code import (
    ARRAY,
    COPIED,
    COUNT,
    INTEGER,
    MOST_AXES,
    OUTPUT,
    REAL,
    SAME,
    CheckRecord,
    Record,
    SharedScratch,
    lowbit_cached_call,
)
from lowbit.jit.compile import Loaded, immortal
from lowbit.jit.function import compiled
from lowbit.jit.objects import HEADER, arrays_are_known, dtype_code, function_maker
from lowbit.jit.workspace import aligned_empty
from lowbit.numerics.float32 import BEYOND

_NEW_FROM_DESCR = 94  # PyArray_NewFromDescr's place in the table of NumPy's C interface
_MOST_OF_STACK = 1 << 14  # bytes that a call may take from its thread's stack
MOST_SCRATCH = 1 << 20  # bytes that it may take in all: more than that, from one memory for all


class Same(NamedTuple):
    """The argument must be this very object, or, `by_value`, of its type and equal to it."""

    value: Any
    by_value: bool = False

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        kind = id(type(self.value)) if self.by_value else 0
        return CheckRecord(SAME, type=kind, value=id(self.value))

    @property
    def key(self) -> tuple[Any, ...]:
        """What it tells apart."""
        kind = type(self.value)
        return (kind, *self.value) if kind is list else (kind, self.value)


class Array(NamedTuple):
    """An array of the shape, strides and type of this one; its address fills a slot.

    `written`: it is the output, which may be written and shares no memory with arrays before it,
    but for one that is `replaced`: of its shape, strides and type, and at its address.
    """

    like: npt.NDArray[Any]
    slot: str
    written: bool = False
    replaced: bool = False

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        like = self.like
        spans = [(n - 1) * step for n, step in zip(like.shape, like.strides, strict=True)]
        return CheckRecord(
            OUTPUT if self.written else ARRAY,
            places[self.slot],
            value=self.replaced,
            low=sum(span for span in spans if span < 0),
            high=sum(span for span in spans if span > 0) + like.itemsize,
            dtype=dtype_code(like.dtype),
            ndim=like.ndim,
            shape=like.shape,
            strides=like.strides,
        )


class Copied(NamedTuple):
    """An array like this one, contiguous, which is copied there into the scratch, so that what
    lies behind it may be read."""

    like: npt.NDArray[Any]
    offset: int

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        record = Array(self.like, "").record({"": self.offset})
        record.kind = COPIED
        return record


class Real(NamedTuple):
    """A number of type `kind`, one of REALS, of a magnitude from `least` to below `most`, within
    float32, which is put there into the scratch."""

    offset: int
    least: float = 0.0
    most: float = BEYOND
    kind: type = float

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        low, high = struct.unpack("2q", struct.pack("2d", self.least, self.most))
        return CheckRecord(
            REAL, self.offset, id(self.kind), self.kind is np.float32, low=low, high=high
        )


class Integer(NamedTuple):
    """An integer of type `kind`, Python's or one of NumPy's, from `low` to `high`, which is put
    there into the scratch, `shift` added."""

    offset: int
    low: int
    high: int
    shift: int = 0
    kind: type = int

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        return CheckRecord(INTEGER, self.offset, id(self.kind), self.shift, self.low, self.high)


class Count(NamedTuple):
    """The argument must be None, and a function, int (), must return a number. Without a function
    that must be how many threads there were when jit.threads chose what starts them."""

    function: int
    expected: int

    def record(self, places: Mapping[str, int]) -> CheckRecord:
        return CheckRecord(COUNT, value=self.function, low=self.expected)


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
        check.key if isinstance(check, Same) else bytes(check.record(defaultdict(int)))
        for check in checks
    )


@dataclass(frozen=True)
class Fresh:
    """Where no output is given: what makes one, of what arguments, and the slot of its address.

    What `np.empty` would make of a shape and a dtype is made by NumPy's C interface."""

    make: Callable[..., npt.NDArray[Any]]
    arguments: tuple[Any, ...]
    slot: str

    def members(self, places: Mapping[str, int]) -> dict[str, Any]:
        """What the record says of it."""
        members = {"output_slot": places[self.slot], "make": id(self.make)}
        members["arguments"] = id(self.arguments)
        maker = _array_maker() if self.make is np.empty else 0
        if not maker or len(self.arguments[0]) != MOST_AXES:
            return members
        shape, dtype = self.arguments
        return {**members, "maker": maker, "dtype": id(dtype), "ndim": len(shape), "shape": shape}


def cached_call(
    loaded: Loaded,
    names: Sequence[str],
    words: Mapping[str, int],
    scratch: Mapping[str, int],
    scratch_bytes: int,
    checks: Sequence[Check],
    fresh: Fresh | None = None,
    kept: Any = None,
    keeps_gil: bool = False,
    thread_count: int = 1,
) -> Callable[..., Any] | None:
    """A function of one argument for each check: the output, or None if one does not fit.

    It runs a kernel of parameters `names`: those in `words` hold these numbers, those in `scratch`
    the addresses of memory that belongs to the call, `scratch_bytes` in all, at these offsets;
    checks and `fresh` fill others. If `keeps_gil`, it does not give the GIL back and take it again,
    which would be a good part of a short call. It also returns None where jit.threads is to choose
    what starts several threads, or another call has taken the memory that calls share. None,
    instead of a function, where Python's objects are of unknown layout, the scratch is too large,
    or an array has too many axes.
    """
    arrays = [check.like for check in checks if isinstance(check, Array | Copied)]
    if scratch_bytes > MOST_SCRATCH or any(array.ndim > MOST_AXES for array in arrays):
        return None
    if not arrays_are_known():
        return None
    before = area(loaded.address, thread_count)
    places = {name: place for place, name in enumerate(names, len(before))}
    given = [*before, *(words.get(name, 0) for name in names)]
    moves = [word for name, offset in scratch.items() for word in (places[name], offset)]
    outputs = [i for i, check in enumerate(checks) if isinstance(check, Array) and check.written]
    record = Record(
        len(given),
        len(scratch),
        len(checks),
        id(np.ndarray),
        outputs[-1] if outputs else -1,
        **(fresh.members(places) if fresh else {}),
        keeps_gil=keeps_gil,
        threads=thread_count,
        starter=threads.starter_at(),
        shared=_shared_scratch() if scratch_bytes > _MOST_OF_STACK else 0,
        scratch_bytes=scratch_bytes,
    )
    fixed = struct.pack(f"{len(given) + len(moves)}q", *given, *moves)
    packed = bytes(record) + fixed + b"".join(bytes(check.record(places)) for check in checks)
    make, method = _entry()
    known = [check.value for check in checks if isinstance(check, Same)]
    return make(method, (packed, loaded, fresh, kept, known), __name__)


_scratch = immortal(SharedScratch())
if hasattr(os, "register_at_fork"):  # the thread that has it is not in the child
    os.register_at_fork(after_in_child=partial(setattr, _scratch, "taken", 0))


@cache
def _shared_scratch() -> int:
    _scratch.address = immortal(aligned_empty((MOST_SCRATCH,), np.uint8)).ctypes.data
    return ctypes.addressof(_scratch)


@cache
def _entry() -> tuple[Callable[..., Any], int]:
    loaded = compiled(lowbit_cached_call, HEADER)
    return function_maker(lowbit_cached_call.__name__, loaded)


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
