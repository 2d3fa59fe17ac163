"""Programs of a grid, and lines of a kernel's text."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

Node = TypeVar("Node", bound=ast.stmt)
Program = tuple[int, ...]
Grid = tuple[int, int, int]


def grid_of(dims: Sequence[int]) -> Grid:
    """One to three numbers of programs as a grid."""
    x, y, z = [*map(int, dims), 1, 1][:3]
    return x, y, z


def programs_of(grid: Grid) -> list[Program]:
    """In order: the last axis counts fastest."""
    return list(product(*map(range, grid)))


def first_line(node: ast.stmt) -> int:
    """The number of a statement's first line, that of a decorator perhaps."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


@dataclass(frozen=True)
class Place:
    """A line of the kernel's text."""

    file: str
    line: int

    def around(self, *kinds: type[Node]) -> Node | None:
        """The innermost statement of these kinds around the line; None if there is none."""
        try:
            tree = ast.parse("".join(linecache.getlines(self.file)))
        except SyntaxError:
            return None
        found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        around = [n for n in found if first_line(n) <= self.line <= (n.end_lineno or 0)]
        return max(around, key=first_line, default=None)

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"
