"""Which convolutions Winograd's algorithm serves, and how they are cut."""

from __future__ import annotations

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
_MORE_PARTS = 4  # than the fewest, among which one is chosen
_HIDDEN = 4  # times as long as they are waited for, reading of weights takes beside products
# Cycles that a tile takes beside its products, for each column and each channel; and bytes of
# weights that come from the last cache or beyond in one, which few tiles wait for.
_FOR_COLUMN, _FOR_CHANNEL, _WEIGHT_BYTES = 8, 6, 8


class Query(NamedTuple):
    """A convolution as far as it decides whether this kernel serves it.

    window: of its kernel; `plain`: stride and dilation are 1, what lies outside is the zero point,
    and there is one group. size: of the output of each of the images. `bounded`: no sum of stored
    values reaches MOST_SUM.
    """

    window: tuple[int, ...]
    plain: bool
    channels: int
    outputs: int
    images: int
    size: tuple[int, ...]
    bounded: bool

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


def refuses(isa: InstructionSet, query: Query) -> str:
    """ "" if the kernel serves, and should be faster than products of bytes, else why not."""
    if query.window != (KERNEL, KERNEL) or not query.plain:
        return "windows are 3 x 3 pixels of all channels, side by side"
    if not may_serve(isa):
        return f"{isa.name} multiplies bytes faster than a quarter as many words"
    if not lanes_of(isa, query.channels):
        return f"{query.channels} channels are no multiple of 8"
    if not query.bounded:
        return f"sums could reach {MOST_SUM:,}"
    words, direct = _cycles(isa, query)
    return "" if words < direct else f"it would take {words:,} cycles, and products {direct:,}"


def _cycles(isa: InstructionSet, query: Query) -> tuple[int, int]:
    """Of one thread, about, by this kernel and by products of bytes."""
    vnni = vpdpwssd.feature in isa.features or vpdpwssd_256.feature in isa.features
    lanes, each = isa.vector_bytes // s16.bytes, query.channels * query.outputs
    # Without VNNI, words take two instructions, and bytes three.
    words, byte = (lanes, 2 * lanes) if vnni else (lanes / 2, 2 * lanes / 3)
    products = max(query.products / words, POINTS * s16.bytes / _WEIGHT_BYTES) * each
    transformed = query.channels * (lanes // lanes_of(isa, query.channels))
    beside = query.tiles * (_FOR_COLUMN * query.outputs + _FOR_CHANNEL * transformed)
    height, width = query.size
    direct = query.images * height * width * KERNEL * KERNEL * each / byte
    return int(products + beside * (LINE / isa.vector_bytes)), int(direct)


class Cut(NamedTuple):
    """How a convolution is cut: channels of a vector, rows of a block of registers, whether weights
    are fetched ahead, tiles and panels of an item, and the memory of a thread."""

    lanes: int
    rows: int
    ahead: bool
    item_tiles: int
    item_panels: int
    private_bytes: int


def cut(isa: InstructionSet, tiles: int, channels: int, outputs: int, threads: int) -> Cut:
    """So many tiles of all images, for so many threads.

    The planes of an item take half of the second-level cache. Items are such that the threads, of
    which each takes one after another, are done soonest: of fewer tiles, they read all weights more
    often; of fewer columns, they transform pixels more often.
    """
    cache, together = host.caches()["L2"], panels_of(isa)
    wide, words = blocks(outputs, PANEL * together), isa.vector_bytes // s16.bytes
    weights = POINTS * channels * PANEL * together * s16.bytes  # bytes, of panels together
    most = max(_ROWS[0], cache // 2 // _planes(isa, 1, channels))
    least = blocks(tiles, most)

    def cost(sizes: tuple[int, int, int]) -> float:
        parts, beside, rows = sizes
        each, panels = blocks(tiles, parts), blocks(wide, beside)
        turns = blocks(each, rows)
        products = turns * (rows + 1) * panels * weights / s16.bytes / words
        transformed = each * channels * _FOR_CHANNEL
        waited = panels * weights / (_HIDDEN * _WEIGHT_BYTES)
        items = blocks(tiles, each) * blocks(wide, panels)
        return blocks(items, threads) * (products + transformed + waited)

    several = range(least, max(least, blocks(tiles, 2 * _ROWS[0]), 1) + 1)
    if threads == 1:
        several = range(least, least + _MORE_PARTS)
    every = product(several, range(1, (wide if threads > 1 else 1) + 1), _ROWS)
    parts, beside, rows = min(every, key=cost)
    each = blocks(blocks(tiles, parts), rows) * rows
    private = private_bytes(isa, each + rows, channels)
    far = wide * weights > cache // 2
    return Cut(lanes_of(isa, channels), rows, far, each, blocks(wide, beside) * together, private)


def _planes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Bytes of the planes of rows and of sums of some tiles."""
    return POINTS * tiles * (channels * s16.bytes + panels_of(isa) * PANEL * s32.bytes)


def private_bytes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Of a thread: planes, with a line behind each, and what is copied of a tile."""
    patch = blocks((POINTS + 1) * channels, LINE) * LINE
    return _planes(isa, tiles, channels) + 2 * POINTS * LINE + patch
