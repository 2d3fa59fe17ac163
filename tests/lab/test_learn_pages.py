"""The pages of the course: they show the teaching kernels as they are, and lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lowbit.kernels.triton.registry import teaching_kernels
from lowbit.lab import trace_kernel
from lowbit.lab.check_script import load
from lowbit.lab.check_triton import TritonKernel
from lowbit.lab.learn_file import teaching
from lowbit.lab.lessons import LESSONS, Lesson
from lowbit.lab.report import TITLES

HERE = Path(__file__).parent
FOLDER = HERE.parent.parent / "docs" / "learn"
WRONG = {path.name: load(path).WRONG for path in sorted(HERE.glob("wrong/*.py"))}
HEADINGS = ["The picture", "The idea", "What goes wrong", "The teaching kernel", "On a GPU"]
every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)


def _file(lesson: Lesson) -> Path:
    return FOLDER / f"{lesson.stem.replace('_', '-')}.md"


def _page(lesson: Lesson) -> str:
    return _file(lesson).read_text(encoding="utf-8")


def test_there_is_a_page_for_each_lesson_and_no_other() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {_file(e).name for e in LESSONS} | {"README.md"}


def test_the_index_says_what_the_lessons_say() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        link = f"[{lesson.name}]({_file(lesson).name})"
        assert f"| {lesson.number} | {link} | {lesson.formula} | {lesson.idea} |\n" in index


@every_lesson
def test_a_page_begins_with_its_lesson(lesson: Lesson) -> None:
    head = f"# {lesson.number}. {lesson.name}\n\n    {lesson.formula}\n\n{lesson.idea}\n"
    assert _page(lesson).startswith(head)
    assert re.findall(r"^## (.*)$", _page(lesson), re.MULTILINE) == HEADINGS


@every_lesson
def test_a_page_shows_the_teaching_kernel_as_it_is(lesson: Lesson) -> None:
    blocks = re.findall(r"^```python\n(.*?)\n```$", _page(lesson), re.MULTILINE | re.DOTALL)
    assert blocks == [teaching(lesson).solution]


@every_lesson
def test_a_page_says_how_much_is_moved(lesson: Lesson) -> None:
    kernel = teaching_kernels()[lesson.name]
    trace = trace_kernel(kernel.kernel, lesson.operation, grid=kernel.grid)
    said = (
        f"it loads {trace.bytes('load'):,} bytes and stores {trace.bytes('store'):,};\n"
        f"at least {trace.least_bytes:,} have to be moved."
    )
    assert said in _page(lesson)
    sizes = lesson.operation.exercise
    for tensor in (*lesson.operation.inputs, lesson.operation.result):
        shape = ", ".join(map(str, tensor.shape(sizes)))
        assert f"{tensor.name} [{shape}]" in _page(lesson)


@every_lesson
def test_the_wrong_kernels_of_a_page_are_found_as_it_says(lesson: Lesson) -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", _page(lesson), re.MULTILINE)
    assert rows
    files = re.findall(r"\(\.\./\.\./tests/lab/wrong/(\w+\.py)\)", _page(lesson))
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
