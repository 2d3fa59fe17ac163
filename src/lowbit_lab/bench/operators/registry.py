"""What is timed on a GPU: cases of operators, each with everything that can run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator, Tensor

from lowbit.registry import Registry
from lowbit.registry.locks import cached_property
from lowbit.spec import Operation
from lowbit_lab.bench.core.case import Case, Implementation, Problem

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class OperatorCase(Case):
    """options: what tells the case apart besides its sizes."""

    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def dtype(self) -> str:
        """As PyTorch calls it."""
        return self.dtypes


def case(sizes: Mapping[str, int], dtype: str, **options: Any) -> OperatorCase:
    """The sizes of one problem by name, its dtype ("bfloat16"), and what else tells it apart."""
    parts = " ".join(f"{name}={value}" for name, value in (*sizes.items(), *options.items()))
    return OperatorCase("", parts, dtype, sizes=sizes, options=options)


@dataclass(frozen=True, eq=False)
class OperatorProblem(Problem):
    """A case with its data.

    calls: by name, lowbit's own first; each returns what is compared with `reference()`, the result
    in float64 or float32. specs: the operation, or all that it consists of, with their dtypes;
    sizes: those of the specification. moved: what is written and read, the result first, where the
    specification leaves less open (a stride, the number of heads); what it counts for each element
    of its result holds there too.
    """

    case: OperatorCase
    calls: Mapping[str, Call]
    reference: Call
    specs: tuple[Operation, ...]
    sizes: Mapping[str, int]
    moved: tuple[Tensor, ...] = ()

    @cached_property
    def operations(self) -> int:
        count = sum(spec.operation_count(self.sizes) for spec in self.specs)
        if not self.moved:
            return count
        return count * self.moved[0].numel() // math.prod(self.specs[0].result.shape(self.sizes))

    @cached_property
    def bytes(self) -> int:
        if self.moved:
            return sum(tensor.nbytes for tensor in self.moved)
        return self.specs[0].case(self.sizes).bytes_moved

    @cached_property
    def ideal(self) -> Tensor:
        """The reference, computed once."""
        return self.reference()

    def error(self, result: Tensor) -> float:
        """As of any problem, in the dtype of the reference; infinite for another shape."""
        if result.shape != self.ideal.shape:
            return math.inf
        largest = float(self.ideal.abs().max()) or 1.0
        return float((result.to(self.ideal.dtype) - self.ideal).abs().max()) / largest

    def wrong(self, implementation: Implementation, result: Tensor) -> str | None:
        """Whoever has another shape, infinities or NaN."""
        return None if math.isfinite(self.error(result)) else "the result is not finite"


def chosen(spec: Operation, case: OperatorCase) -> Operation:
    """An operation with the dtype of a case, and those of its options that are parameters of it."""
    found = next(each for each in spec.variants() if case.dtype in each.dtypes.values())
    return found.variant(static={n: v for n, v in case.options.items() if n in spec.static})


def drawn(case: OperatorCase, generator: Generator, *shape: int) -> Tensor:
    """Normal numbers in the dtype of a case, on the generator's device."""
    dtype = getattr(torch, case.dtype)
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


Maker = Callable[[OperatorCase, Generator], OperatorProblem]


@dataclass(frozen=True)
class Operator:
    """An operator's cases. Where `copies`, memory is its limit, and a copy of as many bytes is
    timed beside it. make: the data, on the generator's device. quick: how many of the cases, evenly
    chosen, tell the most."""

    cases: tuple[OperatorCase, ...]
    copies: bool
    make: Maker
    quick: int = 2

    def chosen(self, quick: bool) -> tuple[OperatorCase, ...]:
        """All cases, or the few of a quick run."""
        if not quick or len(self.cases) <= self.quick:
            return self.cases
        step = (len(self.cases) - 1) / max(self.quick - 1, 1)
        return tuple(self.cases[round(i * step)] for i in range(self.quick))


operators: Registry[Operator] = Registry("operation", "lowbit_lab.bench.operators")


def operation(
    name: str, cases: Sequence[OperatorCase], *, copies: bool, quick: int = 2
) -> Callable[[Maker], Maker]:
    """Register what makes the problem of a case."""

    def register(make: Maker) -> Maker:
        named = tuple(replace(one, operation=name) for one in cases)
        operators.add(name, Operator(named, copies, make, quick))
        return make

    return register
