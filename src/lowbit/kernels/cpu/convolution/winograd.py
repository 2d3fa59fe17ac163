"""Convolution with windows of 3 x 3 by Winograd's algorithm, in whole numbers: exact.

Four by four outputs that are neighbours need six by six pixels, and 144 products a channel. As
polynomials that are multiplied by way of their values at six points, along both axes, they need 36:

    Y = Aᵀ [ (G w Gᵀ) ∘ (Bᵀ x B) ] A          (Winograd, 1980; Lavin and Gray, "Fast Algorithms for
                                               Convolutional Neural Networks", 2016, F(4x4, 3x3))

The points are 0, 1, −1, 2, −2 and infinity. A and G usually hold sixths and twenty-fourths. Here
all three are of integers, so that what comes out is 24² times the sum, or a quarter of that and
less (`_SHIFTS`): 9·2^s times. Sums of 32 bits wrap, and are right modulo 2^32. Nine has an inverse
there; 2^s is shifted away, and what is left is right modulo 2^26. So it is right if the sum has 26
bits (`MOST_SUM`), which is known from the weights. Pixels become words of at most 68·255 (and
weights of at most 49·128), so the products are those of 16 bits: a quarter as many, at half the
rate of those of bytes, or better where bytes have no exact product.

An item is some tiles of 4 x 4 outputs, one behind the other, by some panels of 16 columns:

    1. pixels of each tile → 36 planes of rows [tiles, channels], words: Bᵀ x B
    2. for some panels at a time, each plane times its weights → 36 planes of sums [tiles, columns]
    3. the 36 sums of a tile and column → 16 outputs, finished and stored

All of them lie in memory of the thread, in the second-level cache. Lines of different planes lie no
multiple of a page apart. Weights: words, for each block of panels that are multiplied at once
(`panels_of`; each of those that are left is a block) [36, panels, channels / 2, 16 columns, 2
channels]. They pass once for each item; where they come from afar, those of the next plane are
fetched in the course of the products of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa import InstructionSet, host
from lowbit.isa.avx2 import vpmaddwd
from lowbit.isa.avx2_vnni import vpdpwssd_256
from lowbit.isa.avx512 import vpmaddwd_512
from lowbit.isa.avx512_vnni import vpdpwssd
from lowbit.isa.generic import minimum, prefetch_far, select
from lowbit.isa.types import F32Pointer, Int, S16Pointer, S32Pointer, U8Pointer, s16, s32, u32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.rows.input_format import ImageRows, LeftOperand
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Output
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.kernels.cpu.shared.post_op import Operands

KERNEL, TILE, SEEN = 3, 4, 6  # of a window, of a tile's outputs, of the pixels that these need
POINTS = SEEN * SEEN
MOST_SUM = 1 << 25  # below which the magnitude of each sum of bytes must be
_PAIR = 2  # channels in a dword
_INVERSE_OF_9 = pow(9, -1, 1 << 32)
_SHIFTS = 3, 2, 1, 1  # an output of place i along an axis comes out as 3·2^shift times itself
_ROWS = 6, 5, 4  # of a block of registers; the fewest are for few tiles
_LEAST_VECTOR = 32  # bytes
_ITEMS_PER_THREAD = 4  # so that one that lost its core does not hold up the others
_UNROLLED = 4  # dwords of a row, in a turn of the loop over channels
# Cycles that a tile takes beside its products, for each column and each channel; and bytes of
# weights that come from the last cache or beyond in one, which few tiles wait for.
_FOR_COLUMN, _FOR_CHANNEL, _WEIGHT_BYTES = 8, 6, 8


class Query(NamedTuple):
    """A convolution as far as it decides whether this kernel serves it.

    window: of its kernel; `plain`: stride and dilation are 1, what lies outside is the zero point,
    and there is one group. tiles: of all images; pixels: of their outputs. `bounded`: no sum of
    stored values reaches MOST_SUM.
    """

    window: tuple[int, ...]
    plain: bool
    channels: int
    outputs: int
    tiles: int
    pixels: int
    bounded: bool


def may_serve(isa: InstructionSet) -> bool:
    """Whether the kernel is for a set: tiles multiply bytes faster, and short vectors hold too
    little."""
    return isa.architecture == "x86_64" and isa.vector_bytes >= _LEAST_VECTOR and not isa.tiles


def lanes_of(isa: InstructionSet) -> int:
    """Channels in a vector of words."""
    return isa.vector_bytes // 2


def refuses(isa: InstructionSet, query: Query) -> str:
    """ "" if the kernel serves, and should be faster than products of bytes, else why not."""
    if query.window != (KERNEL, KERNEL) or not query.plain:
        return "windows are 3 x 3 pixels of all channels, side by side"
    if not may_serve(isa):
        return f"{isa.name} multiplies bytes faster than a quarter as many words"
    if query.channels % lanes_of(isa):
        return f"{query.channels} channels are no multiple of {lanes_of(isa)}"
    if not query.bounded:
        return f"sums could reach {MOST_SUM:,}"
    words, direct = _cycles(isa, query)
    return "" if words < direct else f"it would take {words:,} cycles, and products {direct:,}"


def _cycles(isa: InstructionSet, query: Query) -> tuple[int, int]:
    """Of one thread, about, by this kernel and by products of bytes."""
    vnni = vpdpwssd.feature in isa.features or vpdpwssd_256.feature in isa.features
    lanes, each = lanes_of(isa), query.channels * query.outputs
    # Without VNNI, words take two instructions, and bytes three.
    words, byte = (lanes, 2 * lanes) if vnni else (lanes / 2, 2 * lanes / 3)
    products = max(query.tiles / words, 2 / _WEIGHT_BYTES) * POINTS * each
    beside = query.tiles * (_FOR_COLUMN * query.outputs + _FOR_CHANNEL * query.channels)
    direct = query.pixels * KERNEL * KERNEL * each / byte
    return int(products + beside * (LINE / isa.vector_bytes)), int(direct)


class Cut(NamedTuple):
    """How a convolution is cut: rows of a block of registers, whether weights are fetched ahead,
    tiles and panels of an item, and the memory of a thread."""

    rows: int
    ahead: bool
    item_tiles: int
    item_panels: int
    private_bytes: int


def cut(isa: InstructionSet, tiles: int, channels: int, outputs: int, threads: int) -> Cut:
    """So many tiles of all images, for so many threads.

    The planes of an item take half of the second-level cache. For several threads there are some
    items for each, of as many tiles as that leaves, then of fewer panels.
    """
    most = max(_ROWS[0], host.caches()["L2"] // 2 // _planes(isa, 1, channels))
    wanted = threads * _ITEMS_PER_THREAD if threads > 1 else 1
    parts = max(blocks(tiles, most), min(wanted, blocks(tiles, 2 * _ROWS[0])))
    each = blocks(tiles, parts)
    rows = min(_ROWS, key=lambda rows: (blocks(each, rows) * (rows + 1), -rows))
    each = blocks(each, rows) * rows
    wide = blocks(outputs, PANEL * panels_of(isa))
    beside = min(wide, blocks(wanted, blocks(tiles, each)))
    far = POINTS * channels * outputs * s16.bytes > host.caches()["L2"] // 2
    item_panels = blocks(wide, beside) * panels_of(isa)
    return Cut(rows, far, each, item_panels, _private_bytes(isa, each, channels))


def _planes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Bytes of the planes of rows and of sums of some tiles."""
    return POINTS * tiles * (channels * s16.bytes + panels_of(isa) * PANEL * s32.bytes)


