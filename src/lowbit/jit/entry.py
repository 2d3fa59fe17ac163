"""How Python enters machine code: one compiled function for all kernels.

It is a function of CPython's own calling convention (METH_FASTCALL), made through LLVM as the
kernels are. Behind each callable that `bound` makes stands a record: the area of jit.area and the
kernel's slots with what was fixed beforehand, and which of them a call fills. A call copies these
words to its stack, or to memory of its own if they are many, fills them, releases the GIL and
jumps. Through ctypes the same costs microseconds, as long as a small product takes. An argument is
an int (an address, a size), None (0), or a NumPy array, whose address is read from where NumPy
keeps it. Whether objects are laid out so (jit.objects) is asked once, of some.

Sources: Python's C API reference, "Common Object Structures", "Thread State and the GIL".
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from lowbit.isa.types import Int, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.area import area, entered
from lowbit.jit.compile import Loaded
from lowbit.jit.function import Function, Words, compiled
from lowbit.jit.objects import (
    HEADER,
    Array,
    PyObject,
    Tuple,
    function_maker,
    layout_is_known,
    none,
    record_of,
    words,
)

_MOST_ON_STACK = 1 << 16  # bytes; networks of thousands of steps have more
_WRONG_COUNT = "wrong number of arguments for a kernel"


class _Record(ctypes.Structure):
    """What stands before the template of the words, and, of each that an argument fills, its place,
    the argument's, and what is added: how many threads, words, arguments and words to fill, NumPy's
    array type, by which an array is told from an int, and TypeError, since Numba gives LLVM another
    meaning of PyExc_TypeError."""

    _fields_ = words("threads", "words", "arguments", "filled", "array_type", "error")


def bound(
    loaded: Loaded,
    threads: int,
    names: Sequence[str],
    varying: Mapping[str, tuple[int, int]],
    fixed: Mapping[str, Any],
) -> Callable[..., None]:
    """A kernel with its parameters `names`, but for those `varying`, bound to values.

    varying: of each the argument that fills it, and how many bytes behind its address. Before the
    arguments stands, for several threads, what `threads.runner` returns. TypeError, in a call, for
    another number of arguments.
    """
    before = area(loaded.address, threads)
    given = [*before, *(word(fixed.get(name)) for name in names)]
    at = {name: place for place, name in enumerate(names, len(before))}
    fills = [(at[name], *source) for name, source in varying.items()]
    count = 1 + max((argument for _, argument, _ in fills), default=-1)
    record = _Record(threads, len(given), count, len(fills), id(np.ndarray), id(TypeError))
    given.extend(chain.from_iterable(fills))
    packed = bytes(record) + struct.pack(f"{len(given)}q", *given)
    make, method = _entry()
    return make(method, (packed, loaded, *fixed.values()), __name__)  # which it keeps alive


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
    return function_maker(lowbit_enter.__name__, compiled(lowbit_enter, HEADER))


def lowbit_enter(k: Function, self: Tuple, args: Words, given: Int) -> Int:
    """What Python calls. `self` begins with the record."""
    record = record_of(k, self, _Record)
    several = (record.threads > 1).to(s64)
    for _ in k.unless(given.equals(record.arguments + several)):
        k.call("PyErr_SetString", record.error, k.text(_WRONG_COUNT), returns=None)
        k.returns(0)
    size, memory = call_size(record), k.register(k.index(0))
    large = size > _MOST_ON_STACK
    for _ in k.when(large):
        memory.value = k.call("aligned_alloc", 64, (size + 63) & -64)
        for _ in k.when(memory.value.equals(0)):
            k.returns(k.call("PyErr_NoMemory"))
    for _ in k.otherwise():
        memory.value = k.address(k.stack(size))
    answer = k.call(_run, record, args, template_copy(k, record, memory.value))
    for _ in k.when(large):
        k.call("free", memory.value, returns=None)
    return answer


def call_size(record: Any) -> Value:
    """Bytes for a call's words, behind a cache line that ends with their number, for jit.team."""
    return (record.words + 8) * 8


def template_copy(k: Function, record: Any, memory: Any) -> Words:
    """The words of a call, filled with the template behind its record."""
    copied = k.view(Words, memory) + 8
    copied[-1] = record.words
    k.copy(copied, record.end, record.words * 8)
    return copied


def _run(k: Function, record: _Record, args: Words, shared: Words) -> Int:
    """Fill slots and run the kernel: None, or 0 for an error. For several threads, what starts them
    is the first argument."""
    several = record.threads > 1
    values, fills = args + several.to(s64), record.end + record.words
    for i in k.range(0, record.filled):
        fill = fills + i * 3
        number = k.call(_word, values[fill[1]], record.array_type)
        for _ in k.when(number.equals(-1)):  # which may be one, a stride, say
            k.return_unless(k.call("PyErr_Occurred").equals(0), 0)
        shared[fill[0]] = number + fill[2]
    for _ in k.when(several):
        start, count = k.call("PyLong_AsLongLong", args[0]), record.threads.to(s32)
        state = k.call("PyEval_SaveThread")
        k.call(start, entered, shared, count, k.constant(0, s32), returns=None)
        k.call("PyEval_RestoreThread", state, returns=None)
    for _ in k.otherwise():
        state = k.call("PyEval_SaveThread")
        k.call(entered, shared)
        k.call("PyEval_RestoreThread", state, returns=None)
    return none(k)


def _word(k: Function, value: Int, array_type: Int) -> Int:
    """As `word`; -1: perhaps an error."""
    for _ in k.when(k.view(PyObject, value).type.equals(array_type)):
        k.returns(k.view(Array, value).data)
    k.return_if(value.equals(k.external("_Py_NoneStruct")), 0)
    return k.call("PyLong_AsLongLong", value)
