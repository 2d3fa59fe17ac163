"""A quantized tensor: integers together with all that is needed to read them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import (
    affine_parameters,
    check_finite,
    dequantize_affine,
    quantize_affine,
)
from lowbit.numerics.formats import (
    IntDtype,
    IntFormat,
    check_values,
    checked_axis,
    int_format,
    is_masked,
)
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
        fmt, values, sharing = self.format, self.values, self._sharing
        if axis_like(self.axis, sharing.kept) != self.axis:
            raise ValueError(f"expected non-negative ascending axes, got axis={self.axis!r}")
        if self.group_axis not in (None, sharing.cut):
            raise ValueError(f"expected a non-negative axis, got group_axis={self.group_axis}")
        # The way to fill in a field of a frozen dataclass.
        object.__setattr__(self, "group_axis", sharing.cut)
        parts = (
            ("values", values, fmt.storage, values.shape),
            ("scale", self.scale, np.dtype(np.float32), sharing.scales),
            ("zero_point", self.zero_point, np.dtype(np.int32), sharing.scales),
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
    def _sharing(self) -> Sharing:
        return Sharing.of(self.values.shape, self.axis, self.group_size, self.group_axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.values.shape

    @property
    def T(self) -> QTensor:
        """The transposed matrix, in views. ValueError for other than two dimensions."""
        if self.values.ndim != 2:
            raise ValueError(f"expected two dimensions to transpose, got shape {self.shape}")
        axis = axis_like(self.axis, tuple(1 - i for i in reversed(self._sharing.kept)))
        group_axis = None if self.group_axis is None else 1 - self.group_axis
        made = copy(self)  # whose parts fit together, and are not looked at again
        values, scale, zero_point = self.values.T, self.scale.T, self.zero_point.T
        vars(made).update(values=values, scale=scale, zero_point=zero_point, axis=axis,
                          group_axis=group_axis)  # fmt: skip
        return made

    @property
    def nbytes(self) -> int:
        """Bytes held: values, scales and zero points."""
        return self.values.nbytes + self.scale.nbytes + self.zero_point.nbytes

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The real values, float32, in the tensor's shape."""
        return dequantize_affine(self.values, self.spread(self.scale), self.spread(self.zero_point))

    def spread(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`part`, of the shape of the scales, in a shape that broadcasts against the values."""
        return self._sharing.spread(part)

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
    dtype: IntDtype | IntFormat = "int8",
    *,
    axis: Axis = None,
    group_size: int | None = None,
    group_axis: int | None = None,
    symmetric: bool = True,
    range: Range = "minmax",
) -> QTensor:
    """What `lowbit.quantize` (weights/quantize.py) computes, in NumPy: its specification."""
    check_range(range)
    fmt = int_format(dtype)
    x = float_array(array)
    sharing = Sharing.of(x.shape, axis, group_size, group_axis)
    check_finite(x)
    scale, zero_point = affine_parameters(*sharing.ranges(x), fmt, symmetric)
    if range == "mse":
        for part, where in sharing.parts(x):
            shape, given = scale[where].shape, (scale[where].ravel(), zero_point[where].ravel())
            count = given[0].size
            rows = part.reshape(count, part.size // max(count, 1))
            found = least_squares(rows, *given, fmt, symmetric)
            scale[where], zero_point[where] = (each.reshape(shape) for each in found)
    values = quantize_affine(x, sharing.spread(scale), sharing.spread(zero_point), fmt)
    kept = axis_like(axis, sharing.kept)
    return QTensor(values, scale, zero_point, fmt, kept, group_size, sharing.cut)


def float_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """`array` as NumPy has it. TypeError: it does not hold real numbers, or cannot be read."""
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


def axis_like(given: Axis, kept: tuple[int, ...]) -> Axis:
    """Axes in the form in which a user gave some: a tuple, or one, or None."""
    return kept if isinstance(given, tuple) else kept[0] if kept else None


class Sharing(NamedTuple):
    """Which values share a scale: those with the same indices of the axes `kept` and, if there are
    groups, in the same `size` indices of the axis `cut`."""

    shape: tuple[int, ...]
    kept: tuple[int, ...]
    size: int = 0
    cut: int | None = None

    @classmethod
    def of(
        cls, shape: tuple[int, ...], axis: Axis, group_size: int | None, group_axis: int | None
    ) -> Sharing:
        """From what users give, checked, with negative axes resolved."""
        axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        expected, ndim = "None, an int or a tuple of ints", len(shape)
        kept = tuple(sorted(checked_axis(i, ndim, expected=expected) for i in axes))
        if len(set(kept)) < len(kept):
            raise ValueError(f"expected each axis once, got axis={axis!r}")
        if group_size is None:
            if group_axis is not None:
                raise ValueError(
                    f"group_axis={group_axis!r} needs a group_size; pass both or leave both out"
                )
            return cls(shape, kept)
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
        cut = checked_axis(given, ndim, "group_axis", "None or an int")
        if cut in kept:
            raise ValueError(
                f"group_size cuts axis {cut}, which has a scale per index already with "
                f"axis={axis!r}; leave one of the two out, or cut another axis with group_axis"
            )
        return cls(shape, kept, group_size, cut)

    def _counts(self) -> list[int]:
        """How many scales there are along each axis; 0 along one that has none."""
        counts = [n if i in self.kept else 0 for i, n in enumerate(self.shape)]
        if self.cut is not None:
            counts[self.cut] = -(-self.shape[self.cut] // self.size)
        return counts

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of scales and zero points."""
        counts = self._counts()
        return tuple(n for i, n in enumerate(counts) if i in self.kept or i == self.cut)

    def spread(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Scales or zero points in a shape that broadcasts against the values."""
        own = (*self.kept, self.cut)
        part = part.reshape([n if i in own else 1 for i, n in enumerate(self._counts())])
        if self.cut is None:
            return part
        return np.take(part, np.arange(self.shape[self.cut]) // self.size, axis=self.cut)

    def ranges(self, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Least and greatest value of what shares a scale, the range widened to hold 0."""
        low, high = np.zeros(self.scales, x.dtype), np.zeros(self.scales, x.dtype)
        for part, where in self.parts(x):
            others = tuple(range(low.ndim, part.ndim))
            # Starting from 0 widens the range to hold it, and gives an empty range a meaning.
            low[where] = np.minimum.reduce(part, axis=others, initial=0)
            high[where] = np.maximum.reduce(part, axis=others, initial=0)
        return low, high

    def parts(self, x: npt.NDArray[Any]) -> Iterator[tuple[npt.NDArray[Any], tuple[slice, ...]]]:
        """Views of x, whose first axes are those of scales and whose others share one; and where in
        the array of scales they are. There are two if the last groups are shorter than the others.
        """
        if self.cut is None:
            yield _first(x, self.kept), ()
            return
        cut, size, length = self.cut, self.size, self.shape[self.cut]
        # The axis of groups becomes two: which group, and where in it.
        before = tuple(i for i in self.kept if i < cut)
        kept = (*before, cut, *(i + 1 for i in self.kept if i > cut))
        whole = length - length % size
        for start, stop in ((0, whole), (whole, length)):
            if start < stop:
                each = min(size, stop - start)
                part = x[(slice(None),) * cut + (slice(start, stop),)]
                inner = ((stop - start) // each, each)
                part = part.reshape(x.shape[:cut] + inner + x.shape[cut + 1 :])
                groups = slice(start // size, -(-stop // size))
                yield _first(part, kept), (*(slice(None),) * len(before), groups)


def _first(x: npt.NDArray[Any], axes: tuple[int, ...]) -> npt.NDArray[Any]:
    """A view with these axes before the others."""
    return x.transpose(axes + tuple(i for i in range(x.ndim) if i not in axes))