def _private_bytes(isa: InstructionSet, tiles: int, channels: int) -> int:
    """Of a thread: planes, with a line behind each, and what is copied of a tile."""
    patch = blocks((POINTS + 1) * channels, LINE) * LINE
    return _planes(isa, tiles, channels) + 2 * POINTS * LINE + patch


def panels_of(isa: InstructionSet) -> int:
    """That are multiplied at once."""
    return 4 if isa.vector_registers > 16 else 1


def packed(kernels: npt.NDArray[np.int16], panels: int) -> npt.NDArray[np.int16]:
    """G w Gᵀ of kernels [3, 3, panels, words of a panel], in blocks of so many panels."""
    *_, count, size = kernels.shape
    made = aligned_empty((count * POINTS * size,), np.int16, lasting=True)
    whole = count // panels * panels
    for begin, end, each in ((0, whole, panels), (whole, count, 1)):
        if begin < end:
            some = kernels[:, :, begin:end].reshape(KERNEL, KERNEL, -1, each * size)
            part = made[begin * POINTS * size : end * POINTS * size]
            _transform(some, part.reshape(-1, POINTS, each * size).swapaxes(0, 1))
    return made


def _transform(kernels: npt.NDArray[np.int16], out: npt.NDArray[np.int16]) -> None:
    """Kernels [3, 3, ...] become [36, ...], element by element."""
    lines = [_weights(kernels[:, i]) for i in range(KERNEL)]  # [column][point] of rows
    for i in range(SEEN):
        _weights([line[i] for line in lines], out[i * SEEN : i * SEEN + SEEN])


