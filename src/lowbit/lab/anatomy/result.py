"""What an anatomy says, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lowbit.lab.run.program import Place
from lowbit.lab.view.data import function_at

SCHEMA = "lowbit-anatomy-1"

Row = tuple[str, int | None]
"""A line of text, and which place of the source it comes from, by its number; None: of none."""


@dataclass(frozen=True)
class Pane:
    """A text of the kernel in one language."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Part:
    """One of the four parts of a product, with its time of one call in seconds. how: by what
    runs that was measured."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Anatomy:
    """A kernel taken apart.

    places: files and lines of the source that rows refer to. facts: by name, in words. mix: the
    instructions of the inner loop by kind. mca: what llvm-mca says of it, or why it says nothing.
    """

    kernel: str
    about: str
    places: tuple[tuple[str, int], ...]
    panes: tuple[Pane, ...]
    facts: Mapping[str, str]
    mix: Mapping[str, int]
    parts: tuple[Part, ...] = ()
    mca: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False)


class Places:
    """Numbers for places of the source, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, file: str, line: int) -> int:
        """That of a line of a file."""
        return self._numbers.setdefault((file, line), len(self._numbers))

    def listed(self) -> tuple[tuple[str, int], ...]:
        """All of them, files by their own names."""
        return tuple((file.rpartition("/")[2], line) for file, line in self._numbers)

    def source(self) -> Pane:
        """The functions in which the places lie, file after file."""
        shown: dict[str, dict[int, str]] = {}
        for file, line in self._numbers:
            if line not in shown.setdefault(file, {}):
                first, lines = function_at(Place(file, line))
                shown[file].update(enumerate(lines, first))
        rows: list[Row] = []
        for file, lines in shown.items():
            rows.append((file.rpartition("/")[2], None))
            before = min(lines) - 1
            for line, text in sorted(lines.items()):
                if line != before + 1:
                    rows.append(("", None))
                rows.append((f"{line:5} {text}", self._numbers.get((file, line))))
                before = line
        return Pane("source", tuple(rows))
