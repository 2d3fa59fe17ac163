"""A quantized tensor: integers together with all that is needed to read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import (
    affine_parameters,
    check_finite,
    dequantize_affine,
    quantize_affine,
)
from lowbit.numerics.formats import IntFormat, check_values, checked_axis, int_format, is_masked
from lowbit.numerics.ranges import Range, check_range, least_squares

Axis = int | tuple[int, ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """Integers with their scales and zero points; r ≈ scale · (values − zero_point).

    - values: integers of dtype `format.storage`, one per byte also for 4-bit formats.
    - scale, zero_point: float32 and int32, both of the shape of `values` without the axes that
      share a scale, and with the number of groups in place of the size of `group_axis`. With
      neither axis nor group_size that is the shape (), with axis=0 it is (values.shape[0],),
      and for a weight [K, N] with axis=1 and groups along K it is [groups, N].
    - axis: the axis or the ascending axes that have a scale per index. None: no axis has.
    - group_size: how many consecutive elements of `group_axis` share a scale; the last
      group may be shorter. None: there are no groups.
    - group_axis: the axis that is cut into groups; the last one if it is left out. None
      without groups.

    Raises TypeError or ValueError if the parts do not fit together.
    """

    values: npt.NDArray[Any]
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int32]
    format: IntFormat
    axis: Axis = None
    group_size: int | None = None
    group_axis: int | None = None

    def __post_init__(self) -> None:
        fmt, values = self.format, self.values
        if _normalized_axis(self.axis, values.ndim) != self.axis:
            raise ValueError(f"expected non-negative ascending axes, got axis={self.axis!r}")
        group_axis = _normalized_group_axis(
            self.group_axis, self.group_size, self.axis, values.ndim
        )
        if self.group_axis not in (None, group_axis):
            raise ValueError(f"expected a non-negative axis, got group_axis={self.group_axis}")
        # The way to fill in a field of a frozen dataclass.
        object.__setattr__(self, "group_axis", group_axis)
        expected = _parameter_shape(values.shape, self.axis, self.group_size, group_axis)
        parts = (
            ("values", values, fmt.storage, values.shape),
            ("scale", self.scale, np.dtype(np.float32), expected),
            ("zero_point", self.zero_point, np.dtype(np.int32), expected),
        )
        for name, array, dtype, shape in parts:
            if is_masked(array):
                raise TypeError(f"expected {name} without a mask, got MaskedArray")
            if array.dtype != dtype:
                raise TypeError(f"expected {name} of dtype {dtype}, got {array.dtype}")
            if array.shape != shape:
                raise ValueError(f"expected {name} of shape {shape}, got {array.shape}")
        if not (np.isfinite(self.scale) & (self.scale > 0)).all():
            raise ValueError("expected scales that are positive and finite")
        check_values(values, fmt, "values")
        check_values(self.zero_point, fmt, "zero_point")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.values.shape

    @property
    def T(self) -> QTensor:
        """The transposed matrix, in views. ValueError for other than two dimensions."""
        if self.values.ndim != 2:
            raise ValueError(f"expected two dimensions to transpose, got shape {self.shape}")
        axes = tuple(sorted(1 - i for i in _kept(self.axis)))
        axis = axes if isinstance(self.axis, tuple) else axes[0] if axes else None
        group_axis = None if self.group_axis is None else 1 - self.group_axis
        return QTensor(
            self.values.T, self.scale.T, self.zero_point.T, self.format, axis, self.group_size,
            group_axis,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales and zero points."""
        return self.values.nbytes + self.scale.nbytes + self.zero_point.nbytes

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The real values, float32, in the tensor's shape."""
        scale, zero_point = (
            _spread(part, self.shape, self.axis, self.group_size, self.group_axis)
            for part in (self.scale, self.zero_point)
        )
        return dequantize_affine(self.values, scale, zero_point)

    def __repr__(self) -> str:
        parts = [f"{self.format.name} {list(self.shape)}"]
        if self.axis is None and self.group_size is None:
            parts.append(f"scale={self.scale:.6g}, zero_point={self.zero_point}")
        else:
            parts.append(f"axis={self.axis}, group_size={self.group_size}")
            if self.group_axis not in (None, len(self.shape) - 1):
                parts.append(f"group_axis={self.group_axis}")
            parts.append(f"scales {list(self.scale.shape)}")
            if self.scale.size:
                parts[-1] += f" from {self.scale.min():.6g} to {self.scale.max():.6g}"
        return f"QTensor({', '.join(parts)}, {self.nbytes:,} bytes)"


