"""Panels packed anew, for kernels that multiply few columns, or sum products in 16 bits."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, blocks
from lowbit.kernels.cpu.shared.panel_format import (
    CHUNKS,
    CYCLES,
    LISTED,
    MOST_LISTED,
    MOST_SUM,
    SCALE,
    TAKEN,
    TOGETHER,
    SplitFormat,
)

# Few columns packed so that many k of each are multiplied at once.


def columns(stored: npt.NDArray[np.int8], held: int, piece: int) -> npt.NDArray[np.uint8]:
    """Columns [K, N] as pieces of `piece` k of each: uint8 [ceil(K / piece), held, piece].

    `held`, no less than N, counts the columns; those behind N are zeros. The last vectors hold the
    last `piece` k, with zeros for those which the vectors before them hold
    (kernels/cpu/integer/in_place.py). `piece` is at most K.
    """
    k, n = stored.shape
    whole, rest = divmod(k, piece)
    made = aligned_empty((blocks(k, piece), held, piece), np.uint8)
    made[...] = 0
    turned = stored.view(np.uint8).T
    made[:whole, :n] = turned[:, : k - rest].reshape(n, whole, piece).transpose(1, 0, 2)
    if rest:
        made[-1, :n, piece - rest :] = turned[:, k - rest :]
    return made


# Panels of bytes split in two: smaller weights, and lists of what was taken away from some.

Array = npt.NDArray[Any]

_LISTS = 2 * TOGETHER  # that lie side by side
_CHUNK = 1 << 16  # pairs that are looked at together
_AT_ONCE = 1 << 20  # weights that are looked at together
_PAIRS = PANEL * QUAD // 2  # in a line
_SAMPLE = 1 << 15  # weights that decide how many products are summed


class Split(NamedTuple):
    """memory: uint8, the panels and, behind them, the lists if there are any, as
    kernels/cpu/shared/layout.py describes them. format: what they are."""

    memory: npt.NDArray[np.uint8]
    format: SplitFormat


def split(panels: npt.NDArray[np.uint8]) -> Split | None:
    """Split panels [panels, lines, 64] of bytes; None if pairs are best, and need no lists."""
    count, lines, _ = panels.shape
    if not lines:
        return None
    # [panel, two lines, which of the two, column, pair of k, k of the pair]
    stored = panels.view(np.int8).reshape(count, lines // 2, 2, PANEL, 2, 2)
    step = max(1, _AT_ONCE // max(1, lines * LINE))
    summed = _best(stored[:step].reshape(-1, *stored.shape[2:])[:: max(1, panels.size // _SAMPLE)])
    reduced = aligned_empty(panels.shape, np.uint8)
    nothing = np.zeros(0, np.int64)
    found = [_Taken(nothing, nothing, nothing)]
    for first in range(0, count, step):
        part = slice(first, first + step)
        at, signs = _changed(stored[part], summed)
        reduced[part] = panels[part]
        reduced[part].reshape(-1).view(np.int8)[at] -= (TAKEN * signs).astype(np.int8)
        panel, both, line, column, pair, which = np.unravel_index(at, stored[part].shape)
        k = (2 * both + line) * QUAD + 2 * pair + which
        found.append(_Taken(panel + first, k, 2 * column + (signs < 0)))
    taken = _Taken(*map(np.concatenate, zip(*found, strict=True)))
    if not taken.k.size:
        return Split(panels, SplitFormat(summed, 0)) if summed == max(CYCLES) else None
    chunk, table = _table(taken, count, lines * QUAD)
    memory = aligned_empty((panels.size + table.nbytes,), np.uint8)
    memory[: panels.size] = reduced.reshape(-1)
    memory[panels.size :] = table.view(np.uint8)
    return Split(memory, SplitFormat(summed, blocks(100 * len(table), panels.size), chunk))


class _Taken(NamedTuple):
    """The weights that were changed: panels, k, and twice the columns in these, plus 1 for those to
    subtract."""

    panels: npt.NDArray[np.int64]
    k: npt.NDArray[np.int64]
    sides: npt.NDArray[np.int64]


def _best(sample: npt.NDArray[np.int8]) -> int:
    """How many products had best be summed in 16 bits, going by some of the weights."""

    def cycles(summed: int) -> float:
        taken, _ = _changed(sample, summed)
        return CYCLES[summed] + 2 * LISTED * taken.size / max(1, sample.size)

    return min(sorted(CYCLES, reverse=True), key=cycles)


def _changed(
    stored: npt.NDArray[np.int8], summed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]:
    """Which of the weights [..., 2, 16, 2, 2] are changed, as few as will do: where they lie among
    all, and their signs."""
    lines = summed // 2
    pairs = stored.view(np.int16).reshape(-1, lines, _PAIRS)
    sums, sizes = sums_and_sizes(pairs[:, 0])
    for line in range(1, lines):
        more = sums_and_sizes(pairs[:, line])
        sums, sizes = sums + more[0], sizes + more[1]
    left = np.flatnonzero(~_fit(sums, sizes))  # mostly few
    both, pair = np.divmod(left, _PAIRS)
    meeting = pairs[both, :, pair].view(np.int8).T.astype(np.int16)  # [line, which of a pair]
    places, signs = [np.zeros(0, np.int64)], [np.zeros(0, np.int16)]
    for choice in sorted(product((0, 1), repeat=summed), key=sum)[1:]:
        if not left.size:
            break
        chosen = np.array(choice, np.int16)[:, None] * np.sign(meeting)
        less = meeting - TAKEN * chosen
        fits = _fit(less.sum(axis=0, dtype=np.int16), np.abs(less).sum(axis=0, dtype=np.int16))
        number, found = np.nonzero(chosen * fits)
        (both, pair), (line, which) = np.divmod(left[found], _PAIRS), np.divmod(number, 2)
        places.append((both * lines + line) * LINE + 2 * pair + which)
        signs.append(chosen[number, found])
        left, meeting = left[~fits], meeting[:, ~fits]
    return np.concatenate(places), np.concatenate(signs)


def sums_and_sizes(pairs: npt.NDArray[np.int16]) -> tuple[Array, Array]:
    """The sum of the two signed bytes of each, and that of their magnitudes. Half of the latter and
    the former's own magnitude is the sum of those of one sign, of that which has more."""
    sizes = np.abs(pairs.view(np.int8)).view(np.uint16)  # of -128 it is 128 as well, unsigned
    return (pairs << 8 >> 8) + (pairs >> 8), ((sizes & 255) + (sizes >> 8)).view(np.int16)


