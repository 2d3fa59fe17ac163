"""Winograd's algorithm for windows of 3 x 3, in whole numbers, and why it is exact.

Four by four outputs that are neighbours need six by six pixels, and 144 products a channel. As
polynomials that are multiplied by way of their values at six points, along both axes, they need 36:

    Y = Aᵀ [ (G w Gᵀ) ∘ (Bᵀ x B) ] A          (Winograd, 1980; Lavin and Gray, "Fast Algorithms for
                                               Convolutional Neural Networks", 2016, F(4x4, 3x3))

The points are 0, 1, −1, 2, −2 and infinity. A and G usually hold sixths and twenty-fourths. Here
all three are of integers. So what comes out along an axis is not the sum, but 3·2^s times that, of
both axes 9·2^s. Sums of 32 bits wrap, and are right modulo 2^32. Nine has an inverse there; 2^s is
shifted away. As s is 6 at most, what is left is right modulo 2^26: it is the sum, if that has 26
bits (`MOST_SUM`), which is known from the weights. Pixels become words of at most 68·255 and
weights of at most 49·128, so the products are those of 16 bits: a quarter as many as of bytes.

Where an axis ends with a tile of three outputs, that takes five of the points, and one of one or
two outputs four of them. Weights are the same: their values at a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from lowbit.isa import InstructionSet, host
from lowbit.isa.avx2 import vpdpwssd_256
from lowbit.isa.avx512 import vpdpwssd
from lowbit.isa.generic import minimum, select
from lowbit.isa.types import Int, S16Pointer, U8Pointer, Vector, s16, s32, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, blocks

KERNEL, TILE, SEEN = 3, 4, 6  # of a window, of a tile's outputs, of the pixels that these need
POINTS = SEEN * SEEN
SHARE_OF_PRODUCTS = POINTS / (TILE * KERNEL) ** 2
MOST_SUM = 1 << 25  # below which the magnitude of each sum of bytes must be
_INVERSE_OF_9 = pow(9, -1, 1 << 32)
Values = Sequence[Value]


class Tile(NamedTuple):
    """A tile along an axis: of its six points those that it takes, and of each output that comes
    out as 3·2^s times itself, s."""

    points: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def seen(self) -> int:
        """Pixels."""
        return len(self.points)

    def pixels(self, d: Values) -> list[Value]:
        """Bᵀ d."""
        return _PIXELS[self.seen](d)

    def outputs(self, m: Values) -> list[Value]:
        """Aᵀ m."""
        return _OUTPUTS[self.seen](m)


WHOLE = Tile((0, 1, 2, 3, 4, 5), (3, 2, 1, 1))
_THREE = Tile((0, 1, 2, 3, 5), (1, 1, 1))
_TWO = Tile((0, 1, 2, 5), (1, 1))


def last_tile(size: int) -> Tile | None:
    """What follows the whole tiles of so many outputs."""
    return (None, _TWO, _TWO, _THREE)[size % TILE]


def weights(w: Values) -> list[Value]:
    """G w: w0 + w1·t + w2·t² at the six points t; at 0 and infinity three times that."""
    even, odd = w[0] + w[2], w[1]
    four, two = even + (w[2] + (w[2] << 1)), odd << 1
    at_0, at_infinity = (one + (one << 1) for one in (w[0], w[2]))
    return [at_0, even + odd, even - odd, four + two, four - two, at_infinity]


def _pixels_of_four(d: Values) -> list[Value]:
    four, more = d[4] - (d[2] << 2), d[3] - (d[1] << 2)
    even, odd = d[4] - d[2], d[3] - d[1]
    return [
        ((d[0] - d[2]) << 2) + even,
        four + more,
        four - more,
        even + (odd << 1),
        even - (odd << 1),
        (d[5] - d[3]) - (odd << 2),
    ]


def _outputs_of_four(m: Values) -> list[Value]:
    plus, minus = m[1] + m[2], m[1] - m[2]
    far_plus, far_minus = m[3] + m[4], m[3] - m[4]
    return [
        ((m[0] - (plus << 1)) << 1) + far_plus,
        far_minus - (minus << 1),
        far_plus - plus,
        ((far_minus + m[5]) << 1) - minus,
    ]


def _pixels_of_three(d: Values) -> list[Value]:
    """For 0, 1, −1, 2 and infinity."""
    odd, even = d[3] - d[1], d[0] - d[2]
    return [
        (even << 1) + odd,
        odd - d[1] - d[2],
        d[3] - d[2] + ((d[1] - d[2]) << 1),
        odd,
        (d[4] - d[2]) - (odd << 1),
    ]


def _outputs_of_three(m: Values) -> list[Value]:
    thrice = m[1] + (m[1] << 1)
    return [
        m[0] - thrice - m[2] + m[3],
        m[2] - thrice + (m[3] << 1),
        (m[3] << 2) - thrice - m[2] + (m[4] << 1),
    ]


def _pixels_of_two(d: Values) -> list[Value]:
    """For 0, 1, −1 and infinity."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[3] - d[1]]


