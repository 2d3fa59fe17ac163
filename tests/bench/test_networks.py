"""Whole networks in engines: what is prepared, what engines give, and a run of the suite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets import Net

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from remote_here import RemoteHere  # noqa: E402

from lowbit.graph import Session, load  # noqa: E402
from lowbit.models.model import Model, models  # noqa: E402
from lowbit.models.work import linear_share, multiply_adds  # noqa: E402
from lowbit_lab.bench import Plan, Record, run  # noqa: E402
from lowbit_lab.bench.core import cpu  # noqa: E402
from lowbit_lab.bench.core.case import find  # noqa: E402
from lowbit_lab.bench.core.clock import Limits  # noqa: E402
from lowbit_lab.bench.core.stamps import outside_kernels  # noqa: E402
from lowbit_lab.bench.networks import engine  # noqa: E402
from lowbit_lab.bench.networks.engine import FLOAT, MEASURE, REFERENCE, STATIC, Engine, NetworkWork  # noqa: E402
from lowbit_lab.bench.networks.prepare import Facts, Preparation, prepare  # noqa: E402
from lowbit_lab.bench.suites import networks  # noqa: E402


class Tiny(Model):
    """A convolution and a linear layer."""

    name, title, source = "tiny", "Tiny", "for tests"

    def build(self, weights: Any = None, *, for_speed: bool = False) -> Any:
        torch.manual_seed(0)
        nn = torch.nn
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), *head).eval()

    def example(self, batch: int) -> Any:
        return (np.random.default_rng(0).standard_normal((batch, 3, 12, 12), np.float32),)

    def calibration(self, count: int, batch: int = 32) -> Iterator[Any]:
        raise NotImplementedError

    def accuracy(self, run: Any, limit: Any = None, reference: Any = None) -> Any:
        raise NotImplementedError


def _engine(name: str) -> Engine:
    found = find("networks", name)
    assert isinstance(found, Engine)
    return found


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    known = models.get
    monkeypatch.setattr(models, "get", lambda name: Tiny() if name == "tiny" else known(name))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Facts]:
    """A folder with what is prepared of the model, and what was found out about it."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "get", lambda name: Tiny())
        return folder, prepare(Preparation("tiny", None, str(folder), 5, (FLOAT, STATIC)))


def test_multiply_adds_of_each_kind() -> None:
    net = Net()
    x = net.input(2, 8, 6, 6)
    made = net("Conv", x, net.weight(16, 4, 3, 3), group=2)  # 4 × 4 pixels
    made = net("Flatten", made)
    made = net("Linear", made, net.weight(10, 256))
    q, k = net.input(2, 5, 4), net.input(2, 7, 4)
    attended = net("Attention", q, k, k)
    graph = net.graph(made, attended)
    counts = multiply_adds(graph)
    assert counts == {"v0": 2 * 16 * 16 * 36, "v2": 2 * 10 * 256, "v3": 2 * (2 * 5 * 4 * 7)}
    assert linear_share(graph) == pytest.approx(5120 / (18432 + 5120 + 560))


def test_engines_run_what_was_prepared(prepared: tuple[Path, Facts]) -> None:
    folder, facts = prepared
    assert facts.missing == {}
    assert facts.multiply_adds == 16 * 25 * 27 + 160
    ideal = np.load(folder / REFERENCE)
    assert ideal.shape == (5, 10)
    work = NetworkWork("tiny", None, str(folder), 2, 1)
    errors = {}
    for name in ("lowbit int8", "lowbit fp32", "torch fp32"):
        made = engine.outputs(_engine(name).open(work), work.arrays("inputs.npz"), 2)
        errors[name] = np.abs(made - ideal).max() / np.abs(ideal).max()
    assert errors["torch fp32"] < 1e-6
    assert errors["lowbit fp32"] < 1e-5
    assert 1e-6 < errors["lowbit int8"] < 0.05


def test_what_is_outside_of_kernels_is_a_share(prepared: tuple[Path, Facts]) -> None:
    folder, _ = prepared
    inputs = (np.zeros((1, 3, 12, 12), np.float32),)
    session = Session(load(folder / FLOAT), threads=1)
    assert 0 < outside_kernels(lambda: session(*inputs)) < 1


class Near(RemoteHere):
    KNOWN = ("lowbit int8", "lowbit fp32", "torch fp32")

    def answer(self, seconds: float) -> Any:
        assert super().answer(seconds) == ""
        return f"{self.name} in its process"

    def ask(self, question: Any, seconds: float) -> Any:
        return {} if question == (MEASURE,) else super().ask(question, seconds)


def _prepared_here(function: Any, task: Preparation, seconds: float) -> Facts:
    facts = prepare(replace(task, files=(FLOAT, STATIC)))
    missing = {"float.onnx": "RuntimeError: no exporter"}
    return Facts(facts.multiply_adds, 0.1, 4, missing)


