"""The file of an exercise: the specification, an empty kernel, and the grid.

All of it is taken from the source of the specification and of the teaching kernel, so that nothing
is written twice; Triton is not imported for that.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from lowbit.lab.exercises.course import Exercise
from lowbit.lab.run.trace import first_line
from lowbit.spec import exercises


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
    file = resources.files("lowbit.kernels.triton") / "exercises.py"
    source, name = file.read_text(encoding="utf-8"), f"{exercise.name}_kernel"
    function = next(s for s in ast.parse(source).body if getattr(s, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    teaches, jit = function.decorator_list
    assert isinstance(teaches, ast.Call)
    grid = next(k.value for k in teaches.keywords if k.arg == "grid")
    assert isinstance(grid, ast.Lambda)
    docstring, *body = function.body
    signature = _lines(source, function.lineno, docstring.lineno - 1)
    return Teaching(
        _lines(source, jit.lineno, function.end_lineno),
        signature.replace(name, "kernel"),
        _lines(source, body[0].lineno, function.end_lineno),
        ast.unparse(grid.body).replace("'", '"'),
    )


def _lines(source: str, first: int, last: int | None) -> str:
    """The lines from `first` to `last`, counted from 1."""
    return "\n".join(source.splitlines()[first - 1 : last])


def starter(exercise: Exercise) -> str:
    """The text of the file that an exercise begins with; `lowbit check` takes it as it is."""
    kernel = teaching(exercise)
    sizes, blocks = exercise.operation.exercise, exercise.operation.blocks
    taken = {n: b for n, b in blocks.items() if f"{n}: tl.constexpr" in kernel.signature}
    specification, imports = _specification(exercise.name)
    return _TEMPLATE.format(
        number=exercise.number,
        name=exercise.name,
        formula=exercise.formula,
        idea=exercise.idea,
        sizes=_listed(sizes),
        blocks=_listed({n: b(sizes) if callable(b) else b for n, b in taken.items()}),
        third_party="\n".join(line for line in imports if "from lowbit" not in line),
        own="\n".join(line for line in imports if "from lowbit" in line),
        specification=specification,
        signature=kernel.signature,
        grid=kernel.grid,
    )


def _specification(name: str) -> tuple[str, list[str]]:
    """The statements of exercises.py that an operation is made of, and the imports they need."""
    source = inspect.getsource(exercises)
    makers: dict[str, ast.FunctionDef | ast.Assign] = {}
    imports: list[ast.ImportFrom] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef):
            makers[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            names = [target for target in statement.targets if isinstance(target, ast.Name)]
            makers |= {name.id: statement for name in names}
        elif isinstance(statement, ast.ImportFrom):
            imports.append(statement)
    wanted, found, used = [name], dict[int, str](), set[str]()
    while wanted:
        maker = makers[wanted.pop()]
        if isinstance(maker, ast.FunctionDef):
            # A bare name makes a thing known to lowbit, and says nothing about it.
            facts = [one for one in maker.decorator_list if not isinstance(one, ast.Name)]
            maker.decorator_list = facts
        first = first_line(maker)
        found[first] = _lines(source, first, maker.end_lineno)
        names = {node.id for node in ast.walk(maker) if isinstance(node, ast.Name)}
        wanted += [name for name in names - used if name in makers]
        used |= names
    lines: list[str] = []
    for one in imports:
        names = sorted({alias.name for alias in one.names} & used, key=_import_order)
        if names:
            lines.append(f"from {one.module} import {', '.join(names)}")
    return "\n\n\n".join(found[first] for first in sorted(found)), lines


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
