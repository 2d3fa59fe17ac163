"""How CPython and NumPy lay out the objects that machine code reads, and whether they do so here.

Sources: Python's C API reference, "Common Object Structures"; NumPy's, "Array Structure" (of
`PyArrayObject_fields` and `PyArray_Descr`, numpy/ndarraytypes.h).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lowbit.isa.value import Value
from lowbit.jit.compile import Loaded, immortal
from lowbit.jit.function import Function

HEADER = object.__basicsize__
BYTES_AT = bytes.__basicsize__ - 1  # where the content of bytes begins
WRITEABLE = 0x400  # NPY_ARRAY_WRITEABLE
# Of the dtype's `code`: a number and two letters that follow from it, and the byte order; not the
# flags, which are a byte between them.
DTYPE_BITS = -1 << 32 | 0xFFFFFF
_FASTCALL = 0x80

_HEADER = (("references", c_char * (HEADER - 8)), ("type", c_int64))


def words(*names: str) -> list[tuple[str, Any]]:
    """Members of a Structure that are 64-bit numbers."""
    return [(name, c_int64) for name in names]


class PyObject(Structure):
    _fields_ = _HEADER


class Tuple(Structure):
    _fields_ = (
        *_HEADER, ("count", c_int64), ("rest", c_char * (tuple.__basicsize__ - HEADER - 8)),
        ("items", c_int64 * 1),
    )  # fmt: skip


class Float(Structure):
    """Of Python and float64 of NumPy."""

    _fields_ = (*_HEADER, ("value", c_double))


class Single(Structure):
    """float32 of NumPy."""

    _fields_ = (*_HEADER, ("value", c_float))


class Dtype(Structure):
    _fields_ = (*_HEADER, ("scalar", c_int64), ("code", c_int64))


class Array(Structure):
    _fields_ = (
        *_HEADER, ("data", c_int64), ("ndim", c_int32), ("dimensions", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("base", c_int64), ("dtype", POINTER(Dtype)),
        ("flags", c_int32),
    )  # fmt: skip


class Method(Structure):
    """PyMethodDef."""

    _fields_ = (("name", c_char_p), ("function", c_int64), ("flags", c_int32), ("doc", c_char_p))


class Builtin(Structure):
    """PyCFunctionObject."""

    _fields_ = (*_HEADER, ("method", POINTER(Method)), ("self", c_int64))


def none(k: Function) -> Value:
    """None, a new reference."""
    value = k.external("_Py_NoneStruct")
    k.call("Py_IncRef", value, returns=None)
    return value


def record_of(k: Function, self: Any, structure: type[Structure]) -> Any:
    """The record at the beginning of the bytes that are first in a tuple, what is bound."""
    return k.view(structure, self.items[0] + BYTES_AT)


def function_maker(name: str, loaded: Loaded) -> tuple[Callable[..., Any], int]:
    """PyCFunction_NewEx, and the address of the description of a compiled function."""
    method = Method(name.encode(), loaded.address, _FASTCALL, None)
    return new_function(), ctypes.addressof(immortal(method))


def new_function() -> Callable[..., Any]:
    """PyCFunction_NewEx, of a description's address, what is bound and the name of a module."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    make.restype = ctypes.py_object
    return make


def layout_is_known() -> bool:
    """Whether arrays, bytes and tuples hold their content where compiled functions look."""
    if sys.implementation.name != "cpython":
        return False
    text, memory = b"sixteen bytes...", np.zeros((4, 6), np.uint8)
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], memory.view(np.uint16)[0]
    return (
        all(_at(Array, v).data == v.__array_interface__["data"][0] for v in views)
        and _at(PyObject, memory).type == id(np.ndarray)
        and ctypes.string_at(id(text) + BYTES_AT, len(text)) == text
        and _at(Tuple, pair := (text, memory)).items[0] == id(text)
        and pair[1] is memory
    )


def builtins_are_known() -> bool:
    """Whether builtins and tuples hold what compiled functions read where they look."""
    function, some = _at(Builtin, length := cast(Any, len)), ("a", "b", "c")
    named = function.method.contents.name == b"len" and function.self == id(length.__self__)
    return named and _at(Tuple, some).count == len(some)


@cache
def arrays_are_known() -> bool:
    """Whether arrays and floats hold what compiled functions read where they look."""
    memory, frozen = np.zeros((4, 6), np.uint8), np.zeros(3, np.float32)
    frozen.flags.writeable = False
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], frozen
    number = 1 / 3
    return (
        all(map(_is_known, views))
        and all(map(_is_known_dtype, map(np.dtype, ("uint8", "int8", "<f4", ">f4"))))
        and all(_at(Float, real).value == real for real in (number, np.float64(number)))
        and _at(Single, single := np.float32(number)).value == single
    )


def _is_known(view: npt.NDArray[Any]) -> bool:
    array = _at(Array, view)
    return (
        array.ndim == view.ndim
        and tuple(array.dimensions[: view.ndim]) == view.shape
        and tuple(array.strides[: view.ndim]) == view.strides
        and ctypes.addressof(array.dtype.contents) == id(view.dtype)
        and bool(array.flags & WRITEABLE) == view.flags.writeable
    )


def _is_known_dtype(dtype: np.dtype[Any]) -> bool:
    letters = f"{dtype.kind}{dtype.char}{dtype.byteorder}".encode()
    return dtype_code(dtype) == dtype.num << 32 | int.from_bytes(letters, "little")


def dtype_code(dtype: np.dtype[Any]) -> int:
    """What two equal dtypes of numbers have in common, as compiled functions read it."""
    return _at(Dtype, dtype).code & DTYPE_BITS


def _at(structure: type[Structure], thing: object) -> Any:
    return structure.from_address(id(thing))
