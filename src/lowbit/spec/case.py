"""An operation at one set of sizes, with one kind of data: inputs, and what must come out."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.registry.locks import cached_property
from lowbit.spec.data import CORNERS, FILLS, FURTHER, SPECIAL, Draw, draw_values
from lowbit.spec.dtypes import FLOAT32_UNIT, Array, DType
from lowbit.spec.operation import Operation, Sizes, TensorType
from lowbit.spec.post_ops import applied
from lowbit.spec.rounding import TF32_UNIT, rounded

# Comparing a result with its reference.


@dataclass(frozen=True)
class Verdict:
    """Whether a result is within its budget; if not, `message` says where it is furthest off."""

    ok: bool
    max_error: float
    message: str


@dataclass(frozen=True, eq=False)
class Expected:
    """The reference result of one input and the error allowed to each of its elements.

    reference: int64, float64 or bool, of the output's shape; budget: broadcasts to it; dtype: of
    the output.
    """

    reference: Array
    budget: Array
    dtype: DType

    @cached_property
    def _allowed(self) -> Array:
        # Only the same infinity is right where the reference has one.
        return np.where(np.isfinite(self.reference), self.budget, 0)

    def _error(self, got: Array) -> Array:
        """|got - reference|; 0 where both are NaN or the same infinity, infinite where one is."""
        expected = self.reference
        if not self.dtype.is_float:
            return np.abs(got.astype(np.int64) - expected.astype(np.int64))
        got = got.astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(got - expected)
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            # So is an infinity where the reference, within its budget, is too large for the dtype.
            overflow = np.abs(expected) + self._allowed >= self.dtype.largest
            same |= overflow & (got == np.copysign(np.inf, expected))
        finite = np.isfinite(got) & np.isfinite(expected)
        return np.where(same, 0, np.where(finite, error, math.inf))

    def wrong(self, got: Array) -> NDArray[np.bool_]:
        """Which elements of a result are outside of the budget."""
        return self._error(np.asarray(got)) > self._allowed

    def check(self, result: Array) -> Verdict:
        """Compare a result with the reference, element by element.

        An element passes when |result - reference| <= budget. Where the reference is NaN the
        result must be, and nowhere else. Shape and dtype must be those of the specification.
        """
        shape, storage = self.reference.shape, self.dtype.storage
        if result.shape != shape or result.dtype != storage:
            found = f"{result.dtype}{list(result.shape)}"
            return Verdict(False, math.inf, f"got {found}, expected {storage}{list(shape)}")
        if result.size == 0:
            return Verdict(True, 0.0, "empty")
        error, wrong = self._error(result), self.wrong(result)
        excess = np.where(wrong, error, 0) - np.where(wrong, self._allowed, 0)
        worst = np.unravel_index(int(np.argmax(excess)), shape)
        max_error = float(error.max())
        if not wrong.any():
            return Verdict(True, max_error, f"within budget, largest error {max_error:g}")
        return Verdict(
            False,
            max_error,
            f"{np.count_nonzero(wrong)} of {result.size} elements are wrong; furthest off is "
            f"{[int(i) for i in worst]}: got {result[worst]}, expected {self.reference[worst]} "
            f"within {self._allowed[worst]:g}",
        )


Layout = Literal["contiguous", "padded", "transposed", "rows", "expanded"]
Inputs = Mapping[str, Array]

# How many random perturbations the sensitivity of a reference is estimated from, and how many more
# in which neighbours up to 2^4 - 1 places apart move against each other at least once.
_PERTURBATIONS, _OPPOSED = 12, 4
# A part of a number so small that only what jumps moves by more than a rounding.
_NEXT_TO_NOTHING = 2.0**-45
# Roundings of an element besides those of its sum: a product, exp2 with its argument, a division.
_OWN_ROUNDINGS = 8
# Roundings to TF32, of both factors, in the largest of a few random moves.
_ROUNDINGS_TO_TF32 = 4


def fills_of(operation: Operation) -> tuple[str, ...]:
    """The fills that an operation is tried with."""
    # What an infinity is as an integer, no specification says.
    kept = operation.result.is_float or operation.result.dtype == "bool"
    floats = kept and any(tensor.is_float for tensor in operation.inputs)
    fills = tuple(fill for fill in FILLS if floats or fill not in SPECIAL)
    factors = operation.factors
    whole = bool(factors) and not any(operation.factor_format(f).is_float for f in factors)
    fills = (*fills, *CORNERS) if whole else fills
    return tuple(fill for fill in fills if fill not in operation.excludes)


def _signs(
    rng: np.random.Generator, shape: tuple[int, ...], place: int, bit: int
) -> NDArray[np.int64]:
    """1 or -1 for each element: at random if there is no such bit, else by this bit of the sum of
    its index and of its tensor's place among the inputs."""
    if bit < 0:
        return rng.choice((-1, 1), shape)
    total = np.full(shape, place)
    for axis, size in enumerate(shape):
        total += np.arange(size).reshape(-1, *[1] * (len(shape) - axis - 1))
    return 1 - 2 * (total >> bit & 1)


