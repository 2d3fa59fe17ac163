"""Convolution with windows of 3 x 3 in a quarter of the products: see winograd_tiles.py.

An item is some tiles of 4 x 4 outputs, one behind the other, by some panels of 16 columns:

    1. pixels of each tile → 36 planes of rows [tiles, channels], words: Bᵀ x B
    2. for some panels at a time, each plane times its weights → 36 planes of sums [tiles, columns]
    3. the 36 sums of a tile and column → 16 outputs, finished and stored

All of them lie in memory of the thread, in the second-level cache. Lines of different planes lie no
multiple of a page apart. Weights pass once for each item; where they come from afar,
those of the next plane are fetched in the course of the products of this one.

Tiles at the lower and at the right end of an image may have fewer outputs, and then take fewer of
the points. So that those that a plane has lie together, the tiles of all images are numbered in
four parts: first those at the right end but the last, then whole ones, then those at the lower end,
and at last the corners.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lowbit.isa.avx2 import vpdpwssd_256, vpmaddwd
from lowbit.isa.avx512 import vpdpwssd, vpmaddwd_512
from lowbit.isa.generic import maximum, minimum, prefetch_far, select
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S16Pointer,
    S32Pointer,
    U8Pointer,
    Vector,
    s16,
    s32,
    u8,
    u32,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.convolution.winograd_tiles import (
    POINTS,
    SEEN,
    TILE,
    WHOLE,
    Tile,
    last_tile,
    panels_of,
    sums_of,
)
from lowbit.kernels.cpu.rows.input_format import ImageRows, LeftOperand
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Output
from lowbit.kernels.cpu.shared.layout import LINE, PANEL
from lowbit.kernels.cpu.shared.post_op import Operands

_PAIR = 2  # channels in a dword
_UNROLLED = 4  # dwords of a row, in a turn of the loop over channels
_TURN = _PAIR * _UNROLLED


@kernel
def winograd(
    k: Builder,
    x: U8Pointer,
    image_stride: Int,
    weights: S16Pointer,
    row_scale: F32Pointer,
    row_zero: S32Pointer,
    column_sum: S32Pointer,
    column_scale: F32Pointer,
    bias: F32Pointer,
    residual: F32Pointer,
    parameters: F32Pointer,
    out: U8Pointer,
    m: Int,
    n: Int,
    channels: Int,
    height: Int,
    width: Int,
    above: Int,
    left: Int,
    out_height: Int,
    out_width: Int,
    item_tiles: Int,
    item_panels: Int,
    ahead: Int,
    private: U8Pointer,
    private_bytes: Int,
    *,
    format: ImageRows,
    epilogue: Epilogue,
    lanes: int,
    rows: int,
    ends: tuple[int, int],
) -> None:
    """out = epilogue(convolution of x with weights): m images, n outputs.

    x: images [height, width, channels], `image_stride` bytes apart, with pixels of the zero point
    `above` them and to their `left`, and as many below and beside as the output needs. residual and
    out: pixels n apart; other operands as those of `product`, one scale and zero point for all.
    ahead: 1 if weights are fetched, else 0. lanes: channels that are transformed at once; rows: of
    a block of registers, of which an item has whole ones; ends: what the sizes of the output are
    beyond multiples of four.
    """
    operand = LeftOperand(x, image_stride, k.index(1), k.index(0), row_zero, row_zero, k.index(0))
    operands = Operands(row_zero, row_zero, row_scale, column_sum, column_sum, column_scale, bias,
                        residual, n, parameters, out, n, n)  # fmt: skip
    # A block of rows may begin within an item's, so that one more goes over its end.
    memory = _memory(k, private + k.thread() * private_bytes, item_tiles + rows, channels)
    image = _Image(height, width, above, left, out_height, out_width)
    parts = list(_parts(k, m, (out_height // TILE, out_width // TILE), ends))
    tiles = _Tiles(k, format, operand, operands, image, weights, channels, memory, parts,
                   epilogue, lanes, rows, ahead)  # fmt: skip
    panels, count = (n + (PANEL - 1)) // PANEL, parts[-1].end
    across = (count + item_tiles - 1) // item_tiles
    for item in k.parallel(across * ((panels + item_panels - 1) // item_panels)):
        first, panel = item % across * item_tiles, item // across * item_panels
        last = minimum(first + item_tiles, count)
        tiles.run(first, last, panel, minimum(panel + item_panels, panels))


class _Memory(NamedTuple):
    """Of a thread: the first plane of rows, and of sums, how far planes lie apart, in elements, and
    what is copied of a tile, with a pixel of what lies outside behind it."""

    rows: Value
    sums: Value
    rows_apart: Value
    sums_apart: Value
    patch: Value


def _memory(k: Builder, start: Value, tiles: Value, channels: Value) -> _Memory:
    """For planes of so many tiles, each with a line behind it."""
    rows_apart = tiles * channels + LINE // s16.bytes
    sums_apart = tiles * (panels_of(k.isa) * PANEL) + LINE // s32.bytes
    sums = (start + rows_apart * (POINTS * s16.bytes)).cast(s32)
    patch = (sums + sums_apart * POINTS).cast(u8)
    return _Memory(start.cast(s16), sums, rows_apart, sums_apart, patch)


class _Image(NamedTuple):
    """An image, what lies outside of it, and the output."""

    height: Value
    width: Value
    above: Value
    left: Value
    out_height: Value
    out_width: Value


class _Part(NamedTuple):
    """Tiles of one kind, those from `begin` to before `end`, and of each how many outputs exist.
    Of an image they are so many beside each other, from tile `top` down and `left` across."""

    kinds: tuple[Tile, Tile]
    exist: tuple[int, int]
    begin: Value
    end: Value
    top: Value
    left: Value
    each: Value
    beside: Value

    def find(self, number: Value) -> tuple[Value, Value, Value]:
        """The image of a tile, and its first output: line and place along it."""
        within = number - self.begin
        image, place = within // self.each, within % self.each
        line, along = self.top + place // self.beside, self.left + place % self.beside
        return image, line * TILE, along * TILE


def _parts(
    k: Builder, images: Value, whole: tuple[Value, Value], ends: tuple[int, int]
) -> Iterator[_Part]:
    """The tiles of so many images, each of so many whole ones down and across."""
    (down, across), (below, beside) = whole, ends
    lower, right = last_tile(below), last_tile(beside)
    zero, one = k.index(0), k.index(1)
    end = zero
    for vertical, horizontal in ((0, 1), (0, 0), (1, 0), (1, 1)):
        kinds = lower if vertical else WHOLE, right if horizontal else WHOLE
        if kinds[0] is None or kinds[1] is None:
            continue
        high, wide = one if vertical else down, one if horizontal else across
        begin, end = end, end + images * high * wide
        exist = below if vertical else TILE, beside if horizontal else TILE
        yield _Part((kinds[0], kinds[1]), exist, begin, end, down if vertical else zero,
                    across if horizontal else zero, high * wide, wide)  # fmt: skip


class _Tiles:
    """Tiles of all images, some at a time; see above."""

    def __init__(
        self, k: Builder, format: ImageRows, operand: LeftOperand, operands: Operands,
        image: _Image, weights: Value, channels: Value, memory: _Memory, parts: list[_Part],
        epilogue: Epilogue, words: int, block: int, ahead: Value,
    ) -> None:  # fmt: skip
        self._k, self._format, self._operand, self._operands = k, format, operand, operands
        self._image, self._weights, self._channels, self._memory = image, weights, channels, memory
        self._parts, self._words, self._block, self._ahead = parts, words, block, ahead
        self._output = Output(k, epilogue, operands)
        self._lanes = k.isa.vector_bytes // s32.bytes
        self._offsets = range(0, PANEL, self._lanes)

    def run(self, first: Value, last: Value, panel: Value, end: Value) -> None:
        """The tiles from one to before another by such panels."""
        k, most = self._k, panels_of(self._k.isa)
        self._fill_outside()
        for part in self._parts:
            for number in k.range(maximum(first, part.begin), minimum(last, part.end)):
                self._transform(part, number, number - first)
        whole = (end - panel) // most * most + panel
        for some in k.range(panel, whole, most):
            self._columns(first, last, some, most)
        if most > 1:
            for one in k.range(whole, end):
                self._columns(first, last, one, 1)

    # 1. Pixels.

    def _fill_outside(self) -> None:
        """A pixel of what lies outside of images, behind the patch."""
        k, lanes = self._k, self._words
        nothing = (self._format.nothing(k, self._operand) ^ self._format.flip).splat(lanes)
        for channel in k.range(0, self._channels, lanes):
            (self._memory.patch + (self._channels * POINTS + channel)).store(nothing)

    def _transform(self, part: _Part, number: Value, tile: Value) -> None:
        """The pixels of one tile, from its image, or, where they go over its end, from a copy."""
        k, over, channels = self._k, self._image, self._channels
        down, along = part.kinds
        image, line, place = part.find(number)
        top, left = line - over.above, place - over.left
        start = self._operand.a + image * self._operand.row_stride
        inside = (top > -1) & (left > -1)
        inside = inside & (top + down.seen < over.height + 1)
        inside = inside & (left + along.seen < over.width + 1)
        for _ in k.when(inside.equals(0)):
            self._copy(part, start, top, left)
        source = select(inside, start + (top * over.width + left) * channels, self._memory.patch)
        below = select(inside, over.width * channels, channels * SEEN)
        lanes, flip = self._words, self._format.flip
        for channel in k.range(0, channels, lanes):
            columns = []
            for j in range(along.seen):
                pixels = (source + (below * i + (channels * j + channel)) for i in range(down.seen))
                columns.append(down.pixels([(p.load(lanes) ^ flip).to(s16) for p in pixels]))
            target = self._memory.rows + (tile * channels + channel)
            for at, i in enumerate(down.points):
                made = along.pixels([column[at] for column in columns])
                for j, value in zip(along.points, made, strict=True):
                    (target + self._memory.rows_apart * (i * SEEN + j)).store(value)

    def _copy(self, part: _Part, image: Value, top: Value, left: Value) -> None:
        """The pixels that a tile needs, with what lies outside."""
        k, over, channels = self._k, self._image, self._channels
        lanes, outside = self._words, self._memory.patch + channels * POINTS
        down, along = part.kinds
        for i in k.range(0, down.seen):
            line = top + i
            for j in k.range(0, along.seen):
                place = left + j
                within = (line > -1) & (line < over.height) & (place > -1) & (place < over.width)
                there = image + (line * over.width + place) * channels
                source = select(within, there, outside)
                target = self._memory.patch + (i * SEEN + j) * channels
                for channel in k.range(0, channels, lanes):
                    (target + channel).store((source + channel).load(lanes))

    # 2. Products.

    def _columns(self, first: Value, last: Value, panel: Value, panels: int) -> None:
        """All that comes of the rows, in a block of panels."""
        k, each = self._k, self._channels * PANEL
        for point in k.range(0, POINTS):
            rows = self._memory.rows + self._memory.rows_apart * point
            sums = self._memory.sums + self._memory.sums_apart * point
            weights = self._weights + (panel * POINTS + point * panels) * each
            begin, end = self._with(point, first, last)
            turns = (end - begin + (self._block - 1)) // self._block
            # Of what follows, an equal part in each turn over channels.
            lines = (turns + (panels * _UNROLLED - 1)) // maximum(turns, k.index(1)) * self._ahead
            for turn in k.range(0, turns):
                row = begin - first + turn * self._block
                before = turn * (lines * (self._channels // _TURN))
                fetch = weights + (each * panels + before * (PANEL * _PAIR)), lines
                a, out = rows + row * self._channels, sums + row * (panels * PANEL)
                self._multiply(a, weights, out, panels, fetch)
        with k.scope():
            for which in k.range(0, panels):
                self._finish(first, last, panel + which, which * PANEL, panels * PANEL)

    def _with(self, point: Value, first: Value, last: Value) -> tuple[Value, Value]:
        """Which of the tiles from the first to before the last take a point. Whole ones do."""
        begin, end = first, last
        for axis, number in enumerate((point // SEEN, point % SEEN)):
            short = [part for part in self._parts if part.kinds[axis] is not WHOLE]
            if not short:
                continue
            lacks = number.equals(SEEN)
            for absent in {*WHOLE.points} - {*short[0].kinds[axis].points}:
                lacks = lacks | number.equals(absent)
            for part in short:
                if part.kinds == self._parts[0].kinds and axis:  # before the whole ones
                    begin = select(lacks, maximum(begin, part.end), begin)
                else:
                    end = select(lacks, minimum(end, part.begin), end)
        return begin, maximum(begin, end)

    def _multiply(
        self, rows: Value, weights: Value, sums: Value, panels: int,
        fetch: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """A block of rows of a plane by a block of panels. fetch: from where on so many lines are
        fetched in each turn."""
        k, lanes, channels = self._k, self._lanes, self._channels
        places = [(p, at) for p in range(panels) for at in self._offsets]
        words = Vector(s16, _PAIR * lanes)
        with k.scope():
            zero = k.zeros(s32, lanes)
            made = [[k.register(zero) for _ in places] for _ in range(self._block)]
            for channel in k.range(0, channels, _TURN):
                place, lines = fetch
                before = channel // _TURN * lines
                for line in k.range(0, lines):
                    prefetch_far(place + (before + line) * (PANEL * _PAIR))
                for some in range(0, _TURN, _PAIR):
                    part = weights + (channel + some) * (panels * PANEL)
                    columns = [
                        (part + (p * PANEL + at) * _PAIR).load(_PAIR * lanes) for p, at in places
                    ]
                    for i, own in enumerate(made):
                        pair = (rows + (channels * i + (channel + some))).cast(u32).load()
                        both = pair.splat(lanes).bits(words)
                        for total, column in zip(own, columns, strict=True):
                            total.value = _added(k, total.value, both, column)
            for i, own in enumerate(made):
                for (p, at), total in zip(places, own, strict=True):
                    (sums + ((i * panels + p) * PANEL + at)).store(total.value)

    # 3. Outputs.

    def _finish(self, first: Value, last: Value, panel: Value, column: Value, stride: int) -> None:
        """One panel of the output, whose sums are those from `column` on of rows so far apart."""
        k, lanes = self._k, self._lanes
        whole = panel * PANEL + PANEL < self._operands.columns + 1
        store_rows = self._output.whole(panel, len(self._offsets), lanes)
        stores = [self._output(panel, at, lanes) for at in self._offsets]
        held = k.local(s32, TILE * TILE * PANEL)
        for part in self._parts:
            high, wide = part.exist
            for number in k.range(maximum(first, part.begin), minimum(last, part.end)):
                image, line, place = part.find(number)
                over = self._image
                start = (image * over.out_height + line) * over.out_width + place
                at = self._memory.sums + ((number - first) * stride + column)
                made = [self._sums_of(part, at + offset) for offset in self._offsets]
                for _ in k.when(whole):
                    for i in range(high):
                        row = start + over.out_width * i
                        store_rows([(row + j, [of[i][j] for of in made]) for j in range(wide)])
                for _ in k.when(whole.equals(0)):
                    for i, j in np.ndindex(high, wide):
                        for of, offset in zip(made, self._offsets, strict=True):
                            (held + ((i * TILE + j) * PANEL + offset)).store(of[i][j])
                    for i in k.range(0, high):
                        for j in k.range(0, wide):
                            for store, offset in zip(stores, self._offsets, strict=True):
                                value = (held + ((i * TILE + j) * PANEL + offset)).load(lanes)
                                store(start + (over.out_width * i + j), value)

    def _sums_of(self, part: _Part, at: Value) -> list[list[Value]]:
        """The sums of a tile's outputs, in some columns."""
        down, along = part.kinds
        planes = [
            [self._memory.sums_apart * (i * SEEN + j) for j in along.points] for i in down.points
        ]
        return sums_of(down, along, [[(at + p).load(self._lanes) for p in row] for row in planes])


def _added(k: Builder, total: Value, left: Value, right: Value) -> Value:
    """`total` and the products of two words in each dword."""
    features = k.isa.features
    for dot in (vpdpwssd, vpdpwssd_256):
        if dot.feature in features:
            return dot(total, left, right)
    multiply = vpmaddwd_512 if vpmaddwd_512.feature in features else vpmaddwd
    return total + multiply(left, right)
