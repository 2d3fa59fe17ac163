"""An operation, stated once, and that operation at given sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.spec.check import Expected
from lowbit.spec.dtypes import DTYPES, DType, longest_sum
from lowbit.spec.tensors import FILLS, Draw, Tensor

Array = NDArray[Any]
Inputs = Mapping[str, Array]

EDGE_SIZES = (1, 2, 3, 15, 17, 63, 65, 127, 129, 1000)
"""Sizes one off the widths that kernels like, and one that is large but not a power of two."""


@dataclass(frozen=True)
class Specification:
    """An operation: tensors, reference and error budget.

    factors: names of the inputs that are multiplied and summed; the operation count and the
        reduction follow from their dimensions.
    reference: exact (int64) or float64 result of a kernel's inputs.
    budget: the largest |kernel - reference| that correct rounding can cause, per element.
    ideal: the result in float64 if nothing were quantized inside the operation, to measure
        quality by; None when that is the reference itself.
    accumulator: dtype of the sums; an integer one bounds the length of the reduction.
    options: names of the switches of the operation, off unless a case turns them on.
    """

    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    factors: tuple[str, str]
    reference: Callable[[Inputs, Case], Array]
    budget: Callable[[Inputs, Case], Array]
    ideal: Callable[[Inputs, Case], Array] | None = None
    accumulator: str = "s32"
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def tensor(self, name: str) -> Tensor:
        """The input called `name`; KeyError lists the known names."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        known = ", ".join(tensor.name for tensor in self.inputs)
        raise KeyError(f"{self.name} has no input {name!r}; it has {known}")

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dimension, in order of first appearance: output first, then inputs."""
        tensors = (self.output, *self.inputs)
        return tuple(dict.fromkeys(dim for tensor in tensors for dim in tensor.dims))

    @property
    def iterated(self) -> tuple[str, ...]:
        """The dimensions of the loop nest around one multiplication: those of the factors."""
        return tuple(dict.fromkeys(d for name in self.factors for d in self.tensor(name).dims))

    @property
    def reduced(self) -> tuple[str, ...]:
        """The dimensions that are summed over: in a factor but not in the output."""
        return tuple(dim for dim in self.iterated if dim not in self.output.dims)

    @property
    def signatures(self) -> tuple[str, ...]:
        """Every `left:right:output` dtype combination, for example `u8:s8:s32`."""
        sides = (*(self.tensor(name).dtypes for name in self.factors), self.output.dtypes)
        return tuple(":".join(codes) for codes in itertools.product(*sides))

    def dtype(self, tensor: Tensor, dtypes: str) -> DType:
        """The dtype of an input or the output under `dtypes`, one of `signatures`."""
        if dtypes not in self.signatures:
            raise ValueError(
                f"{self.name}: no dtypes {dtypes!r}; known are {', '.join(self.signatures)}"
            )
        sides = (*self.factors, self.output.name)
        codes = dict(zip(sides, dtypes.split(":"), strict=True))
        return DTYPES[codes.get(tensor.name, tensor.dtypes[0])]

    def factor_dtypes(self, dtypes: str) -> dict[str, DType]:
        """The dtypes in which the operation multiplies, by factor."""
        factors = [self.tensor(name) for name in self.factors]
        return {
            t.name: DTYPES[t.multiplied_as] if t.multiplied_as else self.dtype(t, dtypes)
            for t in factors
        }

    def longest_reduction(self, dtypes: str, without: Iterable[str] = ()) -> int | None:
        """The longest sum that cannot overflow the accumulator; None if that is a float.

        It follows from the ranges of the factors: 65793 for u8 * s8 in s32, 131071 for s8 * s8.
        A zero point widens a range, unless its input is among those left out, `without`.
        """
        if DTYPES[self.accumulator].low is None:
            return None
        left, right = self.factors
        codes = self.factor_dtypes(dtypes)
        absent = {None, *without}
        return longest_sum(
            codes[left].code,
            codes[right].code,
            self.accumulator,
            shifted=(
                self.tensor(left).shifted_by not in absent,
                self.tensor(right).shifted_by not in absent,
            ),
        )

    def case(
        self,
        sizes: Mapping[str, int],
        *,
        dtypes: str | None = None,
        without: Iterable[str] = (),
        options: Iterable[str] = (),
    ) -> Case:
        """This operation at given sizes; `dtypes` is one of `signatures` (the first if None)."""
        return Case(
            self, dict(sizes), dtypes or self.signatures[0], frozenset(without), frozenset(options)
        )


@dataclass(frozen=True)
class Case:
    """A specification at one set of sizes, dtypes, absent inputs (`without`) and options.

    ValueError if a size is missing, unknown or below 1, a name is unknown, a required input is
    left out, or the reduction is so long that the accumulator can overflow.
    """

    spec: Specification
    sizes: Mapping[str, int] = field(hash=False)
    dtypes: str
    without: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        spec = self.spec
        if set(self.sizes) != set(spec.dims):
            raise ValueError(
                f"{spec.name}: got sizes for {', '.join(self.sizes) or 'nothing'}, "
                f"expected {', '.join(spec.dims)}"
            )
        for dim, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"{spec.name}: {dim} is {size}; every size must be at least 1")
        _known(
            spec.name, "optional input", self.without, [t.name for t in spec.inputs if t.optional]
        )
        _known(spec.name, "option", self.options, spec.options)
        length, longest = self.reduction, spec.longest_reduction(self.dtypes, self.without)
        if longest is not None and length > longest:
            raise ValueError(
                f"{spec.name} {self.dtypes}: a sum over {'*'.join(spec.reduced)} = {length} can "
                f"overflow {spec.accumulator}; at most {longest} terms fit, so split it"
            )

    def __str__(self) -> str:
        sizes = " ".join(f"{dim}={size}" for dim, size in self.sizes.items())
        switches = [f"no {name}" for name in sorted(self.without)] + sorted(self.options)
        return ", ".join([f"{self.spec.name} {self.dtypes} {sizes}", *switches])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs that are present."""
        return tuple(t for t in self.spec.inputs if t.name not in self.without)

    def dtype(self, tensor: Tensor) -> DType:
        """The dtype of an input or the output in this case."""
        return self.spec.dtype(tensor, self.dtypes)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of an input or the output in this case."""
        return tuple(self.sizes[dim] for dim in tensor.dims)

    @property
    def reduction(self) -> int:
        """The number of products that are summed into one element of the output."""
        return math.prod(self.sizes[dim] for dim in self.spec.reduced)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product; scales and bias are not counted."""
        return 2 * math.prod(self.sizes[dim] for dim in self.spec.iterated)

    @property
    def bytes_moved(self) -> int:
        """The least bytes that must move: every input read once, the output written once."""
        tensors = (*self.tensors, self.spec.output)
        return sum(-(-math.prod(self.shape(t)) * self.dtype(t).bits // 8) for t in tensors)

    def inputs(self, seed: int = 0, fill: str = "full") -> dict[str, Array]:
        """Input data, the same for the same seed; `fill` is one of `FILLS`."""
        if fill not in FILLS:
            raise ValueError(f"no fill {fill!r}; known are {', '.join(FILLS)}")
        rng = np.random.default_rng(seed)
        left, right = fill.split("*") if "*" in fill else (fill, fill)
        fills = dict(zip(self.spec.factors, (left, right), strict=True))
        return {
            t.name: t.draw(
                Draw(
                    rng,
                    self.shape(t),
                    self.dtype(t),
                    fills.get(t.name, left),
                    self.spec.factor_dtypes(self.dtypes),
                )
            )
            for t in self.tensors
        }

    def expect(self, inputs: Inputs) -> Expected:
        """Reference and budget for these inputs, to check any number of kernels against."""
        return Expected(
            self.spec.reference(inputs, self),
            self.spec.budget(inputs, self),
            self.dtype(self.spec.output),
        )

    def ideal(self, inputs: Inputs) -> Array:
        """The result, in int64 or float64, had nothing been quantized inside the operation."""
        return (self.spec.ideal or self.spec.reference)(inputs, self)


def _known(operation: str, what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(f"{operation} has no {what} {name!r}; it has: {names}")


def edge_cases(spec: Specification, *, rounds: int = 1, seed: int = 0) -> list[Case]:
    """Cases in which every dimension takes every size of `EDGE_SIZES` once per round.

    The sizes are permuted for each dimension on its own; all combinations of dtypes, absent
    inputs and options take turns. 10 cases a round, always the same for the same seed.
    """
    rng = np.random.default_rng(seed)
    optional = [t.name for t in spec.inputs if t.optional]
    every = list(itertools.product(spec.signatures, _subsets(optional), _subsets(spec.options)))
    variants = itertools.cycle([every[i] for i in rng.permutation(len(every))])
    cases: list[Case] = []
    for _ in range(rounds):
        columns = [rng.permutation(EDGE_SIZES).tolist() for _ in spec.dims]
        for sizes, (dtypes, without, options) in zip(
            zip(*columns, strict=True), variants, strict=False
        ):
            named = dict(zip(spec.dims, sizes, strict=True))
            cases.append(spec.case(named, dtypes=dtypes, without=without, options=options))
    return cases


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    lengths = range(len(names) + 1)
    return [subset for n in lengths for subset in itertools.combinations(names, n)]
