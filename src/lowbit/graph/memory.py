"""Where in one arena each buffer of a plan lies, so that memory is used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
SLACK = 64  # bytes behind a buffer that kernels may read, and do not use


@dataclass(frozen=True)
class Life:
    """A buffer's size in bytes, and the first and the last step that name it."""

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """The offset of each buffer, in bytes, and the size of all."""

    offsets: Mapping[str, int]
    size: int


def arrange(lives: Mapping[str, Life]) -> Arena:
    """Place buffers, the largest first, each at the lowest offset where nothing is in its way.

    (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020,
    "Greedy by Size for Offset Calculation".)
    """
    names = sorted(lives, key=lambda name: (-lives[name].size, lives[name].first, name))
    firsts, lasts, begins, ends = np.zeros((4, len(names)), np.int64)
    for placed, name in enumerate(names):  # of thousands, where a network is cut into many steps
        life = lives[name]
        room = _room(life)
        meets = (firsts[:placed] <= life.last) & (life.first <= lasts[:placed])
        taken, until = begins[:placed][meets], ends[:placed][meets]
        order = np.argsort(taken)
        below = np.maximum.accumulate(np.concatenate(([0], until[order])))
        fits = np.flatnonzero(below[:-1] + room <= taken[order])
        offset = below[fits[0] if len(fits) else -1]
        firsts[placed], lasts[placed] = life.first, life.last
        begins[placed], ends[placed] = offset, offset + room
    return Arena(dict(zip(names, begins.tolist(), strict=True)), int(ends.max(initial=0)))


def arranged(named: Iterable[Iterable[str]], sizes: Mapping[str, int], outside: set[str]) -> Arena:
    """Place the buffers that steps name, of these sizes, but for those outside."""
    lives: dict[str, Life] = {}
    for number, names in enumerate(named):
        for name in names:
            if name in sizes and name not in outside:
                first = lives[name].first if name in lives else number
                lives[name] = Life(sizes[name], first, number)
    return arrange(lives)


def _room(life: Life) -> int:
    return -(-(life.size + SLACK) // ALIGNMENT) * ALIGNMENT
