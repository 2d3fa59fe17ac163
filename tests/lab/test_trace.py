"""Whole traces: of code without symbols, of a library, and of subjects that cannot be traced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("iced_x86")

from rich.console import Console
from typer.testing import CliRunner

from lowbit import isa
from lowbit.cli import app
from lowbit_lab.trace import parts, replay, run
from lowbit_lab.trace.report import Trace
from lowbit_lab.trace.text import render
from lowbit_lab.trace.verdict import WAYS

_PRODUCT = """
import numpy as np
import lowbit

random = np.random.default_rng(0)
a = random.integers(0, 256, (192, 512), dtype=np.uint8)
b = lowbit.pack(random.integers(-128, 128, (512, 512), dtype=np.int8))
arithmetic, multiply_adds = "int8", 192 * 512 * 512


def run():
    return lowbit.matmul(a, b, threads=1)
"""


@pytest.fixture(scope="module", autouse=True)
def _short() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SAMPLES", 60)
        patch.setattr(replay, "_SAMPLE_SECONDS", 1e-3)
        # Nothing of a trace asks for a debugger.
        patch.setenv("PATH", "/nowhere")
        yield


deep_fixtures = ("product",)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """lowbit's own product: code that was made at run time, and has no symbols."""
    file = tmp_path_factory.mktemp("trace") / "product.py"
    file.write_text(_PRODUCT)
    return run.trace(str(file), seconds=1.0)


@pytest.mark.deep
def test_the_hot_loop_of_generated_code_is_found(product: Trace) -> None:
    assert product.samples >= 20
    hot = product.loops[0]
    assert hot.kind == "generated"
    assert hot.function.startswith("lowbit ")
    assert hot.part == parts.KERNEL
    assert hot.share > 0.3
    ways = {way.mnemonic for way in WAYS["int8"]} | {"vpmaddwd"}
    assert set(hot.products) <= ways | {f"{name}s" for name in ways}
    assert hot.vector_bits in (0, 8 * isa.active().vector_bytes)
    assert len(hot.listing) == hot.instructions
    assert sum(line.samples for line in hot.listing) == hot.samples
    for line in hot.listing:
        assert line.roles
    assert sum(hot.mix.values()) == hot.instructions
    assert 0 < sum(one.share for one in product.loops) <= 1 + 1e-9
    assert sum(one.share for one in product.parts) == pytest.approx(1)


def test_the_callers_of_generated_code_are_found(product: Trace) -> None:
    functions = [frame.function for frame in product.chain]
    assert functions[0] == "run"
    assert product.chain[0].where.startswith("product.py:")
    assert functions[-1] == product.loops[0].function
    assert "_start" in functions or "Py_BytesMain" in functions  # down to where it all began
    assert not any("another thread" in note for note in product.notes)


def test_the_limit_is_told_beside_the_time(product: Trace) -> None:
    limit, hot = product.limit, product.loops[0]
    if limit is None:  # of tiles only where they could be measured
        assert any("limit was not measured" in note for note in product.notes)
        return
    together = limit.by[replay.TOGETHER]
    assert limit.rate == hot.multiply_adds / together
    assert product.multiply_adds is not None
    assert limit.rate is not None
    assert limit.seconds == pytest.approx(product.multiply_adds / limit.rate)
    assert 0 < limit.loop_seconds <= product.cpu_seconds


def test_text_and_json_tell_the_same(product: Trace) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(product, whole=True))
    text = captured.get()
    parsed = json.loads(product.to_json())
    assert parsed["verdict"]["text"] in text
    assert parsed["subject"] in text
    for line in parsed["loops"][0]["listing"]:
        assert line["text"] in text
    for frame in parsed["chain"]:
        assert frame["function"] in text
    for row in parsed["operators"]:
        assert row["name"] in text
        assert row["mean_seconds"] == pytest.approx(row["total_seconds"] / row["calls"])


