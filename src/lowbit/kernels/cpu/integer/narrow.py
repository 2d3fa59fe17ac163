"""The micro-kernel for weights that cannot saturate: pairs of products summed in 16 bits.

VPMADDUBSW is the fastest byte product without VNNI, and wrong where a pair sum leaves 16 bits. With
a ≤ 255 it cannot, if of every two neighbouring weights along K the positive parts sum to at most
128, and the negative ones too: 255 · 128 = 32640. That is a property of the weights alone, which
packing lets one prove; other weights are refused, and served by an exact kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.isa.avx2 import vpmaddubsw, vpmaddwd
from lowbit.isa.avx512 import vpmaddubsw_512, vpmaddwd_512
from lowbit.isa.types import Vector, s8, s16, u8
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, micro_kernel
from lowbit.kernels.cpu.integer.vectors import VectorKernel
from lowbit.kernels.cpu.shared.layout import QUAD

LARGEST_PAIR = 128  # the sum of two neighbouring weights of one sign that 255 times still fits

# Byte product and pair sum, by columns of a vector.
_INSTRUCTIONS = {16: (vpmaddubsw_512, vpmaddwd_512), 8: (vpmaddubsw, vpmaddwd)}
# Columns in a vector, most rows, panels, rows for nibbles.
_VARIANTS = {"avx512": (16, 8, 2, 16), "avx2": (8, 5, 1, 4)}


@micro_kernel("avx512", "avx2")
class Narrow(VectorKernel):
    """Some rows by one or two panels."""

    name = "narrow"
    preference = 1
    any_pairs = False

    def __init__(self, isa: str) -> None:
        super().__init__(isa, *_VARIANTS[isa])

    def refuses(self, query: KernelQuery) -> str:
        if query.largest_pair <= LARGEST_PAIR:
            return self._parts_pairs(query)
        return (
            f"neighbouring weights sum to {query.largest_pair}, and 16-bit sums could saturate "
            f"above {LARGEST_PAIR}"
        )

    def _parts_pairs(self, query: KernelQuery) -> str:
        """Why few columns of an odd K, whose last piece would begin within a pair, are refused."""
        if query.in_place and query.k % 2 and query.n <= self.lanes // 2:
            return "others multiply few columns in longer pieces, which may begin anywhere"
        return ""

    def multiply(
        self, k: Builder, lanes: int, rows: Iterable[Value], columns: list[Value],
        sums: list[list[Register]], signed: bool = False,
    ) -> None:  # fmt: skip
        size = lanes * QUAD
        unsigned, other = Vector(u8, size), Vector(s8, size)
        ones = k.constant(1, Vector(s16, 2 * lanes))
        multiply, add_pairs = _INSTRUCTIONS[lanes]
        for four, accumulators in zip(rows, sums, strict=True):
            for accumulator, column in zip(accumulators, columns, strict=True):
                pair = (column, four) if signed else (four, column)
                pairs = multiply(pair[0].bits(unsigned), pair[1].bits(other))
                accumulator.value = accumulator.value + add_pairs(pairs, ones)
