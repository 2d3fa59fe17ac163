"""Some octets, 8 neighbouring columns, of a product, each row its own: what maxima did not keep.

The results are those of `product` with the output "f32", to the bit: sums are integers, and what
follows is the same operations in the same order.
"""

from __future__ import annotations

from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
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
    k: Builder, codes: S32Pointer, row_scale: F32Pointer, octets: S64Pointer, places: Int,
    first: Int, beyond: Int, panels: U8Pointer, k_blocks: Int, column_scale: F32Pointer,
    bias: F32Pointer, out: F32Pointer, rows: Int, *, weight: str, biased: bool,
) -> None:  # fmt: skip
    """out[row, place] = what octet octets[row, place] scores, if it is at least first, not beyond.

    codes: the rows' integers less their zero points, s32 [rows, k_blocks · 64]. octets: s64 [rows,
    places]; panels hold those from `first` on. k_blocks: of 64 k. out: float32 [rows, places, 8].
    """
    panel_bytes = k_blocks * (PANEL_LINE if weight == "s8" else PANEL_LINE // 2)
    for row in k.parallel(rows):
        a = codes + row * k_blocks * LINE
        scale = (row_scale + row).load().splat(OCTET)
        for place in k.range(row * places, row * places + places):
            octet = (octets + place).load() - first
            for _ in k.when((octet > -1) & (octet < beyond - first)):
                with k.scope():
                    half = panels + octet % _PER_PANEL * _BYTES
                    source = half + octet // _PER_PANEL * panel_bytes
                    total = _sum(k, a, source, k_blocks, weight)
                    column = octet * OCTET
                    value = total.to(f32) * scale * (column_scale + column).load(OCTET)
                    if biased:
                        value = value + (bias + column).load(OCTET)
                    (out + place * OCTET).store(value)


def _sum(k: Builder, a: Value, source: Value, k_blocks: Value, weight: str) -> Value:
    """Σ a·b of the 8 columns of an octet, whose lines are 64 bytes apart."""
    total = k.register(k.zeros(s32, OCTET))

    def add(quad: Value, values: Value) -> None:
        four = values.bits(Vector(s32, OCTET))
        for byte in range(QUAD):
            b = (four << (24 - 8 * byte)) >> 24
            total.value = total.value + b * (a + (quad * QUAD + byte)).load().splat(OCTET)

    if weight == "s8":
        for line in k.range(0, k_blocks * QUADS):
            add(line, (source + line * LINE).load(_BYTES))
        return total.value
    for line in k.range(0, k_blocks * (QUADS // 2)):
        for which, values in enumerate(unpacked((source + line * LINE).load(_BYTES), weight)):
            add(line * 2 + which, values)
    return total.value
