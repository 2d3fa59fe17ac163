"""The course as notebooks: written, and run as a reader would."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit_lab.backends.source import load
from lowbit_lab.exercises.course import course, find
from lowbit_lab.exercises.learn import Progress, teaching
from lowbit_lab.exercises.notebook import check_exercise, notebook, write_notebooks

nbformat = pytest.importorskip("nbformat")
EMPTY = "    pass  # your kernel"


@pytest.fixture(autouse=True)
def _own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_STATE_DIR", str(tmp_path / "state"))


def code_of(made: Any) -> list[str]:
    return [cell.source for cell in made.cells if cell.cell_type == "code"]


@pytest.mark.deep
def test_there_is_a_notebook_for_each_exercise(tmp_path: Path) -> None:
    paths = write_notebooks(tmp_path / "course")
    assert [path.name for path in paths] == [f"{one.stem}.ipynb" for one in course]
    for exercise, path in zip(course, paths, strict=True):
        made = nbformat.read(path, 4)
        nbformat.validate(made)
        head, hints = made.cells[0], made.cells[5].source
        assert head.source.startswith(f"# {exercise.number}. {exercise.name}\n\n    ")
        assert exercise.idea in head.source
        assert all(hint in hints for hint in exercise.hints)
        specification, kernel, check = code_of(made)
        assert f"def {exercise.name}(" in specification
        assert kernel.startswith("@triton.jit\ndef kernel(")
        assert kernel.count(EMPTY) == 1
        assert check.endswith(f"check_exercise({exercise.number}, kernel, grid)")
    with pytest.raises(FileExistsError):
        write_notebooks(tmp_path / "course")


def test_the_picture_shows_what_a_program_touches() -> None:
    picture = notebook(find("4")).cells[0].attachments["picture.svg"]["image/svg+xml"]
    root = ElementTree.fromstring(base64.b64decode(picture))
    names = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert names == ["x [100]", "y [90]", "z [90, 100]"]
    drawn = list(root.iter("{http://www.w3.org/2000/svg}g"))
    colours = [{path.get("fill") for path in one} for one in drawn]
    assert ["#0072b2" in one for one in colours] == [True, True, False]
    assert ["#e08a00" in one for one in colours] == [False, False, True]
    # The program in the middle writes 32 rows of a block.
    assert sum(path.get("fill") == "#e08a00" for path in drawn[2]) == 32


def run(made: Any, body: str, folder: Path) -> Any:
    """The notebook with this kernel, after all its cells have been run."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace(EMPTY, body)
    nbclient.NotebookClient(
        made, timeout=240, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return made


@pytest.mark.deep
def test_a_notebook_with_a_wrong_and_with_a_right_kernel(tmp_path: Path) -> None:
    exercise = find("2")
    right = teaching(exercise).body
    for body, said in (
        (right.replace("mask=i < N0", "mask=i <= N0", 1), "reads outside of a tensor"),
        (right, "right in "),
    ):
        made = run(notebook(exercise), body, tmp_path)
        shown = made.cells[4].outputs[-1].data["text/html"]
        head, _, view = shown.partition("<iframe")
        assert said in head
        assert "srcdoc=" in view
        known = Progress(print).read()[exercise.name]
        assert known.solved == (body == right)
    assert known.tries == 2


def test_a_kernel_is_held_against_the_exercise(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    exercise = find("1")
    cells = code_of(notebook(exercise))
    file.write_text("\n\n".join(cells[:2]).replace(EMPTY, teaching(exercise).body))
    mine = load(file)
    assert not check_exercise(2, mine.kernel, mine.grid), "one program is not enough"
    assert check_exercise("add_constant", mine.kernel, mine.grid)


@pytest.mark.deep
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def learn(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["learn", *arguments])

    done = learn("--notebook", "course")
    assert done.exit_code == 0, done.output
    assert "12 notebooks written to course; open the first: jupyter lab course/01_" in done.output
    refused = learn("--notebook", "course")
    assert refused.exit_code == 2
    assert "01_add_constant.ipynb exists; --force replaces it" in refused.stderr
    assert learn("--notebook", "course", "--force").exit_code == 0
    assert "give nothing else" in learn("4", "--notebook", "course").stderr
    monkeypatch.setattr("lowbit.registry.extras.find_spec", lambda name: None)
    missing = learn("--notebook", "other")
    assert missing.exit_code == 2
    assert "a notebook needs nbformat" in missing.stderr
    assert not (tmp_path / "other").exists()
