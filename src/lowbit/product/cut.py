"""How a product's steps of rows and strips of columns are cut into items for threads."""

from __future__ import annotations

from lowbit.kernels.cpu.shared.layout import blocks

_MOST = 8  # items for each thread that are looked at
# Cycles that an item takes besides its products and its bytes: to take it, to come to full speed.
_CYCLES = 1 << 10
_BYTES_PER_CYCLE = 16  # from the second level and beyond
# Cycles for each row of an item that has others beside it: cores take from each other the lines of
# the output where these meet, and what is fetched ahead of them.
_EDGE = 256
# When a thread finds no item left, the others are half through theirs, on the average.
_UNFINISHED = 0.5


def cut(
    steps: int, strips: int, least: tuple[int, int], threads: int, cycles: float, rows: int,
    strip_bytes: int, row_bytes: int,
) -> tuple[int, int]:  # fmt: skip
    """How many steps and strips make one item: what lets so many threads end first.

    least: into how many items they are to be cut at least, below and beside each other. cycles: of
    the products of one step, of so many rows, and one strip. Bytes: of a row and of a strip's
    columns, which an item reads once.
    """
    down, across = least
    if threads == 1:
        return blocks(steps, down), blocks(strips, across)
    most = max(_MOST * threads, down * across)
    step, strip = rows * row_bytes / _BYTES_PER_CYCLE, strip_bytes / _BYTES_PER_CYCLE

    def time(height: int, width: int) -> float:
        below, beside = blocks(steps, height), blocks(strips, width)
        items, edge = below * beside, rows * _EDGE if beside > 1 else 0

        def spent(height: float, width: float) -> float:
            return height * (width * cycles + step + edge) + width * strip + _CYCLES

        average = spent(steps / below, strips / beside)  # the last ones are smaller
        return blocks(items, threads) * average + _UNFINISHED * spent(height, width)

    cuts = {
        (blocks(steps, below), blocks(strips, beside))
        for below in range(down, max(down, min(steps, most // across)) + 1)
        for beside in range(across, max(across, min(strips, most // below)) + 1)
    }
    return min(sorted(cuts, reverse=True), key=lambda one: time(*one))
