"""The call chain: from Python's functions through a dispatcher to the kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lowbit.lab.trace.codemap import Function
from lowbit.lab.trace.parts import is_interpreter
from lowbit.lab.trace.report import Frame

PYTHON = "Python"

# What only hands a call on: boxing, type erasure, Python's bindings, threads' starts.
_HANDS_ON = re.compile(
    r"wrap_kernel_functor|make_boxed|_Function_handler|^std::|pybind11|redispatch|lambda|_FUN\b|"
    r"^partial_|^slot_|^cfunction|^method_|^_?Py[A-Z]|THPVariable|^__|^_start|start_thread|clone|"
    r"invokeOperator|_get_operation_for_overload|^swig|_wrap_|_legacy_loop"
)


def frames(functions: Sequence[Function], python: Sequence[Sequence]) -> list[Frame]:
    """From the outermost to the kernel. functions: the native ones, the innermost first; python:
    (file, line, function), the innermost first."""
    found: list[Frame] = []
    inside = False
    for one in functions:
        inside = inside or is_interpreter(one.library)
        name = one.short
        plain = bool(_HANDS_ON.search(name)) or inside or not one.name
        same = bool(found) and found[-1].function == name
        # Code without a name matters where it is the kernel itself.
        matters = not found or not (plain or same)
        where = one.library or "made at run time"
        found.append(Frame(name, where, one.kind, matters, named=bool(one.name) or inside))
    found.reverse()
    known = [
        Frame(name, f"{Path(file).name}:{line}", PYTHON, not _of_module_call(name))
        for file, line, name in reversed(python)
    ]
    return known + found if inside else found


def _of_module_call(name: str) -> bool:
    """Whether a Python function is one of those that PyTorch puts before `forward`."""
    return name in ("_call_impl", "_wrapped_call_impl", "decorate_context")
