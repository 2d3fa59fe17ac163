"""The micro-kernel for machines without an exact byte product: bytes widened to 16 bits.

A dword holds four k of one column. Its even bytes (k0, k2) and its odd ones (k1, k3) become 16-bit
lanes by shifts, on both sides alike, so that one multiply-add of pairs sums two products into the
column's own 32-bit lane. Pair sums of u8 times s8 stay below 2^17: nothing saturates, ever.

    dword      | k3 k2 k1 k0 |         even  | k2 . k0 |    odd  | k3 . k1 |
"""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.isa.avx2 import vpmaddwd
from lowbit.isa.avx512 import vpmaddwd_512
from lowbit.isa.generic import madd16
from lowbit.isa.types import Vector, s16, u16, u32
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import micro_kernel
from lowbit.kernels.cpu.integer.vectors import VectorKernel

# Instructions by columns of a vector, columns in a vector, most rows, panels, rows for nibbles.
_VARIANTS = {
    "avx512": ({16: vpmaddwd_512, 8: vpmaddwd}, 16, 8, 2, 12),
    "avx2": ({8: vpmaddwd}, 8, 4, 1, 3),
    "generic": ({8: madd16}, 8, 2, 1, 2),
}


@micro_kernel("avx512", "avx2", "generic")
class Widening(VectorKernel):
    """A few rows by one or two panels."""

    name = "widening"

    def __init__(self, isa: str) -> None:
        self._instructions, *sizes = _VARIANTS[isa]
        super().__init__(isa, *sizes)

    def multiply(
        self, k: Builder, lanes: int, rows: Iterable[Value], columns: list[Value],
        sums: list[list[Register]], signed: bool = False,
    ) -> None:  # fmt: skip
        """With 4 rows on AVX2: 8 accumulators, 4 vectors of b, 2 of a, a product and a mask."""
        multiply_add = self._instructions[lanes]
        halves = [_widened(column, lanes, not signed) for column in columns]
        for row, accumulators in zip(rows, sums, strict=True):
            even, odd = _widened(row, lanes, signed)
            for accumulator, (b_even, b_odd) in zip(accumulators, halves, strict=True):
                accumulator.value = accumulator.value + multiply_add(even, b_even)
                accumulator.value = accumulator.value + multiply_add(odd, b_odd)


def _widened(vector: Value, lanes: int, signed: bool) -> tuple[Value, Value]:
    """The even and the odd bytes of so many dwords, as 16 bits."""
    pairs = Vector(s16, 2 * lanes)
    if signed:
        both = vector.bits(pairs)
        return (both << 8) >> 8, both >> 8
    four = vector.bits(Vector(u32, lanes))
    odd = (four.bits(Vector(u16, 2 * lanes)) >> 8).bits(pairs)
    return (four & 0x00FF00FF).bits(pairs), odd
