"""Number formats, and how many products of two of them a third can sum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lowbit.numerics import int_format


@dataclass(frozen=True)
class DType:
    """A number format: its code, width in bits, NumPy storage, and range if it is an integer."""

    code: str
    bits: int
    storage: np.dtype[Any]
    low: int | None = None
    high: int | None = None

    @classmethod
    def integer(cls, code: str, format_name: str) -> DType:
        """The integer format that `lowbit.numerics` knows as `format_name`."""
        fmt = int_format(format_name)
        return cls(code, fmt.bits, np.dtype(fmt.storage), fmt.qmin, fmt.qmax)

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value. TypeError if this is not an integer format."""
        if self.low is None or self.high is None:
            raise TypeError(f"{self.code} is not an integer format and has no integer limits")
        return self.low, self.high

    @property
    def differences(self) -> tuple[int, int]:
        """Smallest and largest difference of two values: what a zero point can make of one."""
        low, high = self.limits
        return low - high, high - low


_INT32 = np.iinfo(np.int32)
DTYPES: Mapping[str, DType] = {
    dtype.code: dtype
    for dtype in (
        DType.integer("u8", "uint8"),
        DType.integer("s8", "int8"),
        DType.integer("u4", "uint4"),
        DType.integer("s4", "int4"),
        DType("s32", _INT32.bits, np.dtype(np.int32), int(_INT32.min), int(_INT32.max)),
        DType("f32", np.finfo(np.float32).bits, np.dtype(np.float32)),
    )
}


@cache
def longest_sum(
    left: str,
    right: str,
    accumulator: str = "s32",
    *,
    shifted: tuple[bool, bool] = (False, False),
) -> int:
    """The largest number of products left * right that the accumulator holds, whatever they are.

    Formats are given by their codes; `shifted` says of which factor a zero point of its own
    format is taken first, which widens its range. From the corners of the two ranges: for
    u8 * s8 in s32 it is 2**31 // (255 * 128) = 65793.
    """
    ranges = [
        DTYPES[code].differences if wider else DTYPES[code].limits
        for code, wider in zip((left, right), shifted, strict=True)
    ]
    corners = [x * y for x, y in itertools.product(*ranges)]
    low, high = DTYPES[accumulator].limits
    above = high // max(corners) if max(corners) > 0 else high
    below = -low // -min(corners) if min(corners) < 0 else high
    return min(above, below)
