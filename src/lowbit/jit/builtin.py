"""Public functions as Python's builtins: a known call of one never sees a Python frame.

Binding thirteen parameters, looking up what is known of the right operand and calling that takes
Python longer than a small product takes the machine. So a function that is written in Python is
wrapped in one of CPython's own calling convention (METH_FASTCALL | METH_KEYWORDS): machine code
puts the arguments into order, finds the known calls that the operand keeps (`Finder`), and tries
them (jit.cached_call). Where none fits, or the arguments are not plain ones, Python's
function is called with what was given, and says what is wrong, if something is.

What wraps it has the function's name, module, documentation and, as text, its parameters; it is
pickled by its name, as the function would be.

Sources: Python's C API reference, "Common Object Structures", "Vectorcall".
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from lowbit.isa.types import Int, s64
from lowbit.jit.compile import Loaded, immortal
from lowbit.jit.function import Bit, Function, Words, compiled
from lowbit.jit.objects import (
    HEADER,
    Array,
    Builtin,
    Method,
    PyObject,
    Tuple,
    arrays_are_known,
    builtins_are_known,
    new_function,
    words,
)

_FLAGS = 0x80 | 0x02  # METH_FASTCALL | METH_KEYWORDS
_INSTALL = -1  # in place of a number of arguments
_ENDING = "the function is gone, since Python ends"
_MIX = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: Knuth, vol. 3, 6.4

F = TypeVar("F", bound=Callable[..., Any])
Shapes = Sequence[tuple[int, ...]]


class Finder(NamedTuple):
    """Where the calls are that machine code knows: a `Table`, under `key` in the dictionary
    `attribute` of the operand, of type `kind`; or, without an operand, in the dictionary `calls`.
    The first `arrays` arguments, but for the operand, are the arrays whose shapes a table goes by.
    """

    key: str
    operand: str = ""
    kind: type = np.ndarray
    attribute: str = ""
    calls: dict[str, Table] | None = None
    arrays: int = 1


Known = Callable[..., Any]
"""What `jit.cached_call` makes: it takes all arguments but the operand, in order."""

Table = tuple[tuple[Known, ...], ...]
"""Buckets of known calls, as many as a power of two: see `table`."""


def table(calls: Sequence[tuple[Shapes, Known]]) -> Table:
    """These calls, by the shapes of their first arrays: as many buckets as calls, or up to twice
    that."""
    buckets: list[list[Known]] = [[] for _ in range(1 << (len(calls) - 1).bit_length())]
    for shapes, call in calls:
        mixed = 0
        for size in itertools.chain.from_iterable(shapes):
            mixed = (mixed ^ size) * _MIX % (1 << 64)
        buckets[(mixed >> 32) % len(buckets)].append(call)
    return tuple(map(tuple, buckets))


def builtin(function: F, find: Finder) -> F:
    """`function` as a builtin that tries known calls first; itself where Python keeps its objects
    in a way that is not known. It may have no parameters with stars."""
    if not arrays_are_known() or not builtins_are_known():
        return function
    assert isinstance(function, FunctionType)
    names, defaults = _parameters(function)
    order = [name for name in names if name != find.operand]
    order += [find.operand] if find.operand else []
    values = [id(defaults[name]) if name in defaults else 0 for name in order]
    positional = names[: function.__code__.co_argcount]
    module = ModuleType(function.__name__)  # bound to one, a builtin is pickled by its name
    # These live as long as the builtin, but for the time when Python takes cycles apart.
    module.__dict__.update({_FUNCTION: function, _CALLS: find.calls})
    loaded = _loaded()
    record = _Record(
        module=id(module), function=id(_FUNCTION), parameters=len(order),
        positional=len(positional), kind=id(find.kind), attribute=id(find.attribute),
        key=id(find.key), calls=id(_CALLS) if find.calls is not None else 0,
        arrays=find.arrays, array_type=id(np.ndarray), error=id(RuntimeError),
    )  # fmt: skip
    further = *map(id, order), *values, *map(order.index, positional)
    packed = bytes(record) + struct.pack(f"{len(further)}q", *further)
    kept = ctypes.create_string_buffer(packed)
    install = ctypes.PYFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 2, ctypes.c_int64,
                                ctypes.c_void_p)(loaded.address)  # fmt: skip
    install(None, ctypes.addressof(kept), _INSTALL, None)
    text = f"{function.__name__}({_signature(names, defaults, positional)})\n--\n\n"
    doc = text + (function.__doc__ or "")
    method = Method(function.__name__.encode(), loaded.address, _FLAGS, doc.encode())
    immortal((kept, method, find.attribute, find.key, order, defaults))
    return cast(F, new_function()(ctypes.addressof(method), module, function.__module__))


# Under which the module that a builtin is bound to holds Python's function and the known calls.
_FUNCTION, _CALLS = "__wrapped__", "__calls__"


def _parameters(function: FunctionType) -> tuple[list[str], dict[str, Any]]:
    """All parameters, in order, and the defaults of those that have one."""
    code = function.__code__
    names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    given = function.__defaults__ or ()
    last = names[code.co_argcount - len(given) : code.co_argcount]
    return names, dict(zip(last, given, strict=True)) | (function.__kwdefaults__ or {})


def _signature(names: Sequence[str], defaults: dict[str, Any], positional: Sequence[str]) -> str:
    """Parameters as `inspect` reads them from a builtin's documentation."""
    told = [f"{name}={defaults[name]!r}" if name in defaults else name for name in names]
    stars = ["*"] if len(names) > len(positional) else []
    return ", ".join(["$module", *told[: len(positional)], *stars, *told[len(positional) :]])


