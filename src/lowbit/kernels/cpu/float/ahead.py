"""What is fetched while something else is multiplied, so that loads and arithmetic overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowbit.isa.generic import prefetch, prefetch_far
from lowbit.isa.value import Value
from lowbit.kernels.cpu.float.micro_kernel import PackedRight, PlainRight


class Ahead(Protocol):
    """Something that is fetched bit by bit."""

    def fetch(self, unit: Value) -> None:
        """The bit that belongs to this unit of the step."""
        ...


@dataclass(frozen=True)
class Beside:
    """Of a right operand that is read where it is, what follows along its rows; or what lies so
    many units on, which is read so late that it waits in the second-level cache."""

    right: PlainRight
    vectors: int
    units: int
    elements: int

    def fetch(self, unit: Value) -> None:
        right, bring = self.right, prefetch_far if self.units else prefetch
        at = right.base + ((unit + self.units) * right.reader.depth * right.stride + self.elements)
        for which in range(self.vectors):
            bring(at + which * right.lanes)


@dataclass(frozen=True)
class Along:
    """What follows in a packed panel, so many units on."""

    right: PackedRight
    vectors: int
    units: int

    def fetch(self, unit: Value) -> None:
        right = self.right
        at = right.base + (unit + self.units) * right.width
        for which in range(self.vectors):
            prefetch(at + which * right.lanes)
