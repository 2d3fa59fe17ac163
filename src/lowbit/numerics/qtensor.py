"""A quantized tensor: integers together with all that is needed to read them."""

from __future__ import annotations

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
from lowbit.numerics.formats import IntFormat, int_format

Axis = int | tuple[int, ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """Integers with their scales and zero points; r ≈ scale · (values − zero_point).

    - values: integers of dtype `format.storage`, one per byte also for 4-bit formats.
    - scale, zero_point: float32 and int32, both of shape (*sizes of `axis`, groups); with
      neither axis nor group_size that is the shape (), with axis=0 it is (values.shape[0],).
    - axis: the axis or the ascending axes that have a scale per index. None: no axis has.
    - group_size: how many consecutive elements of the last axis share a scale; the last
      group may be shorter. None: all of them do, unless the last axis is in `axis`.

    Raises TypeError or ValueError if the parts do not fit together.
    """

    values: npt.NDArray[Any]
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int32]
    format: IntFormat
    axis: Axis = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        fmt, values = self.format, self.values
        if _normalized_axis(self.axis, values.ndim) != self.axis:
            raise ValueError(f"expected non-negative ascending axes, got axis={self.axis!r}")
        _check_group_size(self.group_size, self.axis, values.ndim)
        expected = _parameter_shape(values.shape, self.axis, self.group_size)
        parts = (
            ("values", values, fmt.storage, values.shape),
            ("scale", self.scale, np.dtype(np.float32), expected),
            ("zero_point", self.zero_point, np.dtype(np.int32), expected),
        )
        for name, array, dtype, shape in parts:
            if array.dtype != dtype:
                raise TypeError(f"expected {name} of dtype {dtype}, got {array.dtype}")
            if array.shape != shape:
                raise ValueError(f"expected {name} of shape {shape}, got {array.shape}")
        if not (np.isfinite(self.scale) & (self.scale > 0)).all():
            raise ValueError("expected scales that are positive and finite")
        for name, array in (("values", values), ("zero_point", self.zero_point)):
            if ((array < fmt.qmin) | (array > fmt.qmax)).any():
                raise ValueError(
                    f"expected {name} within {fmt.name}, {fmt.qmin} to {fmt.qmax}, "
                    f"got {array.min()} to {array.max()}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales and zero points."""
        return self.values.nbytes + self.scale.nbytes + self.zero_point.nbytes

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The real values, float32, in the tensor's shape."""
        scale, zero_point = (
            _spread(part, self.shape, self.axis, self.group_size)
            for part in (self.scale, self.zero_point)
        )
        return dequantize_affine(self.values, scale, zero_point)

    def __repr__(self) -> str:
        parts = [f"{self.format.name} {list(self.shape)}"]
        if self.axis is None and self.group_size is None:
            parts.append(f"scale={self.scale:.6g}, zero_point={self.zero_point}")
        else:
            parts.append(f"axis={self.axis}, group_size={self.group_size}")
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
    symmetric: bool = True,
) -> QTensor:
    """Quantize floating-point numbers to integers of the format `dtype`.

    `array` is a NumPy array of any shape, of float16, float32, float64 or a small float type
    such as ml_dtypes.bfloat16, or what converts to one, such as a PyTorch tensor on the CPU.
    Scales and zero points are chosen from the least and greatest value, as
    `affine_parameters` says:

    - axis=None: one for the whole array;
    - axis=i: one per index of axis i (a weight [out, in], per output channel: axis=0; an
      activation [M, K], per token: axis=0); a tuple of axes: one per combination of indices;
    - group_size=g: in addition, one per g consecutive elements of the last axis.

    With `symmetric` the zero point is the middle of the format (0 for int8, 128 for uint8).

    Raises TypeError if `array` is not of such a float type or `axis` or `group_size` is not an
    integer; ValueError for NaN or infinity (naming the first), values beyond float32, an
    unknown format, an axis that the array does not have, or a group size that does not fit.
    """
    fmt = int_format(dtype)
    x = _float_array(array)
    axis = _normalized_axis(axis, x.ndim)
    _check_group_size(group_size, axis, x.ndim)
    check_finite(x)
    low, high = _ranges(x, axis, group_size)
    scale, zero_point = affine_parameters(low, high, fmt, symmetric)
    spread_scale = _spread(scale, x.shape, axis, group_size)
    spread_zero_point = _spread(zero_point, x.shape, axis, group_size)
    values = quantize_affine(x, spread_scale, spread_zero_point, fmt)
    return QTensor(values, scale, zero_point, fmt, axis, group_size)


def _float_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    # A PyTorch parameter refuses to become an array until it is detached.
    detach = getattr(array, "detach", None)
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
    axes = axis if isinstance(axis, tuple) else (axis,)
    for i in axes:
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(f"expected axis to be None, an int or a tuple of ints, got {axis!r}")
        if not -ndim <= i < ndim:
            raise ValueError(f"axis {i} does not exist in an array of {ndim} dimensions")
    resolved = tuple(sorted(i % ndim for i in axes))
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"expected each axis once, got axis={axis!r}")
    return resolved if isinstance(axis, tuple) else resolved[0]


def _check_group_size(group_size: int | None, axis: Axis, ndim: int) -> None:
    if group_size is None:
        return
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"expected group_size to be None or an int, got {group_size!r}")
    if group_size < 1:
        raise ValueError(f"expected group_size to be at least 1, got {group_size}")
    if ndim == 0:
        raise ValueError("group_size cuts the last axis, and this array has no axis; leave it out")
    if ndim - 1 in _kept(axis):
        raise ValueError(
            f"group_size cuts the last axis, {ndim - 1}, which has a scale per index already "
            f"with axis={axis!r}; leave one of the two out"
        )


def _kept(axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _parameter_shape(shape: tuple[int, ...], axis: Axis, group_size: int | None) -> tuple[int, ...]:
    kept = tuple(shape[i] for i in _kept(axis))
    return kept if group_size is None else (*kept, -(-shape[-1] // group_size))


def _ranges(
    x: npt.NDArray[Any], axis: Axis, group_size: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Least and greatest value of what shares a scale, the range widened to hold 0."""
    kept = _kept(axis) if group_size is None else (*_kept(axis), x.ndim - 1)
    others = tuple(i for i in range(x.ndim) if i not in kept)
    low = high = x
    if group_size is not None and x.shape[-1] > 0:
        starts = np.arange(0, x.shape[-1], group_size)
        low = np.minimum.reduceat(x, starts, axis=-1)
        high = np.maximum.reduceat(x, starts, axis=-1)
    # Starting from 0 widens the range to hold it, and gives an empty range a meaning.
    low = np.minimum.reduce(low, axis=others, initial=0)
    high = np.maximum.reduce(high, axis=others, initial=0)
    return np.asarray(low), np.asarray(high)


def _spread(
    part: npt.NDArray[Any], shape: tuple[int, ...], axis: Axis, group_size: int | None
) -> npt.NDArray[Any]:
    """A scale or zero point array in a shape that broadcasts against the values."""
    kept = _kept(axis)
    ones = [shape[i] if i in kept else 1 for i in range(len(shape))]
    if group_size is None:
        return part.reshape(ones)
    ones[-1] = part.shape[-1]
    return np.repeat(part.reshape(ones), group_size, axis=-1)[..., : shape[-1]]
