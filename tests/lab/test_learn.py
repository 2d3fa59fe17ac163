"""The course: lessons, the file that an exercise begins with, progress, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.kernels.triton.registry import teaching_kernels
from lowbit.spec import Operation
from lowbit.spec.exercises import exercises
from lowbit_lab import check_file
from lowbit_lab.backends.source import load, request_of_file
from lowbit_lab.checks.cases import check_request
from lowbit_lab.exercises.course import Exercise, course, find
from lowbit_lab.exercises.learn import Progress, Standing, folder, starter, teaching

OPERATIONS = list(exercises)
EMPTY = "    pass  # your kernel"
EXERCISES = tuple(course)
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def learn(*arguments: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `lowbit learn`."""
    done = CliRunner().invoke(app, ["learn", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def one_line(*arguments: str) -> str:
    """What `lowbit learn` says when it refuses."""
    code, out, error = learn(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith("lowbit: ")
    assert error.count("\n") == 1
    return error


def solve(exercise: Exercise, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(EMPTY) == 1
    path.write_text(text.replace(EMPTY, teaching(exercise).body), encoding="utf-8")


def test_every_operation_has_an_exercise() -> None:
    assert [exercise.operation for exercise in EXERCISES] == OPERATIONS
    assert [exercise.number for exercise in EXERCISES] == list(range(1, len(OPERATIONS) + 1))
    for exercise in EXERCISES:
        assert len(set(exercise.hints)) == 3
        assert "\n" not in exercise.formula + exercise.idea
        assert "..." in exercise.hints[-1], "the last hint leaves something to do"


def test_help_has_an_example() -> None:
    assert "Example: lowbit learn 4 --start" in learn("--help")[1]


def test_a_lesson_is_found_by_number_and_by_name() -> None:
    assert find("4") is find("04") is find("outer_add_blocks") is EXERCISES[3]
    with pytest.raises(ValueError, match="no exercise '13'; there are 1 add_constant, 2 "):
        find("13")


@every_exercise
def test_the_last_hint_is_taken_from_the_teaching_kernel(exercise: Exercise) -> None:
    lines = {line.strip() for line in teaching(exercise).solution.splitlines()}
    given = [line.strip() for line in exercise.hints[-1].splitlines() if "..." not in line]
    assert given
    assert not [line for line in given if line not in lines]


def _sizes_of_exercise(operation: Operation) -> dict[str, int]:
    """The sizes and the block sizes."""
    sizes = operation.exercise
    blocks = {n: b(sizes) if callable(b) else b for n, b in operation.blocks.items()}
    return {**sizes, **blocks}


@pytest.mark.deep(
    "quantized_matmul", "flash_attention", "conv2d", "long_softmax", "batched_matmul", "outer_add"
)
@every_exercise
def test_the_file_with_the_teaching_kernel_in_it_is_right(
    exercise: Exercise, tmp_path: Path
) -> None:
    path = tmp_path / f"{exercise.stem}.py"
    path.write_text(starter(exercise), encoding="utf-8")
    solve(exercise, path)
    request = request_of_file(path)
    # A fixed grid, so that only the exercise's sizes are tried: test_check_triton.py tries all.
    assert callable(request.variant.grid)
    grid = request.variant.grid(_sizes_of_exercise(exercise.operation))
    result = check_request(request.launched(grid=grid), "cpu")
    assert result.ok, str(result)
    assert result.cases >= 5


@every_exercise
def test_the_file_states_what_the_exercise_states(exercise: Exercise, tmp_path: Path) -> None:
    text = starter(exercise)
    assert max(map(len, text.splitlines())) <= 100
    path = tmp_path / f"{exercise.stem}.py"
    path.write_text(text, encoding="utf-8")
    module = load(path)
    spec, wanted = module.spec, exercise.operation
    for field in ("name", "doc", "inputs", "result", "exercise", "summed", "multiple_of"):
        assert getattr(spec, field) == getattr(wanted, field)
    meta = _sizes_of_exercise(wanted)
    assert _sizes_of_exercise(spec) == meta
    assert module.grid(meta) == teaching_kernels()[exercise.name].grid(meta)


def test_the_empty_file_fails_with_a_readable_message() -> None:
    assert learn("2", "--start")[0] == 0
    code, out, _ = learn("2")
    assert code == 1
    assert "elements never written: 200 of 200 elements, first z[0]" in out
    assert "lowbit learn 2 --hint" in out


@pytest.mark.deep
def test_from_start_to_solution() -> None:
    path = Path("02_add_constant_blocks.py")
    code, out, _ = learn("2", "--start")
    assert code == 0
    assert "z_i = x_i + 10" in out
    assert str(path) in out
    message = f"{path} exists; `lowbit learn 2` checks it, --force replaces it"
    assert message in one_line("2", "--start")
    assert "not solved yet" in one_line("2", "--solution")
    assert learn("2", "--solution", "--yes")[1].startswith("@triton.jit\ndef add_constant_blocks_")

    text = starter(EXERCISES[1])
    wrong = teaching(EXERCISES[1]).body.replace("mask=i < N0", "mask=i <= N0", 1)
    path.write_text(text.replace(EMPTY, wrong), encoding="utf-8")
    code, out, _ = learn("2")
    assert code == 1
    assert "reads outside of a tensor" in out
    assert " 2  add_constant_blocks  tried " in learn()[1]

    path.write_text(text, encoding="utf-8")
    solve(EXERCISES[1], path)
    code, out, _ = learn("2")
    assert code == 0
    assert "Exercise 2 is right." in out
    assert "Next: lowbit learn 3 --start" in out
    listed = learn()[1]
    assert "1 of 12 done. Next: lowbit learn 3 --start" in listed
    assert " 2  add_constant_blocks  done " in listed
    assert " 3  outer_add            not yet " in listed
    assert "1 of 12 done" in listed
    assert learn("2", "--solution")[0] == 0

    assert learn("2", "--start", "--force")[0] == 0
    assert path.read_text(encoding="utf-8") == text
    assert learn("2")[0] == 1
    assert " 2  add_constant_blocks  done " in learn()[1], "what is solved stays solved"


def test_the_view_lies_beside_the_file() -> None:
    learn("1", "--start")
    code, out, _ = learn("1")
    page = Path("01_add_constant.html")
    assert code == 1
    assert f"the view of it: {page.absolute()}" in out
    assert "add_constant" in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_no_failure() -> None:
    learn("1", "--start")
    Path("01_add_constant.html").mkdir()
    code, out, _ = learn("1")
    assert code == 1
    assert "no view: " in out


@pytest.mark.deep
def test_the_file_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "over" / "there"
    assert learn("add_constant", "--start", "--dir", str(there))[0] == 0
    path = there / "01_add_constant.py"
    solve(EXERCISES[0], path)
    assert learn("1")[0] == 0
    message = one_line("1", "--dir", str(tmp_path))
    assert str(tmp_path / "01_add_constant.py") in message
    assert "`lowbit learn 1 --start` writes one" in message
    assert "--dir says where one is" in message
    path.rename("01_add_constant.py")
    assert learn("1")[0] == 0


@pytest.mark.deep
def test_a_file_that_was_moved_is_known_where_it_was_checked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn("1", "--start")
    moved = tmp_path / "moved"
    moved.mkdir()
    solve(EXERCISES[0], Path("01_add_constant.py"))
    Path("01_add_constant.py").rename(moved / "01_add_constant.py")
    assert one_line("1").count("01_add_constant.py") == 1
    assert learn("1", "--dir", str(moved))[0] == 0
    assert learn("1")[0] == 0


@pytest.mark.deep
def test_the_working_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn("1", "--start")
    solve(EXERCISES[0], Path("01_add_constant.py"))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert learn("1")[0] == 0
    out = learn("1", "--start")[1]
    assert f"the one before stays where it is: {tmp_path / 'work' / '01_add_constant.py'}" in out
    assert learn("1")[0] == 1
    assert "stays where it is" not in learn("1", "--start", "--force")[1]
    monkeypatch.chdir(tmp_path / "work")
    assert learn("1")[0] == 0


def test_a_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    for more in ([], ["--force"]):
        assert f"{file}: it is no folder" in one_line("1", "--start", "--dir", str(file), *more)


def test_hints_come_one_after_the_other() -> None:
    exercise = EXERCISES[6]
    shown = [learn("7", "--hint")[1] for _ in range(4)]
    assert [f"hint {n} of 3" in out for n, out in zip((1, 2, 3, 3), shown, strict=True)] == [
        True
    ] * 4
    assert " ".join(exercise.hints[0].split()) in " ".join(shown[0].split())
    assert exercise.hints[2] in shown[2]
    assert shown[1].endswith("another one: lowbit learn 7 --hint\n")
    assert shown[2].endswith("lowbit learn 7 --solution --yes\n")
    assert "hint 1 of 3" in learn("7", "--hint", "1")[1]
    assert "hint 3 of 3" in learn("7", "--hint")[1]
    assert "there is no hint 4; there are 1 to 3" in one_line("7", "--hint", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["13"], "no exercise '13'"),
        (["1"], "`lowbit learn 1 --start` writes one"),
        (["--start"], "say which exercise"),
        (["1", "2"], "a number of a hint goes with --hint"),
        (["1", "--force"], "--force goes with --start"),
        (["1", "--yes"], "--yes goes with --solution"),
        (["1", "--start", "--hint"], "give one of --start, --hint"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], message: str) -> None:
    assert message in one_line(*arguments)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (EMPTY, "    if", "01_add_constant.py, line "),
        ("import numpy as np", "import numpy as np\n\nunknown + 1", "NameError: name 'unknown'"),
        ("    return (1,)", '    return (meta["B7"],)', "KeyError: 'B7'"),
        ("def grid(meta):", "grid = (3,)\n\n\ndef other(meta):", "write a function of meta"),
        ("spec = add_constant\n", "", "defines no `spec`"),
        ("x_ptr, z_ptr, N0", "x_ptr, z_ptr, N7", "N7"),
        ("@triton.jit\n", "", "write @triton.jit in the line above it"),
        ("def grid(meta):", "def grid():", "takes 0 positional arguments"),
    ],
)
def test_a_file_that_cannot_be_checked_is_one_line(old: str, new: str, message: str) -> None:
    learn("1", "--start")
    path = Path("01_add_constant.py")
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    said = one_line("1")
    assert message in said
    assert path.name in said or "N7" in said or "grid()" in said


@pytest.mark.deep
def test_a_changed_specification_changes_nothing() -> None:
    learn("1", "--start")
    path = Path("01_add_constant.py")
    text = path.read_text(encoding="utf-8").replace("return x + 10", "return x + 11")
    path.write_text(text, encoding="utf-8")
    solve(EXERCISES[0], path)
    assert not check_file(path, "cpu").ok
    assert learn("1")[0] == 0


# -- progress


def _heard() -> tuple[Progress, list[str]]:
    said: list[str] = []
    return Progress(said.append), said


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_STATE_DIR", "/one")
    assert folder() == Path("/one")
    monkeypatch.delenv("LOWBIT_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/two")
    assert folder() == Path("/two/lowbit")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/three")
    monkeypatch.setattr(sys, "platform", "linux")
    assert folder() == Path("/three/.local/state/lowbit")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert folder() == Path("/three/Library/Application Support/lowbit")


def test_without_a_home_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOWBIT_STATE_DIR")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert "set LOWBIT_STATE_DIR" in one_line()


def test_progress_is_kept() -> None:
    progress, said = _heard()
    assert progress.read() == {}
    done = Standing("somewhere.py", tries=3, solved=True, hints=2)
    assert progress.update("long_sum", lambda known: done) == done
    progress.update("conv2d", lambda known: Standing(tries=1))
    assert _heard()[0].read() == {"long_sum": done, "conv2d": Standing(tries=1)}
    assert [path.name for path in progress.path.parent.iterdir()] == ["learn.json"]
    assert said == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "exercises": {}}',
        '{"version": 1}',
        '{"version": 1, "exercises": {"conv2d": {"tries": 1}}}',
        '{"version": 1, "exercises": {"conv2d": '
        '{"file": null, "tries": "1", "solved": false, "hints": 0}}}',
        "\udcff",
    ],
)
def test_a_damaged_file_is_kept_aside(text: str) -> None:
    progress, said = _heard()
    progress.path.parent.mkdir(parents=True)
    for number in (1, 2):
        progress.path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert progress.read() == {}
        aside = progress.path.with_name(f"learn.damaged-{number}.json")
        assert aside.read_bytes() == text.encode("utf-8", "surrogateescape")
        assert len(said) == number
        assert str(aside) in said[-1]
    progress.update("conv2d", lambda known: Standing(tries=1))
    assert progress.read() == {"conv2d": Standing(tries=1)}
    assert len(said) == 2