def quantize(
    array: npt.ArrayLike,
    dtype: str | IntFormat = "int8",
    *,
    axis: Axis = None,
    group_size: int | None = None,
    group_axis: int | None = None,
    symmetric: bool = True,
    range: Range = "minmax",
) -> QTensor:
    """Quantize floating-point numbers to integers of the format `dtype`.

    `array` is a NumPy array of any shape, of float16, float32, float64 or a small float type
    such as ml_dtypes.bfloat16, or what converts to one, such as a PyTorch tensor on the CPU.
    Which values share a scale and a zero point:

    - axis=None: one for the whole array;
    - axis=i: one per index of axis i (a weight [out, in], per output channel: axis=0; an
      activation [M, K], per token: axis=0); a tuple of axes: one per combination of indices;
    - group_size=g: in addition, one per g consecutive elements of the last axis, or of
      `group_axis`. Where g does not divide the axis, the last group is shorter. (A weight
      [K, N] in groups of 128 along K: axis=1, group_size=128, group_axis=0.)

    With `symmetric` the zero point is the middle of the format (0 for int8, 128 for uint8).
    What these are chosen from is the `range`:

    - "minmax": the least and greatest value, as `affine_parameters` says. No value is off by more
      than half a step.
    - "mse": a range, mostly narrower, that is searched for to lower the squared error of what
      shares a scale, which is never above that of "minmax". Values outside of the range saturate.
      Of normal data in 4 bits with zero points it is 10 % less in groups of 32, 40 % in rows of
      4096. The search takes one to three seconds for 4096 x 4096 numbers.

    Raises TypeError if `array` is not of such a float type, `axis`, `group_size` or `group_axis`
    is not an integer or `range` no string; ValueError for NaN or infinity (naming the first),
    values beyond float32, an unknown format or range, an axis that the array does not have, or a
    group size or axis that does not fit.
    """
    check_range(range)
    fmt = int_format(dtype)
    x = _float_array(array)
    axis = _normalized_axis(axis, x.ndim)
    group_axis = _normalized_group_axis(group_axis, group_size, axis, x.ndim)
    check_finite(x)
    low, high = _ranges(x, axis, group_size, group_axis)
    scale, zero_point = affine_parameters(low, high, fmt, symmetric)
    if range == "mse":
        for rows, one in _sharing(x, axis, group_size, group_axis):
            shape = scale[one].shape
            found = least_squares(rows, scale[one].ravel(), zero_point[one].ravel(), fmt, symmetric)
            scale[one], zero_point[one] = (part.reshape(shape) for part in found)
    spread_scale = _spread(scale, x.shape, axis, group_size, group_axis)
    spread_zero_point = _spread(zero_point, x.shape, axis, group_size, group_axis)
    values = quantize_affine(x, spread_scale, spread_zero_point, fmt)
    return QTensor(values, scale, zero_point, fmt, axis, group_size, group_axis)


def _float_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    # A PyTorch parameter refuses to become an array until it is detached.
    detach = getattr(array, "detach", None)
    if is_masked(array):
        raise TypeError(
            "expected an array without a mask, got MaskedArray; array.filled(value) gives one"
        )
    try:
        x = np.asarray(array if detach is None else detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"cannot read {type(array).__name__} as an array ({error}); pass a NumPy array or "
            "a CPU tensor of float16, float32 or float64 (tensor.float() converts)"
        ) from error
    if x.dtype.kind in "biu" or not np.can_cast(x.dtype, np.float64):
        raise TypeError(
            f"expected an array of float16, float32 or float64, got {x.dtype}; convert it with "
            "astype if its values are meant as real numbers"
        )
    return x


def _normalized_axis(axis: Axis, ndim: int) -> Axis:
    """`axis` with negative numbers resolved, a tuple in ascending order."""
    if axis is None:
        return None
    expected = "None, an int or a tuple of ints"
    resolved = tuple(sorted(checked_axis(i, ndim, expected=expected) for i in _kept(axis)))
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"expected each axis once, got axis={axis!r}")
    return resolved if isinstance(axis, tuple) else resolved[0]


