"""Where in one arena each buffer of a plan lies, so that memory is used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
SLACK = 64  # bytes behind a buffer that kernels may read, and do not use


@dataclass(frozen=True)
class Life:
    """A buffer's size in bytes, and the first and the last step that name it."""

    size: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        """Whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


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
    offsets: dict[str, int] = {}
    size = 0
    for name in sorted(lives, key=lambda one: (-lives[one].size, lives[one].first, one)):
        life = lives[name]
        room = _room(life)
        taken = sorted(
            (offsets[other], offsets[other] + _room(lives[other]))
            for other in offsets
            if lives[other].meets(life)
        )
        offset = 0
        for begin, end in taken:
            if offset + room <= begin:
                break
            offset = max(offset, end)
        offsets[name] = offset
        size = max(size, offset + room)
    return Arena(offsets, size)


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