def test_progress_that_cannot_be_kept_is_a_warning() -> None:
    progress, said = _heard()
    progress.path.parent.write_text("a file where the folder should be", encoding="utf-8")
    assert progress.update("conv2d", lambda known: Standing(tries=1)) == Standing(tries=1)
    assert any("the progress cannot be kept" in line for line in said)
    code, _, error = learn("1", "--start")
    assert code == 0
    assert error.count("the progress cannot be kept") == 1
    assert len(set(error.splitlines())) == error.count("\n")


def test_the_damaged_file_is_told_once_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "learn.json").write_text("nonsense", encoding="utf-8")
    code, out, error = learn()
    assert code == 0
    assert "0 of 12 done" in out
    assert "lowbit learn 4 --hint" in out
    assert error.count("\n") == 1
    assert learn()[2] == ""
    learn("3", "--hint")
    kept = json.loads((tmp_path / "state" / "learn.json").read_text(encoding="utf-8"))
    assert kept["exercises"]["outer_add"]["hints"] == 1


# -- without Triton, or with another one


def _elsewhere(setup: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv[0] = 'lowbit'; {setup}; from lowbit.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.deep(
    "*-import triton; triton.__version__ = '4.1.0'-*",
    "*-import triton.runtime.interpreter as i; del i._implicit_cvt-*",
)
@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (
            "sys.modules['triton'] = None",
            "needs triton; in a clone of lowbit: pip install '.[lab]'",
        ),
        (
            "import triton; triton.__version__ = '4.1.0'",
            "lowbit's checker knows Triton 3.6 to 3.9; this is 4.1.0: pip install 'triton>=3.6,",
        ),
        (
            "import triton.runtime.interpreter as i; del i._implicit_cvt",
            "but another one inside (",
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [["learn", "1"], ["check", "01_add_constant.py"], ["view", "01_add_constant.py"]]
)
def test_another_triton_is_one_line(setup: str, message: str, command: list[str]) -> None:
    learn("1", "--start")
    solve(EXERCISES[0], Path("01_add_constant.py"))
    done = _elsewhere(setup, *command)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("lowbit: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.deep("command1")
@pytest.mark.parametrize("command", [["learn"], ["view", "long_sum"]])
def test_a_missing_package_is_one_line(command: list[str]) -> None:
    done = _elsewhere("sys.modules['jaxtyping'] = None", *command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lowbit: ")
    assert done.stderr.endswith("in a clone of lowbit: pip install '.[cli]'\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.deep
def test_lessons_need_no_triton() -> None:
    hidden = "sys.modules['triton'] = None"
    assert _elsewhere(hidden, "learn").returncode == 0
    assert _elsewhere(hidden, "learn", "4", "--hint").returncode == 0
    assert _elsewhere(hidden, "learn", "4", "--solution", "--yes").returncode == 0
