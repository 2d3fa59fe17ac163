"""Packing the right operand: once for all M, from any strides, with the column sums beside it."""

from __future__ import annotations

from lowbit.isa.generic import minimum, prefetch, shuffle
from lowbit.isa.types import Int, S32Pointer, S64Pointer, U8Pointer, Vector, s32, u8, u16, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.layout import FLIP, LINE, NIBBLE_FLIP, PANEL, PANEL_LINE, QUAD, QUADS


@kernel
def pack(
    k: Builder,
    b: U8Pointer,
    k_stride: Int,
    n_stride: Int,
    panels: U8Pointer,
    column_sum: S32Pointer,
    k_size: Int,
    n: Int,
    *,
    along: str,
    unsigned: bool,
) -> None:
    """Pack b[k_size, n] into panels (see layout.py) and sum each column of stored values.

    `along` names the axis whose stride is 1 ("k", "n", or "" for neither). `unsigned` bytes have
    128 taken away, so that what is stored, and summed, is signed.
    """
    flip = FLIP if unsigned else 0
    lines = (k_size + (LINE - 1)) // LINE * QUADS
    whole_lines = k_size // QUAD
    for panel in k.parallel((n + (PANEL - 1)) // PANEL):
        first = panel * PANEL
        with k.scope():
            source = b + first * n_stride
            target = panels + panel * lines * LINE
            width = minimum(n - first, k.index(PANEL))
            sums = k.register(k.zeros(s32, PANEL))

            def put(line: Value, values: Value, target: Value = target) -> None:
                (target + line * LINE).store(values)

            fast_lines = k.register(k.index(0))
            if along:
                for _ in k.when(width.equals(PANEL)):
                    fast_lines.value = whole_lines
                    for line in k.range(0, whole_lines):
                        start = source + line * QUAD * k_stride
                        if along == "n":
                            put(line, _interleaved(start, k_stride) ^ flip)
                        else:
                            _gather(start, n_stride, target + line * LINE, flip)
            for line in k.range(fast_lines.value, lines):
                put(line, k.zeros(u8, LINE))
                for i in k.range(line * QUAD, minimum(line * QUAD + QUAD, k_size)):
                    place = target + line * LINE + (i - line * QUAD)
                    for column in k.range(0, width):
                        value = (source + i * k_stride + column * n_stride).load() ^ flip
                        (place + column * QUAD).store(value)
            for line in k.range(0, lines):
                four = (target + line * LINE).load(LINE).bits(Vector(s32, PANEL))
                for byte in range(QUAD):
                    sums.value = sums.value + ((four << (24 - 8 * byte)) >> 24)
            (column_sum + first).store(sums.value)


def _interleaved(start: Value, k_stride: Value) -> Value:
    """Four rows of 16 neighbouring columns as one line: column by column, four k each."""
    rows = [(start + k_stride * i).load(PANEL) for i in range(QUAD)]
    pairs = [_zipped(rows[0], rows[1]), _zipped(rows[2], rows[3])]
    words = [pair.bits(Vector(u16, PANEL)) for pair in pairs]
    return _zipped(*words).bits(Vector(u8, LINE))


def _zipped(a: Value, b: Value) -> Value:
    """a0 b0 a1 b1 ..."""
    assert isinstance(a.type, Vector)
    lanes = a.type.lanes
    return shuffle(a, b, tuple(i // 2 + lanes * (i % 2) for i in range(2 * lanes)))


def _gather(start: Value, n_stride: Value, target: Value, flip: int) -> None:
    """Four neighbouring k of each of 16 columns, a dword at a time."""
    for column in range(PANEL):
        four = (start + n_stride * column).cast(u32).load()
        (target + column * QUAD).cast(u32).store(four ^ (flip * 0x01010101))


# From panels of nibbles to panels of bytes.


def unpack_nibbles(k: Builder, source: Value, target: Value, k_blocks: Value, kind: str) -> None:
    """Bring a panel's nibbles, "u4" or "s4", into bytes: `k_blocks` times 64 k (see layout.py)."""
    for line in k.range(0, k_blocks * (PANEL_LINE // LINE // 2)):
        for number, values in enumerate(unpacked((source + line * LINE).load(LINE), kind)):
            (target + (line * 2 + number) * LINE).store(values)


def unpacked(both: Value, kind: str) -> tuple[Value, Value]:
    """The bytes in a vector of nibbles, those in the low ones first."""
    low, high = both & 15, both >> 4
    return (low - NIBBLE_FLIP, high - NIBBLE_FLIP) if kind == "s4" else (low, high)


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
