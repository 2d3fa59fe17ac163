"""What is timed: cases of operators, each with everything that can run it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Generator, Tensor

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """The sizes of one problem by name, its dtype ("bfloat16"), and what else tells it apart."""

    sizes: Mapping[str, int]
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in (*self.sizes.items(), *self.options.items())]
        return f"{self.dtype} " + " ".join(parts)


@dataclass(frozen=True)
class Work:
    """A case with its data. calls: by name, lowbit's own first; each returns what is compared
    with `reference()`, the result in float64 or float32. bytes: the least that must be moved;
    operations: additions and multiplications."""

    calls: Mapping[str, Call]
    reference: Call
    bytes: int
    operations: int


Maker = Callable[[Case, Generator], Work]


@dataclass(frozen=True)
class OperationBench:
    """An operator's cases. Where `copies`, memory is its limit, and a copy of as many bytes is
    timed beside it. quick: how many of the cases, evenly chosen, tell the most."""

    name: str
    cases: tuple[Case, ...]
    copies: bool
    make: Maker
    quick: int = 2

    def chosen(self, quick: bool) -> tuple[Case, ...]:
        """All cases, or the few of a quick run."""
        if not quick or len(self.cases) <= self.quick:
            return self.cases
        step = (len(self.cases) - 1) / max(self.quick - 1, 1)
        return tuple(self.cases[round(i * step)] for i in range(self.quick))


_benches: dict[str, OperationBench] = {}


def operation(
    name: str, cases: Sequence[Case], *, copies: bool, quick: int = 2
) -> Callable[[Maker], Maker]:
    """Register what makes the Work of a Case (whose tensors go to the generator's device)."""

    def register(make: Maker) -> Maker:
        if name in _benches:
            raise ValueError(f"two benchmarks are called {name!r}; rename one")
        _benches[name] = OperationBench(name, tuple(cases), copies, make, quick)
        return make

    return register


@cache
def _import_all() -> None:
    from lowbit.bench import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")


def benches(names: Sequence[str] = ()) -> tuple[OperationBench, ...]:
    """Those of these names, or all. ValueError, with the known names, for an unknown one."""
    _import_all()
    unknown = [name for name in names if name not in _benches]
    if unknown:
        raise ValueError(f"no operation {unknown[0]!r}; known are {', '.join(_benches)}")
    return tuple(_benches[name] for name in names or _benches)
