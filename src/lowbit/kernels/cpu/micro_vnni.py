"""The micro-kernel for VPDPBUSD: rows times panels of accumulators, all in registers.

          panel 0   panel 1   panel 2       a block of 8 rows and three panels:
    a0 |  zmm0      zmm1      zmm2          24 accumulators, 3 lines of b and one dword of a,
    a1 |  zmm3      zmm4      zmm5          broadcast, leave 4 of the 32 registers free.
    ..
    a7 |  zmm21     zmm22     zmm23

For each 4 k: three loads of b and eight broadcasts feed 24 products.
"""

from __future__ import annotations

from lowbit.isa.avx512_vnni import vpdpbusd
from lowbit.isa.types import Vector, s8, s32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

_MOST_ROWS, _PANELS = 8, 3
_STEP_OVERHEAD = 4  # loads and loop control of a step, in units of one product
_LATENCY = 5  # cycles until an accumulator can be used again, with two products a cycle at best


@micro_kernel("avx512_vnni")
class Vnni(MicroKernel):
    """Up to 8 rows by 3 panels of 16 columns."""

    name = "vnni"

    def shape(self, m: int) -> tuple[Shape, int]:
        def cost(rows: int) -> tuple[int, int]:
            return blocks(m, rows) * (rows * _PANELS + _STEP_OVERHEAD), -rows

        rows = min(range(1, _MOST_ROWS + 1), key=cost)
        return Shape(rows, depth=1, panels=_PANELS), rows

    def step(self, k: Builder, shape: Shape, step: Step, panels: int) -> None:
        # Few accumulators would wait for each other: give each several partial sums.
        parts = max(p for p in (1, 2, 4) if p == 1 or p * shape.rows * panels <= 2 * _LATENCY)
        sums = [
            [[k.register(k.zeros(s32, PANEL)) for _ in range(panels)] for _ in range(shape.rows)]
            for _ in range(parts)
        ]
        for line in k.range(0, step.lines):
            a = step.a + line * (shape.rows * LINE)
            b = step.b + line * (LINE * LINE // GROUP)
            for quad in k.range(0, LINE // GROUP, parts):
                for part in range(parts):
                    at = quad + part
                    self._multiply(a + at * GROUP, b + at * LINE, step.panel_bytes, sums[part])
        for which in range(panels):
            store = step.columns(which)
            for row in range(shape.rows):
                for _ in k.when(step.row + row < step.rows):
                    total = sums[0][row][which].value
                    for part in sums[1:]:
                        total = total + part[row][which].value
                    store(step.row + row, total)

    @staticmethod
    def _multiply(a: Value, b: Value, panel_bytes: Value, sums: list[list[Register]]) -> None:
        """Add the products of 4 k to every accumulator."""
        columns = [(b + panel_bytes * which).cast(s8).load(LINE) for which in range(len(sums[0]))]
        for row, accumulators in enumerate(sums):
            four = (a + row * LINE).cast(u32).load().splat(PANEL).bits(Vector(u8, LINE))
            for accumulator, column in zip(accumulators, columns, strict=True):
                accumulator.value = vpdpbusd(accumulator.value, four, column)
