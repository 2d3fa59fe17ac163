"""The micro-kernel for VPDPBUSD: rows times panels of accumulators, all in registers.

          panel 0   panel 1   panel 2       512 bits, 8 rows and three panels: 24 accumulators,
    a0 |  zmm0      zmm1      zmm2          3 lines of b and one dword of a, broadcast, leave 4
    a1 |  zmm3      zmm4      zmm5          of the 32 registers free.
    ..                                      256 bits, 6 rows and one panel of two vectors: 12
    a7 |  zmm21     zmm22     zmm23         accumulators, 2 halves of a line, one dword of a.

For each 4 k: three loads of b and eight broadcasts feed 24 products.
"""

from __future__ import annotations

from lowbit.isa import named
from lowbit.isa.avx2_vnni import vpdpbusd_256
from lowbit.isa.avx512_vnni import vpdpbusd
from lowbit.isa.types import Vector, s8, s32, u8, u32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step
from lowbit.kernels.registry import micro_kernel

# Instruction, most rows, panels.
_VARIANTS = {"avx512_vnni": (vpdpbusd, 8, 3), "avx2_vnni": (vpdpbusd_256, 6, 1)}
_STEP_OVERHEAD = 4  # loads and loop control of a step, in units of one product
_LATENCY = 5  # cycles until an accumulator can be used again, with two products a cycle at best


@micro_kernel("avx512_vnni", "avx2_vnni")
class Vnni(MicroKernel):
    """Some rows by some panels, of one 512-bit or two 256-bit vectors each."""

    name = "vnni"

    def __init__(self, isa: str) -> None:
        super().__init__(isa)
        self._dot, self._most_rows, self._panels = _VARIANTS[isa]
        self._lanes = named(isa).vector_bytes // GROUP
        self._halves = range(0, PANEL, self._lanes)

    def shape(self, m: int) -> tuple[Shape, int]:
        vectors = self._panels * len(self._halves)

        def cost(rows: int) -> tuple[int, int]:
            return blocks(m, rows) * (rows * vectors + _STEP_OVERHEAD), -rows

        rows = min(range(1, self._most_rows + 1), key=cost)
        return Shape(rows, depth=1, panels=self._panels), rows

    def step(self, k: Builder, shape: Shape, step: Step, panels: int) -> None:
        # Few accumulators would wait for each other: give each several partial sums.
        vectors = panels * len(self._halves)
        parts = max(p for p in (1, 2, 4) if p == 1 or p * shape.rows * vectors <= 2 * _LATENCY)
        sums = [
            [
                [k.register(k.zeros(s32, self._lanes)) for _ in range(vectors)]
                for _ in range(shape.rows)
            ]
            for _ in range(parts)
        ]
        for line in k.range(0, step.lines):
            a = step.a + line * (shape.rows * LINE)
            b = step.b + line * (LINE * LINE // GROUP)
            for quad in k.range(0, LINE // GROUP, parts):
                for part in range(parts):
                    at = quad + part
                    lines = [b + (step.panel_bytes * p + at * LINE) for p in range(panels)]
                    self._multiply(a + at * GROUP, lines, sums[part])
        for number in range(vectors):
            panel, half = divmod(number, len(self._halves))
            store = step.columns(panel, self._halves[half], self._lanes)
            for row in range(shape.rows):
                for _ in k.when(step.row + row < step.rows):
                    total = sums[0][row][number].value
                    for part in sums[1:]:
                        total = total + part[row][number].value
                    store(step.row + row, total)

    def _multiply(self, a: Value, lines: list[Value], sums: list[list[Register]]) -> None:
        """Add the products of 4 k to every accumulator."""
        size = self._lanes * GROUP
        columns = [
            (line + half * GROUP).cast(s8).load(size) for line in lines for half in self._halves
        ]
        for row, accumulators in enumerate(sums):
            four = (a + row * LINE).cast(u32).load().splat(self._lanes).bits(Vector(u8, size))
            for accumulator, column in zip(accumulators, columns, strict=True):
                accumulator.value = self._dot(accumulator.value, four, column)
