"""The inner loops of float products: R rows by V vectors of accumulators.

    8 x 3 of 16 lanes:  b  | zmm24   zmm25   zmm26         24 accumulators, 3 vectors of b and one
                  a0       | zmm0    zmm1    zmm2          number of a, broadcast, leave 4 of the
                  a1       | zmm3    zmm4    zmm5          32 registers free.
                  ..
                  a7       | zmm21   zmm22   zmm23

For each unit of K: V loads of b and R broadcasts of a feed R·V fused multiply-adds. R and V are
chosen for the shape (see plan.py): one row meets up to 16 vectors, wide outputs 8 by 3 or
6 by 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lowbit.isa import named
from lowbit.isa.avx2 import AVX2
from lowbit.isa.avx512 import AVX512
from lowbit.isa.avx512_bf16 import AVX512_BF16, vdpbf16ps
from lowbit.isa.generic import fma
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Vector, bf16, f32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.float.operand import Reader

_LATENCY = 5  # cycles until an accumulator can be used again, with two products a cycle at best
_UNROLLED = 32  # products that a turn of the loop should hold, so that its control costs little


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


class Right(Protocol):
    """Where the units of a few vectors of columns come from."""

    def vector(self, unit: Value, which: int) -> Value: ...


@dataclass(frozen=True)
class PackedLeft:
    """A packed block, from the first unit on; `rows` units lie together, or lines of units."""

    base: Value
    rows: int

    def one(self, unit: Value, row: int) -> Value:
        return (self.base + (unit * self.rows + row)).load()


@dataclass(frozen=True)
class PlainLeft:
    """Rows where they are: a pointer to each one's first element."""

    reader: Reader
    rows: list[Value]
    stride: Value

    def one(self, unit: Value, row: int) -> Value:
        at = self.rows[row] + unit * self.reader.depth * self.stride
        return self.reader.one(at, self.stride)


@dataclass(frozen=True)
class PackedRight:
    """A packed panel of `width` columns, from the first unit on."""

    base: Value
    width: int
    lanes: int

    def vector(self, unit: Value, which: int) -> Value:
        return (self.base + (unit * self.width + which * self.lanes)).load(self.lanes)


@dataclass(frozen=True)
class PlainRight:
    """Columns where they are, side by side; of vector number `masked`, if any, `left` exist."""

    reader: Reader
    base: Value
    stride: Value
    lanes: int
    masked: int | None
    left: Value

    def vector(self, unit: Value, which: int) -> Value:
        at = self.base + (unit * self.reader.depth * self.stride + which * self.lanes)
        left = self.left if which == self.masked else None
        return self.reader.across(at, self.stride, self.lanes, left)


class FloatMicro(ABC):
    """The inner loop for one instruction set.

    `pair`: a unit of K is two bfloat16. `plain`: it can read operands where they are. `line`:
    units of one row of the packed left operand that lie together. `quantum`: K is padded to so
    many. `lanes`: float32 in a vector of accumulators.
    """

    name: str
    pair: bool = False
    plain: bool = True
    line: int = 1
    quantum: int = 1

    def __init__(self, isa: InstructionSet) -> None:
        self.isa = isa
        self.lanes = isa.vector_bytes // f32.bytes

    def __repr__(self) -> str:
        return f"{self.name}/{self.isa.name}"

    @abstractmethod
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, vectors) that the registers can hold."""

    def begin(self, k: Builder) -> None:  # noqa: B027
        """Emit what each thread must do before its first step: as a rule, nothing."""

    def end(self, k: Builder) -> None:  # noqa: B027
        """Emit what each thread must do after its last step: as a rule, nothing."""

    @abstractmethod
    def step(
        self,
        k: Builder,
        sizes: tuple[int, int],
        left: Left,
        right: Right,
        units: Value,
        scratch: Value,
    ) -> list[list[Value]] | None:
        """Emit the product of (rows, vectors) `sizes` over `units`.

        Returns the sums [row][vector], or None if they are in `scratch`: float32, row by row.
        """


Combine = Callable[[Value, Value, Value], Value]


def _fused(acc: Value, a: Value, b: Value) -> Value:
    return fma(a.bits(acc.type), b.bits(acc.type), acc)  # type: ignore[arg-type]


def _twice_rounded(acc: Value, a: Value, b: Value) -> Value:
    return acc + a.bits(acc.type) * b.bits(acc.type)  # type: ignore[arg-type]


def _dot_of_pairs(acc: Value, a: Value, b: Value) -> Value:
    halves = Vector(bf16, 32)
    return vdpbf16ps(acc, a.bits(halves), b.bits(halves))


class VectorMicro(FloatMicro):
    """Accumulators in vector registers; one instruction (or two) for each vector product."""

    def __init__(
        self, name: str, isa: InstructionSet, combine: Combine, *, pair: bool = False
    ) -> None:
        super().__init__(isa)
        self.name, self.combine, self.pair = name, combine, pair
        self.quantum = 2 if pair else 1

    def shapes(self) -> list[tuple[int, int]]:
        free = self.isa.vector_registers - 1  # for the broadcast number
        most = self.isa.vector_registers // 2
        return [
            (rows, vectors)
            for vectors in range(1, most + 1)
            for rows in range(1, (free - vectors) // vectors + 1)
        ]

    def step(
        self,
        k: Builder,
        sizes: tuple[int, int],
        left: Left,
        right: Right,
        units: Value,
        scratch: Value,
    ) -> list[list[Value]] | None:
        rows, vectors = sizes
        products = rows * vectors
        # Few accumulators would wait for each other: give each several partial sums.
        parts = max(p for p in (1, 2, 4) if p == 1 or p * products <= 2 * _LATENCY)
        unroll = max(u for u in (parts, 4, 2, 1) if u == parts or u * products <= _UNROLLED)
        zero = k.zeros(f32, self.lanes)
        sums = [
            [[k.register(zero) for _ in range(vectors)] for _ in range(rows)] for _ in range(parts)
        ]
        whole = units // unroll * unroll
        for unit in k.range(0, whole, unroll):
            for u in range(unroll):
                self._multiply(left, right, unit + u, sums[u % parts])
        if unroll > 1:
            for unit in k.range(whole, units):
                self._multiply(left, right, unit, sums[0])
        totals = [[register.value for register in row] for row in sums[0]]
        for part in sums[1:]:
            for row, more in zip(totals, part, strict=True):
                row[:] = [a + b.value for a, b in zip(row, more, strict=True)]
        return totals

    def _multiply(self, left: Left, right: Right, unit: Value, sums: list[list[Register]]) -> None:
        """Add the products at one unit of K to every accumulator."""
        columns = [right.vector(unit, which) for which in range(len(sums[0]))]
        for row, accumulators in enumerate(sums):
            a = left.one(unit, row).splat(self.lanes)
            for accumulator, column in zip(accumulators, columns, strict=True):
                accumulator.value = self.combine(accumulator.value, a, column)


FMA_512 = VectorMicro("fma", AVX512, _fused)
FMA_256 = VectorMicro("fma", AVX2, _fused)
# What any machine runs: a product and a sum, each rounded.
MULTIPLY_ADD = VectorMicro("multiply-add", named("generic"), _twice_rounded)
PAIRS_512 = VectorMicro("pairs", AVX512_BF16, _dot_of_pairs, pair=True)
