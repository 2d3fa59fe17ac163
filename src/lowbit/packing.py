"""Bringing right operands into panels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import threads as thread_runtime
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import FLIP, GROUP, LINE, NIBBLE_FLIP, PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.pack import pack as pack_kernel
from lowbit.kernels.cpu.shared.panel_format import STORED
from lowbit.numerics import QTensor, int_format
from lowbit.numerics.affine import check_finite
from lowbit.numerics.formats import check_values
from lowbit.packed import GROUP_UNIT, PackedMatrix, bytes_to_nibbles
from lowbit.product.arguments import bytes_matrix, padded

_WORTH_THREADS = 1 << 20  # bytes
_NIBBLES = {"int4": 0, "uint4": NIBBLE_FLIP}  # what a nibble of 8 stands for


def pack(
    b: Any, *, dtype: str | None = None, zero_point: Any = None, isa: str | None = None
) -> PackedMatrix:
    """Pack a right operand once, for `matmul` and every function of this library that follows it.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit or 4-bit integers [K, N] with one scale, or one for each column
    (axis=1), or of 4-bit integers with groups along K (group_axis=0, group_size a multiple of 8).
    `dtype` "int4" or "uint4" packs an int8 or uint8 array of such values two to a byte.
    `zero_point`: for a QTensor with groups, real numbers [groups, N], kept as float32, in place of
    its own zero points: b ≈ scale·(values − zero_point). The result does not depend on the
    instruction set.

    TypeError: not of 8-bit integers, or of another sign than `dtype`. ValueError: not
    two-dimensional, other scales along K, a value outside of `dtype`, naming the first, or a
    zero_point where there are no groups, of another shape or not finite in float32.
    """
    if isinstance(b, QTensor) and dtype not in (None, b.format.name):
        raise ValueError(f"b is quantized to {b.format.name}, and dtype is {dtype!r}")
    if isinstance(b, QTensor) and b.group_size is not None:
        return pack_groups(b, zero_point, isa)
    if zero_point is not None:
        raise ValueError("zero_point belongs to a QTensor with groups; others hold their own")
    scale = zero = None
    if isinstance(b, QTensor):
        if b.values.ndim != 2 or b.axis not in (None, 1):
            raise ValueError(
                f"b has scales along axis={b.axis}; a packed matrix [K, N] takes one scale, or "
                "one for each column: lowbit.quantize(b, axis=1)"
            )
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
    if STORED[kind] == "s8":
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


def pack_groups(b: QTensor, zero_point: Any = None, isa: str | None = None) -> PackedMatrix:
    """`pack` for 4-bit integers [K, N] with a scale for each column of each group of k."""
    size = b.group_size
    if b.values.ndim != 2 or b.axis != 1 or b.group_axis != 0 or b.format.name not in _NIBBLES:
        raise ValueError(
            f"groups are for 4-bit integers [K, N] and lie along K; got {b.format.name} "
            f"{list(b.shape)} with axis={b.axis}, group_axis={b.group_axis}: "
            "lowbit.quantize(b, 'int4', axis=1, group_size=..., group_axis=0)"
        )
    assert size is not None
    (depth, columns), middle = b.shape, _NIBBLES[b.format.name]
    if size >= depth:  # one group, and its end is the end of K
        size = max(padded_k(depth), GROUP_UNIT)
    if size % GROUP_UNIT:
        raise ValueError(f"group_size must be a multiple of {GROUP_UNIT}, got {size}")
    zero = b.zero_point - np.int32(middle)
    real_zero = zero.astype(np.float64)
    if zero_point is not None:
        real_zero = _real_zeros(zero_point, b.scale.shape) - middle
    starts = np.arange(0, depth, size)
    values = b.values.astype(np.int16) - np.int16(middle)
    counts = np.minimum(depth - starts, size)[:, None]
    sums = np.add.reduceat(values, starts, axis=0, dtype=np.int64) if depth else zero
    real_sums = (b.scale.astype(np.float64) * (sums - counts * real_zero)).sum(axis=0)
    panels, _ = panels_and_sums(values.astype(np.int8), isa)
    zeros = real_zero.astype(np.float32) if zero_point is not None else zero.astype(np.int8)
    return PackedMatrix(
        panels=bytes_to_nibbles(panels, signed=True),
        column_sums=padded(real_sums.astype(np.float32)),
        K=depth,
        N=columns,
        dtype=b.format.name,
        scale=_by_panels(b.scale),
        zero_points=_by_panels(zeros) if zeros.any() else None,
        group_size=size,
    )


def _by_panels(each: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Numbers [groups, N] as [panels, groups, 16], filled with zeros."""
    groups, columns = each.shape
    count = blocks(columns, PANEL)
    filled = np.zeros((max(groups, 1), count * PANEL), each.dtype)
    filled[:groups, :columns] = each
    parts = filled.reshape(len(filled), count, PANEL).transpose(1, 0, 2)
    result = aligned_empty(parts.shape, each.dtype)
    result[...] = parts
    return result


def _real_zeros(given: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    zeros = np.asarray(given, np.float64)
    if zeros.shape != shape:
        raise ValueError(f"zero_point must have shape of the scales, {shape}, got {zeros.shape}")
    with np.errstate(over="ignore"):  # float32 is what is kept
        check_finite(zeros.astype(np.float32))
    return zeros


def _checked_dtype(values: npt.NDArray[Any], dtype: str | None) -> str:
    """What to pack `values` as."""
    if dtype is None or dtype == values.dtype.name:
        return values.dtype.name
    if dtype not in ("int4", "uint4"):
        raise ValueError(f"dtype must be one of {', '.join(STORED)}, got {dtype!r}")
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
