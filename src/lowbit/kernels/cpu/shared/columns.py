"""Some columns of a packed right operand, in panels of their own."""

from __future__ import annotations

from lowbit.isa.generic import minimum, prefetch
from lowbit.isa.types import Int, S32Pointer, S64Pointer
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.layout import PANEL

_AHEAD = 16  # columns whose lines are fetched before they are read


@kernel
def take_columns(
    k: Builder, panels: S32Pointer, lines: Int, sums: S32Pointer, scale: S32Pointer,
    bias: S32Pointer, columns: S64Pointer, first: Int, out_panels: S32Pointer,
    out_sums: S32Pointer, out_scale: S32Pointer, out_bias: S32Pointer, begin: Int, count: Int,
    *, biased: bool,
) -> None:  # fmt: skip
    """Column begin + i of the panels `out_panels` becomes column columns[i] − first of `panels`.

    Of bytes or of nibbles, since a column's part of a line is 32 bits of either (see layout.py);
    so are a sum, a scale and a bias. A panel has so many lines. Columns that are not named stay
    as they are.
    """
    for block in k.parallel((count + (PANEL - 1)) // PANEL):
        for number in k.range(block * PANEL, minimum(block * PANEL + PANEL, count)):
            column = (columns + number).load() - first
            place = begin + number
            source = panels + (column // PANEL * lines * PANEL + column % PANEL)
            target = out_panels + (place // PANEL * lines * PANEL + place % PANEL)
            ahead = (columns + minimum(number + _AHEAD, count - 1)).load() - first
            coming = panels + ahead // PANEL * lines * PANEL
            for line in k.range(0, lines * PANEL, PANEL):
                prefetch(coming + line)
                (target + line).store((source + line).load())
            (out_sums + place).store((sums + column).load())
            (out_scale + place).store((scale + column).load())
            if biased:
                (out_bias + place).store((bias + column).load())
