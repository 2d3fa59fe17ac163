"""The four parts of a product as FBGEMM's paper names them (Khudia et al., arXiv:2101.05615):
packing of A, packing of B, the kernel, output processing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lowbit_lab.trace import roles
from lowbit_lab.trace.codemap import Function
from lowbit_lab.trace.report import Frame, Loop

PACK_A, PACK_B, KERNEL, OUTPUT = "packing of A", "packing of B", "kernel", "output processing"
PACK, WAITING, CALLING, OTHER = "packing", "waiting", "calling", "other"
OF_A_PRODUCT = (PACK_A, PACK_B, PACK, KERNEL, OUTPUT)
PARTS = (PACK_A, PACK_B, PACK, KERNEL, OUTPUT, CALLING, WAITING, OTHER)

# What libraries call their functions: FBGEMM, oneDNN, MKL, OpenBLAS, lowbit.
_NAMES = (
    (PACK_A, re.compile(r"pack_?a(?![a-z])|pack_?a(with|matrix|transform)|copy_?a(?![b-z])|copya|"
                        r"i[tn]copy|rowoffset|row_offset", re.I)),
    (PACK_B, re.compile(r"pack_?b(?![a-z])|pack_?b(matrix)|copy_?b(?![a-z])|copyb|o[tn]copy|"
                        r"prepack", re.I)),
    (PACK, re.compile(r"reorder|transpos(e|ition)|im2col|unfold|(^|[^a-z])(un)?pack[^a-z]|"
                      r"direct_copy|interleave|(?<!re)(?<!de)quantize(?!d)", re.I)),
    (OUTPUT, re.compile(r"requant|output_?process|post_?ops|epilogue|gemm_beta", re.I)),
    (CALLING, re.compile(r"^_?Py|^_Py|malloc|_int_free|Dispatcher|operator new", re.I)),
    (WAITING, re.compile(r"spin|barrier|sched_yield|futex|kmp_wait|wait_sleep", re.I)),
)  # fmt: skip
_INTERPRETER = re.compile(r"^(lib)?python\d")
_KERNEL_NAME = re.compile(r"gemm_kernel|brgemm|gemm.*kernel|sgemm|dgemm|matmul_kernel", re.I)


def is_interpreter(library: str) -> bool:
    """Whether a file is CPython's."""
    return bool(_INTERPRETER.match(library))


def _by_name(function: str) -> str:
    """The part that a function's name tells, "" if it tells none."""
    return next((part for part, names in _NAMES if names.search(function)), "")


def of_products(loops: Sequence[Loop]) -> list[Loop]:
    """The same loops: what copies or converts, and whose name does not say so, is a part of a
    product only where something is multiplied."""
    if any(loop.part == KERNEL and loop.multiply_adds for loop in loops):
        return list(loops)
    return [
        replace(loop, part=OTHER)
        if loop.part in OF_A_PRODUCT and not _by_name(loop.function)
        else loop
        for loop in loops
    ]


def part_of(function: str, library: str, structure: Mapping[str, int], vector_bits: int = 0) -> str:
    """Of a loop, or of code outside of loops (without a structure): by the function's name if that
    tells, else by what it does."""
    if is_interpreter(library):
        return CALLING
    named = _by_name(function)
    multiplies = structure.get(roles.PRODUCTS) and structure.get(roles.ACCUMULATE)
    if named and not (named == PACK and multiplies):  # a transposed product is none
        return named
    if structure.get(roles.WAIT):
        return WAITING
    if multiplies:
        return KERNEL
    if structure.get(roles.WRITE_BACK) and vector_bits and roles.CALL not in structure:
        computes = sum(structure.get(one, 0) for one in (roles.PRODUCTS, roles.ARITHMETIC))
        if structure.get(roles.CONVERT) and computes:
            return OUTPUT
        if not computes and (structure.get(roles.LOAD) or structure.get(roles.BROADCAST)):
            return PACK
    return KERNEL if not structure and _KERNEL_NAME.search(function) else OTHER


# The call chain: from Python's functions through a dispatcher to the kernel.

PYTHON = "Python"

# What only hands a call on: boxing, type erasure, Python's bindings, threads' starts.
_HANDS_ON = re.compile(
    r"wrap_kernel_functor|make_boxed|_Function_handler|^std::|pybind11|redispatch|lambda|_FUN\b|"
    r"^partial_|^slot_|^cfunction|^method_|^_?Py[A-Z]|THPVariable|^__|^_start|start_thread|clone|"
    r"invokeOperator|_get_operation_for_overload|^swig|_wrap_|_legacy_loop"
)

# What PyTorch puts before a module's `forward`.
_OF_MODULES = ("_call_impl", "_wrapped_call_impl", "decorate_context")


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
        Frame(name, f"{Path(file).name}:{line}", PYTHON, name not in _OF_MODULES)
        for file, line, name in reversed(python)
    ]
    return known + found if inside else found
