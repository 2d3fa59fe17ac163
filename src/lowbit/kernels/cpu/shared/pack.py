"""Packing the right operand: once for all M, from any strides, with sums of columns beside it."""

from __future__ import annotations

from lowbit.isa.generic import minimum, prefetch, shuffle
from lowbit.isa.types import Int, S32Pointer, S64Pointer, U8Pointer, Vector, s32, u8, u16, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.layout import LINE, NIBBLE_FLIP, PANEL, PANEL_LINE, QUAD, QUADS


@kernel
def pack(
    k: Builder, b: U8Pointer, k_stride: Int, n_stride: Int, panels: U8Pointer, sums: S32Pointer,
    k_size: Int, n: Int, group: Int,
    *, along: str, flip: int, zero: int, nibbles: bool,
) -> None:  # fmt: skip
    """Pack b[k_size, n] into panels (see layout.py), and sum its values less `zero`, by column and
    `group` of k, a multiple of 8: sums[panels, groups, 16], to which is added.

    `along` names the axis whose stride is 1 ("k", "n", or "" for neither). What is stored is a
    value with the bits `flip` changed, or the low half of that; behind K and N it is of `zero`.
    """
    lines = (k_size + (LINE - 1)) // LINE * QUADS
    groups = (k_size + (group - 1)) // group
    held = k.local(u8, PANEL_LINE)
    for panel in k.parallel((n + (PANEL - 1)) // PANEL):
        first = panel * PANEL
        source, width = b + first * n_stride, minimum(n - first, k.index(PANEL))
        for line in k.range(0, lines, QUADS):
            start = source + line * QUAD * k_stride
            _take(k, start, (k_stride, n_stride), held, (k_size - line * QUAD, width), along, zero)
            for pair in k.range(0, QUADS, 2):
                both = [(held + (pair + i) * LINE).load(LINE) for i in range(2)]
                place = minimum((line + pair) * QUAD // group, groups - 1) + panel * groups
                target = sums + place * PANEL
                target.store(target.load(PANEL) + _summed(both[0] - zero) + _summed(both[1] - zero))
                low, high = (values ^ flip for values in both)
                place = panel * lines + line + pair
                if nibbles:
                    (panels + place // 2 * LINE).store((low & 15) | (high << 4))
                else:
                    (panels + place * LINE).store(low)
                    (panels + (place + 1) * LINE).store(high)


def _take(
    k: Builder, source: Value, strides: tuple[Value, Value], target: Value,
    sizes: tuple[Value, Value], along: str, zero: int,
) -> None:  # fmt: skip
    """Bring 64 k of 16 columns, or of those that there are, into lines of a panel."""
    (k_stride, n_stride), (depth, width) = strides, sizes
    whole = k.register(k.index(0))
    if along:
        for _ in k.when(width.equals(PANEL)):
            whole.value = minimum(depth // QUAD, k.index(QUADS))
            for line in k.range(0, whole.value):
                start, place = source + line * QUAD * k_stride, target + line * LINE
                if along == "n":
                    place.store(_interleaved(start, k_stride))
                else:
                    _gather(start, n_stride, place)
    for line in k.range(whole.value, QUADS):
        (target + line * LINE).store(k.zeros(u8, LINE) + zero)
        for i in k.range(line * QUAD, minimum(line * QUAD + QUAD, depth)):
            place = target + line * LINE + (i - line * QUAD)
            for column in k.range(0, width):
                (place + column * QUAD).store((source + i * k_stride + column * n_stride).load())


def _summed(line: Value) -> Value:
    """The sums of signed bytes of each column of a line."""
    four, total = line.bits(Vector(s32, PANEL)), None
    for byte in range(QUAD):
        value = (four << (24 - 8 * byte)) >> 24
        total = value if total is None else total + value
    assert total is not None
    return total


def _interleaved(start: Value, k_stride: Value) -> Value:
    """Four rows of 16 neighbouring columns as one line: column by column, four k each."""
    rows = [(start + k_stride * i).load(PANEL) for i in range(QUAD)]
    pairs = [_zipped(rows[0], rows[1]), _zipped(rows[2], rows[3])]
    words = [pair.bits(Vector(u16, PANEL)) for pair in pairs]
    return _zipped(*words).bits(Vector(u8, LINE))


def _zipped(a: Value, b: Value) -> Value:
    """a0 b0 a1 b1 ..."""
    return shuffle(a, b, tuple(i // 2 + a.lanes * (i % 2) for i in range(2 * a.lanes)))


def _gather(start: Value, n_stride: Value, target: Value) -> None:
    """Four neighbouring k of each of 16 columns, a dword at a time."""
    for column in range(PANEL):
        four = (start + n_stride * column).cast(u32).load()
        (target + column * QUAD).cast(u32).store(four)


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
