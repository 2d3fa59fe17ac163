"""The micro-kernel for VPDPBUSD: rows times panels of accumulators, all in registers.

          panel 0   panel 1   panel 2       512 bits, 8 rows and three panels: 24 accumulators,
    a0 |  zmm0      zmm1      zmm2          3 lines of b and one dword of a, broadcast, leave 4
    a1 |  zmm3      zmm4      zmm5          of the 32 registers free.
    ..                                      256 bits, 6 rows and one panel of two vectors: 12
    a7 |  zmm21     zmm22     zmm23         accumulators, 2 halves of a line, one dword of a.

For each 4 k: three loads of b and eight broadcasts feed 24 products.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.isa import named
from lowbit.isa.avx2 import vpdpbusd_256
from lowbit.isa.avx512 import vpdpbusd, vpdpbusd_half
from lowbit.isa.types import Vector, s8, u8
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.integer.micro_kernel import micro_kernel
from lowbit.kernels.cpu.integer.vectors import VectorKernel
from lowbit.kernels.cpu.shared.layout import QUAD

# Instructions by columns of a vector, most rows, panels, rows for nibbles.
_VARIANTS = {
    "avx512_vnni": ({16: vpdpbusd, 8: vpdpbusd_half}, 8, 3, 16),
    "avx2_vnni": ({8: vpdpbusd_256}, 6, 1, 5),
}
_CHAINS = 12  # an accumulator is ready again after 5 cycles, with two products a cycle at best


@micro_kernel("avx512_vnni", "avx2_vnni")
class Vnni(VectorKernel):
    """Some rows by some panels, of one 512-bit or two 256-bit vectors each."""

    name = "vnni"
    quads = 2
    reads_in_place = True

    def __init__(self, isa: str) -> None:
        self._dots, *sizes = _VARIANTS[isa]
        super().__init__(isa, named(isa).vector_bytes // QUAD, *sizes, chains=_CHAINS)

    def multiply(
        self, k: Builder, lanes: int, rows: Iterable[Value], columns: list[Value],
        sums: list[list[Register]], signed: bool = False,
    ) -> None:  # fmt: skip
        size, dot = lanes * QUAD, self._dots[lanes]
        unsigned, other = Vector(u8, size), Vector(s8, size)
        for four, accumulators in zip(rows, sums, strict=True):
            for accumulator, column in zip(accumulators, columns, strict=True):
                pair = (column, four) if signed else (four, column)
                accumulator.value = dot(
                    accumulator.value, pair[0].bits(unsigned), pair[1].bits(other)
                )
