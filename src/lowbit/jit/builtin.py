"""Public functions as Python's builtins: a known call of one never sees a Python frame.

Binding thirteen parameters, looking up what is known of the right operand and calling that takes
Python longer than a small product takes the machine. So a function that is written in Python is
wrapped in one of CPython's own calling convention (METH_FASTCALL | METH_KEYWORDS): machine code
puts the arguments into order, finds the known calls that the operand keeps (`Finder`), and tries
them as `jit.recognize` does. Where none fits, or the arguments are not plain ones, Python's
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

from lowbit.isa import get
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded, immortal
from lowbit.jit.entry import HEADER, TUPLE_AT, Method, new_function
from lowbit.jit.recognize import arrays_are_known
from lowbit.jit.recognizing import DIMENSIONS, NDIM, READING

_NAME = "lowbit_builtin"
_FLAGS = 0x80 | 0x02  # METH_FASTCALL | METH_KEYWORDS
_FACTS = 12  # words of a record before names
_INSTALL = -1  # in place of a number of arguments
_METHOD, _SELF = HEADER, HEADER + 8  # of a builtin (PyCFunctionObject)
_COUNT = HEADER  # of a tuple
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
"""What `jit.recognize` makes: it takes all arguments but the operand, in order."""

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
    if not arrays_are_known() or not _builtins_are_known():
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
    words = (
        0, id(module), id(_FUNCTION), len(order), len(positional), id(find.kind),
        id(find.attribute), id(find.key), id(_CALLS) if find.calls is not None else 0,
        find.arrays, id(np.ndarray), id(RuntimeError),
        *map(id, order), *values, *map(order.index, positional),
    )  # fmt: skip
    assert len(words) == _FACTS + 2 * len(order) + len(positional)
    record = ctypes.create_string_buffer(struct.pack(f"{len(words)}q", *words))
    install = ctypes.PYFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 2, ctypes.c_int64,
                                ctypes.c_void_p)(loaded.address)  # fmt: skip
    install(None, ctypes.addressof(record), _INSTALL, None)
    text = f"{function.__name__}({_signature(names, defaults, positional)})\n--\n\n"
    doc = text + (function.__doc__ or "")
    method = Method(function.__name__.encode(), loaded.address, _FLAGS, doc.encode())
    immortal((record, method, find.attribute, find.key, order, defaults))
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
    return load(_NAME, get("generic"), lambda: _IR, HEADER)


def _builtins_are_known() -> bool:
    """Whether builtins and tuples hold what the compiled function reads where it looks."""
    at, some, length = ctypes.c_size_t.from_address, ("a", "b", "c"), cast(Any, len)
    name = Method.from_address(at(id(length) + _METHOD).value).name
    bound_to = at(id(length) + _SELF).value
    known = (name, bound_to) == (b"len", id(length.__self__))
    return known and at(id(some) + _COUNT).value == len(some)


# Records are in a list: the next one; what the builtin is bound to, by which its record is found;
# the name there of Python's function; how many parameters, and how many of them may be given by
# position; the type of the operand, the name of its dictionary, the key there; or the name of the
# dictionary of all; how many arrays a table goes by; the types of arrays and of an error. Then for
# each parameter, the operand last, its name and its default, or 0, and for those that may be given
# by position which one it is. Names in a call are the objects of the function's own, as a rule;
# where one is another object, Python's function compares it.
_IR = f"""{READING}
@records = private global ptr null
@message = private constant [{len(_ENDING) + 1} x i8] c"{_ENDING}\\00"
declare ptr @PyModule_GetDict(ptr)
declare void @PyErr_SetString(ptr, ptr)
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare ptr @PyObject_GetAttr(ptr, ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare void @PyErr_Clear()
declare void @Py_DecRef(ptr)

define private ptr @object(ptr %at, i64 %index) alwaysinline {{
  %place = getelementptr ptr, ptr %at, i64 %index
  %value = load ptr, ptr %place
  ret ptr %value
}}

define private ptr @type_of(ptr %object) alwaysinline {{
  %at = getelementptr i8, ptr %object, i64 {HEADER - 8}
  %type = load ptr, ptr %at
  ret ptr %type
}}

; What the builtin is bound to holds by this name, a new reference. null: Python takes it apart.
define private ptr @bound(ptr %record, ptr %name) {{
  %module = call ptr @object(ptr %record, i64 1)
  %names = call ptr @PyModule_GetDict(ptr %module)
  %is_whole = icmp ne ptr %names, null
  br i1 %is_whole, label %look, label %no
look:
  %value = call ptr @PyDict_GetItemWithError(ptr %names, ptr %name)
  %is_there = icmp ne ptr %value, null
  br i1 %is_there, label %yes, label %no
yes:
  call void @Py_IncRef(ptr %value)
  ret ptr %value
no:
  ret ptr null
}}

; Which bucket of a table of so many holds the calls with such first arrays; -1: they are none.
define private i64 @bucket(ptr %record, ptr %values, i64 %buckets) {{
entry:
  %arrays = call i64 @word(ptr %record, i64 9)
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %next_i, %axis ]
  %mixed = phi i64 [ 0, %entry ], [ %mixed_so_far, %axis ]
  %more = icmp slt i64 %i, %arrays
  br i1 %more, label %look, label %done
look:
  %next_i = add i64 %i, 1
  %value = call ptr @object(ptr %values, i64 %i)
  %type = call ptr @type_of(ptr %value)
  %array = call ptr @object(ptr %record, i64 10)
  %is_array = icmp eq ptr %type, %array
  br i1 %is_array, label %measure, label %no
measure:
  %ndim_at = getelementptr i8, ptr %value, i64 {NDIM}
  %ndim = load i32, ptr %ndim_at
  %axes = sext i32 %ndim to i64
  %dimensions_word = call i64 @member(ptr %value, i64 {DIMENSIONS})
  %dimensions = inttoptr i64 %dimensions_word to ptr
  br label %axis
axis:
  %j = phi i64 [ 0, %measure ], [ %next_j, %mix ]
  %mixed_so_far = phi i64 [ %mixed, %measure ], [ %mixed_on, %mix ]
  %more_axes = icmp slt i64 %j, %axes
  br i1 %more_axes, label %mix, label %next
mix:
  %size = call i64 @word(ptr %dimensions, i64 %j)
  %differing = xor i64 %mixed_so_far, %size
  %mixed_on = mul i64 %differing, {_MIX}
  %next_j = add i64 %j, 1
  br label %axis
done:
  %high = lshr i64 %mixed, 32
  %mask = sub i64 %buckets, 1
  %number = and i64 %high, %mask
  ret i64 %number
no:
  ret i64 -1
}}

