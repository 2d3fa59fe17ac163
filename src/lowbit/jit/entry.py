"""How Python enters machine code: one compiled function that takes a kernel and its arguments.

It is a function of CPython's own calling convention (METH_FASTCALL), made through LLVM as the
kernels are: reads its arguments into slots on its stack, releases the GIL and jumps. Through ctypes
the same costs microseconds, as long as a small product takes. An argument is an int (an address, a
size), None (0), or a NumPy array, whose address is read from where NumPy's C interface keeps it
(`PyArrayObject_fields`, numpy/ndarraytypes.h: the first member after Python's own header); whether
it is there is asked once, of real arrays. Where it is not, ctypes does the work.

Sources: Python's C API reference, "Common Object Structures", "Thread State and the GIL".
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from lowbit.isa import get
from lowbit.jit import cache as disk
from lowbit.jit import compile as compiler
from lowbit.jit.builder import COUNTERS

_NAME = "lowbit_enter"
_FASTCALL = 0x80
_HEADER = object.__basicsize__  # what every Python object begins with; its type is the last of it
_FIRST = 3  # arguments before the kernel's own

# (kernel's address, address of a GOMP_parallel or 0, threads, the kernel's arguments) -> None
Enter = Callable[..., None]

# How a kernel is called: one pointer to its slots. Releases the GIL while it runs.
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def slots(arguments: tuple[Any, ...]) -> bytes:
    """The memory that a kernel takes: its arguments, and counters at zero.

    A new object each time, since the kernel counts in it.
    """
    values = [_address(a) if isinstance(a, np.ndarray) else a or 0 for a in arguments]
    return struct.pack(f"{len(values)}q{8 * COUNTERS}x", *values)


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.__array_interface__["data"][0]


def _through_ctypes(kernel: int, runner: int, threads: int, *arguments: Any) -> None:
    """What the compiled function does, some microseconds slower."""
    memory = slots(arguments)
    if threads > 1:
        kinds = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint
        ctypes.CFUNCTYPE(None, *kinds)(runner)(kernel, memory, threads, 0)
    else:
        FUNCTION(kernel)(memory)


@cache
def enter() -> Enter:
    """The function that enters kernels."""
    if sys.implementation.name != "cpython" or not _layout_is_known():
        return _through_ctypes
    isa = get("generic")
    path = disk.entry(_NAME, _HEADER, COUNTERS)
    code = disk.read(path)
    if code is None:
        code = compiler.object_code(_text(), isa)
        disk.write(path, code)
    loaded = compiler.Loaded(code, _NAME, isa)
    method = _Method(_NAME.encode(), loaded.address, _FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes, make.restype = (
        [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p],
        ctypes.py_object,
    )
    _kept.extend((loaded, method))
    return make(ctypes.addressof(method), np.ndarray, None)


_kept: list[Any] = []  # code and its description must live as long as the process


def _layout_is_known() -> bool:
    memory = np.zeros((4, 6), np.uint8)
    views = memory, memory[1:, 2:], memory.T[3:], memory[::-1, ::2], memory.view(np.uint16)[0]
    return all(ctypes.c_size_t.from_address(id(v) + _HEADER).value == _address(v) for v in views)


def _text() -> str:
    """The function as LLVM IR: PyObject *lowbit_enter(PyObject *self, PyObject **args, ssize_t n).

    `self` is NumPy's array type, by which an array is told from an int.
    """
    word, pointer, none = ir.IntType(64), ir.PointerType(), ir.VoidType()
    byte = ir.IntType(8)
    module = ir.Module(_NAME)

    def external(name: str, result: ir.Type, *parameters: ir.Type) -> ir.Function:
        return ir.Function(module, ir.FunctionType(result, parameters), name)

    as_long = external("PyLong_AsLongLong", word, pointer)
    occurred = external("PyErr_Occurred", pointer)
    save = external("PyEval_SaveThread", pointer)
    restore = external("PyEval_RestoreThread", none, pointer)
    retain = external("Py_IncRef", none, pointer)
    none_object = ir.GlobalVariable(module, byte, "_Py_NoneStruct")
    function = external(_NAME, pointer, pointer, pointer, word)
    array_type, args, count = function.args
    b: Any = ir.IRBuilder(function.append_basic_block("entry"))
    null = ir.Constant(pointer, None)
    own = b.sub(count, word(_FIRST))
    memory = b.alloca(word, b.add(own, word(COUNTERS)))
    memory.align, memory.type = 64, pointer

    def at(base: Any, index: Any, element: ir.Type = word) -> Any:
        return b.gep(base, [index], source_etype=element)

    def number(index: Any) -> Any:
        return b.call(as_long, [b.load(at(args, index), typ=pointer)])

    for counter in range(COUNTERS):
        b.store(word(0), at(memory, b.add(own, word(counter))))
    entry = b.block
    head, body, done = (function.append_basic_block(n) for n in ("head", "body", "done"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(word)
    i.add_incoming(word(0), entry)
    b.cbranch(b.icmp_signed("<", i, own), body, done)

    b.position_at_end(body)
    argument = b.load(at(args, b.add(i, word(_FIRST))), typ=pointer)
    kind = b.load(at(argument, word(_HEADER - 8), byte), typ=pointer)
    from_array, not_array, from_int, stored, failed = (
        function.append_basic_block(n) for n in ("array", "other", "int", "stored", "failed")
    )
    b.cbranch(b.icmp_unsigned("==", kind, array_type), from_array, not_array)
    b.position_at_end(from_array)
    data = b.load(at(argument, word(_HEADER), byte), typ=word)
    b.branch(stored)
    b.position_at_end(not_array)
    b.cbranch(b.icmp_unsigned("==", argument, none_object), stored, from_int)
    b.position_at_end(from_int)
    value = b.call(as_long, [argument])
    b.cbranch(b.icmp_signed("==", value, word(-1)), failed, stored)
    b.position_at_end(failed)  # or it was -1: a stride, say
    error = b.icmp_unsigned("!=", b.call(occurred, []), null)
    with b.if_then(error, likely=False):
        b.ret(null)
    after_check = b.block
    b.branch(stored)
    b.position_at_end(stored)
    slot = b.phi(word)
    for incoming, block in (
        (data, from_array),
        (word(0), not_array),
        (value, from_int),
        (word(-1), after_check),
    ):
        slot.add_incoming(incoming, block)
    b.store(slot, at(memory, i))
    i.add_incoming(b.add(i, word(1)), b.block)
    b.branch(head)

    b.position_at_end(done)
    kernel, runner, threads = (number(word(n)) for n in range(_FIRST))
    state = b.call(save, [])
    short = ir.IntType(32)
    one_thread = ir.FunctionType(none, [pointer])
    many_threads = ir.FunctionType(none, [pointer, pointer, short, short])
    with b.if_else(b.icmp_signed(">", threads, word(1))) as (several, single):
        with several:
            start = b.inttoptr(runner, many_threads.as_pointer())
            b.call(start, [b.inttoptr(kernel, pointer), memory, b.trunc(threads, short), short(0)])
        with single:
            b.call(b.inttoptr(kernel, one_thread.as_pointer()), [memory])
    b.call(restore, [state])
    b.call(retain, [none_object])
    b.ret(none_object)
    return str(module)
