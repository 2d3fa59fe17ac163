"""Which convolutions Winograd's algorithm serves, and how they are cut."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from lowbit.isa import InstructionSet, host
from lowbit.isa.avx2_vnni import vpdpwssd_256
from lowbit.isa.avx512_vnni import vpdpwssd
from lowbit.isa.types import s16, s32
from lowbit.kernels.cpu.convolution.winograd.arithmetic import (
    KERNEL,
    MOST_SUM,
    POINTS,
    TILE,
    WHOLE,
    last_tile,
)
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks

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
