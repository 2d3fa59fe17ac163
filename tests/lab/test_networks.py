"""Networks quantized, run and reported on from the command line."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets import Net

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from lowbit.cli.application import app
from lowbit.graph import save
from lowbit.models import report, source
from lowbit.models.model import Model, classified, models
from lowbit.report import page as lab_page

MODULE = """
import torch

nn = torch.nn


def network():
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), *head)


def pair():
    return network(), torch.zeros(1, 3, 12, 12)


def nothing():
    return nn.Sequential(nn.ReLU()), torch.zeros(1, 3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    made = tmp_path_factory.mktemp("networks")
    (made / "tiny_of_tests.py").write_text(MODULE)
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


deep_fixtures = ("quantized",)


@pytest.fixture(scope="module")
def quantized(folder: Path) -> str:
    """What is printed while a network is quantized into the folder int8."""
    with contextlib.chdir(folder):
        return _run("quantize", "tiny_of_tests:pair", "--data", "random", "--out", "int8")


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def _fails(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (1, 2)
    return done.output


def test_a_function_is_quantized_run_and_reported_on(here: Path, quantized: str) -> None:
    assert "Conv int8" in quantized
    found = json.loads((here / "int8" / "report.json").read_text())
    assert [row["choice"] for row in found["layers"] if "choice" in row] == ["int8", "int8"]
    assert all(20 < row["sqnr_db"] < 100 for row in found["layers"] if "choice" in row)
    assert math.isclose(sum(row.get("time_share", 0) for row in found["layers"]), 1)
    assert math.isclose(sum(row["operation_share"] for row in found["layers"]), 1)
    assert found["operations"] == {
        "before": {"Conv float32": 10800, "Linear float32": 160},
        "after": {"Conv int8": 10800, "Linear int8": 160},
    }
    images = np.random.default_rng(0).standard_normal((3, 3, 12, 12), np.float32)
    np.save("images.npy", images)
    told = _run("run", "int8", "--input", "images.npy", "--output", "made.npz", "--profile")
    assert "float32 [3, 10]" in told
    assert "ms a call" in told
    with np.load("made.npz") as made:
        assert [one.shape for one in made.values()] == [(3, 10)]
    told = _run("report", "int8", "--html", "page.html", "--json", "again.json")
    assert "No accuracy" in told
    assert json.loads(Path("again.json").read_text()) == found


@pytest.mark.usefixtures("quantized")
def test_a_page_loads_nothing_and_holds_all(here: Path) -> None:
    found = report.read(here / "int8") | {"name": "<tiny>"}
    text = lab_page.page(f"{found['name']}, quantized", report.text(found))
    assert "<h1>&lt;tiny&gt;, quantized</h1>" in text
    assert not re.search(r"https?:|src=|@import|url\(", text)
    for one in report.sections(found):
        assert f"<h2>{one.title}</h2>" in text
    assert text.count("<tr>") == sum(1 + len(one.lines) for one in report.sections(found))


@pytest.mark.usefixtures("quantized")
def test_times_of_a_record_are_taken_in(here: Path) -> None:
    found = report.read(here / "int8")
    row = {
        "implementation": "OpenVINO int8",
        "work": "pair",
        "case": "pair batch 1",
        "threads": 1,
        "seconds": {"median": 2e-3, "p10": 1e-3, "p90": 3e-3},
        "extra": {},
    }
    record = {"suite": "networks", "benchmarks": [row, row | {"work": "other"}]}
    (here / "record.json").write_text(json.dumps(record))
    assert "OpenVINO int8" in _run("report", "int8", "--latency", "record.json")
    with pytest.raises(ValueError, match="no times of pair"):
        report.with_latency(found, {"suite": "networks", "benchmarks": []})


@pytest.mark.deep
def test_data_of_a_file(here: Path) -> None:
    np.save("twenty.npy", np.ones((20, 3, 12, 12), np.float32))
    found = source.find("tiny_of_tests:network", "twenty.npy")
    assert [one["input"].shape[0] for one in found.batches] == [8]
    assert found.sample["input"].shape == (8, 3, 12, 12)
    _run("quantize", "tiny_of_tests:network", "--data", "twenty.npy", "--config", "dynamic",
         "--out", "dynamic")  # fmt: skip
    found = report.read(here / "dynamic")
    assert found["operations"]["after"] == {"Conv int8": 10800, "Linear int8, rows": 160}
    told = _run("quantize", "tiny_of_tests:network", "--data", "twenty.npy", "--config", "int4",
                "--rounding", "gptq", "--weight-range", "mse", "--equalize",
                "--out", "four")  # fmt: skip
    assert "int4, ranges by minmax, weights by gptq, their ranges by mse, equalize" in told
    found = report.read(here / "four")
    assert found["operations"]["after"] == {"Conv int8": 10800, "Linear int4": 160}


class Judged(Model):
    """A network with data and labels."""

    name, title, source = "judged", "Judged", "for tests"

    def build(self, weights: Any = None, *, for_speed: bool = False) -> Any:
        import torch

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def example(self, batch: int) -> Any:
        return (np.random.default_rng(0).standard_normal((batch, 8), np.float32),)

    def calibration(self, count: int, batch: int = 32) -> Iterator[Any]:
        yield from [self.example(batch)] * count

    def accuracy(self, run: Any, limit: Any = None, reference: Any = None) -> Any:
        (x,) = self.example(limit)
        return classified(run(x), np.zeros(limit, int), reference(x) if reference else None)


@pytest.mark.deep
def test_accuracy_is_measured_where_it_can_be(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "get", lambda name: Judged())
    told = _run("quantize", "judged", "--samples", "40", "--out", "judged")
    assert "top1" in told
    found = report.read(here / "judged")["accuracy"]
    assert found["top1"]["count"] == 40
    assert found["top1"]["error"] > 0
    assert abs(found["top1"]["value"] - found["top1"]["float"]) <= 0.1
    assert found["agreement"]["value"] > 0.9


def test_an_onnx_file(here: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", 1, ["n", 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 4])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, "small.onnx")
    _run("quantize", "small.onnx", "--data", "random", "--out", "small")
    assert report.read(here / "small")["operations"]["after"] == {"Linear int8": 32}
    assert "y: float32 [1, 4]" in _run("run", "small.onnx")


def test_sizes_that_are_open_are_those_of_the_data(here: Path) -> None:
    """Of images, beside inputs that are the same for all samples."""
    onnx = pytest.importorskip("onnx")
    helper, rng = onnx.helper, np.random.default_rng(0)
    weight = rng.standard_normal((8, 3, 3, 3)).astype(np.float32)
    sizes = {"x": ["n", 3, "h", "w"], "t": [8, 1, 1], "s": []}
    nodes = [("Conv", ["x", "k"], "a"), ("Add", ["a", "t"], "b"), ("Mul", ["b", "s"], "y")]
    graph = helper.make_graph(
        [helper.make_node(op, read, [made]) for op, read, made in nodes],
        "images",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in sizes.items()],
        [onnx.ValueInfoProto(name="y")],
        [onnx.numpy_helper.from_array(weight, "k")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, "images.ONNX")
    images = rng.standard_normal((16, 3, 12, 10)).astype(np.float32)
    np.savez("images.npz", x=images, t=np.ones((8, 1, 1), np.float32), s=np.float32(2))
    _run("quantize", "images.ONNX", "--data", "images.npz", "--out", "images")
    assert report.read(here / "images")["operations"]["after"] == {"Conv int8": 27 * 8 * 10 * 8}
    assert "y: float32 [16, 8, 10, 8]" in _run("run", "images", "--input", "images.npz")


def test_a_saved_graph_runs(tmp_path: Path) -> None:
    net = Net()
    net("Relu", net.input("batch", 5))
    save(net.graph(), tmp_path / "net.safetensors")
    assert "v0: float32 [1, 5]" in _run("run", str(tmp_path / "net.safetensors"))


@pytest.mark.usefixtures("quantized")
def test_what_is_wrong_is_said_in_a_line(here: Path) -> None:
    for what, text in (
        (("quantize", "tiny_of_tests:network", "--data", "random"), "says no inputs"),
        (("quantize", "tiny_of_tests:absent"), "has no 'absent'"),
        (("quantize", "tiny_of_tests:nothing"), "nothing to quantize in nothing"),
        (("quantize", "absent"), "absent"),
        (("quantize", "tiny_of_tests:pair", "--config", "int3"), "config 'int3' is not known"),
        (("quantize", "tiny_of_tests:pair", "--rounding", "up"), "unknown method 'up'"),
        (("quantize", "tiny_of_tests:pair", "--smooth", "2"), "smooth must be from 0 to 1"),
    ):
        assert text in _fails(*what, "--out", "none")
    (here / "broken").mkdir()
    (here / "broken" / "report.json").write_text("{")
    assert "is no report" in _fails("report", "broken")
    np.savez("two.npz", np.zeros(1), np.zeros(1))
    assert "got 2 arrays" in _fails("run", "int8", "--input", "two.npz")
    assert not (here / "none").exists()


def test_tokens_are_padded_to_a_networks_length() -> None:
    tokens, floats = np.ones((2, 3), np.int64), np.ones((2, 3), np.float32)
    made = source.padded((tokens, floats), [("batch", 5), ("batch", 3)])
    assert made[0].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert made[1] is floats
    with pytest.raises(ValueError, match="negative"):
        source.padded((tokens,), [("batch", 2)])
