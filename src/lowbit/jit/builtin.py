"""Public functions as Python's builtins: a recognized call of one never sees a Python frame.

Binding thirteen parameters, looking up what is known of the right operand and calling that takes
Python longer than a small product takes the machine. So a function that is written in Python is
wrapped in one of CPython's own calling convention (METH_FASTCALL | METH_KEYWORDS): machine code
puts the arguments into order, finds the recognized calls that the operand keeps (`Finder`), and
tries them as `jit.recognize` does. Where none fits, or the arguments are not plain ones, Python's
function is called with what was given, and says what is wrong, if something is.

What wraps it has the function's name, module, documentation and, as text, its parameters; it is
pickled by its name, as the function would be.

Sources: Python's C API reference, "Common Object Structures", "Vectorcall".
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from lowbit.isa import get
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded
from lowbit.jit.entry import HEADER, TUPLE_AT, Method, new_function
from lowbit.jit.recognize import arrays_are_known
from lowbit.jit.recognizing import READING

_NAME = "lowbit_builtin"
_FLAGS = 0x80 | 0x02  # METH_FASTCALL | METH_KEYWORDS
_FACTS = 9  # words of a record before names
_INSTALL = -1  # in place of a number of arguments
_METHOD, _SELF = HEADER, HEADER + 8  # of a builtin (PyCFunctionObject)
_COUNT = HEADER  # of a tuple

F = TypeVar("F", bound=Callable[..., Any])


class Finder(NamedTuple):
    """Where recognized calls are kept: in the dictionary `attribute` of the operand, of type
    `kind`, under `key`; or, without an operand, in `calls`, under the shapes of the first two
    arguments, which are arrays. Each a tuple of what `jit.recognize` makes. They take all arguments
    but the operand, in order."""

    operand: str = ""
    kind: type = np.ndarray
    attribute: str = "shape"
    key: str = ""
    calls: dict[Any, tuple[Callable[..., Any], ...]] | None = None


def builtin(function: F, find: Finder) -> F:
    """`function` as a builtin that tries recognized calls first; itself where Python keeps its
    objects in a way that is not known. It may have no parameters with stars."""
    if not arrays_are_known() or not _builtins_are_known():
        return function
    assert isinstance(function, FunctionType)
    names, defaults = _parameters(function)
    order = [name for name in names if name != find.operand]
    order += [find.operand] if find.operand else []
    values = [id(defaults[name]) if name in defaults else 0 for name in order]
    positional = names[: function.__code__.co_argcount]
    module = ModuleType(function.__name__)  # bound to one, a builtin is pickled by its name
    module.__dict__["__wrapped__"] = function
    loaded = _loaded()
    words = (
        0, id(module), id(function), len(order), len(positional), id(find.kind),
        id(find.attribute), id(find.key), id(find.calls) if find.calls is not None else 0,
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
    _kept.append((loaded, record, method, function, find, order, defaults))
    return cast(F, new_function()(ctypes.addressof(method), module, function.__module__))


_kept: list[Any] = []  # code and what it reads must live as long as the process


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
# Python's function; how many parameters, and how many of them may be given by position; the type of
# the operand, the name of its dictionary, the key there; or the dictionary of all. Then for each
# parameter, the operand last, its name and its default, or 0, and for those that may be given by
# position which one it is. Names in a call are the objects of the function's own, as a rule;
# where one is another object, Python's function compares it.
_IR = f"""{READING}
@records = private global ptr null
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr)
declare ptr @PyObject_GetAttr(ptr, ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare ptr @PyTuple_Pack(i64, ...)
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

; The key of the calls of two arrays, a new reference: their shapes. null: there is none.
define private ptr @shapes(ptr %record, ptr %values) {{
  %array = call ptr @object(ptr %record, i64 5)
  %name = call ptr @object(ptr %record, i64 6)
  %first = call ptr @object(ptr %values, i64 0)
  %second = call ptr @object(ptr %values, i64 1)
  %first_type = call ptr @type_of(ptr %first)
  %second_type = call ptr @type_of(ptr %second)
  %first_fits = icmp eq ptr %first_type, %array
  %second_fits = icmp eq ptr %second_type, %array
  %fit = and i1 %first_fits, %second_fits
  br i1 %fit, label %ask, label %no
ask:
  %shape = call ptr @PyObject_GetAttr(ptr %first, ptr %name)
  %has = icmp ne ptr %shape, null
  br i1 %has, label %ask_other, label %no
ask_other:
  %other = call ptr @PyObject_GetAttr(ptr %second, ptr %name)
  %has_other = icmp ne ptr %other, null
  br i1 %has_other, label %pack, label %drop
drop:
  call void @Py_DecRef(ptr %shape)
  br label %no
pack:
  %key = call ptr (i64, ...) @PyTuple_Pack(i64 2, ptr %shape, ptr %other)
  call void @Py_DecRef(ptr %shape)
  call void @Py_DecRef(ptr %other)
  ret ptr %key
no:
  ret ptr null
}}

; The tuple of calls to try, a new reference. null: there is none, or an error.
define private ptr @known(ptr %record, ptr %values, i64 %last) {{
  %calls = call ptr @object(ptr %record, i64 8)
  %for_all = icmp ne ptr %calls, null
  br i1 %for_all, label %by_shapes, label %by_operand
by_shapes:
  %shapes = call ptr @shapes(ptr %record, ptr %values)
  %has_shapes = icmp ne ptr %shapes, null
  br i1 %has_shapes, label %look, label %no
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
  br i1 %has_own, label %own_key, label %no
own_key:
  %key = call ptr @object(ptr %record, i64 7)
  br label %look
look:
  %in = phi ptr [ %calls, %by_shapes ], [ %own, %own_key ]
  %of = phi ptr [ %shapes, %by_shapes ], [ %key, %own_key ]
  %new = phi ptr [ %shapes, %by_shapes ], [ %own, %own_key ]
  %found = call ptr @PyDict_GetItemWithError(ptr %in, ptr %of)
  %is_found = icmp ne ptr %found, null
  br i1 %is_found, label %hold, label %drop
hold:
  call void @Py_IncRef(ptr %found)
  br label %drop
drop:
  call void @Py_DecRef(ptr %new)
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
  %function = call ptr @object(ptr %record, i64 2)
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
  %answer = call ptr @PyObject_Vectorcall(ptr %function, ptr %args, i64 %given, ptr %keywords)
  ret ptr %answer
}}
"""
