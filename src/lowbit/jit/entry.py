"""How Python enters machine code: one compiled function for all kernels.

It is a function of CPython's own calling convention (METH_FASTCALL), made through LLVM as the
kernels are. Behind each callable that `bound` makes stands a record: the kernel's slots with what
was fixed beforehand, and which of them a call fills. A call copies the slots to its stack, or to
memory of its own if they are many, fills them, releases the GIL and jumps. Through ctypes the same
costs microseconds, as long as a small product takes. An argument is an int (an address, a size),
None (0), or a NumPy array, whose address is read from where NumPy's C interface keeps it
(`PyArrayObject_fields`, numpy/ndarraytypes.h: the first member after Python's own header). Whether
objects are laid out so is asked once, of some.

Sources: Python's C API reference, "Common Object Structures", "Thread State and the GIL".
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from lowbit.isa import get
from lowbit.jit.builder import counters
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded, immortal

_NAME = "lowbit_enter"
_FASTCALL = 0x80
HEADER = object.__basicsize__  # what every Python object begins with; its type is the last of it
_FACTS = 6  # words of a record before the slots
_MOST_ON_STACK = 1 << 13  # words of slots; networks of thousands of steps have more


class Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def bound(
    loaded: Loaded,
    threads: int,
    names: Sequence[str],
    varying: Sequence[str],
    fixed: Mapping[str, Any],
) -> Callable[..., None]:
    """A kernel with its parameters `names`, but for those `varying`, bound to values.

    It takes the varying ones in this order, and before them, for several threads, what
    `threads.runner` returns. TypeError, in a call, for another number of arguments.
    """
    words = [*(word(fixed.get(name)) for name in names), *counters(threads)]
    places = [names.index(name) for name in varying]
    sizes = len(words), len(places)
    facts = (loaded.address, threads, *sizes, id(np.ndarray), id(TypeError))
    record = struct.pack(f"{_FACTS + len(words) + len(places)}q", *facts, *words, *places)
    make, method = _entry()
    return make(method, (record, loaded, *fixed.values()), __name__)  # which it keeps alive


def word(argument: Any) -> int:
    """What a kernel is given for an argument: an int, an array's address, 0 for None."""
    if isinstance(argument, np.ndarray):
        return argument.__array_interface__["data"][0]
    return 0 if argument is None else operator.index(argument)


@cache
def _entry() -> tuple[Callable[..., Any], int]:
    """How a call enters kernels; RuntimeError where Python keeps its objects in another way."""
    if not layout_is_known():
        raise RuntimeError(
            f"Python {sys.version.split()[0]} with NumPy {np.__version__} keeps its objects as "
            "lowbit does not know; take versions that it is tested with"
        )
    return method_of(_NAME, load(_NAME, get("generic"), lambda: _IR, HEADER))


def method_of(name: str, loaded: Loaded) -> tuple[Callable[..., Any], int]:
    """PyCFunction_NewEx, and the address of the description of a compiled function."""
    method = Method(name.encode(), loaded.address, _FASTCALL, None)
    return new_function(), ctypes.addressof(immortal(method))


