"""The file of an exercise: the specification, an empty kernel, and the grid.

All of it is taken from the source of the specification and of the teaching kernel, so that nothing
is written twice; Triton is not imported for that.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from lowbit.lab.exercises.exercise import Exercise
from lowbit.spec import exercises


@dataclass(frozen=True)
class _Source:
    """A module's text, and the statement that makes each of its names."""

    lines: list[str]
    makers: dict[str, ast.stmt]

    @classmethod
    def of(cls, text: str) -> _Source:
        makers: dict[str, ast.stmt] = {}
        for statement in ast.parse(text).body:
            if isinstance(statement, ast.FunctionDef):
                # A bare name makes a thing known to lowbit, and says nothing about it.
                facts = [d for d in statement.decorator_list if not isinstance(d, ast.Name)]
                statement.decorator_list = facts
            for name in _made(statement):
                makers[name] = statement
        return cls(text.splitlines(), makers)

    def text(self, first: int, last: int) -> str:
        """The lines from `first` to `last`, counted from 1."""
        return "\n".join(self.lines[first - 1 : last])

    def text_of(self, statement: ast.stmt) -> str:
        """A statement with its decorators."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(d.lineno for d in decorators)])
        return self.text(first, statement.end_lineno or first)


def _made(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    return []


@cache
def _exercises() -> _Source:
    return _Source.of(inspect.getsource(exercises))


@dataclass(frozen=True)
class Teaching:
    """The text of a teaching kernel. solution: all of it, as a function under triton.jit.
    signature: its first lines, for a function that is called `kernel`. body: what follows the
    docstring. grid: the expression of its grid, which is a function of `meta`."""

    solution: str
    signature: str
    body: str
    grid: str


def teaching(exercise: Exercise) -> Teaching:
    """The teaching kernel of an exercise, from its source."""
    file = resources.files("lowbit.kernels.triton.exercises") / f"{exercise.name}.py"
    source = _Source.of(file.read_text(encoding="utf-8"))
    name = f"{exercise.name}_kernel"
    function = source.makers[name]
    assert isinstance(function, ast.FunctionDef)
    teaches, jit = function.decorator_list
    assert isinstance(teaches, ast.Call)
    grid = next(k.value for k in teaches.keywords if k.arg == "grid")
    assert isinstance(grid, ast.Lambda)
    docstring = function.body[0]
    last = function.end_lineno or function.lineno
    signature = source.text(function.lineno, docstring.lineno - 1)
    return Teaching(
        source.text(jit.lineno, last),
        signature.replace(name, "kernel"),
        source.text((docstring.end_lineno or docstring.lineno) + 1, last),
        ast.unparse(grid.body).replace("'", '"'),
    )


def starter(exercise: Exercise) -> str:
    """The text of the file that an exercise begins with; `lowbit check` takes it as it is."""
    kernel = teaching(exercise)
    statements = _needed(exercise.name)
    sizes, blocks = exercise.operation.exercise, exercise.operation.blocks
    taken = {n: b for n, b in blocks.items() if f"{n}: tl.constexpr" in kernel.signature}
    specification = "\n\n\n".join(
        _exercises().text_of(s)
        for s in statements
        if not isinstance(s, (ast.Import, ast.ImportFrom))
    )
    return _TEMPLATE.format(
        number=exercise.number,
        name=exercise.name,
        formula=exercise.formula,
        idea=exercise.idea,
        sizes=_listed(sizes),
        blocks=_listed({n: b(sizes) if callable(b) else b for n, b in taken.items()}),
        third_party=_imports(statements, lowbit=False),
        own=_imports(statements, lowbit=True),
        specification=specification,
        signature=kernel.signature,
        grid=kernel.grid,
    )


def _needed(name: str) -> list[ast.stmt]:
    """The statements of exercises.py that an operation is made of, as they follow each other."""
    makers = _exercises().makers
    wanted, found = [name], dict[str, ast.stmt]()
    while wanted:
        maker = makers[wanted.pop()]
        if isinstance(maker, (ast.Import, ast.ImportFrom)):
            continue
        found |= dict.fromkeys(_made(maker), maker)
        wanted += [n for n in _names(maker) if n in makers and n not in found]
    used = {n for maker in found.values() for n in _names(maker)}
    imports = {
        n: m for n, m in makers.items() if n in used and isinstance(m, (ast.Import, ast.ImportFrom))
    }
    return sorted({*found.values(), *imports.values()}, key=lambda statement: statement.lineno)


def _names(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _imports(statements: Iterable[ast.stmt], *, lowbit: bool) -> str:
    """The lines that import what the other statements use; with `lowbit` those from lowbit."""
    listed = list(statements)
    used = {n for s in listed if not isinstance(s, ast.ImportFrom) for n in _names(s)}
    lines: list[str] = []
    for statement in listed:
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        names = sorted((a.name for a in statement.names if a.name in used), key=_import_order)
        if statement.module.startswith("lowbit") == lowbit and names:
            lines.append(f"from {statement.module} import {', '.join(names)}")
    return "\n".join(lines)


def _import_order(name: str) -> tuple[bool, str]:
    return name.islower(), name


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


_TEMPLATE = '''\
"""Exercise {number} of lowbit's course: {name}.

    {formula}

{idea}

The exercise: {sizes}. Blocks there: {blocks}.
The check tries many other sizes too.

    lowbit learn {number}           checks this file
    lowbit learn {number} --hint    gives a hint; there are three
"""

import numpy as np
import triton
import triton.language as tl
{third_party}

{own}

# The specification: what goes in and comes out, and what the kernel has to compute. `lowbit learn`
# compares with a copy of its own, so there is nothing to gain by changing this one.


{specification}


spec = {name}


# A pointer is called as its tensor, a size as in the annotations. Every program of the grid runs
# this text; tl.program_id(0) says which one it is. Offsets are in elements; rows lie one behind
# another, without gaps.
@triton.jit
{signature}
    pass  # your kernel


def grid(meta):
    """The number of programs on each axis of the grid; `meta` holds all sizes and block sizes."""
    return {grid}
'''
