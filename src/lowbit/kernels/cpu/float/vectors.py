"""The inner loops of float products: R rows by V vectors of accumulators.

    8 x 3 of 16 lanes:  b  | zmm24   zmm25   zmm26         24 accumulators, 3 vectors of b and one
                  a0       | zmm0    zmm1    zmm2          number of a, broadcast, leave 4 of the
                  a1       | zmm3    zmm4    zmm5          32 registers free.
                  ..
                  a7       | zmm21   zmm22   zmm23

For each unit of K: V loads of b and R broadcasts of a feed R·V fused multiply-adds. R and V are
chosen for the shape (product/float_dispatch.py): one row meets up to 16 vectors, wide outputs 8 by
3 or 6 by 4.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.isa import GENERIC
from lowbit.isa.avx2 import AVX2
from lowbit.isa.avx512 import AVX512, AVX512_BF16, vdpbf16ps
from lowbit.isa.generic import fma
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.types import Vector, bf16, f32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.float.micro_kernel import FloatMicro, Left, Passing, Right, register

LATENCY = 5  # cycles until an accumulator can be used again, with two products a cycle at best
_UNROLLED = 32  # products that a turn of the loop should hold, so that its control costs little
_MOST_ROWS = 8  # each has a pointer, for which a register is wanted too

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

    def shapes(self, alone: bool = False) -> list[tuple[int, int]]:
        registers = self.isa.vector_registers
        free = registers - 1 - registers // 16  # one for the broadcast number, a few to work with
        if alone:  # what is loaded for one row is read where it is multiplied
            return [(1, vectors) for vectors in range(1, free)]
        return [
            (rows, vectors)
            for vectors in range(1, free // 2 + 1)
            for rows in range(1, min((free - vectors) // vectors, _MOST_ROWS) + 1)
        ]

    @staticmethod
    def parts(products: int) -> int:
        """Partial sums that each of few accumulators has, which would wait for each other."""
        return max(p for p in (1, 2, 4) if p == 1 or p * products <= 2 * LATENCY)

    def step(
        self, k: Builder, sizes: tuple[int, int], left: Left, right: Right, units: Value,
        passing: Passing | None = None,
    ) -> list[list[Value]]:  # fmt: skip
        rows, vectors = sizes
        products = rows * vectors
        parts = self.parts(products)
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
        right.fetch(unit, len(sums[0]))
        columns = [right.vector(unit, which) for which in range(len(sums[0]))]
        for row, accumulators in enumerate(sums):
            a = left.one(unit, row).splat(self.lanes)
            for accumulator, column in zip(accumulators, columns, strict=True):
                accumulator.value = self.combine(accumulator.value, a, column)


FMA_512 = register(VectorMicro("fma", AVX512, _fused))
FMA_256 = register(VectorMicro("fma", AVX2, _fused))
# What any machine runs: a product and a sum, each rounded.
MULTIPLY_ADD = register(VectorMicro("multiply-add", GENERIC, _twice_rounded))
PAIRS_512 = register(VectorMicro("pairs", AVX512_BF16, _dot_of_pairs, pair=True))
