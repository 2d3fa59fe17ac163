"""The pages of the course: they show the teaching kernels as they are, and lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit.kernels.triton.registry import teaching_kernels
from lowbit_lab import trace_kernel
from lowbit_lab.backends.source import load
from lowbit_lab.exercises.course import Exercise, course
from lowbit_lab.exercises.learn import teaching
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.run.findings import TITLES

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "docs" / "learn"
WRONG = {path.name: load(path).WRONG for path in sorted(HERE.glob("wrong/*.py"))}
HEADINGS = ["The picture", "The idea", "What goes wrong", "The teaching kernel", "On a GPU"]
EXERCISES = tuple(course)
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


def _file(exercise: Exercise) -> Path:
    return FOLDER / f"{exercise.stem.replace('_', '-')}.md"


def _page(exercise: Exercise) -> str:
    return _file(exercise).read_text(encoding="utf-8")


def test_there_is_a_page_for_each_lesson_and_no_other() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {_file(e).name for e in EXERCISES} | {"README.md"}


def test_the_index_says_what_the_lessons_say() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for exercise in EXERCISES:
        link = f"[{exercise.name}]({_file(exercise).name})"
        assert f"| {exercise.number} | {link} | {exercise.formula} | {exercise.idea} |\n" in index


@every_exercise
def test_a_page_begins_with_its_lesson(exercise: Exercise) -> None:
    head = f"# {exercise.number}. {exercise.name}\n\n    {exercise.formula}\n\n{exercise.idea}\n"
    assert _page(exercise).startswith(head)
    assert re.findall(r"^## (.*)$", _page(exercise), re.MULTILINE) == HEADINGS


@every_exercise
def test_a_page_shows_the_teaching_kernel_as_it_is(exercise: Exercise) -> None:
    blocks = re.findall(r"^```python\n(.*?)\n```$", _page(exercise), re.MULTILINE | re.DOTALL)
    assert blocks == [teaching(exercise).solution]


@every_exercise
def test_a_page_says_how_much_is_moved(exercise: Exercise) -> None:
    kernel = teaching_kernels()[exercise.name]
    trace = trace_kernel(kernel.kernel, exercise.operation, grid=kernel.grid)
    said = (
        f"it loads {trace.bytes('load'):,} bytes and stores {trace.bytes('store'):,};\n"
        f"at least {trace.least_bytes:,} have to be moved."
    )
    assert said in _page(exercise)
    sizes = exercise.operation.exercise
    for tensor in (*exercise.operation.inputs, exercise.operation.result):
        shape = ", ".join(map(str, tensor.shape(sizes)))
        assert f"{tensor.name} [{shape}]" in _page(exercise)


@every_exercise
def test_the_wrong_kernels_of_a_page_are_found_as_it_says(exercise: Exercise) -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", _page(exercise), re.MULTILINE)
    assert rows
    files = re.findall(r"\(\.\./\.\./tests/lab/wrong/(\w+\.py)\)", _page(exercise))
    assert len(files) == 1
    known = {
        (TritonKernel.of(kernel).name, TITLES[finding]) for kernel, _, finding, _ in WRONG[files[0]]
    }
    assert not [row for row in rows if row not in known]


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert local
    assert not [target for target in local if not (page.parent / target).exists()]
