"""The integer formats that values are quantized to, and how many products are summed in them."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

# The integer formats that values are quantized to.

IntDtype = Literal["int8", "uint8", "int4", "uint4"]


@dataclass(frozen=True)
class IntFormat:
    """An integer format of at most eight bits, two's complement where it is signed."""

    name: IntDtype
    bits: int
    signed: bool

    @property
    def qmin(self) -> int:
        """The least value."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        """The greatest value."""
        return self.qmin + (1 << self.bits) - 1

    @property
    def midpoint(self) -> int:
        """The zero point of symmetric quantization: 0 if signed, else half of the range."""
        return self.qmin + (1 << (self.bits - 1))

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype that holds one value per byte: int8 or uint8."""
        return np.dtype(np.int8 if self.signed else np.uint8)


_FORMATS = {
    fmt.name: fmt
    for fmt in (
        IntFormat("uint8", bits=8, signed=False),
        IntFormat("int8", bits=8, signed=True),
        IntFormat("uint4", bits=4, signed=False),
        IntFormat("int4", bits=4, signed=True),
    )
}


def int_format(name: str | IntFormat) -> IntFormat:
    """The format of that name; a format is returned as it is.

    Raises TypeError if `name` is neither, ValueError if no format has the name.
    """
    if isinstance(name, IntFormat):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"a format is given by its name, got {type(name).__name__} {name!r}; "
            f"pass one of {', '.join(map(repr, _FORMATS))}"
        )
    if name not in _FORMATS:
        raise ValueError(
            f"unknown integer format {name!r}; pass one of {', '.join(map(repr, _FORMATS))}"
        )
    return _FORMATS[name]


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's or ml_dtypes' dtype of that name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def whole_part(x: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Floats without their fractions, as integers of this dtype.

    C does not say what becomes of floats that an integer does not hold. Here it is what x86 makes
    of them, and NumPy and PyTorch there: int32 (for uint32, int64 and uint64: int64) of what that
    does not hold, and of NaN, is its least number; others are the last bits of these."""
    kind = np.dtype(dtype)
    if kind == np.uint64:
        half = x.dtype.type(2.0**63)
        upper = _whole_part(x - half, 64) ^ np.int64(-(2**63))
        return np.where(x < half, _whole_part(x, 64), upper).astype(kind)
    return _whole_part(x, 64 if kind.itemsize == 8 or kind == np.uint32 else 32).astype(kind)


def _whole_part(x: npt.NDArray[Any], bits: int) -> npt.NDArray[Any]:
    """int32 or int64; the least for what these do not hold."""
    limit = 2.0 ** (bits - 1)
    wide = x.astype(np.float64)
    inside = (wide >= -limit) & (wide < limit)
    whole = np.where(inside, wide, 0).astype(f"int{bits}")
    return np.where(inside, whole, whole.dtype.type(-(2 ** (bits - 1))))


def is_masked(value: Any) -> bool:
    """Whether it is a MaskedArray, without the import of numpy.ma, which takes a while."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)  # it may come just now
    return masked is not None and isinstance(value, masked)


def first_index(found: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    """The index of the first True, in C order; there must be one."""
    return tuple(int(i) for i in np.unravel_index(int(found.argmax()), found.shape))


def checked_axis(axis: Any, ndim: int, name: str = "axis", expected: str = "an int") -> int:
    """`axis`, not negative. TypeError if it is no integer, ValueError if there is no such axis."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"expected {name} to be {expected}, got {axis!r}")
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} {axis} does not exist in an array of {ndim} dimensions")
    return axis % ndim


def check_values(values: npt.NDArray[Any], fmt: IntFormat, name: str) -> None:
    """Raise ValueError naming the first of the integers `values`, in C order, outside of `fmt`.

    `name` says in the message what the values are.
    """
    if values.size == 0 or values.dtype.name == fmt.name:  # which holds nothing else
        return
    if (values.dtype.kind == "u" or values.min() >= fmt.qmin) and values.max() <= fmt.qmax:
        return
    index = first_index((values < fmt.qmin) | (values > fmt.qmax))
    raise ValueError(
        f"expected {name} within {fmt.name}, {fmt.qmin} to {fmt.qmax}, "
        f"found {int(values[index])} at index {index}"
    )


# How many products of two integer formats an accumulator holds.


@cache
def longest_sum(
    left: str,
    right: str,
    accumulator: str = "int32",
    *,
    shifted: tuple[bool, bool] = (False, False),
) -> int:
    """The largest number of products left * right that the accumulator holds, whatever they are.

    left, right: formats as `int_format` knows them; accumulator: a NumPy dtype. `shifted` says of
    which factor a zero point of its own format is taken first, which widens its range. From the
    corners of the two ranges: for uint8 * int8 in int32 it is 2**31 // (255 * 128) = 65793.
    """
    ranges: list[tuple[int, int]] = []
    for name, wider in zip((left, right), shifted, strict=True):
        fmt = int_format(name)
        span = fmt.qmax - fmt.qmin
        ranges.append((-span, span) if wider else (fmt.qmin, fmt.qmax))
    corners = [x * y for x, y in itertools.product(*ranges)]
    limits = np.iinfo(accumulator)
    low, high = int(limits.min), int(limits.max)
    above = high // max(corners) if max(corners) > 0 else high
    below = -low // -min(corners) if min(corners) < 0 else high
    return min(above, below)
