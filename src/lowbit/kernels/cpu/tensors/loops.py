"""Loops over strided tensors: which dimensions they run over, in which order, how they are cut.

`plan_loops` decides that from a shape and the strides of each operand, once. What it decides lies
in a table of int64, which `Nest` reads in a kernel:

    6 sizes | 6 blocks | 6 strides of each operand, the output first

An item of a parallel region is one block of every dimension; the outer three have blocks of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import minimum, shuffle
from lowbit.isa.types import F32Pointer, Int, U8Pointer, Vector, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder, item_size
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    load_vector,
    parameters_of,
    store_vector,
    storing,
    transposed,
)

DIMENSIONS, INNER = 6, 3
# Elements of an item, about: long beside what an item costs, and two fit in L1.
_LEAST, _MOST = 1024, 16384
GATHERED = 256  # elements of a row that pass through scratch memory together
_MASKING_BYTES = 64  # the size of registers, where loads and stores of bytes can be masked
TILE_BYTES = 16  # a side of the tiles that `transposed` operands are moved in

CONTIGUOUS, BROADCAST, STRIDED, TRANSPOSED = "contiguous", "broadcast", "strided", "transposed"
_ROW_COST, _STRIDED_COST, _COST = 30.0, 1.5, 0.1  # in cycles, roughly


@dataclass(frozen=True)
class Loops:
    """columns: how each operand, the output first, lies along the innermost loop. It keys code.

    geometry: int64, the table. items: how many blocks there are, 0 for an empty tensor.
    """

    columns: tuple[str, ...]
    geometry: npt.NDArray[np.int64]
    items: int


@dataclass(frozen=True)
class _Dimension:
    size: int
    strides: tuple[int, ...]  # of each operand, the output first


def plan_loops(
    shape: Sequence[int], strides: Sequence[Sequence[int]], tile_bytes: int = 0
) -> Loops:
    """Loops over a tensor of this shape.

    - strides: of each operand, the output first, in elements of that operand; 0 where an input is
      broadcast, negative where it runs backwards.
    - tile_bytes: the size of an element, where output and one input, of equal elements, may be
      moved in tiles.

    NotImplementedError: there are more than six dimensions that cannot be merged. ValueError:
    strides do not fit.
    """
    if any(len(one) != len(shape) for one in strides):
        raise ValueError(f"strides {strides} do not fit the shape {tuple(shape)}")
    sizes = [int(size) for size in shape]
    found = [
        _Dimension(size, tuple(int(one[axis]) for one in strides))
        for axis, size in enumerate(sizes)
        if size > 1
    ]
    found.sort(key=lambda one: -abs(one.strides[0]))
    merged = _merged(found) or [_Dimension(1, (1,) + (0,) * (len(strides) - 1))]
    if len(merged) > DIMENSIONS:
        raise NotImplementedError(
            f"{len(merged)} dimensions of {tuple(shape)} remain, at most {DIMENSIONS}"
        )
    ordered, columns = _ordered(merged, tile_bytes)
    padding = [_Dimension(1, (0,) * len(strides))] * (DIMENSIONS - len(ordered))
    ordered = padding + ordered
    blocks = _blocks(ordered, columns)
    items = math.prod(-(-one.size // b) for one, b in zip(ordered, blocks, strict=True))
    rows = [[one.size for one in ordered], blocks]
    rows += [[one.strides[operand] for one in ordered] for operand in range(len(strides))]
    return Loops(columns, np.array(rows, np.int64), items if all(sizes) else 0)


def _merged(dimensions: list[_Dimension]) -> list[_Dimension]:
    """Neighbours that all operands run through as if they were one, as one."""
    made: list[_Dimension] = []
    for one in dimensions:
        last = made[-1] if made else None
        if last and all(a == b * one.size for a, b in zip(last.strides, one.strides, strict=True)):
            made[-1] = _Dimension(last.size * one.size, one.strides)
        else:
            made.append(one)
    return made


def _kind(stride: int) -> str:
    return {0: BROADCAST, 1: CONTIGUOUS}.get(stride, STRIDED)


def _cost(one: _Dimension) -> float:
    """Of an element, if this dimension is the innermost."""
    strided = sum(_kind(stride) == STRIDED for stride in one.strides)
    return _ROW_COST / one.size + strided * _STRIDED_COST + len(one.strides) * _COST


def _ordered(
    dimensions: list[_Dimension], tile_bytes: int
) -> tuple[list[_Dimension], tuple[str, ...]]:
    """Dimensions from the outermost on, and how operands lie along the innermost."""
    side = TILE_BYTES // tile_bytes if tile_bytes else 0
    if side > 1:
        across = [d for d in dimensions if d.strides[1] == 1 != d.strides[0] and d.size >= side]
        along = [d for d in dimensions if d.strides[0] == 1 != d.strides[1] and d.size >= side]
        if across and along and along[0].strides[1]:
            inner = [across[0], along[0]]
            rest = [one for one in dimensions if one not in inner]
            return rest + inner, (CONTIGUOUS, TRANSPOSED)
    # Of equals the one whose output stride is least: it stands last.
    best = min(reversed(dimensions), key=_cost)
    columns = tuple(map(_kind, best.strides))
    if columns[0] == BROADCAST:  # an output is written once
        columns = (STRIDED, *columns[1:])
    rest = [one for one in dimensions if one is not best]
    strided = [at for at, kind in enumerate(columns) if kind == STRIDED]
    # Where a row strides through memory, the next one should take the neighbours.
    rest.sort(key=lambda one: any(one.strides[at] == 1 for at in strided))
    return [*rest, best], columns


def _blocks(dimensions: list[_Dimension], columns: tuple[str, ...]) -> list[int]:
    narrow = STRIDED in columns or TRANSPOSED in columns
    left = item_size(math.prod(one.size for one in dimensions), _LEAST, _MOST)
    limit, blocks = GATHERED if narrow else _MOST, list[int]()
    for one in reversed(dimensions[-INNER:]):
        blocks.insert(0, max(1, min(one.size, left, limit)))
        left, limit = left // blocks[0], _MOST
    return [1] * (DIMENSIONS - INNER) + blocks


@dataclass(frozen=True)
class Block:
    """One item: so many planes, rows and columns, and where each operand begins."""

    extents: tuple[Value, ...]
    pointers: list[Value]
    strides: list[tuple[Value, ...]]

    def rows(self, k: Builder, body: Callable[[list[Value]], None]) -> None:
        """Emit loops over planes and rows; `body` gets the pointers to a row."""
        planes, rows, _ = self.extents
        for plane in k.range(0, planes):
            begin = self.at(self.pointers, 0, plane)
            for row in k.range(0, rows):
                body(self.at(begin, 1, row))

    def at(self, pointers: list[Value], dimension: int, index: Value) -> list[Value]:
        return [
            pointer + index * stride[dimension]
            for pointer, stride in zip(pointers, self.strides, strict=True)
        ]


class Nest:
    """The table of `plan_loops`, in a kernel."""

    def __init__(self, k: Builder, geometry: Value, operands: int) -> None:
        self._k = k

        def row(number: int) -> list[Value]:
            return [(geometry + (number * DIMENSIONS + d)).load() for d in range(DIMENSIONS)]

        self.sizes, self.blocks = row(0), row(1)
        self.strides = [row(2 + operand) for operand in range(operands)]

    def block(self, item: Value, pointers: list[Value]) -> Block:
        """The item of that number; `pointers` to each operand's first element."""
        rest, starts = item, list[Value]()
        for size, block in zip(reversed(self.sizes), reversed(self.blocks), strict=True):
            count = (size + (block - 1)) // block
            starts.insert(0, rest % count * block)
            rest = rest // count
        at = list[Value]()
        for pointer, strides in zip(pointers, self.strides, strict=True):
            for start, stride in zip(starts, strides, strict=True):
                pointer = pointer + start * stride
            at.append(pointer)
        inner = slice(DIMENSIONS - INNER, None)
        parts = zip(self.sizes[inner], starts[inner], self.blocks[inner], strict=True)
        extents = tuple(minimum(size - start, block) for size, start, block in parts)
        return Block(extents, at, [tuple(strides[inner]) for strides in self.strides])


