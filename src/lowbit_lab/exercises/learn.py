"""The course: starting the file of an exercise, and checking it."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from lowbit.registry.files import naming_file, replacing
from lowbit.spec import exercises
from lowbit_lab.backends.source import blamed, request_of_file
from lowbit_lab.checks.cases import check_request
from lowbit_lab.checks.result import CheckResult
from lowbit_lab.exercises.course import Exercise
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.run.trace import first_line
from lowbit_lab.run.triton import triton_modules


def start(exercise: Exercise, progress: Progress, folder: Path, *, force: bool) -> Path:
    """Write the file of an exercise and remember where it is; returns its path.

    FileExistsError if there is one and not `force`; NotADirectoryError if `folder` is a file;
    OSError if it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(20, "it is no folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{exercise.stem}.py"
    with naming_file(path), path.open("w" if force else "x", encoding="utf-8") as file:
        file.write(starter(exercise))
    progress.update(exercise.name, lambda known: replace(known, file=str(path.absolute())))
    return path


def file_of(exercise: Exercise, progress: Progress, folder: Path | None) -> Path:
    """The file of an exercise: in `folder` if one is given, else in the working folder, else where
    it was last. FileNotFoundError, with what to do, if it is not there."""
    here = (folder or Path()).absolute() / f"{exercise.stem}.py"
    last = None if folder else progress.read().get(exercise.name, Standing()).file
    places = list(dict.fromkeys([here, Path(last or here)]))
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"exercise {exercise.number} has no file {' or '.join(map(str, places))}; "
        f"`lowbit learn {exercise.number} --start` writes one, and --dir says where one is"
    )


def try_out(exercise: Exercise, progress: Progress, path: Path) -> CheckResult:
    """Check the file of an exercise against the exercise's own specification, and remember it.

    ValueError, with the line, if the file cannot be run or does not define what is needed;
    otherwise as `check`.
    """
    triton_modules()
    tried(exercise, progress, path)
    request = request_of_file(path)
    if not TritonKernel.takes(request.variant.kernel):
        raise ValueError(
            f"{path}: kernel is not a Triton kernel; write @triton.jit in the line above it, as "
            "the file had at first"
        )
    if not callable(grid := request.variant.grid):
        raise ValueError(
            f"{path}: grid is {grid!r}; write a function of meta, as the file had at first: the "
            "kernel is tried at many sizes"
        )
    with blamed(path):
        result = check_request(replace(request, spec=exercise.operation), stop=True)
    if result.ok:
        solved(exercise, progress)
    return result


def tried(exercise: Exercise, progress: Progress, path: Path | None = None) -> None:
    """Remember that an exercise was tried, and in which file if it is one."""

    def more(known: Standing) -> Standing:
        file = known.file if path is None else str(path.absolute())
        return replace(known, file=file, tries=known.tries + 1)

    progress.update(exercise.name, more)


def solved(exercise: Exercise, progress: Progress) -> None:
    """Remember that an exercise is solved."""
    progress.update(exercise.name, lambda known: replace(known, solved=True))


def view_beside(result: CheckResult, path: Path) -> str:
    """Write the view of a result beside the file that was checked; returns a line that says so."""
    page = path.with_suffix(".html")
    try:
        if result.viewer is None:
            return "there is no view of it"
        result.viewer().save(page)
    except OSError as error:
        return f"no view: {error.filename}: {error.strerror}"
    return f"the view of it: {page}"


# How far someone is in the course, in a small file of JSON.
#
# The folder is $LOWBIT_STATE_DIR, else $XDG_STATE_HOME/lowbit, else where the platform keeps a
# user's data. The file is replaced as a whole by renaming, so that a reader never sees half of it.

_VERSION = 1


@dataclass(frozen=True)
class Standing:
    """What is known of one exercise. file: where it was last. tries: how often it was checked.
    hints: how many were shown."""

    file: str | None = None
    tries: int = 0
    solved: bool = False
    hints: int = 0

    def __str__(self) -> str:
        if self.solved:
            return "done"
        if self.tries:
            return "tried"
        return "not yet"


def folder() -> Path:
    """Where the file is. RuntimeError for a user who has no home and no variable that says."""
    chosen = os.environ.get("LOWBIT_STATE_DIR")
    if chosen:
        return Path(chosen)
    # A relative path is to be ignored (XDG Base Directory Specification).
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "lowbit"
    try:
        home = Path.home()
    except RuntimeError:
        raise RuntimeError(
            "there is no home folder to keep the progress in; set LOWBIT_STATE_DIR to another one"
        ) from None
    return home / _HOMES.get(sys.platform, ".local/state") / "lowbit"


_HOMES = {"darwin": "Library/Application Support", "win32": "AppData/Local"}


class Progress:
    """The file, read and written. `warn` is told, in one line, when it is damaged or cannot be
    written; the course goes on without it."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.path = folder() / "learn.json"

    def read(self) -> dict[str, Standing]:
        """The exercises that something is known of, by the name of their operation."""
        try:
            text = self.path.read_text(encoding="utf-8")
            return _parsed(json.loads(text))
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"the progress cannot be read: {self.path}: {error.strerror}")
            return {}
        except ValueError as error:
            self._set_aside(str(error))
            return {}

    def update(self, name: str, change: Callable[[Standing], Standing]) -> Standing:
        """Change what is known of one exercise, and return it as it is now."""
        known = self.read()
        now = change(known.get(name, Standing()))
        exercises = {n: asdict(e) for n, e in {**known, name: now}.items()}
        text = json.dumps({"version": _VERSION, "exercises": exercises}, indent=2) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                file.write(text.encode())
        except OSError as error:
            self._warn(f"the progress cannot be kept: {self.path}: {error.strerror}")
        return now

    def _set_aside(self, reason: str) -> None:
        names = (self.path.with_name(f"learn.damaged-{n}.json") for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            self.path.rename(aside)
        except OSError as error:
            self._warn(f"the progress in {self.path} is damaged ({reason}): {error.strerror}")
        else:
            self._warn(f"the progress was damaged ({reason}) and starts afresh; it is now {aside}")


_FIELDS: Mapping[str, tuple[type, ...]] = {
    "file": (str, type(None)),
    "tries": (int,),
    "solved": (bool,),
    "hints": (int,),
}


def _parsed(data: Any) -> dict[str, Standing]:
    """ValueError, with what is wrong, if it is not what `update` writes."""
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    exercises = data.get("exercises")
    if not isinstance(exercises, dict):
        raise ValueError("it has no exercises")
    for name, values in exercises.items():
        types = (
            {key: type(value) for key, value in values.items()} if isinstance(values, dict) else {}
        )
        if types.keys() != _FIELDS.keys() or any(types[n] not in _FIELDS[n] for n in types):
            raise ValueError(f"{name} is {values!r}")
    return {name: Standing(**values) for name, values in exercises.items()}


# The file of an exercise: the specification, an empty kernel, and the grid.
#
# All of it is taken from the source of the specification and of the teaching kernel, so that
# nothing is written twice; Triton is not imported for that.


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
        taken = {alias.name for alias in one.names} & used
        names = sorted(taken, key=lambda name: (name.islower(), name))
        if names:
            lines.append(f"from {one.module} import {', '.join(names)}")
    return "\n\n\n".join(found[first] for first in sorted(found)), lines


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