; The tuple of calls to try, a new reference. null: there is none, or an error.
define private ptr @known(ptr %record, ptr %values, i64 %last) {{
  %calls = call ptr @object(ptr %record, i64 8)
  %for_all = icmp ne ptr %calls, null
  br i1 %for_all, label %find_all, label %by_operand
find_all:
  %all = call ptr @bound(ptr %record, ptr %calls)
  %has_all = icmp ne ptr %all, null
  br i1 %has_all, label %look, label %no
by_operand:
  %operand = call ptr @object(ptr %values, i64 %last)
  %type = call ptr @type_of(ptr %operand)
  %kind = call ptr @object(ptr %record, i64 5)
  %fits = icmp eq ptr %type, %kind
  br i1 %fits, label %ask, label %no
ask:
  %name = call ptr @object(ptr %record, i64 6)
  %own = call ptr @PyObject_GetAttr(ptr %operand, ptr %name)
  %has_own = icmp ne ptr %own, null
  br i1 %has_own, label %look, label %no
look:
  %in = phi ptr [ %all, %find_all ], [ %own, %ask ]
  %key = call ptr @object(ptr %record, i64 7)
  %table = call ptr @PyDict_GetItemWithError(ptr %in, ptr %key)
  %has_table = icmp ne ptr %table, null
  br i1 %has_table, label %choose, label %drop
choose:
  %buckets = call i64 @member(ptr %table, i64 {_COUNT})
  %number = call i64 @bucket(ptr %record, ptr %values, i64 %buckets)
  %is_bucket = icmp sge i64 %number, 0
  br i1 %is_bucket, label %hold, label %drop
hold:
  %items = getelementptr i8, ptr %table, i64 {TUPLE_AT}
  %bucket = call ptr @object(ptr %items, i64 %number)
  call void @Py_IncRef(ptr %bucket)
  br label %drop
drop:
  %found = phi ptr [ null, %look ], [ null, %choose ], [ %bucket, %hold ]
  call void @Py_DecRef(ptr %in)
  ret ptr %found
no:
  ret ptr null
}}

