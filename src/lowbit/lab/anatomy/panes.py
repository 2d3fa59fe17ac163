"""The texts that become of a kernel, each row with the place of the source that it comes from."""

from __future__ import annotations

import re

from lowbit.lab.anatomy.result import Pane, Places, Row
from lowbit.lab.compare.code import Code

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
