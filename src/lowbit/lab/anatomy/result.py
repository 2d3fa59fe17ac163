"""What an anatomy says, as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from lowbit.lab.compare.code import Code
from lowbit.lab.run.trace import Place
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


# The texts that become of a kernel, each row with the place of the source that it comes from.

_NODE = re.compile(r"^(!\d+) = (?:distinct )?!(\w+)\((.*)\)$")
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(![\d]+|\w+))')
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"\s+"([^"]*)"')
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_USE = re.compile(r"\s*loc\((#\w+)\)")
_DEFINED = re.compile(r'^(#\w+) = loc\((?:"([^"]*)":(\d+):\d+|"[^"]*"\((#\w+)\)|callsite\((#\w+))')


def ir_pane(text: str, places: Places, function: str | None = None) -> Pane:
    """LLVM's IR after optimization, of one function or of all; what says where lines come from is
    left out."""
    nodes: dict[str, tuple[str, dict[str, str]]] = {}
    for row in text.splitlines():
        if found := _NODE.match(row):
            fields = {name: quoted or plain for name, quoted, plain in _FIELD.findall(found[3])}
            nodes[found[1]] = found[2], fields

    def place(node: str) -> int | None:
        kind, fields = nodes.get(node, ("", {}))
        file = nodes.get(nodes.get(fields.get("scope", ""), ("", {}))[1].get("file", ""))
        if kind != "DILocation" or file is None:
            return None
        path = f"{file[1].get('directory', '')}/{file[1].get('filename', '')}"
        return places.number(path, int(fields.get("line", 0)))

    rows: list[Row] = []
    within = function is None
    for row in text.splitlines():
        if function is not None and row.startswith("define"):
            within = f"@{function}(" in row or f'@"{function}"(' in row
        if not within or row.startswith("!") or "llvm.dbg." in row or "#dbg_" in row:
            continue
        plain, _, node = row.partition(", !dbg ")
        rows.append((plain, place(node.split(",")[0].split(" ")[0]) if node else None))
    return Pane("LLVM IR, optimized", tuple(rows))


def assembly_pane(text: str, places: Places) -> Pane:
    """Labels and instructions."""
    files = {one[1]: f"{one[2]}/{one[3]}" for row in text.splitlines() if (one := _FILE.match(row))}
    rows: list[Row] = []
    now: int | None = None
    for row in text.splitlines():
        if row.lstrip().startswith(".section") and rows:
            break
        if place := _LOCATION.match(row):
            file = files.get(place[1])
            now = places.number(file, int(place[2])) if file and place[2] != "0" else None
        elif re.match(r"^\s+[a-z]", row):
            rows.append((row.expandtabs(8).rstrip(), now))
        elif re.match(r"^(\.LBB|[a-z])\w*:", row):
            rows.append((row, None))
    return Pane("assembly", tuple(rows))


def mlir_pane(title: str, text: str, places: Places) -> Pane:
    """MLIR; where a row comes from is said by #loc names that are defined at the end."""
    defined = {one[1]: one for row in text.splitlines() if (one := _DEFINED.match(row))}

    def place(name: str) -> int | None:
        for _ in range(8):
            one = defined.get(name)
            if one is None:
                return None
            if one[2]:
                return places.number(one[2], int(one[3]))
            name = one[4] or one[5]
        return None

    rows: list[Row] = []
    for row in text.splitlines():
        if row.startswith("#"):
            continue
        used = _USE.findall(row)
        rows.append((_USE.sub("", row), place(used[-1]) if used else None))
    return Pane(title, tuple(rows))


def code_pane(title: str, code: Code, file: str, places: Places) -> Pane:
    """Labels and instructions."""
    at: dict[int, list[str]] = {}
    for label, index in code.labels.items():
        at.setdefault(index, []).append(label)
    rows: list[Row] = []
    for index, one in enumerate(code.instructions):
        rows += [(f"{label}:", None) for label in at.get(index, ())]
        where = None if one.line is None else places.number(file, one.line)
        rows.append((f"    {one}", where))
    return Pane(title, tuple(rows))
