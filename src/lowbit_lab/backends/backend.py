"""What is to be checked, as it is asked for and as it is run, whatever its language."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowbit.registry.locks import cached_property
from lowbit.spec import Case, Operation, Sizes, from_function
from lowbit_lab.run.findings import Finding, Severity
from lowbit_lab.run.outcome import Run, Trial
from lowbit_lab.run.tensor import CheckedTensor
from lowbit_lab.run.trace import Grid, Place, Recorder, grid_of

GridLike = int | Sequence[int] | Callable[[dict[str, Any]], int | Sequence[int]]


@dataclass(frozen=True)
class Variant:
    """A kernel with how it is launched. grid: programs or blocks, or a function of sizes and
    constants, None where nobody has said it; block: threads of a block; constants: by parameter;
    shared: bytes of dynamic shared memory; flat: whether arrays are passed with one dimension (of
    Numba, which passes shapes)."""

    kernel: Any
    name: str = ""
    grid: GridLike | None = None
    block: tuple[int, ...] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shared: int = 0
    flat: bool = False

    def grid_at(self, numbers: Mapping[str, Any]) -> Grid:
        """The programs, or blocks, with these sizes and constants. ValueError if the grid is
        none."""
        wanted = self.grid(dict(numbers)) if callable(self.grid) else self.grid
        several = isinstance(wanted, (tuple, list, np.ndarray))
        dims: list[Any] = list(wanted) if several else [wanted]
        if not 1 <= len(dims) <= 3 or any(
            not isinstance(n, (int, np.integer)) or n < 0 for n in dims
        ):
            raise ValueError(
                f"the grid of {self.name} is {wanted!r}; it must be one to three numbers, 0 or "
                "more, or a function of the sizes that returns them"
            )
        return grid_of(dims)


@dataclass(frozen=True)
class Request:
    """A variant, and what it is to be held against, as `lowbit_lab.check` is asked. untried: kinds
    of data of which the specification says nothing."""

    variant: Variant
    spec: Operation | Callable[..., Any]
    output: str | None = None
    initial: float | None = None
    seed: int = 0
    untried: tuple[str, ...] = ()

    def launched(self, **changes: Any) -> Request:
        """The same with another grid, or other constants."""
        return replace(self, variant=replace(self.variant, **changes))

    @cached_property
    def operation(self) -> Operation:
        """The operation that the specification states. TypeError if it is none."""
        if not callable(self.spec):
            raise TypeError(f"spec is {self.spec!r}; give an annotated function, or an Operation")
        return self.spec if isinstance(self.spec, Operation) else from_function(self.spec)

    def each_result(self) -> list[Request]:
        """One for each result that the specification returns."""
        one = self.operation
        return [replace(self, spec=spec) for spec in (one, *one.others)]


@dataclass(frozen=True)
class Way:
    """How a run is made: programs in another order, poison in lanes that a mask leaves undefined,
    of all loads or those of one line, and what takes down all that happens. corners: only the
    programs at the ends of the grid's axes, each of them even where another has crashed."""

    seed: int | None = None
    poisoned: bool | Place = False
    recorder: Recorder | None = None
    corners: bool = False


PLAIN = Way()


@dataclass(frozen=True, kw_only=True)
class Subject(ABC):
    """A kernel bound to an operation: everything that a run needs besides a case.

    name: what reports call it. description: what runs it, with its version. text: the function as
    it was written; None if this launches kernels, and is none whose steps can be shown. on_gpu:
    whether `start` can run it. slow: whether the exercise is tried with one kind of data only.
    any_sizes: whether it is known how many programs there are at all sizes.
    """

    request: Request
    name: str
    description: str
    text: Callable[..., None] | None = None
    on_gpu: bool = False
    slow: bool = False
    any_sizes: bool = True

    @property
    def operation(self) -> Operation:
        return self.request.operation

    @abstractmethod
    def cases(self) -> tuple[list[Case], list[str]]:
        """What to try it on, and what to tell about the choice."""

    @abstractmethod
    def tensors(self, trial: Trial) -> list[CheckedTensor]:
        """Fresh tensors, those that are passed to it."""

    @abstractmethod
    def run(self, trial: Trial, way: Way = PLAIN) -> Run:
        """Run it once."""

    @abstractmethod
    def start(self, sizes: Sizes, tensors: Mapping[str, Any]) -> Any:
        """Run it on a GPU on these torch tensors, by their names; returns the result's."""

    def wide(self) -> list[Case]:
        """Cases with several blocks along all dimensions, if its blocks are known."""
        return []

    def variants(self) -> list[tuple[str, Subject, Severity]]:
        """The same with other block sizes, in words; and how bad it is if that goes wrong."""
        return []

    def grid_at(self, sizes: Sizes) -> Grid:
        """The programs that there are at these sizes."""
        return (1, 1, 1)

    def refusals(self, case: Case) -> list[Finding]:
        """What speaks against it besides a run of this case: that it does not compile, or that
        autotuning spoils its tensors."""
        return []