def _outputs_of_two(m: Values) -> list[Value]:
    plus, minus = m[1] + m[2], m[1] - m[2]
    return [
        ((m[0] + plus) << 1) + plus,
        ((m[3] + minus) << 1) + minus,
    ]


_PIXELS = {6: _pixels_of_four, 5: _pixels_of_three, 4: _pixels_of_two}
_OUTPUTS = {6: _outputs_of_four, 5: _outputs_of_three, 4: _outputs_of_two}


def sums_of(down: Tile, along: Tile, m: Sequence[Values]) -> list[list[Value]]:
    """Aᵀ m A without its factors: the sums of a tile's outputs, line by line."""
    columns = [down.outputs([row[j] for row in m]) for j in range(along.seen)]
    lines = [along.outputs([column[i] for column in columns]) for i in range(len(down.shifts))]
    return [
        [(value * _INVERSE_OF_9) >> (i + j) for j, value in zip(along.shifts, line, strict=True)]
        for i, line in zip(down.shifts, lines, strict=True)
    ]


# Which convolutions Winograd's algorithm serves, and how they are cut.

_ROWS = 6, 5, 4  # of a block of registers; the fewest are for few tiles
_LEAST_VECTOR = 32  # bytes
_MORE_PARTS = 4  # for each thread, than the fewest, among which one is chosen
_LARGEST_IMAGE = 1 << 31  # bytes, as of all convolutions
# Cycles that a tile takes beside its products, for each column and each channel, with registers of
# 64 bytes; that a block of rows takes beside those of its rows. Bytes of weights that come from the
# last cache or beyond in a cycle; how many times as long that takes as it is waited for.
_FOR_COLUMN, _FOR_CHANNEL, _FOR_BLOCK, _WEIGHT_BYTES, _HIDDEN = 12, 6, 0.5, 8, 4


class Query(NamedTuple):
    """A convolution as far as it decides whether this kernel serves it.

    window: of its kernel; `plain`: stride and dilation are 1, what lies outside is the zero point,
    and there is one group. image: bytes of one; size: of the output of each. `bounded`: no sum of
    stored values reaches MOST_SUM.
    """

    window: tuple[int, ...]
    plain: bool
    channels: int
    outputs: int
    images: int
    image: int
    size: tuple[int, ...]
    bounded: bool
    threads: int = 1

    @property
    def tiles(self) -> int:
        """Of all images."""
        height, width = self.size
        return self.images * blocks(height, TILE) * blocks(width, TILE)

    @property
    def products(self) -> int:
        """Of rows with all columns."""
        height, width = (
            size // TILE * WHOLE.seen + (last.seen if (last := last_tile(size)) else 0)
            for size in self.size
        )
        return self.images * height * width


def may_serve(isa: InstructionSet) -> bool:
    """Whether the kernel is for a set: tiles multiply bytes faster, and short vectors hold too
    little."""
    return isa.architecture == "x86_64" and isa.vector_bytes >= _LEAST_VECTOR and not isa.tiles


def lanes_of(isa: InstructionSet, channels: int) -> int:
    """How many of the channels are transformed at once, as words; 0: a multiple of none."""
    most = isa.vector_bytes // s16.bytes
    fitting = (lanes for lanes in (32, 16, 8) if lanes <= most and channels % lanes == 0)
    return next(fitting, 0)


def panels_of(isa: InstructionSet) -> int:
    """That are multiplied at once."""
    return 4 if isa.vector_registers > 16 else 1


@lru_cache(maxsize=1 << 10)
def refuses(isa: InstructionSet, query: Query) -> str:
    """ "" if the kernel serves, and should be faster than products of bytes, else why not."""
    if query.window != (KERNEL, KERNEL) or not query.plain:
        return "windows are 3 x 3 pixels of all channels, side by side"
    if not may_serve(isa):
        faster = "multiplies bytes faster than a quarter as many words"
        return f"{isa.name} {faster if isa.tiles else 'has no kernel'}"
    if not lanes_of(isa, query.channels):
        return f"{query.channels} channels are no multiple of 8"
    if not query.bounded:
        return f"sums could reach {MOST_SUM:,}"
    if query.image >= _LARGEST_IMAGE:
        return "an image takes 2 GiB"
    words, direct = cut(isa, query).cycles, _direct(isa, query)
    return "" if words < direct else f"it would take {words:,} cycles, and products {direct:,}"


