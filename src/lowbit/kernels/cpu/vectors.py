"""What the micro-kernels of vector registers share: rows times panels of accumulators.

      panel 0   panel 1   panel 2       Every row meets every panel: for each 4 k, a line of
a0 |  sum       sum       sum           each panel is loaded once and 4 bytes of each row are
a1 |  sum       sum       sum           broadcast. How many rows and panels fit, and what
..                                      instructions multiply, is each kernel's own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from lowbit.isa.types import s32
from lowbit.jit.builder import Builder
from lowbit.jit.value import Register, Value
from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks
from lowbit.kernels.micro_kernel import MicroKernel, Shape, Step

_STEP_OVERHEAD = 4  # loads and loop control of a step, in units of one product


class VectorKernel(MicroKernel):
    """Some rows by some panels, of vectors of `lanes` columns each.

    `most_rows`, `panels`: what the registers hold. `chains`: accumulators that the products need
    in order not to wait for each other; where a step has fewer, each gets partial sums.
    """

    def __init__(self, isa: str, lanes: int, most_rows: int, panels: int, chains: int = 0) -> None:
        super().__init__(isa)
        self.lanes, self.most_rows, self.panels, self.chains = lanes, most_rows, panels, chains
        self.offsets = range(0, PANEL, lanes)

    @abstractmethod
    def multiply(
        self, k: Builder, a: Value, lines: list[Value], sums: list[list[Register]]
    ) -> None:
        """Emit the products of 4 k. `a`: those of the first row, the next rows' 64 bytes apart;
        `lines`: one of each panel; `sums`: for each row one register for each vector."""

    def shape(self, m: int, lines: int) -> tuple[Shape, int]:
        vectors = self.panels * len(self.offsets)

        def cost(rows: int) -> tuple[int, int]:
            return blocks(m, rows) * (rows * vectors + _STEP_OVERHEAD), -rows

        rows = min(range(1, self.most_rows + 1), key=cost)
        return Shape(rows, depth=1, panels=self.panels), rows

    def step(self, k: Builder, session: Any, shape: Shape, step: Step, panels: int) -> None:
        vectors = panels * len(self.offsets)
        parts = max(p for p in (1, 2, 4) if p == 1 or p * shape.rows * vectors <= self.chains)
        sums = [
            [
                [k.register(k.zeros(s32, self.lanes)) for _ in range(vectors)]
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
                    self.multiply(k, a + at * GROUP, lines, sums[part])
        for number in range(vectors):
            panel, part = divmod(number, len(self.offsets))
            store = step.columns(step.panel + panel, self.offsets[part], self.lanes)
            for row in range(shape.rows):
                for _ in k.when(step.row + row < step.rows):
                    total = sums[0][row][number].value
                    for other in sums[1:]:
                        total = total + other[row][number].value
                    store(step.row + row, total)
