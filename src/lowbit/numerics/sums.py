"""How many products of two integer formats an accumulator holds."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np

from lowbit.numerics.formats import int_format


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
