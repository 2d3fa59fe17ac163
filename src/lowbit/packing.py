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
from lowbit.numerics import QTensor
from lowbit.packed import PackedMatrix

_WORTH_THREADS = 1 << 20  # bytes


def pack(b: Any, *, isa: str | None = None) -> PackedMatrix:
    """Pack a right operand once, for `matmul`, `matmul_scaled` and `linear_dynamic`.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit integers [K, N] with one scale, or one for each column (axis=1).
    The result does not depend on the instruction set.

    TypeError: not of 8-bit integers. ValueError: not two-dimensional, or scales along K.
    """
    scale = zero = None
    if isinstance(b, QTensor):
        if b.values.ndim != 2 or b.axis not in (None, 1) or b.group_size is not None:
            raise ValueError(
                f"b has scales along axis={b.axis}, group_size={b.group_size}; a packed matrix "
                "[K, N] takes one scale, or one for each column: lowbit.quantize(b, axis=1)"
            )
        columns = b.shape[1]
        scale = padded(np.broadcast_to(b.scale, (columns,)))
        zero = np.broadcast_to(b.zero_point, (columns,))
    values = bytes_matrix(b.values if isinstance(b, QTensor) else b, "b")
    depth, columns = values.shape
    if zero is None:
        zero = np.zeros(columns, np.int32)
    stored_zero = padded(zero - np.int32(FLIP) if values.dtype == np.uint8 else zero)
    panels, sums = panels_and_sums(values, isa)
    return PackedMatrix(
        panels=panels,
        column_sums=sums - np.int32(depth) * stored_zero,
        K=depth,
        N=columns,
        dtype=values.dtype.name,
        scale=scale,
        zero_points=stored_zero if stored_zero.any() else None,
    )


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
