"""MKL's own integer product, from the package `mkl`, called through ctypes.

Source: Intel oneMKL developer reference for C, cblas_gemm_s8u8s32 and its _pack, _compute forms
(with row-major operands the left one is unsigned and the right one signed).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import metadata

import numpy as np

from lowbit.jit.workspace import aligned_empty
from lowbit.registry.extras import install
from lowbit_lab.bench.core.case import Ready, implementation
from lowbit_lab.bench.peers.torch_products import SumsOnly
from lowbit_lab.bench.suites.matmul.problem import Array, MatmulCase, MatmulProblem

# Values of the enumerations in mkl_cblas.h and mkl_service.h.
_ROW_MAJOR, _NO_TRANSPOSE, _PACKED, _B_MATRIX, _ONE_OFFSET = 101, 111, 151, 162, 173
_GNU_THREADS = 3

_INT, _FLOAT, _BYTE, _POINTER = ctypes.c_int, ctypes.c_float, ctypes.c_int8, ctypes.c_void_p


@cache
def _library() -> ctypes.CDLL:
    """MKL, told to use the OpenMP runtime that torch has loaded."""
    files = metadata.files("mkl") or []
    path = next(file.locate() for file in files if "libmkl_rt" in file.name)
    library = ctypes.CDLL(str(path))
    library.MKL_Set_Threading_Layer(_GNU_THREADS)
    library.cblas_gemm_s8u8s32_pack_get_size.restype = ctypes.c_size_t
    library.cblas_gemm_s8u8s32_pack_get_size.argtypes = [_INT] * 4
    library.cblas_gemm_s8u8s32_pack.restype = None
    library.cblas_gemm_s8u8s32_pack.argtypes = [_INT] * 6 + [_POINTER, _INT, _POINTER]
    library.cblas_gemm_s8u8s32_compute.restype = None
    operand = [_POINTER, _INT, _BYTE]
    library.cblas_gemm_s8u8s32_compute.argtypes = (
        [_INT] * 7 + [_FLOAT] + operand * 2 + [_FLOAT, _POINTER, _INT, _POINTER]
    )
    return library


@implementation("matmul")
class MklIntegers(SumsOnly):
    """`cblas_gemm_s8u8s32_compute` on packed weights."""

    name = "MKL s8u8s32"
    isolated = True
    needs = ("torch",)  # whose threads it shares
    takes = ("u8:s8",)
    package = "MKL", "mkl"

    def available(self, case: MatmulCase) -> str | None:
        try:
            metadata.version("mkl")
        except metadata.PackageNotFoundError:
            return f"mkl is not installed; {install('peers')}"
        return super().available(case)

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        import torch  # noqa: F401 - loads the OpenMP runtime

        library = _library()
        library.MKL_Set_Num_Threads(threads)
        m, n, k = (problem.case.sizes[dim] for dim in "MNK")
        size = library.cblas_gemm_s8u8s32_pack_get_size(_B_MATRIX, m, n, k)
        packed = aligned_empty((size,), np.uint8)
        library.cblas_gemm_s8u8s32_pack(
            *(_ROW_MAJOR, _B_MATRIX, _NO_TRANSPOSE, m, n, k),
            *(problem.b.ctypes.data, n, packed.ctypes.data),
        )
        return Ready(_call(library, problem.a, packed, n), problem.from_sums)


def _call(library: ctypes.CDLL, a: Array, packed: Array, n: int) -> Callable[[], Array]:
    """The product of a [M, K] with `packed` as a function that allocates its result."""
    m, k = a.shape
    offset = np.zeros(1, np.int32)
    at = [_POINTER(array.ctypes.data) for array in (a, packed, offset)]
    compute, memory = library.cblas_gemm_s8u8s32_compute, _INT * (m * n)
    # Made once: to convert numbers in each call takes longer than a small product.
    sizes = map(_INT, (_ROW_MAJOR, _NO_TRANSPOSE, _PACKED, _ONE_OFFSET, m, n, k))
    left, right = (at[0], _INT(k), _BYTE(0)), (at[1], _INT(n), _BYTE(0))
    before, after = (*sizes, _FLOAT(1), *left, *right, _FLOAT(0)), (_INT(n), at[2])

    def call() -> Array:
        sums = np.empty((m, n), np.int32)
        compute(*before, memory.from_buffer(sums), *after)
        return sums

    # The addresses stand for arrays that must live as long as the call.
    call.__dict__["operands"] = (a, packed, offset)
    return call
