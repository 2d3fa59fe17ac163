"""The operands of an operation, and the data that it is tried on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.spec.dtypes import DTYPES, DType

Array = NDArray[Any]

FILLS = ("full", "max*max", "max*min", "min*max", "min*min")
"""How inputs are filled: random over the full range, or both factors at an end of theirs."""


@dataclass(frozen=True)
class Draw:
    """What a generator of input data is told: the random source, shape, dtype and fill.

    `fill` is "full", "max" or "min"; `factors` are the dtypes in which the operation multiplies,
    by tensor name (a zero point lies in the range of the tensor it belongs to).
    """

    rng: np.random.Generator
    shape: tuple[int, ...]
    dtype: DType
    fill: str
    factors: Mapping[str, DType]


def draw_values(draw: Draw) -> Array:
    """Integers over the whole range of their format, or all at one end; floats N(0, 1)."""
    if draw.dtype.low is None:
        return draw.rng.standard_normal(draw.shape).astype(draw.dtype.storage)
    low, high = draw.dtype.limits
    if draw.fill != "full":
        return np.full(draw.shape, high if draw.fill == "max" else low, draw.dtype.storage)
    return draw.rng.integers(low, high, draw.shape, draw.dtype.storage, endpoint=True)


def draw_scales(draw: Draw) -> Array:
    """Positive scales, log-uniform over two decades, as the channels of one layer have them."""
    return np.power(10.0, draw.rng.uniform(-4, -2, draw.shape)).astype(draw.dtype.storage)


def draw_zero_points_of(factor: str) -> Callable[[Draw], Array]:
    """Zero points over the range of `factor`, both ends among them; only ends when saturating."""

    def draw_zero_points(draw: Draw) -> Array:
        ends = draw.factors[factor].limits
        if draw.fill != "full":
            return draw.rng.choice(ends, draw.shape).astype(draw.dtype.storage)
        points = draw.rng.integers(*ends, draw.shape, draw.dtype.storage, endpoint=True)
        points.flat[: len(ends)] = ends[: points.size]
        return points

    return draw_zero_points


def draw_activations(draw: Draw) -> Array:
    """Rows [M, ...] of very different magnitude: of both signs, never negative, never positive,
    all zero, and again, so that the dynamic zero point goes to both ends. Saturating fills are
    constant rows, which quantize to the end of the range."""
    rows = np.power(10.0, draw.rng.uniform(-3, 3, draw.shape[0]))
    rows = rows.reshape(-1, *[1] * (len(draw.shape) - 1))
    if draw.fill != "full":
        values = np.full(draw.shape, 1.0 if draw.fill == "max" else -1.0)
    else:
        values = draw.rng.standard_normal(draw.shape)
        values[1::4] = np.abs(values[1::4])
        values[2::4] = -np.abs(values[2::4])
        values[3::4] = 0.0
    return (rows * values).astype(draw.dtype.storage)


_TENSOR = re.compile(r"(?P<name>\w+): (?P<dtypes>\w+(?:\|\w+)*)\[(?P<dims>[\w ]*)\](?P<maybe>\??)")


@dataclass(frozen=True)
class Tensor:
    """One operand: its name, the dtypes it may have, its dimensions, and how to make data.

    `multiplied_as` is the dtype code in which the operation multiplies it, when that is not
    its own (an activation that is quantized inside). `shifted_by` names the input that is the
    zero point taken from it before it is multiplied, or itself if that is made inside.
    """

    name: str
    dtypes: tuple[str, ...]
    dims: tuple[str, ...]
    optional: bool = False
    draw: Callable[[Draw], Array] = draw_values
    multiplied_as: str | None = None
    shifted_by: str | None = None

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        draw: Callable[[Draw], Array] = draw_values,
        multiplied_as: str | None = None,
        shifted_by: str | None = None,
    ) -> Tensor:
        """Read `name: dtype|dtype[dim dim]`, with a `?` behind for a tensor that may be absent."""
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a tensor; write it as 'a: u8|s8[M K]'")
        dtypes = tuple(match["dtypes"].split("|"))
        for code in dtypes:
            if code not in DTYPES:
                raise ValueError(f"{text!r}: no dtype {code!r}; known are {', '.join(DTYPES)}")
        dims = tuple(match["dims"].split())
        return cls(
            match["name"], dtypes, dims, bool(match["maybe"]), draw, multiplied_as, shifted_by
        )