@cache
def _loaded() -> Loaded:
    return compiled(lowbit_builtin, HEADER)


class _Record(ctypes.Structure):
    """Records are in a list: the next one; what the builtin is bound to, by which its record is
    found; the name there of Python's function; how many parameters, and how many of them may be
    given by position; the type of the operand, the name of its dictionary, the key there; or the
    name of the dictionary of all; how many arrays a table goes by; the types of arrays and of an
    error. Behind it stand the names of the parameters, the operand last, their defaults, or 0, and
    which ones those are that may be given by position. Names in a call are the objects of the
    function's own, as a rule; where one is another object, Python's function compares it."""

    _fields_ = words("next", "module", "function", "parameters", "positional", "kind", "attribute",
                     "key", "calls", "arrays", "array_type", "error")  # fmt: skip


class _Records(ctypes.Structure):
    _fields_ = words("first")


def lowbit_builtin(k: Function, self: Int, args: Words, given: Int, keywords: Int) -> Int:
    """What Python calls, by position first; the names of the others are a tuple, or 0. To install
    a record it is called with that."""
    records = k.shared(_Records)
    for _ in k.when(given.equals(_INSTALL)):
        k.view(_Record, args).next = records.first
        records.first = k.address(args)
        k.returns(0)
    record = k.view(_Record, k.call(_record_of, self, records.first))
    size = record.parameters * 8
    values = k.view(Words, k.stack(size, align=8))
    k.copy(values, record.end + record.parameters, size)
    for _ in k.when(k.call(_are_ordered, record, values, args, given, keywords)):
        calls = k.call(_calls, record, values)
        for _ in k.when(calls.equals(0)):
            k.call("PyErr_Clear", returns=None)
        for _ in k.otherwise():
            answer = k.call(_tried, record, values, calls)
            for _ in k.unless(answer.equals(k.external("_Py_NoneStruct"))):
                k.returns(answer)
    function = k.call(_bound, record, record.function)
    for _ in k.when(function.equals(0)):
        k.call("PyErr_SetString", record.error, k.text(_ENDING), returns=None)
        k.returns(0)
    answer = k.call("PyObject_Vectorcall", function, args, given, keywords)
    k.call("Py_DecRef", function, returns=None)
    return answer


def _record_of(k: Function, self: Int, first: Int) -> Int:
    """The record of the builtin that is bound to this."""
    place = k.register(first)
    for _ in k.loop():
        record = k.view(_Record, place.value)
        k.return_if(record.module.equals(self), record)
        place.value = record.next
    return k.index(0)


