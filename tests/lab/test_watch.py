"""Launches of Triton watched without a specification: what is found, who launched, scripts, and the
sample of a GPU's programs."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")

from triton.runtime.jit import JITFunction  # noqa: E402

from lowbit.cli import app  # noqa: E402
from lowbit_lab import watch  # noqa: E402
from lowbit_lab.backends.source import load  # noqa: E402
from lowbit_lab.run.outcome import UnsupportedError  # noqa: E402
from lowbit_lab.watched import watch as watched  # noqa: E402
from lowbit_lab.watched.log import Log  # noqa: E402

HERE = Path(__file__).parent / "watched"
wrong, right = load(HERE / "wrong.py"), load(HERE / "right.py")
if torch.cuda.is_available():  # what is watched here is the interpreter
    pytest.skip("these programs would run on the GPU", allow_module_level=True)


@pytest.mark.parametrize(
    ("program", "kind", "line"), wrong.WRONG, ids=lambda one: getattr(one, "__name__", str(one))
)
def test_what_is_wrong_is_found(program: Callable[[], None], kind: str, line: str) -> None:
    if program.__name__ == "in_gluon":  # no interpreter runs it, and Z3 says what it reaches
        pytest.importorskip("z3")
    with watch() as log:
        try:
            program()
        except (ValueError, UnsupportedError):
            assert program in (wrong.stops_with_an_error, wrong.in_gluon)
    assert not log.ok
    assert kind in log.kinds, str(log)
    finding = next(one for one in log.findings if one.kind == kind)
    assert finding.place is not None
    assert line in linecache.getline(finding.place.file, finding.place.line)
    assert finding.stack[0].function == program.__name__
    assert finding.stack[1].function == "test_what_is_wrong_is_found"


@pytest.mark.parametrize("program", right.RIGHT)
def test_what_is_right_passes(program: Callable[[], None]) -> None:
    launcher = JITFunction.run
    with watch() as log:
        program()
    assert not log.findings, str(log)
    assert (JITFunction.run, torch.cuda.is_available()) == (launcher, False)


def test_findings_are_counted_over_launches() -> None:
    with watch() as log:
        for _ in range(3):
            wrong.no_mask()
    (finding,) = log.findings
    assert (finding.more, log.launches["copies_a_block"]) == (2, 3)
    assert "wrong in 3 launches of 1 kernel" in str(log)
    assert "launched at wrong.py" in str(log)
    assert json.loads(log.to_json())["findings"][0]["stack"][0]["function"] == "no_mask"


def test_a_view_has_its_own_bounds_and_indices() -> None:
    with watch() as log:
        wrong.more_than_the_view_has()
    assert "x_ptr has 5 elements" in log.findings[0].message
    assert log.findings[0].index == (10,)


def test_memory_is_forgotten_with_its_tensor() -> None:
    watcher = watched.Watcher(Log())
    with watcher.running():
        for _ in range(4):
            right.in_place_and_again()
    watcher.forget_freed()
    assert not watcher._held


# Scripts.

SCRIPT = """
import sys
import torch, triton, triton.language as tl
import beside