def test_the_command(product: Trace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def traced(subject: str, threads: int, on_progress: run.OnProgress) -> Trace:
        on_progress("was sampled")
        if subject == "it ends":
            raise ChildProcessError("it ended its process")
        return product

    monkeypatch.setattr(run, "trace", traced)
    runner = CliRunner()
    shown = runner.invoke(app, ["explain", "call", "x", "--json", "-"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["subject"] == product.subject
    file = tmp_path / "trace.json"
    shown = runner.invoke(app, ["explain", "call", "x", "--whole", "--json", str(file)])
    assert "fast path" in shown.stdout
    assert json.loads(file.read_text()) == json.loads(product.to_json())
    ended = runner.invoke(app, ["explain", "call", "it ends"])
    assert ended.exit_code == 1
    assert ended.stderr == "lowbit: it ended its process\n"


@pytest.mark.deep
def test_a_librarys_operator_by_name() -> None:
    found = run.trace("numpy:matmul 256x256:256x256", seconds=0.5)
    assert found.multiply_adds == 256**3
    assert found.loops[0].arithmetic == "float32"
    assert found.loops[0].kind == "native"
    assert found.verdict.fast is not None
    assert found.chain[0].function == "run"


def _subject(folder: Path, body: str) -> str:
    file = folder / "subject.py"
    file.write_text(f"import ctypes, os, sys, time\n\n\ndef run():\n    {body}\n")
    return str(file)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("ctypes.string_at(0)", r"ended its process while it ran for the first time: crashed with "
         r"SIGSEGV, in run \(.*subject\.py, line 5\)"),
        ("import json; json.loads('{')", r"raised .* JSONDecodeError: .*\(.*subject.py, line 5\)"),
        ("os._exit(0)", "ended its process while it ran for the first time: exit status 0"),
        ("sys.exit(3)", r"raised while it ran for the first time: SystemExit: 3 \(.*, line 5\)"),
        ("raise ValueError('no')", r"raised while it ran .*: ValueError: no \(.*, line 5\)"),
        ("1 / 0", r"raised .* ZeroDivisionError: division by zero \(.*subject.py, line 5\)"),
    ],
)  # fmt: skip
def test_subjects_that_end_are_told(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=said):
        run.trace(_subject(tmp_path, body), seconds=0.2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("time.sleep(0.02)", "samples: it hardly uses the processor"),
        ("return sum(i * i for i in range(3000))", "of the time is Python's own"),
    ],
)
def test_subjects_without_a_hot_loop_are_told(body: str, said: str, tmp_path: Path) -> None:
    found = run.trace(_subject(tmp_path, body), seconds=0.3)
    assert found.loops == ()
    assert said in found.why
    assert found.verdict.fast is None
    assert said in found.verdict.text


def test_a_file_without_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.touch()
    with pytest.raises(ValueError, match=r"defines no function run\(\) to trace"):
        run.trace(str(file))
    with pytest.raises(ValueError, match="threads is 0"):
        run.trace(str(file), threads=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nosuch.py", "nosuch.py: there is no such file; .*numpy:.*FILE.py with a run"),
        ("folder.py", "folder.py cannot be read: .*FILE.py with a run"),
        ("notes.txt", "'notes.txt' is no subject; known are"),
        ("empty.py", r"defines no function run\(\)"),
        ("onnxruntime:nosuch.onnx", "nosuch.onnx"),
        ("numpy:matmul 64x64", "numpy:matmul cannot be called with 64x64: .*such as MxK:KxN"),
        ("numpy:matmul 64x64:3x64", "numpy:matmul cannot be called with 64x64:3x64: .*MxK:KxN"),
        ("numpy:nothing 4x4", "numpy has no function 'nothing'"),
    ],
)
def test_unknown_subjects_are_bad_input(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.py").mkdir()
    Path("notes.txt").touch()
    Path("empty.py").touch()
    shown = CliRunner().invoke(app, ["explain", "call", text])
    assert shown.exit_code == 2
    assert re.search(said, shown.stderr)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise ValueError('no')", r"ValueError: no \(.*subject.py, line 2\)"),
        ("x = 1\n\nint('y')", r"ValueError: .*\(.*subject.py, line 3\)"),
        ("x = 1\nx = = 2", r"SyntaxError: .*\(.*subject.py, line 2\)"),
    ],
)
def test_a_file_that_raises_is_told_by_its_own_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "subject.py"
    file.write_text(text)
    with pytest.raises(ChildProcessError, match=f"raised while it was made: {said}"):
        run.trace(str(file))