TOGETHER = 4  # vectors

# (first element, lanes, number of vectors, how many elements are left where they fill none)
Vectors = Callable[[Value, int, int, Value | None], None]


def by_vectors(
    k: Builder, count: Value, lanes: int, together: int, body: Vectors, halving: bool = False
) -> None:
    """Emit loops over `count` elements: so many vectors at a time, then one, then what is left.

    halving: what is left may be taken in vectors of half as many lanes, a quarter, and so on, which
    is done where an instruction set cannot mask bytes.
    """
    wide = together * lanes
    first, second = count // wide * wide, count // lanes * lanes
    for at in k.range(0, first, wide):
        body(at, lanes, together, None)
    for at in k.range(first, second, lanes):
        body(at, lanes, 1, None)
    if not halving or k.isa.vector_bytes == _MASKING_BYTES:
        for _ in k.when(second < count):
            body(second, lanes, 1, count - second)
        return
    while lanes > 1:
        before, lanes = count // lanes * lanes, lanes // 2
        for _ in k.when((count & lanes) > 0):
            body(before, lanes, 1, None)


def convert_row(
    k: Builder, source: Value, target: Value, count: Value, lanes: int,
    convert: Callable[[Value], Value], halving: bool = False,
) -> None:  # fmt: skip
    """Emit target[i] = convert(source[i]) for `count` contiguous elements, by vectors."""

    def some(at: Value, lanes: int, together: int, left: Value | None) -> None:
        for part in range(0, together * lanes, lanes):
            value = convert(load_vector(source + at + part, lanes, left))
            store_vector(value, target + at + part, left)

    by_vectors(k, count, lanes, TOGETHER, some, halving)