@triton.jit
def twice(x_ptr, z_ptr, N, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(z_ptr + i, 2 * tl.load(x_ptr + i, mask=i < N + MORE, other=0), mask=i < N)

MORE = tl.constexpr(int(sys.argv[1]))
if __name__ == "__main__":
    x = torch.ones(beside.SIZE, device="cuda")
    z = torch.empty_like(x)
    twice[(1,)](x, z, beside.SIZE, B=16)
    print("sum", z.sum().item(), *sys.argv[2:])
    sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("SIZE = 11\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.parametrize(("more", "code", "exits"), [(0, 0, 0), (1, 0, 1), (1, 5, 1), (0, 5, 2)])
def test_a_script_is_watched(script: Path, more: int, code: int, exits: int) -> None:
    arguments = ["check", "--run", str(script), str(more), str(code), "--json", "x"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exits, result.output
    assert f"sum 22.0 {code} --json x" in result.output
    found = "reads outside of a tensor in twice at script.py:9"
    assert (found in result.output) == bool(more)
    assert ("launched at script.py:15 in <module>\n" in result.output) == bool(more)
    assert ("it left Python with 5" in result.output) == (code == 5)


def test_a_script_that_fails_shows_its_own_lines(script: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--run", str(script)])
    assert result.exit_code == 2
    assert "IndexError" in result.output
    assert "runpy" not in result.output


def test_options_stand_before_the_script(script: Path, tmp_path: Path) -> None:
    file = tmp_path / "log.json"
    CliRunner().invoke(app, ["check", "--json", str(file), "--run", str(script), "1", "0"])
    record = json.loads(file.read_text())
    assert (record["ok"], record["launches"]) == (False, {"twice": 1})


def test_bad_input_of_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--run", str(tmp_path / "none.py")])
    assert (result.exit_code, "no such file" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["check", "long_sum", "long_softmax"])
    assert (result.exit_code, "name one" in result.output) == (2, True)


def test_reports_of_benchmarks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.py"
    path.write_text(
        "import triton\n"
        "@triton.testing.perf_report(triton.testing.Benchmark(['N'], [1], 'p', ['a'], ['a'], [], "
        "'y', 'plot', {}))\n"
        "def bench(N, p):\n    raise ValueError\n"
        "bench.run(print_data=True)\n"
    )
    result = CliRunner().invoke(app, ["check", "--run", str(path)])
    assert (result.exit_code, "was not run" in result.output) == (2, True)


NOTHING = [
    "x = torch.ones(5, device='cuda') + 1",
    "",
    "import triton.language as tl\n"
    "@triton.jit\ndef nothing(x_ptr):\n    pass\n"
    "nothing[(0,)](torch.zeros(1, device='cuda'))",
]


@pytest.mark.parametrize("text", NOTHING, ids=["torch", "nothing", "no programs"])
def test_a_program_that_launches_nothing_was_not_watched(tmp_path: Path, text: str) -> None:
    path, file = tmp_path / "program.py", tmp_path / "log.json"
    path.write_text(f"import torch, triton\n{text}\n")
    result = CliRunner().invoke(app, ["check", "--json", str(file), "--run", str(path)])
    assert result.exit_code == 2
    assert "nothing was watched: the program launched no kernel of Triton" in result.stdout
    assert "nothing wrong" not in result.output
    assert "launched no kernel of Triton to watch" in result.stderr
    assert json.loads(file.read_text())["watched"] is False


def test_what_torch_does_is_wrong_without_a_launch_too(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch\ntorch.empty(3).sum()\n")
    result = CliRunner().invoke(app, ["check", "--run", str(path)])
    assert result.exit_code == 1
    assert "wrong, although the program launched no kernel of Triton" in result.stdout


def test_kernels_that_nobody_watches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SimpleNamespace(generated_kernel_count=2)
    monkeypatch.setitem(sys.modules, "torch._inductor.metrics", metrics)
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace())
    with watch() as log:
        metrics.generated_kernel_count += 3
    assert not log.watched
    compiled, numba = log.notes
    assert "torch.compile made 3 kernels in C++" in compiled
    assert "kernels of Numba are not watched" in numba
    with watch() as log:
        right.adds_one[(1,)](torch.zeros(8), torch.empty(8), 8, 1, B=8)
    assert (log.watched, log.notes) == (True, [])


# A sample of a GPU's programs. The GPU is played by the interpreter, or by torch.


def _sampled(start: Callable[[], object], z: object, more: int = 0) -> Log:
    log = Log()
    x = torch.arange(300.0)
    arguments = {"x_ptr": x, "z_ptr": z, "N": 300 + more, "stride": 1, "B": 8}
    watcher = watched.Watcher(log)
    with watcher.running():
        watcher.on_gpu(start, right.adds_one, (38,), arguments)
    return log


def test_a_launch_on_a_gpu_is_sampled_and_agrees() -> None:
    z = torch.zeros(300)
    log = _sampled(lambda: z.copy_(torch.arange(300.0) + 1), z)
    assert not log.findings, str(log)
    assert log.launches["adds_one"] == 1
    assert torch.equal(z, torch.arange(300.0) + 1)


def test_a_gpu_that_computes_otherwise_is_found() -> None:
    z = torch.zeros(300)
    log = _sampled(lambda: z.copy_(torch.arange(300.0) + 1 + (torch.arange(300) == 299) * 50), z)
    (finding,) = log.findings
    assert (finding.kind, finding.severity, finding.device) == (
        "device-disagrees",
        "warning",
        "cuda",
    )
    assert (finding.tensor, finding.index, finding.program) == ("z_ptr", (299,), (37, 0, 0))
    assert finding.kernel == "adds_one"


def test_rounding_of_a_gpu_is_none() -> None:
    z = torch.zeros(300)
    log = _sampled(lambda: z.copy_((torch.arange(300.0) + 1) * (1 + 1e-3)), z)
    assert not log.findings


def test_a_sample_finds_what_leaves_a_tensor() -> None:
    log = _sampled(lambda: None, torch.zeros(304), more=2)
    assert log.kinds == ("out-of-bounds-load",)
    assert {one.program for one in log.findings if one.severity == "error"} == {(37, 0, 0)}


def test_what_leaves_a_tensor_outside_of_the_sample_is_found_by_z3() -> None:
    pytest.importorskip("z3")
    log = _sampled(lambda: None, torch.zeros(304), more=2)
    assert {one.device for one in log.findings if one.kind == "out-of-bounds-load"} == {
        "interpreter",
        "Z3",
    }


def test_the_last_program_is_in_the_sample() -> None:
    from lowbit_lab.watched.sample import chosen

    programs = chosen((1000, 2, 1))
    assert (programs[0], programs[-1], len(programs)) == ((0, 0, 0), (999, 1, 0), 16)
    assert chosen((1000, 2, 1)) == programs
    assert len(chosen((3, 2, 2))) == 12


def test_what_was_undefined_stays_as_the_first_run_left_it() -> None:
    z = torch.zeros(1)
    with watch() as log:
        wrong.sums_a_row[(1,)](torch.full((5,), -1.0), z, 5, B=8)
    assert log.kinds == ("undefined-lanes",)
    assert np.isfinite(z.item())


def test_only_programs_with_undefined_lanes_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[int]()
    original = watched.Watcher.run

    def run(self, kernel, values, tensors, grid, chosen=None):
        runs.append(len(chosen or range(grid[0])))
        original(self, kernel, values, tensors, grid, chosen)

    monkeypatch.setattr(watched.Watcher, "run", run)
    with watch() as log:
        right.adds_one[(5,)](torch.zeros(39), torch.empty(39), 39, 1, B=8)
        right.adds_one[(5,)](torch.zeros(40), torch.empty(40), 40, 1, B=8)
    assert log.ok
    assert runs == [5, 1, 5]