def new_function() -> Callable[..., Any]:
    """PyCFunction_NewEx, of a description's address, what is bound and the name of a module."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    make.restype = ctypes.py_object
    return make


BYTES_AT, TUPLE_AT = bytes.__basicsize__ - 1, tuple.__basicsize__


def layout_is_known() -> bool:
    """Whether arrays, bytes and tuples hold their content where the compiled function looks."""
    if sys.implementation.name != "cpython":
        return False
    at = ctypes.c_size_t.from_address
    text, memory = b"sixteen bytes...", np.zeros((4, 6), np.uint8)
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], memory.view(np.uint16)[0]
    return (
        all(at(id(view) + HEADER).value == word(view) for view in views)
        and at(id(memory) + HEADER - 8).value == id(np.ndarray)
        and ctypes.string_at(id(text) + BYTES_AT, len(text)) == text
        and at(id(pair := (text, memory)) + TUPLE_AT).value == id(text)
        and pair[1] is memory
    )


# `self` is a tuple that begins with the record: the kernel's address, threads, slots, arguments,
# NumPy's array type, by which an array is told from an int, and TypeError, since Numba gives LLVM
# another meaning of PyExc_TypeError; then the slots; then which of them the arguments fill.
_IR = f"""
@_Py_NoneStruct = external global i8
@message = private constant [39 x i8] c"wrong number of arguments for a kernel\\00"
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyErr_Occurred()
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare ptr @PyErr_NoMemory()
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define ptr @{_NAME}(ptr %self, ptr %args, i64 %given) {{
entry:
  %bytes_at = getelementptr i8, ptr %self, i64 {TUPLE_AT}
  %bytes = load ptr, ptr %bytes_at
  %record = getelementptr i8, ptr %bytes, i64 {BYTES_AT}
  %threads_at = getelementptr i64, ptr %record, i64 1
  %words_at = getelementptr i64, ptr %record, i64 2
  %count_at = getelementptr i64, ptr %record, i64 3
  %array_at = getelementptr i64, ptr %record, i64 4
  %template = getelementptr i64, ptr %record, i64 {_FACTS}
  %kernel = load ptr, ptr %record
  %threads = load i64, ptr %threads_at
  %words = load i64, ptr %words_at
  %count = load i64, ptr %count_at
  %array = load ptr, ptr %array_at
  %places = getelementptr i64, ptr %template, i64 %words
  %several = icmp sgt i64 %threads, 1
  %first = zext i1 %several to i64
  %values = getelementptr ptr, ptr %args, i64 %first
  %expected = add i64 %count, %first
  %right = icmp eq i64 %given, %expected
  br i1 %right, label %copy, label %wrong
wrong:
  %kind_at = getelementptr i64, ptr %record, i64 5
  %kind = load ptr, ptr %kind_at
  call void @PyErr_SetString(ptr %kind, ptr @message)
  ret ptr null
copy:
  %room = add i64 %words, 8
  %large = icmp ugt i64 %room, {_MOST_ON_STACK}
  br i1 %large, label %on_heap, label %on_stack
on_heap:
  %lines = add i64 %room, 7
  %whole = and i64 %lines, -8
  %room_bytes = shl i64 %whole, 3
  %allocated = call ptr @aligned_alloc(i64 64, i64 %room_bytes)
  %is_allocated = icmp ne ptr %allocated, null
  br i1 %is_allocated, label %begin, label %no_memory
no_memory:
  %no_memory_error = call ptr @PyErr_NoMemory()
  ret ptr null
on_stack:
  %reserved = alloca i64, i64 %room, align 64
  br label %begin
begin:
  %numbered = phi ptr [ %allocated, %on_heap ], [ %reserved, %on_stack ]
  %slots = getelementptr i64, ptr %numbered, i64 8
  %number_at = getelementptr i64, ptr %numbered, i64 7
  store i64 %words, ptr %number_at        ; before the slots, for jit.team
  %size = shl i64 %words, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %slots, ptr %template, i64 %size, i1 false)
  br label %next
next:
  %i = phi i64 [ 0, %begin ], [ %following, %store ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %look, label %filled
look:
  %value_at = getelementptr ptr, ptr %values, i64 %i
  %value = load ptr, ptr %value_at
  %type_at = getelementptr i8, ptr %value, i64 {HEADER - 8}
  %type = load ptr, ptr %type_at
  %is_array = icmp eq ptr %type, %array
  br i1 %is_array, label %from_array, label %other
from_array:
  %data_at = getelementptr i8, ptr %value, i64 {HEADER}
  %data = load i64, ptr %data_at
  br label %store
other:
  %is_none = icmp eq ptr %value, @_Py_NoneStruct
  br i1 %is_none, label %store, label %from_int
from_int:
  %int = call i64 @PyLong_AsLongLong(ptr %value)
  %suspect = icmp eq i64 %int, -1
  br i1 %suspect, label %ask, label %store
ask:                                        ; or it was -1: a stride, say
  %error = call ptr @PyErr_Occurred()
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %store, label %failed
store:
  %word = phi i64 [ %data, %from_array ], [ 0, %other ], [ %int, %from_int ], [ -1, %ask ]
  %place_at = getelementptr i64, ptr %places, i64 %i
  %place = load i64, ptr %place_at
  %slot = getelementptr i64, ptr %slots, i64 %place
  store i64 %word, ptr %slot
  %following = add i64 %i, 1
  br label %next
filled:
  br i1 %several, label %share, label %alone
alone:
  %state = call ptr @PyEval_SaveThread()
  call void %kernel(ptr %slots)
  call void @PyEval_RestoreThread(ptr %state)
  br label %done
share:
  %runner_object = load ptr, ptr %args
  %runner_address = call i64 @PyLong_AsLongLong(ptr %runner_object)
  %runner = inttoptr i64 %runner_address to ptr
  %team = trunc i64 %threads to i32
  %saved = call ptr @PyEval_SaveThread()
  call void %runner(ptr %kernel, ptr %slots, i32 %team, i32 0)
  call void @PyEval_RestoreThread(ptr %saved)
  br label %done
done:
  br label %end
failed:
  br label %end
end:
  %answer = phi ptr [ @_Py_NoneStruct, %done ], [ null, %failed ]
  br i1 %large, label %free, label %answered
free:
  call void @free(ptr %numbered)
  br label %answered
answered:
  %is_answer = icmp ne ptr %answer, null
  br i1 %is_answer, label %hold, label %return
hold:
  call void @Py_IncRef(ptr %answer)
  br label %return
return:
  ret ptr %answer
}}
"""
