"""The course: starting the file of an exercise, and checking it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lowbit.lab.backends.kinds.triton import TritonKernel
from lowbit.lab.check.cases import check_request
from lowbit.lab.exercises.course import Exercise
from lowbit.lab.exercises.file import starter
from lowbit.lab.exercises.progress import Progress, Standing
from lowbit.lab.report import CheckResult
from lowbit.lab.run.triton import triton_modules
from lowbit.lab.source import blamed, request_of_file


def start(exercise: Exercise, progress: Progress, folder: Path, *, force: bool) -> Path:
    """Write the file of an exercise and remember where it is; returns its path.

    FileExistsError if there is one and not `force`; NotADirectoryError if `folder` is a file;
    OSError if it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(20, "it is no folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{exercise.stem}.py"
    with path.open("w" if force else "x", encoding="utf-8") as file:
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
    progress.update(
        exercise.name,
        lambda known: replace(known, file=str(path.absolute()), tries=known.tries + 1),
    )
    request = request_of_file(path)
    if not TritonKernel.takes(request.kernel):
        raise ValueError(
            f"{path}: kernel is not a Triton kernel; write @triton.jit in the line above it, as "
            "the file had at first"
        )
    if not callable(request.grid):
        raise ValueError(
            f"{path}: grid is {request.grid!r}; write a function of meta, as the file had at "
            "first: the kernel is tried at many sizes"
        )
    with blamed(path):
        result = check_request(replace(request, spec=exercise.operation), stop=True)
    if result.ok:
        progress.update(exercise.name, lambda known: replace(known, solved=True))
    return result


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
