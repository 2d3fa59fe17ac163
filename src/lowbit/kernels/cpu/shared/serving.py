"""Which kernel serves: one look-up, for products of integers and of floats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet


class Kernel(Protocol):
    """What is looked up: a kernel for one instruction set, which says what it does not serve."""

    @property
    def isa(self) -> InstructionSet: ...
    def refuses(self, query: Any, /) -> str:
        """ "" if it serves, else why not: the one place that says so."""
        ...


K = TypeVar("K", bound=Kernel)


class Candidate(NamedTuple, Generic[K]):
    """A kernel that was looked at, and why it does not serve ("" if it does)."""

    isa: InstructionSet
    micro: K | None
    why: str


def consider(kernels: Iterable[K], isa: InstructionSet, query: Any) -> tuple[Candidate[K], ...]:
    """Every kernel looked at, the preferred first, down the chain of sets; the last one serves.

    RuntimeError: none does.
    """
    seen: list[Candidate[K]] = []
    all_kernels = tuple(kernels)
    for one in instruction_sets.chain(isa, extensions=True):
        for_it = [kernel for kernel in all_kernels if kernel.isa is one]
        if not for_it and not one.extension:
            seen.append(Candidate(one, None, f"there is no kernel for {one.name}"))
        for kernel in for_it:
            why = kernel.refuses(query)
            seen.append(Candidate(one, kernel, why))
            if not why:
                return tuple(seen)
    raise RuntimeError(f"no kernel for {isa.name} or what it falls back to")
