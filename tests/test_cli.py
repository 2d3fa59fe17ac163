"""The command line, as users run it. Each command has a process of its own once; what parses and
refuses is called in this one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import lowbit
from lowbit import isa
from lowbit.report.text import three_digits
from lowbit_lab.bench import Record


def run_lowbit(
    *arguments: str, without: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the console entry in a process of its own; `without` names a module to hide from it."""
    hide = f"import sys; sys.modules[{without!r}] = None; " if without else ""
    code = f"{hide}import sys; sys.argv[0] = 'lowbit'; from lowbit.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def call_lowbit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As `run_lowbit`, in this process: another takes a second to import what this one has."""
    from lowbit.cli import app

    done = CliRunner().invoke(app, arguments, prog_name="lowbit")
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def error_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The only line on stderr of a call that failed with `code` and printed nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("lowbit: ")
    return lines[0]


def test_the_command_looks_for_garbage_seldom() -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_threshold()[0])); "
        "sys.argv = ['lowbit', '--version']; from lowbit.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "10000", done.stdout


def test_version() -> None:
    done = run_lowbit("--version")
    assert done.returncode == 0
    assert done.stdout == f"lowbit {lowbit.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["info"],
        ["bench"],
        ["bench", "matmul"],
        ["explain"],
        ["explain", "matmul"],
        ["bench", "demo"],
    ],
)
def test_help_has_an_example(command: list[str]) -> None:
    done = call_lowbit(*command, "--help")
    assert done.returncode == 0
    assert f"Example: {' '.join(['lowbit', *command])}" in " ".join(done.stdout.split())


@pytest.mark.deep
def test_info_json_holds_what_the_text_shows() -> None:
    facts = json.loads(run_lowbit("info", "--json", "-").stdout)
    assert facts["active"] == isa.report()["active"]
    assert facts["versions"]["lowbit"] == lowbit.__version__
    done = run_lowbit("info")  # in a process too: here the threads may be PyTorch's
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for shown in (facts["cpu"], facts["model"], facts["thread_runtime"]):
        assert shown in text
    for one in facts["instruction_sets"]:
        assert one["name"] in text
    for name, size in facts["caches"].items():
        assert f"{name} {size / 1024:,.0f} KiB" in text
    for name, version in facts["versions"].items():
        assert f"{name} {version}" in text


def test_forced_instruction_set_is_used_and_shown() -> None:
    facts = json.loads(run_lowbit("info", "--json", "-", LOWBIT_ISA="generic").stdout)
    assert facts["active"] == facts["forced"] == "generic"


@pytest.mark.parametrize("command", [["info"], ["bench", "matmul", "2x3:3x4", "--no-peers"]])
def test_unknown_instruction_set_is_one_line(command: list[str]) -> None:
    line = error_line(run_lowbit(*command, LOWBIT_ISA="mmx"), 2)
    assert "LOWBIT_ISA=mmx" in line
    assert "avx2" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2x3"], "shape '2x3' is not understood; write MxK:KxN"),
        (["2x3:4x5"], "the inner sizes differ, 3 and 4"),
        (["2x0:0x5"], "every size must be at least 1"),
        (["2x3:3x5", "x"], "shape 'x' is not understood"),
        (["2x3:3x5", "--dtype", "u8:s8"], "known are u8:s8:s32"),
        (["2x100000:100000x5"], "can overflow int32"),
        (["2x3:3x5", "--threads", "0"], "threads is 0; it must be at least 1"),
        (["2x3:3x5", "--noise", "0"], "noise is 0.0; it must be above 0"),
        (["2x3:3x5", "--time-limit", "-1"], "seconds is -1.0; it must be above 0"),
        (["2x3:3x5", "--threads", "one"], "threads 'one' is not understood; write 2, or 1,2"),
        (["2x3:3x5", "--threads", "1,"], "is not understood; write 2, or 1,2"),
        (["--suite", "alexnet"], "no set of shapes is called 'alexnet'; known are seed, resnet34"),
        (["2x3:3x5", "--dtype", "u8:s8:u8", "--dtype", "u8:s8"], "known are u8:s8:s32"),
    ],
)
def test_bad_bench_arguments_are_one_line(arguments: list[str], message: str) -> None:
    assert message in error_line(call_lowbit("bench", "matmul", *arguments), 2)


def test_missing_shapes_and_unknown_options_are_told() -> None:
    assert "give shapes MxK:KxN" in error_line(call_lowbit("bench", "matmul"), 2)
    for arguments in (["bench", "matmul", "2x3:3x4", "--fast"], ["nothing"], ["bench", "nothing"]):
        done = call_lowbit(*arguments)
        assert done.returncode == 2
        assert "Usage: lowbit" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_unwritable_file_is_told_before_anything_runs(tmp_path: Path, option: str) -> None:
    target = tmp_path / "missing" / "record"
    done = call_lowbit("bench", "matmul", "2x3:3x4", "--no-peers", option, str(target))
    line = error_line(done, 1)
    assert str(target) in line
    assert "No such file or directory" in line


