"""The inner loops of float products, and what they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from lowbit.isa.generic import prefetch, prefetch_far
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.float.operand import Operand, Reader
from lowbit.registry import Registry

M = TypeVar("M", bound="FloatMicro")


class FloatShape(NamedTuple):
    """How the output is cut; it keys the code.

    A step is `rows` by `vectors`, the last one of a row of steps `rows` by `tail` (0: there is no
    such one). `ragged`: the last vector of the last step is not whole; without a tail there is
    then one step in a row.
    """

    rows: int
    vectors: int
    tail: int
    ragged: bool


class Left(Protocol):
    """Where the units of a block of rows come from."""

    def one(self, unit: Value, row: int) -> Value: ...


@dataclass(frozen=True)
class PackedLeft:
    """A packed block, from the first unit on; `rows` units lie together, or lines of units."""

    base: Value
    rows: int

    def one(self, unit: Value, row: int) -> Value:
        return (self.base + (unit * self.rows + row)).load()


@dataclass(frozen=True)
class PlainLeft:
    """Rows where they are: a pointer to each one's first element, or to that of the first, and
    how many elements `apart` they are."""

    reader: Reader
    rows: list[Value]
    stride: Value
    apart: Value | None = None

    def one(self, unit: Value, row: int) -> Value:
        at = self.rows[row] + unit * self.reader.depth * self.stride
        return self.reader.one(at, self.stride)


@dataclass(frozen=True)
class PackedRight:
    """A packed panel of `width` columns, from the first unit on. Units that lie so many `ahead` are
    fetched while others are multiplied."""

    base: Value
    width: int
    lanes: int
    ahead: int = 0

    def vector(self, unit: Value, which: int) -> Value:
        return (self.base + (unit * self.width + which * self.lanes)).load(self.lanes)

    def fetch(self, unit: Value, vectors: int) -> None:
        if self.ahead:
            at = self.base + (unit + self.ahead) * self.width
            for which in range(vectors):
                prefetch(at + which * self.lanes)


@dataclass(frozen=True)
class PlainRight:
    """Columns where they are, side by side; of vector number `masked`, if any, `left` exist.

    ahead: so many units on lies what is fetched meanwhile, which is read so late that it waits in
    the second-level cache; or so many elements, along rows.
    """

    reader: Reader
    base: Value
    stride: Value
    lanes: int
    masked: int | None
    left: Value
    ahead: tuple[int, int]

    def vector(self, unit: Value, which: int) -> Value:
        at = self.base + (unit * self.reader.depth * self.stride + which * self.lanes)
        left = self.left if which == self.masked else None
        return self.reader.across(at, self.stride, self.lanes, left)

    def fetch(self, unit: Value, vectors: int) -> None:
        if any(self.ahead):
            units, elements = self.ahead
            bring = prefetch_far if units else prefetch
            at = self.base + ((unit + units) * self.reader.depth * self.stride + elements)
            for which in range(vectors):
                bring(at + which * self.lanes)


Right = PackedRight | PlainRight


class Passing(NamedTuple):
    """Where a step leaves its sums, float32, row by row, and what it does meanwhile: `some`
    finishes a few rows of the step before, `rest` what is left of them. `stride`: how far apart
    rows are, if not one behind another."""

    scratch: Value
    some: Callable[[], None] = lambda: None
    rest: Callable[[], None] = lambda: None
    stride: Value | None = None


class FloatMicro(ABC):
    """The inner loop for one instruction set.

    `pair`: a unit of K is two bfloat16. `plain`: it can read operands where they are. `line`:
    units of one row of the packed left operand that lie together. `quantum`: K is padded to so
    many. `lanes`: float32 in a vector of accumulators. `in_registers`: whether a step's sums are
    there at its end.
    """

    name: str
    pair: bool = False
    plain: bool = True
    line: int = 1
    quantum: int = 1
    in_registers: bool = True

    def __init__(self, isa: InstructionSet) -> None:
        self.isa = isa
        self.lanes = isa.vector_bytes // f32.bytes

    def __repr__(self) -> str:
        return f"{self.name}/{self.isa.name}"

    def refuses(self, right: Operand) -> str:
        """ "" if it can serve products with this right operand, else why not."""
        if self.pair and right.kind != "bf16":
            return "it multiplies pairs of bfloat16"
        if not right.packed and (not self.plain or (self.pair and right.along != "k")):
            return "it reads packed operands only"
        return ""

    @abstractmethod
    def shapes(self, alone: bool = False) -> list[tuple[int, int]]:
        """(rows, vectors) that the registers can hold; `alone`: for an output of one row."""

    def begin(self, k: Builder) -> None:  # noqa: B027
        """Emit what each thread must do before its first step: as a rule, nothing."""

    def end(self, k: Builder) -> None:  # noqa: B027
        """Emit what each thread must do after its last step: as a rule, nothing."""

    @abstractmethod
    def step(
        self, k: Builder, sizes: tuple[int, int], left: Left, right: Right, units: Value,
        passing: Passing | None = None,
    ) -> list[list[Value]]:  # fmt: skip
        """Emit the product of (rows, vectors) `sizes` over `units`.

        Returns the sums [row][vector]; or nothing, if they go to scratch, of which `passing` tells.
        """


float_micro_kernels: Registry[FloatMicro] = Registry(
    "float micro-kernel", "lowbit.kernels.cpu.float"
)
"""All inner loops."""


def register(micro: M) -> M:
    """Make an inner loop known."""
    float_micro_kernels.add(repr(micro), micro)
    return micro
