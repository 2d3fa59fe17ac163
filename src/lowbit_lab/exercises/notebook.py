"""The course as notebooks, one an exercise: picture, text, a cell for the kernel, and its check."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.registry.extras import require
from lowbit.registry.files import naming_file
from lowbit_lab.backends.backend import GridLike, Request, Variant
from lowbit_lab.checks.cases import check_request
from lowbit_lab.checks.result import CheckResult
from lowbit_lab.exercises.course import Exercise, course, find
from lowbit_lab.exercises.learn import Progress, solved, starter, tried
from lowbit_lab.run.tensor import CheckedTensor
from lowbit_lab.run.trace import Access
from lowbit_lab.views.trace import Trace, trace_kernel


def write_notebooks(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the notebooks of all exercises into a folder; returns their paths.

    FileExistsError if there is one of them already and not `force`, before any is written;
    NotADirectoryError if `folder` is a file; ModuleNotFoundError without nbformat.
    """
    require("a notebook", "learn", "nbformat")
    import nbformat

    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(20, "it is no folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{exercise.stem}.ipynb" for exercise in course]
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise FileExistsError(17, "it exists; --force replaces it", str(there[0]))
    for exercise, path in zip(course, paths, strict=True):
        with naming_file(path):
            nbformat.write(notebook(exercise), path)
    return paths


def notebook(exercise: Exercise) -> Any:
    """The notebook of an exercise, as nbformat has it."""
    import nbformat.v4 as v4

    _, before, kernel = re.split(r'"""\n\n|# A pointer is called', starter(exercise), maxsplit=2)
    comment, _, text = kernel.partition("@triton.jit")
    number = exercise.number
    cells = [
        _head(exercise),
        v4.new_code_cell(before.split("\n\n\nspec = ")[0].strip()),
        v4.new_markdown_cell(
            "## Your kernel\n\n"
            + " ".join(f"A pointer is called{comment}".replace("#", "").split())
            + "\n\nWrite it in place of `pass`, run the cell, and then the one below."
        ),
        v4.new_code_cell(f"@triton.jit{text}".strip()),
        v4.new_code_cell(
            "from lowbit_lab.exercises.notebook import check_exercise\n\n"
            f"check_exercise({number}, kernel, grid)"
        ),
        v4.new_markdown_cell(_hints(exercise)),
    ]
    following = [one.stem for one in course if one.number == number + 1]
    if following:
        link = f"[{following[0]}.ipynb]({following[0]}.ipynb)"
        cells.append(v4.new_markdown_cell(f"Next: {link}"))
    for n, cell in enumerate(cells):
        cell["id"] = f"{exercise.name.replace('_', '-')}-{n}"
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec})


def check_exercise(what: int | str, kernel: Any, grid: GridLike) -> CheckResult:
    """Check a kernel against an exercise's own specification, and remember that it was tried. In a
    notebook the result shows itself: the first error, and the view of the run that has it.

    what: the exercise, by number or name. ValueError or TypeError as `lowbit_lab.check`.
    """
    exercise = find(str(what))
    progress = Progress(print)
    tried(exercise, progress)
    request = Request(Variant(kernel, grid=grid), exercise.operation)
    result = check_request(request, "cpu", stop=True)
    if result.ok:
        solved(exercise, progress)
    return result


def _head(exercise: Exercise) -> Any:
    import nbformat.v4 as v4

    sizes = ", ".join(f"{name} = {size}" for name, size in exercise.operation.exercise.items())
    text = (
        f"# {exercise.number}. {exercise.name}\n\n    {exercise.formula}\n\n{exercise.idea}\n\n"
        f"![What one program reads and writes](attachment:picture.svg)\n\n"
        f"At the sizes of the exercise, {sizes}: what one program of the solution reads is blue, "
        "what it writes orange. The check tries many other sizes too."
    )
    picture = base64.b64encode(_picture(exercise).encode()).decode()
    return v4.new_markdown_cell(text, attachments={"picture.svg": {"image/svg+xml": picture}})


def _hints(exercise: Exercise) -> str:
    parts = ["## Hints"]
    for number, hint in enumerate(exercise.hints, 1):
        body = f"```python\n{hint}\n```" if "\n" in hint else hint
        parts.append(f"<details><summary>hint {number}</summary>\n\n{body}\n\n</details>")
    return "\n\n".join(parts)


# The picture: tensors as grids, and in them what a program in the middle touches.

_MOST_WIDE, _ROOM, _LABEL = 150, 20, 18  # pixels
_COLOURS = {"read": "#0072b2", "write": "#e08a00", "": "#dfe4e8"}


def _picture(exercise: Exercise) -> str:
    from lowbit.kernels.triton.registry import teaching_kernels

    taught = teaching_kernels()[exercise.name]
    trace = trace_kernel(taught.kernel, taught.operation, grid=taught.grid)
    programs = list(dict.fromkeys(event.program for event in trace.events))
    chosen = programs[len(programs) // 2]
    parts, left, high = list[str](), 0, 0
    for tensor in trace.fresh.values():
        drawn, wide, tall = _grid(tensor, _touched(trace, tensor, chosen))
        label = f"{tensor.name} [{', '.join(map(str, tensor.shape))}]"
        parts.append(f'<g transform="translate({left} {_LABEL})">{drawn}</g>')
        parts.append(f'<text x="{left}" y="12" font-size="12">{label}</text>')
        left += max(wide, 8 * len(label)) + _ROOM
        high = max(high, tall)
    size = f'width="{left}" height="{high + _LABEL}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        f'<rect {size} fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _touched(trace: Trace, tensor: CheckedTensor, program: Any) -> list[str]:
    does = [""] * tensor.count
    for event in trace.events:
        if isinstance(event, Access) and (event.tensor, event.program) == (tensor.name, program):
            for element in np.unique(event.elements[event.elements >= 0]).tolist():
                does[element] = "read" if event.kind == "load" else "write"
    return does


def _grid(tensor: CheckedTensor, does: list[str]) -> tuple[str, int, int]:
    """The rows of a tensor, planes below each other, and how wide and high they are."""
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = max(1, tensor.count // max(1, columns))
    if len(tensor.shape) == 1:
        columns, rows = min(columns, 32), -(-columns // 32)
    side = max(1.0, min(10.0, _MOST_WIDE / columns, 2 * _MOST_WIDE / rows))
    plane = tensor.shape[-2] if len(tensor.shape) > 2 else rows
    runs: list[str] = []
    for row in range(rows):
        y, x = row * side + 4 * (row // plane), 0.0
        for what, cells in itertools.groupby(does[row * columns : (row + 1) * columns]):
            wide = len(list(cells)) * side
            box = f"M{x:.1f} {y:.1f}h{wide:.1f}v{side:.1f}h-{wide:.1f}"
            runs.append(f'<path fill="{_COLOURS[what]}" d="{box}"/>')
            x += wide
        if side >= 3:
            lines = "".join(f"M{n * side:.1f} {y:.1f}v{side:.1f}" for n in range(1, columns))
            runs.append(f'<path stroke="#ffffff" d="{lines}M0 {y:.1f}h{columns * side:.1f}"/>')
    return "".join(runs), round(columns * side), round(rows * side + 4 * (rows // plane))
