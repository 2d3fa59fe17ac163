"""The command `lowbit learn`."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowbit.cli.application import command, console, offered
from lowbit_lab.cli import exercises

if TYPE_CHECKING:
    from lowbit_lab.exercises.course import Exercise
    from lowbit_lab.exercises.learn import Progress, Standing

_WIDTH = 88  # of running text, in columns
_STYLES = {"done": "bold green", "tried": "yellow", "not yet": "dim"}


_Notebook = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write all exercises as Jupyter notebooks into a folder.",
        show_default=False,
    ),
]
_Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="D",
        help="The folder of the file.",
        show_default="this one, or where the file was last",
    ),
]


@command("learn", example="learn 4 --start", code=2)
def learn(
    what: Annotated[
        str | None,
        typer.Argument(
            help="An exercise, by its number or its operation's name; without one, all are listed.",
            show_default=False,
            metavar="EXERCISE",
            autocompletion=offered(exercises),
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Argument(help="Which hint, with --hint: 1, 2 or 3.", show_default=False, metavar="N"),
    ] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Write its file: specification and empty kernel.")
    ] = False,
    hint: Annotated[
        bool, typer.Option("--hint", help="Show hint N, or the next one; there are three.")
    ] = False,
    solution: Annotated[
        bool, typer.Option("--solution", help="Show the teaching kernel, once it is solved.")
    ] = False,
    folder: _Folder = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --start, --notebook: replace what is there."),
    ] = False,
    notebook: _Notebook = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --solution: show it before it is solved.")
    ] = False,
) -> None:
    """Learn to write kernels: twelve exercises, each one idea further than the last.

    `lowbit learn 4` checks the file that `lowbit learn 4 --start` wrote. Exit code: 0 if the kernel
    is right, 1 if it is wrong, 2 if it could not be checked.
    """
    on = {"--start": start, "--hint": hint, "--solution": solution}
    chosen = [name for name in on if on[name]]
    needs = {
        "a number of a hint": ("--hint", number is not None),
        "--force": ("--start", force and notebook is None),
        "--yes": ("--solution", yes),
    }
    for name, (wanted, given) in needs.items():
        if given and wanted not in chosen:
            raise ValueError(f"{name} goes with {wanted}")
    if notebook is not None:
        if what is not None or chosen or folder:
            raise ValueError("--notebook DIR writes all exercises; give nothing else but --force")
        _notebooks(notebook, force)
        return
    if len(chosen) > 1:
        raise ValueError(f"give one of {', '.join(chosen)}")
    if what is None and (chosen or folder):
        raise ValueError("say which exercise, for example: lowbit learn 4 --start")
    if not _learn(what, number, chosen, folder, force or yes):
        raise typer.Exit(1)


def _learn(
    what: str | None, number: int | None, chosen: list[str], folder: Path | None, sure: bool
) -> bool:
    """Do what was asked for; whether that went well. sure: what the option may be refused for."""
    from lowbit_lab.exercises.course import find
    from lowbit_lab.exercises.learn import Progress, Standing

    progress = Progress(cache(lambda line: print(f"lowbit: {line}", file=sys.stderr)))
    if what is None:
        _list(progress)
        return True
    exercise = find(what)
    known = progress.read().get(exercise.name, Standing())
    if chosen == ["--start"]:
        _start(exercise, progress, folder or Path(), sure, known.file)
    elif chosen == ["--hint"]:
        _hint(exercise, progress, number)
    elif chosen == ["--solution"]:
        _solution(exercise, known.solved or sure)
    else:
        return _check(exercise, progress, folder)
    return True


def _list(progress: Progress) -> None:
    from rich.text import Text

    from lowbit_lab.exercises.course import course
    from lowbit_lab.exercises.learn import Standing

    known = progress.read()
    out = console(soft_wrap=True, highlight=False)
    for exercise in course:
        state = str(known.get(exercise.name, Standing()))
        line = Text(f"{exercise.number:2}  {exercise.name:20} ")
        line.append(f"{state:8} ", _STYLES[state]).append(exercise.formula, "bold")
        out.print(line)
        out.print(Text(f"    {exercise.idea}", "dim"))
    done = sum(one.solved for one in known.values())
    last = max((one.number for one in course if _is_solved(one, known)), default=0)
    out.print(f"\n{done} of {len(course)} done. {_next(known, last)}")
    out.print("Three hints for each, one after the other: lowbit learn 4 --hint")
    out.print(Text(f"The progress is kept in {progress.path}", "dim"))


def _is_solved(exercise: Exercise, known: dict[str, Standing]) -> bool:
    return exercise.name in known and known[exercise.name].solved


def _next(known: dict[str, Standing], number: int) -> str:
    """What to do after the exercise of this number: the next that is not solved, else an earlier
    one."""
    from lowbit_lab.exercises.course import course
    from lowbit_lab.exercises.learn import Standing

    for exercise in (*course[number:], *course[:number]):
        if not _is_solved(exercise, known):
            action = "" if known.get(exercise.name, Standing()).file else " --start"
            return f"Next: lowbit learn {exercise.number}{action}"
    return "That was the last one."


def _start(
    exercise: Exercise, progress: Progress, folder: Path, force: bool, last: str | None
) -> None:
    from lowbit_lab.exercises.learn import start

    try:
        path = start(exercise, progress, folder, force=force)
    except FileExistsError as error:
        again = f"lowbit learn {exercise.number}"
        message = f"{error.filename} exists; `{again}` checks it, --force replaces it"
        raise ValueError(message) from None
    print(f"exercise {exercise.number}, {exercise.name}: {exercise.formula}")
    print(f"written to {path}; fill in the kernel, then: lowbit learn {exercise.number}")
    if last and Path(last) != path.absolute() and Path(last).exists():
        print(f"the one before stays where it is: {last}")


def _notebooks(folder: Path, force: bool) -> None:
    from lowbit_lab.exercises.notebook import write_notebooks

    try:
        paths = write_notebooks(folder, force=force)
    except FileExistsError as error:
        raise ValueError(f"{error.filename} exists; --force replaces it") from None
    print(f"{len(paths)} notebooks written to {folder}; open the first: jupyter lab {paths[0]}")


def _hint(exercise: Exercise, progress: Progress, number: int | None) -> None:
    last = len(exercise.hints)
    if number is not None and not 1 <= number <= last:
        raise ValueError(f"there is no hint {number}; there are 1 to {last}")

    def seen(known: Standing) -> Standing:
        return replace(known, hints=max(known.hints, number or min(known.hints + 1, last)))

    shown = number or progress.update(exercise.name, seen).hints
    if number is not None:
        progress.update(exercise.name, seen)
    print(f"hint {shown} of {last} for exercise {exercise.number}, {exercise.name}:\n")
    text = exercise.hints[shown - 1]
    print(text if "\n" in text else textwrap.fill(text, _WIDTH))
    more = "another one: lowbit learn {} --hint"
    whole = "the teaching kernel: lowbit learn {} --solution --yes"
    print("\n" + (more if shown < last else whole).format(exercise.number))


def _solution(exercise: Exercise, allowed: bool) -> None:
    from lowbit_lab.exercises.learn import teaching

    if not allowed:
        raise ValueError(
            f"exercise {exercise.number} is not solved yet; `lowbit learn {exercise.number} --hint`"
            " helps, and --solution --yes shows it all the same"
        )
    print(teaching(exercise).solution)


def _check(exercise: Exercise, progress: Progress, folder: Path | None) -> bool:
    from rich.text import Text

    from lowbit_lab.exercises.learn import file_of, try_out, view_beside

    path = file_of(exercise, progress, folder)
    result = try_out(exercise, progress, path)
    out = console(soft_wrap=True, highlight=False)
    out.print(result)
    print(view_beside(result, path))
    if result.ok:
        out.print(Text(f"Exercise {exercise.number} is right.", "bold green"))
        out.print(f"Compare it: lowbit learn {exercise.number} --solution")
        out.print(_next(progress.read(), exercise.number))
    else:
        print(f"not right yet; a hint: lowbit learn {exercise.number} --hint")
    return result.ok