define ptr @{_NAME}(ptr %self, ptr %args, i64 %given, ptr %keywords) {{
entry:
  %installs = icmp eq i64 %given, {_INSTALL}
  br i1 %installs, label %install, label %find
install:
  %before = load ptr, ptr @records
  store ptr %before, ptr %args
  store ptr %args, ptr @records
  ret ptr null
find:
  %begin = load ptr, ptr @records
  br label %compare
compare:
  %record = phi ptr [ %begin, %find ], [ %after, %compare ]
  %after = load ptr, ptr %record
  %bound = call ptr @object(ptr %record, i64 1)
  %is_this = icmp eq ptr %bound, %self
  br i1 %is_this, label %this, label %compare
this:
  %count = call i64 @word(ptr %record, i64 3)
  %most = call i64 @word(ptr %record, i64 4)
  %names = getelementptr ptr, ptr %record, i64 {_FACTS}
  %defaults = getelementptr ptr, ptr %names, i64 %count
  %places = getelementptr ptr, ptr %defaults, i64 %count
  %values = alloca ptr, i64 %count
  %size = shl i64 %count, 3
  call void @llvm.memcpy.p0.p0.i64(ptr %values, ptr %defaults, i64 %size, i1 false)
  %not_too_many = icmp sle i64 %given, %most
  br i1 %not_too_many, label %position, label %python
position:
  %p = phi i64 [ 0, %this ], [ %next_p, %positioned ]
  %more_p = icmp slt i64 %p, %given
  br i1 %more_p, label %positioned, label %by_name
positioned:
  %place_p = call i64 @word(ptr %places, i64 %p)
  %value_p = call ptr @object(ptr %args, i64 %p)
  %target_p = getelementptr ptr, ptr %values, i64 %place_p
  store ptr %value_p, ptr %target_p
  %next_p = add i64 %p, 1
  br label %position
by_name:
  %has_keywords = icmp ne ptr %keywords, null
  br i1 %has_keywords, label %count_keywords, label %complete
count_keywords:
  %keyword_count = call i64 @member(ptr %keywords, i64 {_COUNT})
  %keyword_names = getelementptr i8, ptr %keywords, i64 {TUPLE_AT}
  %keyword_values = getelementptr ptr, ptr %args, i64 %given
  br label %keyword
keyword:
  %w = phi i64 [ 0, %count_keywords ], [ %next_w, %named ]
  %more_w = icmp slt i64 %w, %keyword_count
  br i1 %more_w, label %name, label %complete
name:
  %wanted = call ptr @object(ptr %keyword_names, i64 %w)
  br label %search
search:
  %n = phi i64 [ 0, %name ], [ %next_n, %another ]
  %more_n = icmp slt i64 %n, %count
  br i1 %more_n, label %look, label %python
look:
  %name_n = call ptr @object(ptr %names, i64 %n)
  %same_name = icmp eq ptr %name_n, %wanted
  br i1 %same_name, label %twice, label %another
another:
  %next_n = add i64 %n, 1
  br label %search
twice:
  %t = phi i64 [ 0, %look ], [ %next_t, %other_place ]
  %more_t = icmp slt i64 %t, %given
  br i1 %more_t, label %other_place, label %named
other_place:
  %place_t = call i64 @word(ptr %places, i64 %t)
  %next_t = add i64 %t, 1
  %is_twice = icmp eq i64 %place_t, %n
  br i1 %is_twice, label %python, label %twice
named:
  %value_w = call ptr @object(ptr %keyword_values, i64 %w)
  %target_n = getelementptr ptr, ptr %values, i64 %n
  store ptr %value_w, ptr %target_n
  %next_w = add i64 %w, 1
  br label %keyword
complete:
  %c = phi i64 [ 0, %by_name ], [ 0, %keyword ], [ %next_c, %present ]
  %more_c = icmp slt i64 %c, %count
  br i1 %more_c, label %present, label %ready
present:
  %value_c = call ptr @object(ptr %values, i64 %c)
  %next_c = add i64 %c, 1
  %is_there = icmp ne ptr %value_c, null
  br i1 %is_there, label %complete, label %python
ready:
  %last = sub i64 %count, 1
  %calls = call ptr @known(ptr %record, ptr %values, i64 %last)
  %has_calls = icmp ne ptr %calls, null
  br i1 %has_calls, label %try, label %clear
clear:
  call void @PyErr_Clear()
  br label %python
try:
  %all = call ptr @object(ptr %record, i64 8)
  %for_all = icmp ne ptr %all, null
  %taken = select i1 %for_all, i64 %count, i64 %last
  %call_count = call i64 @member(ptr %calls, i64 {_COUNT})
  %items = getelementptr i8, ptr %calls, i64 {TUPLE_AT}
  br label %next
next:
  %i = phi i64 [ 0, %try ], [ %next_i, %missed ]
  %more_i = icmp slt i64 %i, %call_count
  br i1 %more_i, label %attempt, label %none
attempt:
  %call = call ptr @object(ptr %items, i64 %i)
  %method_at = getelementptr i8, ptr %call, i64 {_METHOD}
  %method = load ptr, ptr %method_at
  %code = call ptr @object(ptr %method, i64 1)
  %self_at = getelementptr i8, ptr %call, i64 {_SELF}
  %its_self = load ptr, ptr %self_at
  %done = call ptr %code(ptr %its_self, ptr %values, i64 %taken)
  %next_i = add i64 %i, 1
  %is_none = icmp eq ptr %done, @_Py_NoneStruct
  br i1 %is_none, label %missed, label %end
missed:
  call void @Py_DecRef(ptr %done)
  br label %next
end:
  call void @Py_DecRef(ptr %calls)
  ret ptr %done
none:
  call void @Py_DecRef(ptr %calls)
  br label %python
python:
  %function_name = call ptr @object(ptr %record, i64 2)
  %function = call ptr @bound(ptr %record, ptr %function_name)
  %is_there_still = icmp ne ptr %function, null
  br i1 %is_there_still, label %enter, label %ending
enter:
  %answer = call ptr @PyObject_Vectorcall(ptr %function, ptr %args, i64 %given, ptr %keywords)
  call void @Py_DecRef(ptr %function)
  ret ptr %answer
ending:
  %error = call ptr @object(ptr %record, i64 11)
  call void @PyErr_SetString(ptr %error, ptr @message)
  ret ptr null
}}
"""