def largest_pair_of(panels: npt.NDArray[np.uint8]) -> int:
    """`PackedMatrix.largest_pair` of panels of bytes."""
    pairs = panels.reshape(-1).view(np.int16)
    largest = 0
    for start in range(0, len(pairs), _CHUNK):
        sums, sizes = sums_and_sizes(pairs[start : start + _CHUNK])
        largest = max(largest, int((np.abs(sums) + sizes).max()) // 2)
    return largest


def _fit(sums: npt.NDArray[np.int16], sizes: npt.NDArray[np.int16]) -> npt.NDArray[np.bool_]:
    """Whether weights that meet, of such sums and such magnitudes in all, are small enough."""
    return np.abs(sums) + sizes <= 2 * MOST_SUM


def _table(taken: _Taken, panels: int, k_size: int) -> tuple[int, npt.NDArray[np.uint16]]:
    """The chunk, and the starts and lists for that."""

    def lists(chunk: int) -> tuple[Array, Array]:
        """The number of the list of each change, and how long lists are."""
        chunks = blocks(k_size, chunk)
        numbers = (taken.panels * chunks + taken.k // chunk) * (2 * PANEL) + taken.sides
        return numbers, np.bincount(numbers, minlength=panels * chunks * 2 * PANEL)

    chunk = next(one for one in CHUNKS if lists(one)[1].max() <= MOST_LISTED)
    numbers, lengths = lists(chunk)
    order = np.lexsort((taken.k, numbers))
    numbers, k = numbers[order], taken.k[order] % chunk
    longest = lengths.reshape(-1, _LISTS).max(axis=1)
    starts = np.zeros(len(longest) + 1, np.int32)
    np.cumsum(longest * _LISTS, out=starts[1:])
    starts += 2 * len(starts)  # u16 that they take themselves
    table = np.zeros(starts[-1], np.uint16)
    table[: 2 * len(starts)] = starts.view(np.uint16)
    rank = np.arange(len(k)) - (np.cumsum(lengths) - lengths)[numbers]
    table[starts[numbers // _LISTS] + rank * _LISTS + numbers % _LISTS] = (k + 1) * SCALE
    return chunk, table