def _words(isa: InstructionSet) -> float:
    """That are multiplied in a cycle: without VNNI that takes two instructions."""
    vnni = vpdpwssd.feature in isa.features or vpdpwssd_256.feature in isa.features
    return isa.vector_bytes / s16.bytes / (1 if vnni else 2)


def _direct(isa: InstructionSet, query: Query) -> int:
    """Cycles of each thread, about, by products of bytes: twice as many in a cycle as words, and
    without VNNI, in three instructions, a third more."""
    vnni = _words(isa) == isa.vector_bytes / s16.bytes
    height, width = query.size
    each = KERNEL * KERNEL * query.channels * query.outputs / query.threads
    return int(query.images * height * width * each / (_words(isa) * (2 if vnni else 4 / 3)))


class Cut(NamedTuple):
    """How a convolution is cut: channels of a vector, rows of a block of registers, whether weights
    are fetched ahead, tiles and panels of an item, how many items there are, and the memory of a
    thread. cycles: that it takes, about."""

    lanes: int
    rows: int
    ahead: bool
    item_tiles: int
    item_panels: int
    items: int
    private_bytes: int
    cycles: int


def cut(isa: InstructionSet, query: Query) -> Cut:
    """For all images, and so many threads as the query says.

    The planes of an item take half of the second-level cache. Items are such that the threads, of
    which each takes one after another, are done soonest: of fewer tiles, they read all weights more
    often; of fewer columns, they transform pixels more often.
    """
    cache, together, tiles = host.caches()["L2"], panels_of(isa), query.tiles
    channels, threads, lanes = query.channels, query.threads, lanes_of(isa, query.channels)
    wide, columns = blocks(query.outputs, PANEL * together), PANEL * together
    weights = POINTS * channels * columns * s16.bytes  # bytes, of panels together
    taken = query.products / (POINTS * tiles)  # of the points, by all tiles
    by_channel = _FOR_CHANNEL * channels * (LINE / s16.bytes / lanes)
    by_column = _FOR_COLUMN * columns * (LINE / isa.vector_bytes)
    most = max(_ROWS[0], cache // 2 // _planes(isa, 1, channels))
    least = blocks(tiles, most)

    def cycles(sizes: tuple[int, int, int]) -> tuple[float, int]:
        parts, beside, rows = sizes
        turns, panels = blocks(blocks(tiles, parts), rows), blocks(wide, beside)
        each, words = turns * rows, weights / s16.bytes
        made = taken * turns * (rows + _FOR_BLOCK) * words / _words(isa)
        read = weights / _WEIGHT_BYTES
        item = panels * (max(made, read) + read / _HIDDEN + each * by_column) + each * by_channel
        items = blocks(tiles, each) * blocks(wide, panels)
        return blocks(items, threads) * item, items

    several = range(least, min(blocks(tiles, 2 * _ROWS[0]), least + _MORE_PARTS * threads) + 1)
    beside = range(1, (wide if threads > 1 else 1) + 1)
    every = product(several or (least,), beside, _ROWS)
    (parts, across, rows), (taking, items) = min(
        ((sizes, cycles(sizes)) for sizes in every), key=lambda one: one[1]
    )
    each = blocks(blocks(tiles, parts), rows) * rows
    private = private_bytes(isa, each + rows, channels)
    far, panels = wide * weights > cache // 2, blocks(wide, across) * together
    return Cut(lanes, rows, far, each, panels, items, private, int(taking))


def _planes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Bytes of the planes of rows and of sums of some tiles."""
    return POINTS * tiles * (channels * s16.bytes + panels_of(isa) * PANEL * s32.bytes)


def private_bytes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Of a thread: planes, with a line behind each, and what is copied of a tile."""
    patch = blocks((POINTS + 1) * channels, LINE) * LINE
    return _planes(isa, tiles, channels) + 2 * POINTS * LINE + patch


# G w Gᵀ: packed panels of bytes become words at the 36 points, once for each weight.


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
                    lines = [weights(row) for row in rows]
                    for j in range(SEEN):
                        column = weights([line[j] for line in lines])
                        for i, values in enumerate(column):
                            point = i * SEEN + j
                            (place + together * channels * (PANEL * point)).store(values)


def _pairs(line: Value) -> tuple[Value, Value]:
    """Of dwords of four bytes, the first two of each and the others, as words."""
    words, dwords = Vector(s16, line.lanes // 2), Vector(u32, line.lanes // 4)
    both = line.bits(words)
    even, odd = ((both << 8) >> 8).bits(dwords), (both >> 8).bits(dwords)
    low = (even & 0xFFFF) | (odd << 16)
    high = (even >> 16) | (odd & 0xFFFF0000)
    return low.bits(words), high.bits(words)