def _weights(w: Any, out: Any = None) -> Any:
    """Values of w0 + w1·t + w2·t² at the six points, at 0 and infinity three times that."""
    out = np.empty((SEEN, *w[0].shape), np.int16) if out is None else out
    np.multiply(w[0], 3, out=out[0])
    np.multiply(w[2], 3, out=out[5])
    even, odd = w[0] + w[2], w[1]
    np.add(even, odd, out=out[1])
    np.subtract(even, odd, out=out[2])
    even = even + 3 * w[2]
    odd = odd + odd
    np.add(even, odd, out=out[3])
    np.subtract(even, odd, out=out[4])
    return out


def _pixels(d: Sequence[Value]) -> list[Value]:
    """Bᵀ d."""
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


def _outputs(m: Sequence[Value]) -> list[Value]:
    """Aᵀ m."""
    plus, minus = m[1] + m[2], m[1] - m[2]
    far_plus, far_minus = m[3] + m[4], m[3] - m[4]
    return [
        ((m[0] - (plus << 1)) << 1) + far_plus,
        far_minus - (minus << 1),
        far_plus - plus,
        ((far_minus + m[5]) << 1) - minus,
    ]


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
    tiles_down: Int,
    tiles_across: Int,
    item_tiles: Int,
    item_panels: Int,
    private: U8Pointer,
    private_bytes: Int,
    *,
    format: ImageRows,
    epilogue: Epilogue,
    rows: int,
    ahead: bool = False,
) -> None:
    """out = epilogue(convolution of x with weights): m tiles of all images, n outputs.

    x: images [height, width, channels], `image_stride` bytes apart, with pixels of the zero point
    `above` them and to their `left`, and as many below and beside as the output needs. residual and
    out: pixels n apart; other operands as those of `product`, one scale and zero point for all.
    rows: of a block of registers, of which an item has whole ones. ahead: weights are fetched.
    """
    operand = LeftOperand(x, image_stride, k.index(1), k.index(0), row_zero, row_zero, k.index(0))
    operands = Operands(row_zero, row_zero, row_scale, column_sum, column_sum, column_scale, bias,
                        residual, n, parameters, out, n, n)  # fmt: skip
    plane = Planes(item_tiles * channels + LINE // s16.bytes,
                   item_tiles * (panels_of(k.isa) * PANEL) + LINE // s32.bytes)  # fmt: skip
    own = private + k.thread() * private_bytes
    sums = (own + plane.rows * (POINTS * s16.bytes)).cast(s32)
    patch = (sums + plane.sums * POINTS).cast(x.type.element)
    grid = _Grid(tiles_down, tiles_across, height, width, above, left, out_height, out_width)
    tiles = _Tiles(k, format, operand, operands, grid, weights, channels, plane,
                   own.cast(s16), sums, patch, epilogue, rows, ahead)  # fmt: skip
    panels = (n + (PANEL - 1)) // PANEL
    parts = (m + item_tiles - 1) // item_tiles
    for item in k.parallel(parts * ((panels + item_panels - 1) // item_panels)):
        first, panel = item % parts * item_tiles, item // parts * item_panels
        count = minimum(m - first, item_tiles)
        tiles.run(first, count, panel, minimum(panel + item_panels, panels))


class Planes(NamedTuple):
    """How far those of rows and of sums lie apart, in elements."""

    rows: Value
    sums: Value


class _Grid(NamedTuple):
    """Tiles of an image, the image, what lies outside of it, the output."""

    down: Value
    across: Value
    height: Value
    width: Value
    above: Value
    left: Value
    out_height: Value
    out_width: Value

    def find(self, number: Value) -> tuple[Value, Value, Value]:
        """The image of a tile, and its first output: line and place along it."""
        each = self.down * self.across
        within = number % each
        return number // each, within // self.across * TILE, within % self.across * TILE


class _Tiles:
    """Tiles of all images, some at a time; see above."""

    def __init__(
        self, k: Builder, format: ImageRows, operand: LeftOperand, operands: Operands, grid: _Grid,
        weights: Value, channels: Value, plane: Planes, rows: Value, sums: Value, patch: Value,
        epilogue: Epilogue, block: int, ahead: bool,
    ) -> None:  # fmt: skip
        self._k, self._format, self._operand, self._operands = k, format, operand, operands
        self._grid, self._weights, self._channels, self._plane = grid, weights, channels, plane
        self._rows, self._sums, self._patch, self._block = rows, sums, patch, block
        self._ahead = ahead
        self._output = Output(k, epilogue, operands)
        self._lanes = k.isa.vector_bytes // s32.bytes
        self._offsets = range(0, PANEL, self._lanes)

    def run(self, first: Value, count: Value, panel: Value, end: Value) -> None:
        """Some tiles by the panels from one to before another."""
        k, most = self._k, panels_of(self._k.isa)
        self._fill_outside()
        for tile in k.range(0, count):
            self._transform(first + tile, tile)
        whole = (end - panel) // most * most + panel
        for some in k.range(panel, whole, most):
            self._columns(first, count, some, most)
        if most > 1:
            for one in k.range(whole, end):
                self._columns(first, count, one, 1)

    # 1. Pixels.

    def _fill_outside(self) -> None:
        """A pixel of what lies outside of images, behind the patch."""
        k, lanes = self._k, lanes_of(self._k.isa)
        nothing = (self._format.nothing(k, self._operand) ^ self._format.flip).splat(lanes)
        for channel in k.range(0, self._channels, lanes):
            (self._patch + (self._channels * POINTS + channel)).store(nothing)

    def _transform(self, number: Value, tile: Value) -> None:
        """The pixels of one tile, from its image, or, where they go over its end, from a copy."""
        k, grid, channels = self._k, self._grid, self._channels
        image, line, place = grid.find(number)
        top, left = line - grid.above, place - grid.left
        start = self._operand.a + image * self._operand.row_stride
        inside = (top > -1) & (left > -1)
        inside = inside & (top + SEEN < grid.height + 1) & (left + SEEN < grid.width + 1)
        for _ in k.when(inside.equals(0)):
            self._copy(start, top, left)
        source = select(inside, start + (top * grid.width + left) * channels, self._patch)
        down = select(inside, grid.width * channels, channels * SEEN)
        lanes, flip = lanes_of(k.isa), self._format.flip
        for channel in k.range(0, channels, lanes):
            columns = [
                _pixels([
                    ((source + (down * i + (channels * j + channel))).load(lanes) ^ flip).to(s16)
                    for i in range(SEEN)
                ])
                for j in range(SEEN)
            ]  # fmt: skip
            target = self._rows + (tile * channels + channel)
            for i in range(SEEN):
                for j, value in enumerate(_pixels([column[i] for column in columns])):
                    (target + self._plane.rows * (i * SEEN + j)).store(value)

    def _copy(self, image: Value, top: Value, left: Value) -> None:
        """Six by six pixels, with what lies outside."""
        k, grid, channels = self._k, self._grid, self._channels
        lanes, outside = lanes_of(k.isa), self._patch + channels * POINTS
        for i in k.range(0, SEEN):
            line = top + i
            for j in k.range(0, SEEN):
                place = left + j
                within = (line > -1) & (line < grid.height) & (place > -1) & (place < grid.width)
                there = image + (line * grid.width + place) * channels
                source, target = (
                    select(within, there, outside),
                    self._patch + (i * SEEN + j) * channels,
                )
                for channel in k.range(0, channels, lanes):
                    (target + channel).store((source + channel).load(lanes))

    # 2. Products.

    def _columns(self, first: Value, count: Value, panel: Value, panels: int) -> None:
        """All that comes of the rows, in a block of panels."""
        k, each = self._k, self._channels * PANEL
        turns = (count + (self._block - 1)) // self._block
        share = (turns + (panels * _UNROLLED - 1)) // turns if self._ahead else None
        for point in k.range(0, POINTS):
            rows = self._rows + self._plane.rows * point
            sums = self._sums + self._plane.sums * point
            weights = self._weights + (panel * POINTS + point * panels) * each
            for turn in k.range(0, turns):
                row, fetch = turn * self._block, None
                if share is not None:  # what follows, in equal parts
                    lines = turn * (share * (self._channels // (_PAIR * _UNROLLED)))
                    fetch = (weights + (each * panels + lines * PANEL * _PAIR)), share
                a, out = rows + row * self._channels, sums + row * (panels * PANEL)
                self._multiply(a, weights, out, panels, fetch)
        for which in k.range(0, panels):
            self._finish(first, count, panel + which, which * PANEL, panels * PANEL)

    def _multiply(
        self, rows: Value, weights: Value, sums: Value, panels: int,
        fetch: tuple[Value, Value] | None,
    ) -> None:  # fmt: skip
        """A block of rows of a plane by a block of panels. fetch: from where on so many lines are
        fetched in each turn."""
        k, lanes, channels = self._k, self._lanes, self._channels
        places = [(p, at) for p in range(panels) for at in self._offsets]
        with k.scope():
            zero = k.zeros(s32, lanes)
            made = [[k.register(zero) for _ in places] for _ in range(self._block)]
            for channel in k.range(0, channels, _PAIR * _UNROLLED):
                if fetch:
                    place, lines = fetch
                    before = channel // (_PAIR * _UNROLLED) * lines
                    for line in k.range(0, lines):
                        prefetch_far(place + (before + line) * (PANEL * _PAIR))
                for some in range(0, _PAIR * _UNROLLED, _PAIR):
                    part = weights + (channel + some) * PANEL
                    columns = [
                        (part + (channels * (p * PANEL) + at * _PAIR)).load(_PAIR * lanes)
                        for p, at in places
                    ]
                    for i, own in enumerate(made):
                        pair = (rows + (channels * i + (channel + some))).cast(u32).load()
                        both = pair.splat(lanes).bits(columns[0].type)
                        for total, column in zip(own, columns, strict=True):
                            total.value = _added(k, total.value, both, column)
            for i, own in enumerate(made):
                for (p, at), total in zip(places, own, strict=True):
                    (sums + ((i * panels + p) * PANEL + at)).store(total.value)

    # 3. Outputs.

    def _finish(self, first: Value, count: Value, panel: Value, column: Value, stride: int) -> None:
        """One panel of the output, whose sums are those from `column` on of rows so far apart."""
        k, grid, lanes = self._k, self._grid, self._lanes
        vectors = len(self._offsets)
        whole = panel * PANEL + PANEL < self._operands.columns + 1
        store_rows = self._output.whole(panel, vectors, lanes)
        stores = [self._output(panel, at, lanes) for at in self._offsets]
        held = k.local(s32, TILE * TILE * PANEL)
        for tile in k.range(0, count):
            image, line, place = grid.find(first + tile)
            start = (image * grid.out_height + line) * grid.out_width + place
            lines, along = grid.out_height - line, grid.out_width - place
            at = self._sums + (tile * stride + column)
            made = [self._sums_of(at + offset) for offset in self._offsets]
            inside = whole & (lines > TILE - 1) & (along > TILE - 1)
            for _ in k.when(inside):
                for i in range(TILE):
                    row = start + grid.out_width * i
                    store_rows([(row + j, [of[i][j] for of in made]) for j in range(TILE)])
            for _ in k.when(inside.equals(0)):
                for i, j in np.ndindex(TILE, TILE):
                    for of, offset in zip(made, self._offsets, strict=True):
                        (held + ((i * TILE + j) * PANEL + offset)).store(of[i][j])
                for i in k.range(0, minimum(lines, k.index(TILE))):
                    for j in k.range(0, minimum(along, k.index(TILE))):
                        for store, offset in zip(stores, self._offsets, strict=True):
                            value = (held + ((i * TILE + j) * PANEL + offset)).load(lanes)
                            store(start + (grid.out_width * i + j), value)

    def _sums_of(self, at: Value) -> list[list[Value]]:
        """The sums of a tile's outputs, in some columns."""
        lanes, plane = self._lanes, self._plane.sums
        columns = [
            _outputs([(at + plane * (i * SEEN + j)).load(lanes) for i in range(SEEN)])
            for j in range(SEEN)
        ]
        lines = [_outputs([column[i] for column in columns]) for i in range(TILE)]
        return [
            [(value * _INVERSE_OF_9) >> (_SHIFTS[i] + _SHIFTS[j]) for j, value in enumerate(line)]
            for i, line in enumerate(lines)
        ]


def _added(k: Builder, total: Value, left: Value, right: Value) -> Value:
    """`total` and the products of two words in each dword."""
    features = k.isa.features
    for dot in (vpdpwssd, vpdpwssd_256):
        if dot.feature in features:
            return dot(total, left, right)
    multiply = vpmaddwd_512 if vpmaddwd_512.feature in features else vpmaddwd
    return total + multiply(left, right)
