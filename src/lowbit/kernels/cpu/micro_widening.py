"""The micro-kernel for machines without an exact byte product: bytes widened to 16 bits.

A dword holds four k of one column. Its even bytes (k0, k2) and its odd ones (k1, k3) become 16-bit
lanes by shifts, on both sides alike, so that one multiply-add of pairs sums two products into the
column's own 32-bit lane. Pair sums of u8 times s8 stay below 2^17: nothing saturates, ever.

    dword      | k3 k2 k1 k0 |         even  | k2 . k0 |    odd  | k3 . k1 |
"""

from __future__ import annotations

from lowbit.isa import named
from lowbit.isa.avx2 import vpmaddwd
from lowbit.isa.generic import madd16
from lowbit.isa.types import Vector, s16, s32, u16, u32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

_LANES = 8  # columns in a vector
_MULTIPLY_ADD = {"avx2": vpmaddwd, "generic": madd16}


@micro_kernel("avx2", "generic")
class Widening(MicroKernel):
    """A few rows by one panel, as two vectors of 8 columns."""

    name = "widening"

    def shape(self, m: int) -> tuple[Shape, int]:
        isa = named(self.isa)
        most = isa.vector_registers * isa.vector_bytes // (2 * LINE)  # half of all registers
        rows = min(range(1, most + 1), key=lambda r: (blocks(m, r) * (r + 1), -r))
        return Shape(rows, depth=1, panels=1), rows

    def step(self, k: Builder, shape: Shape, step: Step, panels: int) -> None:
        halves = range(0, PANEL, _LANES)
        sums = [[k.register(k.zeros(s32, _LANES)) for _ in halves] for _ in range(shape.rows)]
        for line in k.range(0, step.lines):
            a = step.a + line * (shape.rows * LINE)
            b = step.b + line * (LINE * LINE // GROUP)
            for quad in k.range(0, LINE // GROUP):
                self._multiply(a + quad * GROUP, b + quad * LINE, sums)
        for half, offset in enumerate(halves):
            store = step.columns(0, offset, _LANES)
            for row in range(shape.rows):
                for _ in k.when(step.row + row < step.rows):
                    store(step.row + row, sums[row][half].value)

    def _multiply(self, a: Value, b: Value, sums: list[list[Register]]) -> None:
        """Add the products of 4 k to every accumulator.

        With 4 rows on AVX2: 8 accumulators, 4 vectors of b, 2 of a, a product and a mask.
        """
        multiply_add = _MULTIPLY_ADD[self.isa]
        pairs = 2 * _LANES
        columns = []
        for half in range(len(sums[0])):
            both = (b + half * _LANES * GROUP).cast(s16).load(pairs)
            columns.append(((both << 8) >> 8, both >> 8))
        for row, accumulators in enumerate(sums):
            four = (a + row * LINE).cast(u32).load().splat(_LANES)
            even = (four & 0x00FF00FF).bits(Vector(s16, pairs))
            odd = (four.bits(Vector(u16, pairs)) >> 8).bits(Vector(s16, pairs))
            for accumulator, (b_even, b_odd) in zip(accumulators, columns, strict=True):
                accumulator.value = accumulator.value + multiply_add(even, b_even)
                accumulator.value = accumulator.value + multiply_add(odd, b_odd)
