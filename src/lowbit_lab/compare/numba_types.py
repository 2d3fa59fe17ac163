"""What Numba says of a function: the types of its variables, and its errors."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from lowbit_lab.backends.language import Language
from lowbit_lab.compare.built import Typed, plain

_UNDEFINED = re.compile(r"name '(\w+)' is not defined")


class NumbaLanguage(Language):
    """What Numba compiles, for whatever processor."""

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return kernel.py_func

    @classmethod
    def words(cls, error: Exception, kernel: Any, file: Path) -> str:
        return words(error, *cls.source(kernel))


def typed(annotation: Any, lines: Sequence[str], first_line: int) -> tuple[Typed, ...]:
    """Every variable of the text with its type, in the order of their first assignment. What
    Numba makes on the way has no name of the text and is left out."""
    statements = [s for block in annotation.blocks.values() for s in block.body]
    # By name, since numba-cuda has classes of its own.
    assigned = dict[str, int]()
    for one in statements:
        if type(one).__name__ == "Assign" and not one.target.name.startswith("$"):
            name = one.target.name.partition(".")[0]
            # Line 0 is nobody's.
            line = one.loc.line or first_line
            assigned[name] = min(line, assigned.get(name, line))
    kinds = dict[str, list[str]]()
    for name, type_ in annotation.typemap.items():
        plain = name.partition(".")[0]
        if plain in assigned and not name.startswith("arg."):
            text = str(getattr(type_, "literal_type", None) or type_)
            if text not in kinds.setdefault(plain, []):
                kinds[plain].append(text)
    literals = _literals(lines, first_line)
    found: list[Typed] = []
    for name, line in sorted(assigned.items(), key=lambda item: item[1]):
        if name in kinds:
            why = ("", line)
            if "float64" in kinds[name]:
                why = literals.get(name, why)
            found.append(Typed(name, " or ".join(kinds[name]), line, *why))
    return tuple(found)


def _literals(lines: Sequence[str], first_line: int) -> dict[str, tuple[str, int]]:
    """For each name that is assigned: what makes it float64, a literal, and on which line."""
    try:
        tree = ast.parse(textwrap.dedent("\n".join(lines)))
    except SyntaxError:
        return {}
    floats, integers = dict[str, tuple[str, int]](), dict[str, tuple[str, int]]()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) or node.value is None:
            continue
        line = first_line + node.lineno - 1
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = [one.id for one in targets if isinstance(one, ast.Name)]
        literal = next((one for one in _numbers(node.value) if isinstance(one, float)), None)
        start = node.value.value if isinstance(node.value, ast.Constant) else None
        for name in named:
            if literal is not None:
                floats.setdefault(name, (f"the literal {literal} is float64", line))
            elif isinstance(start, int):
                why = f"it starts as the integer {start}, and with a float32 that makes float64"
                integers.setdefault(name, (why, line))
    return {**integers, **floats}


def _numbers(value: ast.expr) -> list[object]:
    """The literals of an expression, but for those that are converted, as in float32(0.0)."""
    calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)]
    converted = {id(argument) for one in calls for argument in one.args}
    return [
        one.value
        for one in ast.walk(value)
        if isinstance(one, ast.Constant) and id(one) not in converted
    ]


def words(error: Exception, lines: Sequence[str], first_line: int, file: str) -> str:
    """An error of Numba's from its substance on, each part once, without the passes that failed,
    which say nothing of a text. Numba says of a name that is not defined no line."""
    rows = [row.rstrip() for row in plain(str(error)).splitlines()]
    kept = "\n".join(row for row in rows if not row.startswith(("Failed in", "During: Pass")))
    said = "\n".join(dict.fromkeys(part.strip("\n") for part in kept.split("\n\n") if part.strip()))
    name = _UNDEFINED.search(said)
    if name is None or "line" in said:
        return said
    used = re.compile(rf"(?<![\w.]){name[1]}\b")
    for number, line in enumerate(lines, first_line):
        if used.search(line.partition("#")[0]):
            return f"{file}, line {number}: {line.strip()}\n{said}"
    return said