def _normalized_group_axis(
    group_axis: int | None, group_size: int | None, axis: Axis, ndim: int
) -> int | None:
    """The axis that groups cut, not negative, the last one by default; None without groups."""
    if group_size is None:
        if group_axis is not None:
            raise ValueError(
                f"group_axis={group_axis!r} needs a group_size; pass both or leave both out"
            )
        return None
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"expected group_size to be None or an int, got {group_size!r}")
    if group_size < 1:
        raise ValueError(
            f"expected group_size to be at least 1, got {group_size}; leave it out where the "
            "whole of an axis shares a scale"
        )
    if ndim == 0:
        raise ValueError("group_size cuts an axis, and this array has no axis; leave it out")
    given = -1 if group_axis is None else group_axis
    resolved = checked_axis(given, ndim, "group_axis", "None or an int")
    if resolved in _kept(axis):
        raise ValueError(
            f"group_size cuts axis {resolved}, which has a scale per index already with "
            f"axis={axis!r}; leave one of the two out, or cut another axis with group_axis"
        )
    return resolved


def _kept(axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _parameter_shape(
    shape: tuple[int, ...], axis: Axis, group_size: int | None, group_axis: int | None
) -> tuple[int, ...]:
    sizes = {i: shape[i] for i in _kept(axis)}
    if group_size is not None and group_axis is not None:
        sizes[group_axis] = -(-shape[group_axis] // group_size)
    return tuple(sizes[i] for i in sorted(sizes))


def _ranges(
    x: npt.NDArray[Any], axis: Axis, group_size: int | None, group_axis: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Least and greatest value of what shares a scale, the range widened to hold 0."""
    others = tuple(i for i in range(x.ndim) if i not in (*_kept(axis), group_axis))
    low = high = x
    if group_size is not None and group_axis is not None and x.shape[group_axis] > 0:
        starts = np.arange(0, x.shape[group_axis], group_size)
        low = np.minimum.reduceat(x, starts, axis=group_axis)
        high = np.maximum.reduceat(x, starts, axis=group_axis)
    # Starting from 0 widens the range to hold it, and gives an empty range a meaning.
    low = np.minimum.reduce(low, axis=others, initial=0)
    high = np.maximum.reduce(high, axis=others, initial=0)
    return np.asarray(low), np.asarray(high)


def _sharing(
    x: npt.NDArray[Any], axis: Axis, group_size: int | None, group_axis: int | None
) -> Iterator[tuple[npt.NDArray[Any], tuple[slice, ...]]]:
    """Matrices [scales, elements] of what shares a scale, and where in the scales' array these are.

    There are two if the last groups are shorter than the others.
    """
    kept = _kept(axis)
    if group_size is None or group_axis is None:
        yield _rows(x, kept), ()
        return
    # The axis of groups becomes two: which group, and where in it.
    before = sum(i < group_axis for i in kept)
    kept = (*kept[:before], group_axis, *(i + 1 for i in kept[before:]))
    length = x.shape[group_axis]
    whole = length - length % group_size
    for start, stop in ((0, whole), (whole, length)):
        if start < stop:
            size = min(group_size, stop - start)
            part = x[(slice(None),) * group_axis + (slice(start, stop),)]
            inner = ((stop - start) // size, size)
            part = part.reshape(x.shape[:group_axis] + inner + x.shape[group_axis + 1 :])
            groups = slice(start // group_size, -(-stop // group_size))
            yield _rows(part, kept), (*(slice(None),) * before, groups)


def _rows(x: npt.NDArray[Any], kept: tuple[int, ...]) -> npt.NDArray[Any]:
    moved = x.transpose(kept + tuple(i for i in range(x.ndim) if i not in kept))
    count = math.prod(moved.shape[: len(kept)])
    return moved.reshape(count, x.size // max(count, 1))


def _spread(
    part: npt.NDArray[Any],
    shape: tuple[int, ...],
    axis: Axis,
    group_size: int | None,
    group_axis: int | None,
) -> npt.NDArray[Any]:
    """A scale or zero point array in a shape that broadcasts against the values."""
    kept = _kept(axis)
    ones = [shape[i] if i in kept else 1 for i in range(len(shape))]
    if group_size is None or group_axis is None:
        return part.reshape(ones)
    ones[group_axis] = -(-shape[group_axis] // group_size)
    group_of = np.arange(shape[group_axis]) // group_size
    return np.take(part.reshape(ones), group_of, axis=group_axis)
