"""What operations are tried on: the kinds of data, and how each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowbit.spec.dtypes import Array, DType

SPECIAL: Mapping[str, tuple[float, ...]] = {
    "largest": (1.0, -1.0),
    "inf": (np.inf,),
    "neg_inf": (-np.inf,),
    "nan": (np.nan,),
}
"""The fills with a few special values among normal ones, in multiples of the largest that the dtype
holds. Each fill is of one kind, so that a sum does not always end as NaN."""

CORNERS = ("max*max", "max*min", "min*max", "min*min")
"""The fills of integer products: each factor at an end of its range."""

FILLS = ("normal", "zeros", "negative", "large", "low", "tiny", *SPECIAL)
"""Standard normal values; half of them zeros of both signs; all negative; 200 times as large, so
that exp overflows; all below -200, so that exp of each is zero; subnormal ones; special ones.
Integers: any bits; half zeros; all bits one; the two limits; all the lower limit; 0 and 1; any
bits."""

_LARGE, _OFFSET = 200.0, 1000.0
FURTHER = ("ties", "rising", "halves", "offset", "huge")
"""Fills of floats for interpreted kernels: -1, 0 and 1, so that the largest is there many times;
large ones that rise along the last axis, so that the largest is met last; multiples of a half up to
127, which each row has, so that they are halves too when a scale makes that 127 (an input of fewer
dimensions than others, such as a scale, has powers of two); a thousand more than normal values; so
large that their squares are infinite in the dtype."""
OF_INTEGERS = FURTHER[:3]
"""Those whose results are integers that every kernel agrees on."""

# One of so many elements is special, and at least two.
_SPECIAL_AMONG = 64


@dataclass(frozen=True)
class Draw:
    """What a generator of input data is told: the random source, shape, dtype and fill.

    dtype: with the range that the operation states for the input. fill: one of FILLS or FURTHER, or
    "max", "min" or "powers" (of two). ranges: the dtypes in which the operation multiplies, by
    factor, and of the result (a zero point lies in the range of what it belongs to). sizes: of all
    dimensions.
    """

    rng: np.random.Generator
    shape: tuple[int, ...]
    dtype: DType
    fill: str
    ranges: Mapping[str, DType]
    sizes: Mapping[str, int]


def draw_values(draw: Draw) -> Array:
    """Data of any fill, as FILLS says; floats of a corner are standard normal."""
    return _floats(draw) if draw.dtype.is_float else _integers(draw)


def _floats(draw: Draw) -> Array:
    rng, fill = draw.rng, draw.fill
    values = np.asarray(rng.standard_normal(draw.shape))
    if fill == "zeros":
        _plant(values, (0.0, -0.0), -(-values.size // 2), rng)
    elif fill == "negative":
        values = -np.abs(values)
    elif fill == "large":
        values = values * _LARGE
    elif fill == "low":
        values = -_LARGE * (1 + np.abs(values))
    elif fill == "tiny":
        below = 2.0**-4 if draw.dtype.bits == 16 else 2.0**-14
        values = values * draw.dtype.least_normal * below
    elif fill == "ties":
        values = rng.integers(-1, 2, draw.shape).astype(np.float64)
    elif fill == "rising":
        values = np.sort(values * _LARGE, axis=-1) if values.ndim else values
    elif fill == "halves":
        values = _halves(draw.shape, rng)
    elif fill == "powers":
        values = 2.0 ** rng.integers(-2, 3, draw.shape)
    elif fill == "offset":
        values = values + _OFFSET
    elif fill == "huge":
        values = values * np.sqrt(draw.dtype.largest) * 8
    elif fill in SPECIAL:
        numbers = np.array(SPECIAL[fill]) * draw.dtype.largest
        _plant(values, numbers, 2 + values.size // _SPECIAL_AMONG, rng)
    return np.asarray(values).astype(draw.dtype.storage)


def _integers(draw: Draw) -> Array:
    rng, shape, low, high = draw.rng, draw.shape, draw.dtype.low, draw.dtype.high
    storage = draw.dtype.storage
    kind = np.dtype(np.uint8) if storage.kind == "b" else storage
    makers: dict[str, Callable[[], Array]] = {
        "zeros": lambda: (
            rng.integers(low, high, shape, kind, True) * rng.integers(0, 2, shape, kind)
        ),
        "negative": lambda: np.full(shape, -1 if low < 0 else high),
        "large": lambda: rng.choice(np.array([low, high], kind), shape),
        "low": lambda: np.full(shape, low, kind),
        "min": lambda: np.full(shape, low, kind),
        "max": lambda: np.full(shape, high, kind),
        "tiny": lambda: rng.integers(0, 2, shape, kind),
    }
    make = makers.get(draw.fill, lambda: rng.integers(low, high, shape, kind, endpoint=True))
    return np.clip(np.asarray(make()), low, high).astype(storage)


def _halves(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Multiples of a half from -126.5 to 126.5, one in each row replaced by 127 or -127."""
    values = np.asarray(rng.integers(-253, 254, shape) / 2)
    if values.size and values.ndim:
        rows = values.reshape(-1, shape[-1])
        place = rng.integers(0, shape[-1], len(rows))
        rows[np.arange(len(rows)), place] = rng.choice((-127.0, 127.0), len(rows))
    return values


def _plant(
    values: Array, numbers: Sequence[float] | Array, count: int, rng: np.random.Generator
) -> None:
    """Put these numbers, in turn, at `count` places, or everywhere where there are fewer."""
    places = rng.permutation(values.size)[:count]
    values.reshape(-1)[places] = np.resize(numbers, places.size)


def draw_scales(draw: Draw) -> Array:
    """Positive scales, log-uniform over two decades, as the channels of one layer have them."""
    scales = np.power(10.0, draw.rng.uniform(-4, -2, draw.shape))
    return np.asarray(scales).astype(draw.dtype.storage)


def draw_zero_points_of(factor: str) -> Callable[[Draw], Array]:
    """Zero points over the range of `factor`, both ends among them; only ends at the corners."""

    def draw_zero_points(draw: Draw) -> Array:
        limits = draw.ranges[factor]
        ends = (limits.low, limits.high)
        if draw.fill in ("max", "min"):
            return np.asarray(draw.rng.choice(ends, draw.shape)).astype(draw.dtype.storage)
        points = np.asarray(draw.rng.integers(*ends, draw.shape, draw.dtype.storage, True))
        if points.size > 1:
            points.flat[:2] = ends
        return points

    return draw_zero_points


def draw_activations(draw: Draw) -> Array:
    """Rows [M, ...] of very different magnitude: of both signs, never negative, never positive,
    all zero, and again, so that the dynamic zero point goes to both ends. Corners are constant
    rows, which quantize to the end of the range; other fills are as FILLS says."""
    rows = np.power(10.0, draw.rng.uniform(-3, 3, draw.shape[0]))
    rows = rows.reshape(-1, *[1] * (len(draw.shape) - 1))
    if draw.fill in ("max", "min"):
        values = np.full(draw.shape, 1.0 if draw.fill == "max" else -1.0)
    elif draw.fill != "normal":
        return draw_values(draw)
    else:
        values = draw.rng.standard_normal(draw.shape)
        values[1::4] = np.abs(values[1::4])
        values[2::4] = -np.abs(values[2::4])
        values[3::4] = 0.0
    return (rows * values).astype(draw.dtype.storage)
