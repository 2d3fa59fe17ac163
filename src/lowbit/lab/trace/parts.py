"""The four parts of a product as FBGEMM's paper names them (Khudia et al., arXiv:2101.05615):
packing of A, packing of B, the kernel, output processing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lowbit.lab.trace import roles

PACK_A, PACK_B, KERNEL, OUTPUT = "packing of A", "packing of B", "kernel", "output processing"
PACK, WAITING, CALLING, OTHER = "packing", "waiting", "calling", "other"
OF_A_PRODUCT = (PACK_A, PACK_B, PACK, KERNEL, OUTPUT)
PARTS = (PACK_A, PACK_B, PACK, KERNEL, OUTPUT, CALLING, WAITING, OTHER)

# What libraries call their functions: FBGEMM, oneDNN, MKL, OpenBLAS, lowbit.
_NAMES = (
    (PACK_A, re.compile(r"pack_?a(?![a-z])|pack_?a(with|matrix|transform)|copy_?a(?![b-z])|copya|"
                        r"i[tn]copy|rowoffset|row_offset", re.I)),
    (PACK_B, re.compile(r"pack_?b(?![a-z])|pack_?b(matrix)|copy_?b(?![a-z])|copyb|o[tn]copy|"
                        r"reorder|prepack", re.I)),
    (OUTPUT, re.compile(r"requant|output_?process|post_?ops|epilogue|gemm_beta", re.I)),
    (CALLING, re.compile(r"^_?Py|^_Py|malloc|_int_free|Dispatcher|operator new", re.I)),
    (WAITING, re.compile(r"spin|barrier|sched_yield|futex|kmp_wait|wait_sleep", re.I)),
)  # fmt: skip
_INTERPRETER = re.compile(r"^(lib)?python\d")
_KERNEL_NAME = re.compile(r"gemm_kernel|brgemm|gemm.*kernel|sgemm|dgemm|matmul_kernel", re.I)


def is_interpreter(library: str) -> bool:
    """Whether a file is CPython's."""
    return bool(_INTERPRETER.match(library))


def part_of(function: str, library: str, structure: Mapping[str, int], vector_bits: int = 0) -> str:
    """Of a loop, or of code outside of loops (without a structure): by the function's name if that
    tells, else by what it does."""
    if is_interpreter(library):
        return CALLING
    for part, names in _NAMES:
        if names.search(function):
            return part
    if structure.get(roles.WAIT):
        return WAITING
    if structure.get(roles.PRODUCTS) and structure.get(roles.ACCUMULATE):
        return KERNEL
    if structure.get(roles.WRITE_BACK) and vector_bits and roles.CALL not in structure:
        computes = sum(structure.get(one, 0) for one in (roles.PRODUCTS, roles.ARITHMETIC))
        if structure.get(roles.CONVERT) and computes:
            return OUTPUT
        if not computes and (structure.get(roles.LOAD) or structure.get(roles.BROADCAST)):
            return PACK
    return KERNEL if not structure and _KERNEL_NAME.search(function) else OTHER
