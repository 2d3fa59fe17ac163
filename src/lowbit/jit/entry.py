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
from lowbit.jit.builder import COUNTERS
from lowbit.jit.cache import load

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
    loaded = load(_NAME, get("generic"), lambda: str(_Text()), _HEADER)
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


_WORD, _BYTE, _POINTER, _NONE = ir.IntType(64), ir.IntType(8), ir.PointerType(), ir.VoidType()


class _Text:
    """The function as LLVM IR: PyObject *lowbit_enter(PyObject *self, PyObject **args, ssize_t n).

    `self` is NumPy's array type, by which an array is told from an int.
    """

    def __init__(self) -> None:
        self.module = ir.Module(_NAME)
        self.as_long = self._external("PyLong_AsLongLong", _WORD, _POINTER)
        self.occurred = self._external("PyErr_Occurred", _POINTER)
        self.save = self._external("PyEval_SaveThread", _POINTER)
        self.restore = self._external("PyEval_RestoreThread", _NONE, _POINTER)
        self.retain = self._external("Py_IncRef", _NONE, _POINTER)
        self.none_object = ir.GlobalVariable(self.module, _BYTE, "_Py_NoneStruct")
        self.function = self._external(_NAME, _POINTER, _POINTER, _POINTER, _WORD)
        self.b: Any = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._emit()

    def __str__(self) -> str:
        return str(self.module)

    def _external(self, name: str, result: ir.Type, *parameters: ir.Type) -> ir.Function:
        return ir.Function(self.module, ir.FunctionType(result, parameters), name)

    def _blocks(self, *names: str) -> tuple[Any, ...]:
        return tuple(self.function.append_basic_block(name) for name in names)

    def _at(self, base: Any, index: Any, element: ir.Type = _WORD) -> Any:
        return self.b.gep(base, [index], source_etype=element)

    def _emit(self) -> None:
        """Slots for the arguments and counters, filled in a loop; then the call."""
        b, (_, args, count) = self.b, self.function.args
        own = b.sub(count, _WORD(_FIRST))
        memory = b.alloca(_WORD, b.add(own, _WORD(COUNTERS)))
        memory.align, memory.type = 64, _POINTER
        for counter in range(COUNTERS):
            b.store(_WORD(0), self._at(memory, b.add(own, _WORD(counter))))
        entry = b.block
        head, body, done = self._blocks("head", "body", "done")
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(_WORD)
        i.add_incoming(_WORD(0), entry)
        b.cbranch(b.icmp_signed("<", i, own), body, done)
        b.position_at_end(body)
        argument = b.load(self._at(args, b.add(i, _WORD(_FIRST))), typ=_POINTER)
        b.store(self._slot(argument), self._at(memory, i))
        i.add_incoming(b.add(i, _WORD(1)), b.block)
        b.branch(head)
        b.position_at_end(done)
        self._call(args, memory)
        b.call(self.retain, [self.none_object])
        b.ret(self.none_object)

    def _slot(self, argument: Any) -> Any:
        """An array's address, 0 for None, or an int's value; returns NULL where that fails."""
        b = self.b
        kind = b.load(self._at(argument, _WORD(_HEADER - 8), _BYTE), typ=_POINTER)
        from_array, not_array, from_int, stored, failed = self._blocks(
            "array", "other", "int", "stored", "failed"
        )
        b.cbranch(b.icmp_unsigned("==", kind, self.function.args[0]), from_array, not_array)
        b.position_at_end(from_array)
        data = b.load(self._at(argument, _WORD(_HEADER), _BYTE), typ=_WORD)
        b.branch(stored)
        b.position_at_end(not_array)
        b.cbranch(b.icmp_unsigned("==", argument, self.none_object), stored, from_int)
        b.position_at_end(from_int)
        value = b.call(self.as_long, [argument])
        b.cbranch(b.icmp_signed("==", value, _WORD(-1)), failed, stored)
        b.position_at_end(failed)  # or it was -1: a stride, say
        null = ir.Constant(_POINTER, None)
        with b.if_then(b.icmp_unsigned("!=", b.call(self.occurred, []), null), likely=False):
            b.ret(null)
        after_check = b.block
        b.branch(stored)
        b.position_at_end(stored)
        slot = b.phi(_WORD)
        slot.add_incoming(data, from_array)
        slot.add_incoming(_WORD(0), not_array)
        slot.add_incoming(value, from_int)
        slot.add_incoming(_WORD(-1), after_check)
        return slot

    def _call(self, args: Any, memory: Any) -> None:
        """Run the kernel, without the interpreter's lock."""
        b, short = self.b, ir.IntType(32)
        kernel, runner, threads = (
            b.call(self.as_long, [b.load(self._at(args, _WORD(n)), typ=_POINTER)])
            for n in range(_FIRST)
        )
        state = b.call(self.save, [])
        one_thread = ir.FunctionType(_NONE, [_POINTER])
        many_threads = ir.FunctionType(_NONE, [_POINTER, _POINTER, short, short])
        with b.if_else(b.icmp_signed(">", threads, _WORD(1))) as (several, single):
            with several:
                start = b.inttoptr(runner, many_threads.as_pointer())
                task = b.inttoptr(kernel, _POINTER)
                b.call(start, [task, memory, b.trunc(threads, short), short(0)])
            with single:
                b.call(b.inttoptr(kernel, one_thread.as_pointer()), [memory])
        b.call(self.restore, [state])
