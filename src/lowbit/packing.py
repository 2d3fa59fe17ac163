"""Bringing right operands into panels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.arguments import bytes_matrix, padded
from lowbit.jit import threads as thread_runtime
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.layout import FLIP, GROUP, LINE, PANEL, blocks, padded_k
from lowbit.kernels.cpu.pack import pack as pack_kernel
from lowbit.numerics import QTensor, int_format
from lowbit.numerics.formats import check_values
from lowbit.packed import WEIGHTS, PackedMatrix, bytes_to_nibbles

_WORTH_THREADS = 1 << 20  # bytes


def pack(b: Any, *, dtype: str | None = None, isa: str | None = None) -> PackedMatrix:
    """Pack a right operand once, for `matmul`, `matmul_scaled` and `linear_dynamic`.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit or 4-bit integers [K, N] with one scale, or one for each column
    (axis=1). `dtype` "int4" or "uint4" packs an int8 or uint8 array of such values two to a byte.
    The result does not depend on the instruction set.

    TypeError: not of 8-bit integers, or of another sign than `dtype`. ValueError: not
    two-dimensional, scales along K, or a value outside of `dtype`, naming the first.
    """
    scale = zero = None
    if isinstance(b, QTensor):
        if b.values.ndim != 2 or b.axis not in (None, 1) or b.group_size is not None:
            raise ValueError(
                f"b has scales along axis={b.axis}, group_size={b.group_size}; a packed matrix "
                "[K, N] takes one scale, or one for each column: lowbit.quantize(b, axis=1)"
            )
        if dtype not in (None, b.format.name):
            raise ValueError(f"b is quantized to {b.format.name}, and dtype is {dtype!r}")
        dtype = b.format.name
        columns = b.shape[1]
        scale = padded(np.broadcast_to(b.scale, (columns,)))
        zero = np.broadcast_to(b.zero_point, (columns,))
    values = bytes_matrix(b.values if isinstance(b, QTensor) else b, "b")
    kind = _checked_dtype(values, dtype)
    depth, columns = values.shape
    if zero is None:
        zero = np.zeros(columns, np.int32)
    stored_zero = padded(zero - np.int32(FLIP) if kind == "uint8" else zero)
    if WEIGHTS[kind] == "s8":
        panels, sums = panels_and_sums(values, isa)
    else:  # 4-bit values fit a signed byte as they are
        panels, sums = panels_and_sums(values.view(np.int8), isa)
        panels = bytes_to_nibbles(panels, signed=kind == "int4")
    return PackedMatrix(
        panels=panels,
        column_sums=sums - np.int32(depth) * stored_zero,
        K=depth,
        N=columns,
        dtype=kind,
        scale=scale,
        zero_points=stored_zero if stored_zero.any() else None,
    )


def _checked_dtype(values: npt.NDArray[Any], dtype: str | None) -> str:
    """What to pack `values` as."""
    if dtype is None or dtype == values.dtype.name:
        return values.dtype.name
    if dtype not in ("int4", "uint4"):
        raise ValueError(f"dtype must be one of {', '.join(WEIGHTS)}, got {dtype!r}")
    fmt = int_format(dtype)
    if np.dtype(fmt.storage) != values.dtype:
        raise TypeError(f"{dtype} values are given as {fmt.storage}, got {values.dtype}")
    check_values(values, fmt, "b")
    return dtype


def panels_and_sums(
    values: npt.NDArray[Any], isa: str | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """The panels of int8 or uint8 values [K, N], and the sum of each column of stored values."""
    depth, columns = values.shape
    count = blocks(columns, PANEL)
    panels = aligned_empty((count, padded_k(depth) // GROUP, LINE), np.uint8)
    sums = np.zeros(count * PANEL, np.int32)
    if values.size:
        k_stride, n_stride = _strides(values)
        program = pack_kernel.program(
            instruction_sets.active(isa),
            along="n" if n_stride == 1 else "k" if k_stride == 1 else "",
            unsigned=values.dtype == np.uint8,
        )
        threads = thread_runtime.max_threads() if values.size >= _WORTH_THREADS else 1
        program(threads, values, k_stride, n_stride, panels, sums, depth, columns)
    return panels, sums


def _strides(given: npt.NDArray[Any]) -> tuple[int, ...]:
    """Strides of bytes, where an axis of one element counts as contiguous."""
    return tuple(s if n > 1 else 1 for s, n in zip(given.strides, given.shape, strict=True))
