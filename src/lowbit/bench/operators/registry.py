"""What is timed on a GPU: cases of operators, each with everything that can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Generator, Tensor

from lowbit.bench.core.case import Case
from lowbit.registry import Registry
from lowbit.spec import Operation

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


@dataclass(frozen=True)
class Work:
    """A case with its data. calls: by name, lowbit's own first; each returns what is compared
    with `reference()`, the result in float64 or float32. bytes: the least that must be moved;
    operations: additions and multiplications."""

    calls: Mapping[str, Call]
    reference: Call
    bytes: int
    operations: int

    @cached_property
    def expected(self) -> Tensor:
        """The reference, computed once."""
        return self.reference()


def work(
    calls: Mapping[str, Call], reference: Call, spec: Operation, one: OperatorCase, **sizes: int
) -> Work:
    """That of a case which the specification can state, at these sizes."""
    dtypes = next(each for each in spec.variants() if one.dtype in each.dtypes.values())
    stated = dtypes.variant(static=_static(spec, one)).case(sizes)
    return Work(calls, reference, stated.bytes_moved, stated.operations)


def _static(spec: Operation, one: OperatorCase) -> dict[str, Any]:
    return {name: value for name, value in one.options.items() if name in spec.static}


Maker = Callable[[OperatorCase, Generator], Work]


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


operators: Registry[Operator] = Registry("operation", "lowbit.bench.operators")


def operation(
    name: str, cases: Sequence[OperatorCase], *, copies: bool, quick: int = 2
) -> Callable[[Maker], Maker]:
    """Register what makes the Work of a case."""

    def register(make: Maker) -> Maker:
        named = tuple(replace(one, operation=name) for one in cases)
        operators.add(name, Operator(named, copies, make, quick))
        return make

    return register