# Moving tiles of a matrix across its diagonal, in registers of 16 bytes.


def move_tiles(k: Builder, block: Block) -> None:
    """Copy a block whose input runs along its rows, as its output does along its columns."""
    planes, rows, columns = block.extents
    (_, out_stride, _), (_, _, in_stride) = block.strides
    side = TILE_BYTES // block.pointers[0].type.element.bytes  # type: ignore[union-attr]
    whole_rows, whole_columns = rows // side * side, columns // side * side
    for plane in k.range(0, planes):
        out, source = block.at(block.pointers, 0, plane)

        def move(row: Value, column: Value, out: Value = out, source: Value = source) -> None:
            moved = (source + row + column * in_stride).load()
            (out + row * out_stride + column).store(moved)

        for row in k.range(0, whole_rows, side):
            for column in k.range(0, whole_columns, side):
                begin, end = source + row + column * in_stride, out + row * out_stride + column
                loaded = [(begin + in_stride * i).load(side) for i in range(side)]
                for i, vector in enumerate(transposed(loaded)):
                    (end + out_stride * i).store(vector)
            for column in k.range(whole_columns, columns):
                for i in range(side):
                    move(row + i, column)
        for row in k.range(whole_rows, rows):
            for column in k.range(0, columns):
                move(row, column)


# Images in planes of float32 as images of bytes with channels last, for few channels.
#
# What `elementwise` would write byte by byte is made of whole vectors: the bytes of a pixel are put
# together in a word of 32 bits, and words of which not all bytes are wanted are pushed together.

CHANNELS = (2, 3, 4)
_BLOCK = 4096  # pixels of an item


@kernel
def interleave_channels(
    k: Builder,
    out: U8Pointer,
    x: F32Pointer,
    parameters: F32Pointer,
    images: Int,
    pixels: Int,
    *,
    channels: int,
    format: str,
) -> None:
    """out[i, p, c] = x[i, c, p], rounded to "u8" or "s8"; both contiguous, c in `CHANNELS`.

    parameters: 1 / scale and zero point of the output, as `elementwise` has them.
    """
    lanes = k.isa.vector_bytes // 4
    given = [(parameters + i).load() for i in range(parameters_of(format))]
    stored = storing(format, [number.splat(lanes) for number in given])
    one = storing(format, given)
    wanted = tuple(4 * lane + c for lane in range(lanes) for c in range(channels))
    blocks = (pixels + (_BLOCK - 1)) // _BLOCK
    for item in k.parallel(images * blocks):
        image, begin = item // blocks, item % blocks * _BLOCK
        end = minimum(begin + _BLOCK, pixels)
        source = [x + (image * channels + c) * pixels for c in range(channels)]
        target = out + image * pixels * channels
        whole = begin + (end - begin) // lanes * lanes
        for at in k.range(begin, whole, lanes):
            word: Value | None = None
            for c, plane in enumerate(source):
                part = stored((plane + at).load(lanes)).to(u8).to(s32) << (8 * c)
                word = part if word is None else word | part
            assert word is not None
            made = word.bits(Vector(u8, 4 * lanes))
            made = made if channels == 4 else shuffle(made, made, wanted)
            (target + at * channels).store(made)
        for at in k.range(whole, end):
            for c, plane in enumerate(source):
                (target + at * channels + c).store(one((plane + at).load()).to(u8))
