"""Moving tiles of a matrix across its diagonal, in registers of 16 bytes."""

from __future__ import annotations

from lowbit.isa.generic import shuffle
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.tensors.loops import TILE_BYTES, Block


def transposed(rows: list[Value]) -> list[Value]:
    """Square: so many vectors of so many lanes. Each pass interleaves row i with row i + side/2,
    which rotates the bits of an element's place, (row, lane), by one."""
    side = len(rows)
    low = tuple(lane // 2 + side * (lane % 2) for lane in range(side))
    high = tuple(lane + side // 2 for lane in low)
    for _ in range(side.bit_length() - 1):
        pairs = list(zip(rows[: side // 2], rows[side // 2 :], strict=True))
        rows = [shuffle(a, b, lanes) for a, b in pairs for lanes in (low, high)]
    return rows


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