def _are_ordered(
    k: Function, record: _Record, values: Words, args: Words, given: Int, keywords: Int
) -> Bit:
    """Put the arguments in the order of the parameters, over the defaults. False: they do not fit,
    or one is missing."""
    k.return_if(given > record.positional, False)
    count = record.parameters
    names: Words = record.end
    places = names + count * 2
    for i in k.range(0, given):
        values[places[i]] = args[i]
    for _ in k.unless(keywords.equals(0)):
        named = k.view(Tuple, keywords)
        for i in k.range(0, named.count):
            place = k.call(_place, names, count, named.items[i])
            k.return_if(place < 0, False)
            for j in k.range(0, given):
                k.return_if(places[j].equals(place), False)
            values[place] = args[given + i]
    for i in k.range(0, count):
        k.return_if(values[i].equals(0), False)
    return True


def _place(k: Function, names: Words, count: Int, name: Int) -> Int:
    """Where a name stands; -1: nowhere."""
    for i in k.range(0, count):
        k.return_if(names[i].equals(name), i)
    return k.index(-1)


def _bound(k: Function, record: _Record, name: Int) -> Int:
    """What the module of a builtin holds by this name, a new reference. 0: Python takes it
    apart."""
    names = k.call("PyModule_GetDict", record.module)
    k.return_if(names.equals(0), 0)
    value = k.call("PyDict_GetItemWithError", names, name)
    for _ in k.unless(value.equals(0)):
        k.call("Py_IncRef", value, returns=None)
    return value


def _calls(k: Function, record: _Record, values: Words) -> Int:
    """The tuple of calls to try, a new reference. 0: there is none, or an error."""
    holder = k.register(k.index(0))
    for _ in k.when(record.calls.equals(0)):
        operand = values[record.parameters - 1]
        for _ in k.when(k.view(PyObject, operand).type.equals(record.kind)):
            holder.value = k.call("PyObject_GetAttr", operand, record.attribute)
    for _ in k.otherwise():
        holder.value = k.call(_bound, record, record.calls)
    k.return_if(holder.value.equals(0), 0)
    bucket = k.register(k.index(0))
    table = k.call("PyDict_GetItemWithError", holder.value, record.key)
    for _ in k.unless(table.equals(0)):
        buckets = k.view(Tuple, table)
        number = k.call(_bucket, record, values, buckets.count)
        for _ in k.unless(number < 0):
            bucket.value = buckets.items[number]
            k.call("Py_IncRef", bucket.value, returns=None)
    k.call("Py_DecRef", holder.value, returns=None)
    return bucket.value


def _bucket(k: Function, record: _Record, values: Words, buckets: Int) -> Int:
    """Which bucket of a table holds the calls with such first arrays; -1: they are none. As
    `table` has it."""
    mixed = k.register(k.index(0))
    for i in k.range(0, record.arrays):
        k.return_unless(k.view(PyObject, values[i]).type.equals(record.array_type), -1)
        array = k.view(Array, values[i])
        for axis in k.range(0, array.ndim.to(s64)):
            mixed.value = (mixed.value ^ array.dimensions[axis]) * (_MIX - (1 << 64))
    return (mixed.value >> 32) & (buckets - 1)


def _tried(k: Function, record: _Record, values: Words, calls: Int) -> Int:
    """What the first of the calls that fits returns, or None; `calls` is given back."""
    count, known = k.register(record.parameters), k.view(Tuple, calls)
    for _ in k.when(record.calls.equals(0)):
        count.value = count.value - 1
    for i in k.range(0, known.count):
        call = k.view(Builtin, known.items[i])
        answer = k.call(call.method.function, call.self, values, count.value)
        for _ in k.unless(answer.equals(k.external("_Py_NoneStruct"))):
            k.call("Py_DecRef", calls, returns=None)
            k.returns(answer)
        k.call("Py_DecRef", answer, returns=None)
    k.call("Py_DecRef", calls, returns=None)
    return k.external("_Py_NoneStruct")