@pytest.mark.deep
def test_bench_writes_what_it_shows(tmp_path: Path) -> None:
    target, table = tmp_path / "record.json", tmp_path / "rows.csv"
    arguments = ("--no-peers", "--threads", "1", "--noise", "0.5", "--seed", "3")
    files = ("--json", str(target), "--csv", str(table))
    done = run_lowbit("bench", "matmul", "5x70:70x33", *arguments, *files)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(target.read_text())
    (row,) = parsed["benchmarks"]
    assert row["name"] == "matmul/u8:s8:s32/5x70:70x33/lowbit/warm/threads:1_median"
    assert row["threads"] == 1
    assert parsed["context"]["seed"] == 3
    (ceiling,) = parsed["ceilings"]
    # None of a limit that was measured while others had the cores.
    (limit,) = Record.from_json(target.read_text()).ceilings
    assert row["peak_share"] == pytest.approx(limit.share(row["gops"]))
    (line,) = csv.DictReader(table.read_text().splitlines())
    assert float(line["seconds_median"]) == row["seconds"]["median"]
    assert "matmul u8:s8:s32 5x70:70x33, warm weights, 1 thread" in done.stdout
    assert f"{three_digits(ceiling['gops'])} GOP/s of int8 ({ceiling['way']})" in done.stdout
    assert "exact" in done.stdout
    assert "matmul u8:s8:s32 5x70:70x33: timing warm, 1 thread" in done.stderr  # progress


@pytest.mark.deep
def test_bench_runs_a_suite_with_both_outputs_and_thread_counts(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    arguments = ("--suite", "minilm", "--no-peers", "--no-cold", "--time-limit", "0.01")
    done = run_lowbit("bench", "matmul", *arguments, "--threads", "1,2", "--json", str(target))
    assert done.returncode == 0, done.stderr
    rows = json.loads(target.read_text())["benchmarks"]
    assert len(rows) == 6 * 2 * 2
    assert {row["dtypes"] for row in rows} == {"u8:s8:f32", "u8:s8:u8"}
    assert {row["threads"] for row in rows} == {1, 2}
    for row in rows:
        assert row["case"] in done.stdout
        assert row["work"].startswith("minilm: ")


@pytest.mark.deep
def test_explain_names_kernel_and_limit() -> None:
    arguments = ("explain", "matmul", "70x100:100x40", "--dtype", "u8:s8:f32", "--threads", "1")
    done = run_lowbit(*arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(call_lowbit(*arguments, "--json", "-").stdout)
    text = " ".join(done.stdout.split())
    assert f"kernel {found['kernel']} on {found['isa']}" in text
    assert "70x100:100x40" in text
    assert "predicted" in text
    assert found["blocking"]["threads"] == 1
    assert found["prediction"]["limit"] in ("compute", "memory")
    assert found["measured"]["median"] > 0


@pytest.mark.deep
def test_explain_says_that_a_set_is_forced() -> None:
    arguments = ("explain", "matmul", "7x10:10x4", "--json", "-")
    found = json.loads(run_lowbit(*arguments, LOWBIT_ISA="generic").stdout)
    assert found["isa"] == "generic"
    best = isa.available()[0]
    if best != "generic":
        assert {"isa": best, "kernel": None, "why": "generic is forced"} in found["rejected"]


def test_bad_explain_arguments_are_one_line() -> None:
    assert "not understood" in error_line(call_lowbit("explain", "matmul", "2x3"), 2)
    line = error_line(call_lowbit("explain", "matmul", "2x3:3x4", "--threads", "0"), 2)
    assert "threads is 0" in line


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("odd_networks:plain", "too many positional arguments"),
        ("odd_networks:number", "odd_networks:number returns int: let it return a torch.nn.Module"),
        ("odd_networks:wrong", "unsupported operand"),
    ],
)
def test_bad_networks_are_one_line(
    network: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_networks.py").write_text(
        "import torch\nplain, number = lambda: torch.nn.Linear(4, 2), lambda: 5\n"
        "wrong = lambda: 5 + None\n"
    )
    np.savez(tmp_path / "two.npz", a=np.ones((9, 4), np.float32), b=np.ones((9, 4), np.float32))
    files = "--out", str(tmp_path / "out"), "--data", str(tmp_path / "two.npz")
    assert message in error_line(call_lowbit("quantize", network, *files), 2)


@pytest.mark.deep
def test_outputs_that_are_not_finite_have_a_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both networks give the same infinity, it counts as nothing. The example is a dict."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "endless.py").write_text(
        "from torch import nn, ones\n"
        "layers = nn.Linear(4, 2), nn.ConstantPad1d((0, 1), -float('inf'))\n"
        "network = lambda: (nn.Sequential(*layers), {'input': ones(1, 4)})\n"
    )
    done = call_lowbit("quantize", "endless:network", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    (ratio,) = json.loads((tmp_path / "out" / "report.json").read_text())["output_sqnr_db"].values()
    assert 20 < ratio < 100


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_command_line_extra_is_one_line(missing: str) -> None:
    line = error_line(run_lowbit("info", without=missing), 1)
    assert missing in line
    assert "in a clone of lowbit: pip install '.[cli]'" in line


@pytest.mark.deep
def test_bench_without_torch_runs_what_there_is() -> None:
    arguments = ("--threads", "1", "--noise", "0.5")
    done = run_lowbit("bench", "matmul", "5x70:70x33", *arguments, without="torch")
    assert done.returncode == 0, done.stderr
    assert "torch fp32: torch is not installed; in a clone of lowbit: pip install" in done.stdout
    assert "lowbit" in done.stdout


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_missing_gpu_extra_is_one_line(missing: str) -> None:
    line = error_line(run_lowbit("bench", "ops", without=missing), 1)
    assert f"lowbit bench ops needs {missing}" in line
    assert "in a clone of lowbit: pip install '.[gpu]'" in line


def test_missing_demo_extra_is_one_line() -> None:
    line = error_line(run_lowbit("bench", "demo", without="transformers"), 1)
    assert "transformers" in line
    assert "in a clone of lowbit: pip install '.[demo]'" in line


def test_bad_demo_arguments_are_one_line() -> None:
    line = error_line(call_lowbit("bench", "demo", "--sentences", "3"), 2)
    assert "sentences" in line
    assert "got 3" in line
