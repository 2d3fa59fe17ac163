"""Programs of a grid, and lines of a kernel's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Program = tuple[int, ...]
Grid = tuple[int, int, int]


def grid_of(dims: Sequence[int]) -> Grid:
    """One to three numbers of programs as a grid."""
    x, y, z = [*map(int, dims), 1, 1][:3]
    return x, y, z


def programs_of(grid: Grid) -> list[Program]:
    """In order: the last axis counts fastest."""
    return list(product(*map(range, grid)))


@dataclass(frozen=True)
class Place:
    """A line of the kernel's text."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"
