"""Scales and zero points of least squared error.

The range from the least to the greatest value spends its integers on the two ends. Of the values of
a group, few are there, and sixteen integers are not many: a narrower range, which moves the ends
inwards, makes the others' steps finer. How much narrower depends on the group, so it is searched
for, group by group:

1. Grid: the scale of the whole range times 1.15 · 0.95ⁱ, the zero point unchanged; then, at the
   best of these scales, the zero points beside it. (Factors a little above one help as well: they
   move the steps to where the values are.)
2. Least squares: given the integers q, the best scale and zero point are those of the line
   r ≈ S·(q − Z), with Z rounded; given these, the best integers are the nearest. The two in turn
   lower the error each time, and end after a few turns.
3. The result is compared with the whole range once more, in the very arithmetic of
   `quantize_affine` and `dequantize_affine`, and is taken only where its error is less.

Sums are added in an order that `ordered_sum` states, so that whoever follows this text, as the
kernel of kernels/cpu/quantization does, has the same scales to the bit.

Clipping by least squared error is old: Shin, Hwang, Sung 2016 (arXiv:1511.06488) search a grid,
Banner, Nahshan, Soudry 2019 (arXiv:1810.05723) derive the clipping point from a distribution.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import SMALLEST_SCALE, dequantize_affine, quantize_affine
from lowbit.numerics.formats import IntFormat

Range = Literal["minmax", "mse"]

FACTORS = tuple(1.15 * 0.95**i for i in range(20))  # down to 0.43
TURNS = 3
PARTS, TURN, SPAN = 4, 16, 8192  # of a sum: see `ordered_sum`
_BLOCK = 1 << 15  # elements: a few float32 arrays of that many stay in the second cache

Floats = npt.NDArray[np.float32]
Zeros = npt.NDArray[np.int32]


def check_range(name: Any, argument: str = "range") -> None:
    """Raise TypeError or ValueError unless `name`, given for `argument`, is a `Range`."""
    known = " or ".join(map(repr, get_args(Range)))
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be {known}, got {name!r}")
    if name not in get_args(Range):
        raise ValueError(
            f"unknown {argument} {name!r}; pass {known}: the least and greatest value, or the "
            "range of least squared error"
        )


def least_squares(
    x: npt.NDArray[Any], scale: Floats, zero_point: Zeros, fmt: IntFormat, symmetric: bool
) -> tuple[Floats, Zeros]:
    """Scales and zero points of less squared error for groups x [groups, elements].

    `x` is finite, of any float dtype; `scale` and `zero_point` [groups] are those of the whole
    range, as `affine_parameters` gives them, and the results are of the same shape and dtype. No
    group's squared error, that of `dequantize_affine` in float64, is above what it is with these.
    With `symmetric` the zero points stay as they are.

    Memory: some copies of 2¹⁵ elements or of one group, whichever is more.
    """
    groups, size = x.shape
    scale, zero_point = scale.copy(), zero_point.copy()
    if x.size == 0:
        return scale, zero_point
    step = max(1, _BLOCK // size)
    for start in range(0, groups, step):
        block = slice(start, start + step)
        part = x[block].astype(np.float64, order="C")  # sums depend on the layout
        given = scale[block], zero_point[block]
        found = _search(part, *given, fmt, symmetric)
        better = _squared_error(part, *found, fmt) < _squared_error(part, *given, fmt)
        scale[block] = np.where(better, found[0], given[0])
        zero_point[block] = np.where(better, found[1], given[1])
    return scale, zero_point


def _squared_error(
    x: npt.NDArray[np.float64], scale: Floats, zero_point: Zeros, fmt: IntFormat
) -> npt.NDArray[np.float64]:
    """[groups] of the sums over x [groups, elements], as quantized tensors have them."""
    scale, zero_point = scale[:, None], zero_point[:, None]
    q = quantize_affine(x, scale, zero_point, fmt)
    return ordered_sum(np.square(dequantize_affine(q, scale, zero_point) - x))


def _search(
    x: npt.NDArray[np.float64], scale: Floats, zero_point: Zeros, fmt: IntFormat, symmetric: bool
) -> tuple[Floats, Zeros]:
    """The best of the grid and of the turns after it, found in float32 and in units of `scale`."""
    u = (x / scale[:, None]).astype(np.float32)
    zero = zero_point.astype(np.float32)
    work = np.empty_like(u)
    factor = best_factor = np.ones(len(u), np.float32)
    best_zero, best = zero, _round(u, factor, zero, fmt, work)

    def keep_better(factor: Floats, zero: Floats, error: Floats) -> None:
        nonlocal best_factor, best_zero, best
        better = error < best
        best_factor = np.where(better, factor, best_factor)
        best_zero = np.where(better, zero, best_zero)
        best = np.where(better, error, best)

    for one in FACTORS:
        factor = np.full(len(u), one, np.float32)
        keep_better(factor, zero, _round(u, factor, zero, fmt, work))
    factor = best_factor
    if not symmetric:
        for move in (-1, 1):
            moved = np.clip(zero + np.float32(move), fmt.qmin, fmt.qmax)
            keep_better(factor, moved, _round(u, factor, moved, fmt, work))
        zero = best_zero
    for _ in range(TURNS):
        factor, zero = _fit(u, factor, zero, fmt, symmetric, work)
        keep_better(factor, zero, _round(u, factor, zero, fmt, work))
    largest = np.finfo(np.float32).max
    found = np.clip(scale.astype(np.float64) * best_factor, SMALLEST_SCALE, largest)
    return found.astype(np.float32), best_zero.astype(np.int32)


def _integers(u: Floats, factor: Floats, zero: Floats, fmt: IntFormat, out: Floats) -> Floats:
    """The nearest integers less their zero points, q − Z, in `out`."""
    np.multiply(u, (1 / factor)[:, None], out=out)
    np.rint(out, out=out)
    # Where rows are short, these two take half the time of np.clip.
    np.maximum(out, (fmt.qmin - zero)[:, None], out=out)
    return np.minimum(out, (fmt.qmax - zero)[:, None], out=out)


def _round(u: Floats, factor: Floats, zero: Floats, fmt: IntFormat, work: Floats) -> Floats:
    """The squared error of each group."""
    _integers(u, factor, zero, fmt, work)
    work *= factor[:, None]
    work -= u
    return _dots(work, work)


def _fit(
    u: Floats, factor: Floats, zero: Floats, fmt: IntFormat, symmetric: bool, work: Floats
) -> tuple[Floats, Floats]:
    """Factor and zero point of least squared error for the integers that the given ones make.

    With c = q − Z, the line u ≈ factor·(c − d) moves the zero point by d. Where all integers of a
    group are equal there is no such line, and the group keeps what it has.
    """
    c = _integers(u, factor, zero, fmt, work)
    count = u.shape[1]
    sums = u.sum(axis=1), c.sum(axis=1), _dots(u, c), _dots(c, c)
    sum_u, sum_c, sum_uc, sum_cc = (part.astype(np.float64) for part in sums)
    moved = zero
    with np.errstate(divide="ignore", invalid="ignore"):
        if not symmetric:
            slope = (count * sum_uc - sum_u * sum_c) / (count * sum_cc - sum_c**2)
            moved = np.rint(zero + (sum_c - sum_u / slope) / count)
            moved = np.where(slope > 0, np.clip(moved, fmt.qmin, fmt.qmax), zero)
        d = moved - zero
        fitted = (sum_uc - d * sum_u) / (sum_cc - 2 * d * sum_c + count * d * d)
    good = np.isfinite(fitted) & (fitted > 0)
    return np.where(good, fitted, factor).astype(np.float32), np.where(good, moved, zero).astype(
        np.float32
    )


def _dots(a: Floats, b: Floats) -> Floats:
    """`ordered_sum(a * b)`, in a fourth of the time where np.einsum adds in the same order."""
    if len(a) > 1 and a.shape[1] <= SPAN and _einsum_is_ordered():
        return np.einsum("ij,ij->i", a, b)
    return ordered_sum(a * b)


@cache
def _einsum_is_ordered() -> bool:
    """That depends on the vectors that NumPy was built for."""
    a, b = np.random.default_rng(0).standard_normal((2, 7, 1003)).astype(np.float32)
    return np.array_equal(np.einsum("ij,ij->i", a, b), ordered_sum(a * b))


def ordered_sum(terms: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sums of `terms` [groups, elements] over the elements, [groups], in their own type.

    Of more than 16384 elements, spans of 8192 are summed, and their sums added one after another.
    In a span, or the one that there is, part i of four sums the elements whose number is i modulo
    4, starting from 0, in their order but for this: of each whole 16, the last comes first. The
    sum is (part 0 + part 1) + (part 2 + part 3).
    """
    groups = len(terms)
    total = np.zeros(groups, terms.dtype)
    length = SPAN if terms.shape[1] > 2 * SPAN else max(terms.shape[1], 1)
    for start in range(0, terms.shape[1], length):
        span = terms[:, start : start + length]
        count, whole = span.shape[1], span.shape[1] // TURN * TURN
        rows = np.zeros((groups, PARTS - -count // PARTS * PARTS), terms.dtype)
        turns = span[:, :whole].reshape(groups, -1, TURN // PARTS, PARTS)[:, :, ::-1]
        rows[:, PARTS : PARTS + whole] = turns.reshape(groups, whole)  # after a row of zeros
        rows[:, PARTS + whole : PARTS + count] = span[:, whole:]
        # A running sum: np.sum does not promise an order.
        running = np.add.accumulate(rows.reshape(groups, -1, PARTS), axis=1)
        a, b, c, d = running[:, -1].T
        total += (a + b) + (c + d)
    return total
