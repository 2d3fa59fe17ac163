"""The micro-kernel for weights that cannot saturate: pairs of products summed in 16 bits.

VPMADDUBSW is the fastest byte product without VNNI, and wrong where a pair sum leaves 16 bits. With
a ≤ 255 it cannot, if of every two neighbouring weights along K the positive parts sum to at most
128, and the negative ones too: 255 · 128 = 32640. That is a property of the weights alone, which
packing lets one prove; other weights are refused, and served by an exact kernel.
"""

from __future__ import annotations

from lowbit.isa.avx2 import vpmaddubsw, vpmaddwd
from lowbit.isa.avx512 import vpmaddubsw_512, vpmaddwd_512
from lowbit.isa.types import Vector, s8, s16, s32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

LARGEST_PAIR = 128  # the sum of two neighbouring weights of one sign that 255 times still fits

# Byte product, pair sum, columns in a vector, most rows, panels.
_VARIANTS = {
    "avx512": (vpmaddubsw_512, vpmaddwd_512, 16, 8, 2),
    "avx2": (vpmaddubsw, vpmaddwd, 8, 5, 1),
}


@micro_kernel("avx512", "avx2")
class Narrow(MicroKernel):
    """Some rows by one or two panels."""

    name = "narrow"
    preference = 1

    def __init__(self, isa: str) -> None:
        super().__init__(isa)
        variant = _VARIANTS[isa]
        self._multiply_bytes, self._add_pairs = variant[:2]
        self._lanes, self._most_rows, self._panels = variant[2:]
        self._halves = range(0, PANEL, self._lanes)

    def refuses(self, m: int, n: int, k: int, largest_pair: int) -> str:
        if largest_pair <= LARGEST_PAIR:
            return ""
        return (
            f"neighbouring weights sum to {largest_pair}, and 16-bit sums could saturate "
            f"above {LARGEST_PAIR}"
        )

    def shape(self, m: int) -> tuple[Shape, int]:
        rows = min(range(1, self._most_rows + 1), key=lambda r: (blocks(m, r) * (r + 1), -r))
        return Shape(rows, depth=1, panels=self._panels), rows

    def step(self, k: Builder, shape: Shape, step: Step, panels: int) -> None:
        vectors = panels * len(self._halves)
        ones = k.constant(1, Vector(s16, 2 * self._lanes))
        sums = [
            [k.register(k.zeros(s32, self._lanes)) for _ in range(vectors)]
            for _ in range(shape.rows)
        ]
        for line in k.range(0, step.lines):
            a = step.a + line * (shape.rows * LINE)
            b = step.b + line * (LINE * LINE // GROUP)
            for quad in k.range(0, LINE // GROUP):
                lines = [b + (step.panel_bytes * p + quad * LINE) for p in range(panels)]
                self._multiply(a + quad * GROUP, lines, sums, ones)
        for number in range(vectors):
            panel, half = divmod(number, len(self._halves))
            store = step.columns(panel, self._halves[half], self._lanes)
            for row in range(shape.rows):
                for _ in k.when(step.row + row < step.rows):
                    store(step.row + row, sums[row][number].value)

    def _multiply(
        self, a: Value, lines: list[Value], sums: list[list[Register]], ones: Value
    ) -> None:
        """Add the products of 4 k to every accumulator."""
        size = self._lanes * GROUP
        columns = [
            (line + half * GROUP).cast(s8).load(size) for line in lines for half in self._halves
        ]
        for row, accumulators in enumerate(sums):
            four = (a + row * LINE).cast(u32).load().splat(self._lanes).bits(Vector(u8, size))
            for accumulator, column in zip(accumulators, columns, strict=True):
                pairs = self._multiply_bytes(four, column)
                accumulator.value = accumulator.value + self._add_pairs(pairs, ones)
