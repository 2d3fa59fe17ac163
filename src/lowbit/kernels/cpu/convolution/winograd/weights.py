"""G w Gᵀ: packed panels of bytes become words at the 36 points, once for each weight."""

from __future__ import annotations

from lowbit.isa.generic import minimum, select
from lowbit.isa.types import Int, S16Pointer, U8Pointer, Vector, s16, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.convolution.winograd import arithmetic
from lowbit.kernels.cpu.convolution.winograd.arithmetic import KERNEL, POINTS
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD


@kernel
def weight_words(
    k: Builder,
    panels: U8Pointer,
    panel_bytes: Int,
    m: Int,
    channels: Int,
    block: Int,
    out: S16Pointer,
) -> None:
    """out = words of m panels, whose K is [9, channels]: [36, channels / 2, panels of a block, 16
    columns, 2 channels], for blocks of so many panels, and one for each of those that are left."""
    whole = m // block * block
    for panel in k.parallel(m):
        in_block = panel < whole
        first = select(in_block, panel // block * block, panel)
        together = select(in_block, minimum(block, m), k.index(1))
        target = out + ((first * POINTS) * channels + (panel - first) * 2) * PANEL
        size = k.isa.vector_bytes
        for four in k.range(0, channels, QUAD):
            for half in range(0, LINE, size):
                source = panels + (panel * panel_bytes + four * PANEL + half)
                taps = [
                    _pairs((source + channels * (tap * PANEL)).load(size))
                    for tap in range(KERNEL * KERNEL)
                ]
                for which in range(2):
                    place = target + (together * PANEL * (four + 2 * which) + half // 2)
                    rows = [[taps[KERNEL * i + j][which] for j in range(KERNEL)] for i in range(3)]
                    lines = [arithmetic.weights(row) for row in rows]
                    for j in range(arithmetic.SEEN):
                        column = arithmetic.weights([line[j] for line in lines])
                        for i, values in enumerate(column):
                            point = i * arithmetic.SEEN + j
                            (place + together * channels * (PANEL * point)).store(values)


def _pairs(line: Value) -> tuple[Value, Value]:
    """Of dwords of four bytes, the first two of each and the others, as words."""
    assert isinstance(line.type, Vector)
    words, dwords = Vector(s16, line.type.lanes // 2), Vector(u32, line.type.lanes // 4)
    both = line.bits(words)
    even, odd = ((both << 8) >> 8).bits(dwords), (both >> 8).bits(dwords)
    low = (even & 0xFFFF) | (odd << 16)
    high = (even >> 16) | (odd & 0xFFFF0000)
    return low.bits(words), high.bits(words)
