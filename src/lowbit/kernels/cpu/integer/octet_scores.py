"""Some octets, 8 neighbouring columns, of a product of floats and integers, each row its own.

Maxima are those of rows in 8 bits; here rows are the floats that they were. Each sum runs over k in
its order, so that it is the same bits on every instruction set.
"""

from __future__ import annotations

from lowbit.isa.types import (
    F32Pointer,
    Int,
    S64Pointer,
    U8Pointer,
    Value,
    Vector,
    f32,
    s32,
)
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.epilogue import OCTET
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE, QUAD, QUADS
from lowbit.kernels.cpu.shared.pack import unpacked

_PER_PANEL = PANEL // OCTET
_BYTES = OCTET * QUAD  # of an octet in a line


@kernel
def octet_scores(
    k: Builder, values: F32Pointer, octets: S64Pointer, places: Int,
    first: Int, beyond: Int, panels: U8Pointer, k_blocks: Int, column_scale: F32Pointer,
    bias: F32Pointer, out: F32Pointer, rows: Int, *, weight: str, biased: bool,
) -> None:  # fmt: skip
    """out[row, place] = what octet octets[row, place] scores, if it is at least first, not beyond.

    values: float32 [rows, k_blocks · 64], padded with zeros. octets: s64 [rows, places]; panels
    hold those from `first` on. k_blocks: of 64 k. out: float32 [rows, places, 8].
    """
    panel_bytes = k_blocks * (PANEL_LINE if weight == "s8" else PANEL_LINE // 2)
    for row in k.parallel(rows):
        a = values + row * k_blocks * LINE
        for place in k.range(row * places, row * places + places):
            octet = (octets + place).load() - first
            for _ in k.when((octet > -1) & (octet < beyond - first)):
                with k.scope():
                    half = panels + octet % _PER_PANEL * _BYTES
                    source = half + octet // _PER_PANEL * panel_bytes
                    total = _sum(k, a, source, k_blocks, weight)
                    column = octet * OCTET
                    value = total * (column_scale + column).load(OCTET)
                    if biased:
                        value = value + (bias + column).load(OCTET)
                    (out + place * OCTET).store(value)


def _sum(k: Builder, a: Value, source: Value, k_blocks: Value, weight: str) -> Value:
    """Σ a·b of the 8 columns of an octet, whose lines are 64 bytes apart.

    Each byte of a line has a sum of its own, so that additions don't wait for each other.
    """
    sums = [k.register(k.zeros(f32, OCTET)) for _ in range(QUAD)]

    def add(quad: Value, values: Value) -> None:
        four = values.bits(Vector(s32, OCTET))
        for byte, total in enumerate(sums):
            b = ((four << (24 - 8 * byte)) >> 24).to(f32)
            total.value = total.value + b * (a + (quad * QUAD + byte)).load().splat(OCTET)

    if weight == "s8":
        for line in k.range(0, k_blocks * QUADS):
            add(line, (source + line * LINE).load(_BYTES))
    else:
        for line in k.range(0, k_blocks * (QUADS // 2)):
            for which, values in enumerate(unpacked((source + line * LINE).load(_BYTES), weight)):
                add(line * 2 + which, values)
    first, second, third, fourth = (total.value for total in sums)
    return (first + second) + (third + fourth)