@lru_cache(256)
def _mixed(operation: Operation) -> tuple[str, ...]:
    """The dimensions of the result along which one element of a float input moves several of its,
    unless the operation says that they are summed."""
    sizes = operation.fitted(dict.fromkeys(operation.names, 5))
    case, found = Case(operation, sizes), dict[str, None]()
    exact = case.exact(case.inputs())
    before = np.asarray(operation(**exact))
    for tensor in (t for t in operation.inputs if t.is_float and t.dims and exact[t.name].size):
        place = tuple(length // 2 for length in exact[tensor.name].shape)
        moved = exact[tensor.name].copy()
        moved[place] += 1
        moves = np.asarray(operation(**{**exact, tensor.name: moved})) != before
        for axis, dim in enumerate(operation.result.dims):
            if dim in tensor.dims and dim.isidentifier():
                others = tuple(one for one in range(moves.ndim) if one != axis)
                along = moves.any(axis=others)
                along[place[tensor.dims.index(dim)]] = False
                found |= {dim: None} if along.any() else {}
    return tuple(name for name in found if name not in operation.summed)


@dataclass(frozen=True)
class Case:
    """An operation, sizes, kind of data, and how tensors lie where a kernel takes their strides.

    ValueError if a size is missing, unknown, below 1 or no multiple, if the sums are so long that
    they can overflow, or if there is no such fill.
    """

    operation: Operation
    sizes: Sizes = field(hash=False)
    fill: str = "normal"
    layout: Layout = "contiguous"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", self.operation.complete(self.sizes))
        known = (*FILLS, *FURTHER, *CORNERS)
        if self.fill not in known:
            raise ValueError(f"no fill {self.fill!r}; known are {', '.join(known)}")

    def __str__(self) -> str:
        one = self.operation
        sizes = " ".join(f"{dim}={size}" for dim, size in self.sizes.items())
        named = [f"no {name}" for name in sorted(one.without)]
        named += [f"{name}={value}" for name, value in one.static.items()]
        return ", ".join([f"{one.name} {one.signature} {sizes}", *named])

    @property
    def spec(self) -> Operation:
        """The operation as it is stated, before any choice."""
        return self.operation.origin or self.operation

    @property
    def dtypes(self) -> str:
        """The signature, for example `u8:s8:s32`."""
        return self.operation.signature

    @property
    def static(self) -> Mapping[str, Any]:
        """The values of the static parameters."""
        return self.operation.static

    def dtype(self, name: str) -> DType:
        """The dtype of an input or the result."""
        return self.operation.tensor(name).format

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or the result."""
        return self.operation.tensor(name).shape(self.sizes)

    @property
    def reduction(self) -> int:
        """The number of products that are summed into one element of the output."""
        return self.operation.reduction(self.sizes)

    @property
    def operations(self) -> int:
        """Additions and multiplications."""
        return self.operation.operation_count(self.sizes)

    @property
    def bytes_moved(self) -> int:
        """The least bytes that must move: every input read once, the output written once."""
        tensors = (*self.operation.inputs, self.operation.result)
        return sum(-(-math.prod(t.shape(self.sizes)) * t.format.bits // 8) for t in tensors)

    def inputs(self, seed: int = 0) -> dict[str, Array]:
        """Input data in storage dtypes, the same for the same seed."""
        rng = self._random(seed)
        drawn = {tensor.name: self._drawn(tensor, rng) for tensor in self.operation.inputs}
        if self.layout != "expanded":
            return drawn
        # The first row for all, as they lie.
        return {
            name: np.broadcast_to(a[:1], a.shape).copy() if a.ndim > 1 else a
            for name, a in drawn.items()
        }

    def input(self, name: str, seed: int = 0) -> Array:
        """Data of one input alone, in its storage dtype: others than `inputs` has for it. KeyError
        if there is no such input."""
        return self._drawn(self.operation.tensor(name), self._random(seed))

    def _random(self, seed: int) -> np.random.Generator:
        key = repr((self.operation.name, sorted(self.sizes.items()), self.fill, seed))
        return np.random.default_rng(zlib.crc32(key.encode()))

    def _drawn(self, tensor: TensorType, rng: np.random.Generator) -> Array:
        """Data of one input, from this random source."""
        operation = self.operation
        ranges = {name: operation.factor_format(name) for name in operation.factors}
        ranges[operation.result.name] = operation.result.format
        sides = self.fill.split("*")
        fills = dict(zip(operation.factors, sides, strict=False)) if self.fill in CORNERS else {}
        kept = operation.range_of(tensor.name, self.sizes)
        dtype = tensor.format
        if kept is not None:
            dtype = replace(dtype, low=kept[0], high=kept[1])
        fill = fills.get(tensor.name, sides[0])
        if fill == "halves" and len(tensor.dims) < self._most_dims:
            fill = "powers"
        draw = Draw(rng, tensor.shape(self.sizes), dtype, fill, ranges, self.sizes)
        return operation.draws.get(tensor.name, draw_values)(draw)

    @property
    def _most_dims(self) -> int:
        """Of the inputs that are floats."""
        return max((len(t.dims) for t in self.operation.inputs if t.is_float), default=0)

    def exact(self, inputs: Inputs) -> dict[str, Any]:
        """What the reference is given: the inputs as float64, int64 and bool, and sizes."""
        one = self.operation
        widened = {t.name: t.format.widened(inputs[t.name]) for t in one.inputs}
        return {**widened, **{name: self.sizes[name] for name in one.sized}}

    def ideal(self, inputs: Inputs) -> Array:
        """The result, in int64 or float64, had nothing been quantized inside the operation."""
        one = self.operation
        with np.errstate(all="ignore"):
            return replace(one, reference=one.ideal or one.reference)(**self.exact(inputs))

    def expect(self, inputs: Inputs, seed: int = 0) -> Expected:
        """The reference of these inputs, and the error allowed to each element.

        A result of integers or bools must be exact, unless the operation states another budget.
        That of floats is the stated one or, where there is none, `_perturbed`; with one rounding
        of the result's own dtype if that is shorter than float32.
        """
        one, exact = self.operation, self.exact(inputs)
        own, operands, post_ops = one.split(exact)
        shape = self.shape(one.result.name)
        with np.errstate(all="ignore"):
            try:
                value, budget = np.asarray(one.reference(**own)), np.zeros(shape)
            except Exception as error:  # it is anybody's text
                if said := self._without_range(error):
                    raise ValueError(said).with_traceback(error.__traceback__) from error
                raise
            if value.shape != shape:
                raise ValueError(
                    f"the reference of {one.name} returned the shape {value.shape}; its "
                    f"annotation says {shape}"
                )
            if one.budget is not None:
                budget = one.budget(self, **own)
                if one.post_ops:
                    value, budget = applied(value, budget, post_ops, operands)
                value, budget = self._stored(value, budget)
            elif one.result.is_float:
                value = value.astype(np.float64)
                budget = self._perturbed(exact, value, np.random.default_rng(seed))
        return Expected(value, np.broadcast_to(budget, shape), one.result.format)

    def expect_in_tf32(self, inputs: Inputs, expected: Expected, seed: int = 0) -> Expected:
        """The same where products of float32 are rounded to TF32: the error may be four times what
        such roundings of the inputs make besides. As it was if the operation does not allow it."""
        one = self.operation
        if not (one.tf32 and one.result.is_float):
            return expected
        value, rng = expected.reference.astype(np.float64), np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            move = self._moved(self.exact(inputs), value, TF32_UNIT, rng)
        return replace(expected, budget=expected.budget + _ROUNDINGS_TO_TF32 * move)

    def _without_range(self, error: Exception) -> str:
        """What to do against an error of the reference, if an input that nobody gave a range may
        have led to it."""
        one = self.operation
        known = (*one.ranges, *one.draws, *one.factors)
        free = [t for t in one.inputs if not t.is_float and t.name not in known]
        wide = [t for t in free if t.dtype != "bool" and "8" not in t.dtype and t.dims]
        if not wide:
            return ""
        drawn = " and ".join(f"{t.name} any {t.dtype}" for t in wide)
        size = one.names[-1] if one.names else 10
        return (
            f"the reference of {one.name} stops with {type(error).__name__}: {error}. It was given "
            f"for {drawn}; if these are indices, say from where to where: "
            f"@operation(ranges={{{wide[0].name!r}: (0, {size!r})}})"
        )

    def _stored(self, value: Array, budget: Array) -> tuple[Array, Array]:
        """A value with its error, once it is stored in the result's dtype."""
        dtype = self.operation.result.format
        if dtype.is_float:
            rounding = dtype.unit * (np.abs(value) + budget) + dtype.least
            return value, budget + rounding if dtype.unit > FLOAT32_UNIT else budget
        if not self.operation.post_ops:
            return value, budget
        above, middle, below = (
            np.clip(value + sign * budget, dtype.low, dtype.high).astype(np.int64)
            for sign in (1, 0, -1)
        )
        return middle, np.maximum(above - middle, middle - below)

    def _perturbed(self, exact: Inputs, value: Array, rng: np.random.Generator) -> Array:
        """The error of a float result, found by moving the inputs and rounding on the way.

        The error of a sum of L rounded terms grows with L·u·Σ|term| (Higham, section 4.2). What
        Σ|term| is for any reference: how far its result moves when every float input moves by one
        rounding of its own, and every intermediate result is rounded to float32's bits, the largest
        move of twelve random choices of signs, and of four in which any two elements that are up to
        15 places apart have opposite ones in turn (of two large numbers that all but cancel). So
        the budget of an element z is (L + 8)·(move + u·|z|), with u the unit roundoff of float32
        (or of the result, if that is float64, and nothing is rounded on the way); one rounding of
        the result's own dtype; and for underflow, which a GPU may flush to zero, (L + 8) smallest
        normal numbers. Where nobody has said that S elements which the result keeps are summed too,
        as for a cumulative sum, √S is in L (Higham and Mary, "A new approach to probabilistic
        rounding error analysis"). No move shows what cancels in a kernel and not in the reference,
        nor what is rounded to fewer bits on the way: operations that have such state it as their
        `slack`.
        """
        one, dtype = self.operation, self.operation.result.format
        unit = min(dtype.unit, FLOAT32_UNIT)
        move = self._without_jumps(exact, value, self._moved(exact, value, unit, rng), rng)
        unsaid = math.prod(self.sizes[name] for name in _mixed(one.origin or one))
        terms = one.sum_length(self.sizes) + _OWN_ROUNDINGS + math.isqrt(unsaid - 1)
        own = dtype.unit * np.abs(value)
        if one.slack is not None:
            own = own + one.slack(self, **exact, **one.static)
        return terms * (move + unit * np.abs(value)) + own + terms * dtype.least_normal

    def _moved(self, exact: Inputs, value: Array, unit: float, rng: np.random.Generator) -> Array:
        """How far the reference moves, from its `value`, when each float of its inputs moves by so
        many parts of itself, and is computed in float32 unless the unit is finer."""
        one = self.operation
        floats = [t.name for t in one.inputs if t.is_float]
        narrow = unit >= FLOAT32_UNIT
        move = np.zeros(value.shape)
        for number in range(_PERTURBATIONS + _OPPOSED):
            bit = number - _PERTURBATIONS
            moved = {
                name: exact[name] * (1 + unit * _signs(rng, exact[name].shape, place, bit))
                for place, name in enumerate(floats)
            }
            near = self._near({**exact, **moved}, floats if narrow else ())
            difference = np.abs(near - value)
            move = np.maximum(move, np.where(np.isfinite(difference), difference, 0))
        return move

    def _near(self, exact: Inputs, narrow: Sequence[str]) -> Array:
        """The reference in float64, of inputs of which some are rounded to float32's bits, as is
        what is made of them on the way."""
        narrowed = {name: rounded(exact[name]) for name in narrow}
        try:
            return np.asarray(self.operation(**{**exact, **narrowed}), np.float64)
        except TypeError:  # what takes NumPy's own arrays only, as a function of Numba's
            return np.asarray(self.operation(**exact), np.float64)

    def _without_jumps(
        self, exact: Inputs, value: Array, move: Array, rng: np.random.Generator
    ) -> Array:
        """How far the reference moves, where its data are exact halves and float32 computes it
        without rounding: not where it jumps, as a rounding function does between two integers,
        since no kernel has a rounding there that leads to the other side."""
        floats = [t.name for t in self.operation.inputs if t.is_float]
        if self.fill != "halves" or not np.array_equal(self._near(exact, floats), value, True):
            return move
        jumps = self._moved(exact, value, _NEXT_TO_NOTHING, rng) > move / 2
        return np.where(jumps, 0, move)