def _suite(**options: Any) -> networks.Networks:
    return networks.Networks(model=("tiny",), seconds=0.1, **options)


@pytest.mark.deep
def test_a_run_has_everybody_and_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "Remote", Near)
    monkeypatch.setattr(networks, "run_remote", _prepared_here)
    monkeypatch.setattr(engine, "share_processor", lambda: None)
    monkeypatch.setattr(Engine, "available", lambda self, case: None)
    kept: list[Record] = []
    suite = _suite(batch="1,2")
    plan = Plan(limits=Limits(seconds=0.05, least_rounds=3, whole=True))
    record = run(suite, plan, keep=kept.append)
    assert {(row.case, row.implementation) for row in record.rows} == {
        (f"tiny batch {batch}", name) for batch in (1, 2) for name in Near.KNOWN
    }
    assert [len(one.rows) for one in kept] == [3]  # after the first of two cases
    rows = {row.implementation: row for row in record.rows}
    assert rows["torch fp32"].extra["sqnr_db"] > 100 > rows["lowbit int8"].extra["sqnr_db"] > 20
    assert set(rows["lowbit fp32"].ratios) == {"lowbit int8", "torch fp32"}
    assert rows["lowbit fp32"].note == "lowbit fp32 in its process"
    assert rows["lowbit int8"].operations == 2 * 2 * (16 * 25 * 27 + 160)
    reasons = {one.implementation: one.reason for one in record.absent}
    assert reasons["OpenVINO fp32"] == "RuntimeError: no exporter"
    assert reasons["torch bf16"] == "crashed with SIGSEGV"
    assert "torch dynamic onednn" not in reasons  # only static was asked for
    assert [one["best_peer"] for one in record.summary] == ["torch fp32"] * 2
    assert Record.from_json(record.to_json()) == record


def test_peers_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "Remote", Near)
    monkeypatch.setattr(networks, "run_remote", _prepared_here)
    monkeypatch.setattr(engine, "share_processor", lambda: None)
    plan = Plan(peers=False, limits=Limits(seconds=0.05, least_rounds=3, whole=True))
    record = run(_suite(engines="lowbit int8,torch,openvino"), plan)
    assert {row.implementation for row in record.rows} == {"lowbit int8", "torch fp32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": "tensorrt"}, "no engine is called 'tensorrt'; known are .*lowbit"),
        ({"config": ("int3",)}, "config 'int3' is not known; known are static, dynamic"),
        ({"batch": "one"}, "batch 'one' is not understood"),
        ({"batch": "0"}, "a batch is 0"),
        ({"seconds": 0.0}, "seconds is"),
        ({"weights": "a", "model": ("tiny", "tiny")}, "weights are for one model"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        networks.Networks(**{"model": ("tiny",), **options})


def test_linear_networks_are_timed_both_ways() -> None:
    suite = _suite()
    suite._prepared["tiny"] = (type("Folder", (), {"name": "."})(), Facts(1, 0.9, 4))  # type: ignore[assignment]
    problem = suite.make(suite.cases()[0], 0)
    assert problem.configs == ("static", "dynamic")


def test_what_is_kept_gives_way_to_what_is_shown(tmp_path: Path) -> None:
    from lowbit.cli.application import output

    path = tmp_path / "record.json"
    with output(str(path)) as show:
        show.keep('{"rows": [1, 2, 3]}')
        assert json.loads(path.read_text()) == {"rows": [1, 2, 3]}
        show("text", '{"rows": []}')
    assert json.loads(path.read_text()) == {"rows": []}


class InFile(Tiny):
    """One that comes as ONNX."""

    path = Path()

    def build(self, weights: Any = None, *, for_speed: bool = False) -> Any:
        return self.path

    def example(self, batch: int) -> Any:
        return (np.random.default_rng(0).standard_normal((batch, 8), np.float32),)


def test_a_model_that_comes_as_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    onnx.save(made, tmp_path / "small.onnx")
    monkeypatch.setattr(InFile, "path", tmp_path / "small.onnx")
    monkeypatch.setattr(models, "get", lambda name: InFile())
    (tmp_path / "out").mkdir()
    facts = prepare(Preparation("small", None, str(tmp_path / "out"), 3, (FLOAT, STATIC)))
    assert facts == Facts(32, 1.0, 128)
    (x,) = InFile().example(3)
    assert np.allclose(np.load(tmp_path / "out" / REFERENCE), x @ weight, atol=1e-5)
    with pytest.raises(ValueError, match="small comes as an ONNX file"):
        _engine("torch fp32").open(NetworkWork("small", None, str(tmp_path / "out"), 1, 1))
