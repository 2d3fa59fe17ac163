"""Profiles of networks: what they add up to, and that a limit is one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nets import Net
from tests.lab.test_networks import MODULE, _fails, _run

pytest.importorskip("typer")
pytest.importorskip("rich")

from lowbit.graph import NodeTime, Session, save
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.cli import load

load()  # by whatever else is run


@pytest.fixture(autouse=True)
def _limits_of_a_fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above this one's: so no layer may be beyond its limit, however busy it is."""
    levels: list[str] = ["L1d", "L2", "L3", "memory"]
    rates = dict.fromkeys(levels, 1e6)

    def measure(isa: str, threads: int, *, reads: bool = True, dtype: str = "int8") -> Ceiling:
        gops = {"int8": 4e6, "float32": 1e6}[dtype]
        return Ceiling(isa, threads, "fast", gops, gops, {"fast": gops}, rates, (), dtype)

    monkeypatch.setattr(peak, "measure", measure)


def test_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("vl_convert")
    monkeypatch.chdir(tmp_path)
    Path("profiled_of_tests.py").write_text(MODULE)
    files = ("--json", "profile.json", "--html", "profile.html")
    told = _run("explain", "network", "profiled_of_tests:pair", "--threads", "1", *files)
    found = json.loads(Path("profile.json").read_text())
    assert [side["name"] for side in found["sides"]] == ["float32", "quantized, static"]
    assert math.isclose(sum(one["share"] for one in found["operators"]), 1)
    assert {"aten::addmm", "aten::relu"} & {one["name"] for one in found["operators"]}
    for side, computes in zip(found["sides"], ("float32", "int8"), strict=True):
        products = {one["op"]: one for one in side["layers"] if one["multiply_adds"]}
        assert {op: one["multiply_adds"] for op, one in products.items()} == {
            "Conv": 10800,
            "Linear": 160,
        }
        assert {one["computes"] for one in products.values()} == {computes}
        peak_gops = {"int8": 4e6, "float32": 1e6}[computes]
        for one in side["layers"]:
            compute, memory = 2e-9 * one["multiply_adds"] / peak_gops, 1e-9 * one["bytes"] / 1e6
            assert one["limit_seconds"] == max(compute, memory)
            assert one["limit"] == ("compute" if compute >= memory else "memory")
        for part in ("layers", "kinds"):
            assert math.isclose(sum(one["share"] for one in side[part]), 1)
            total = sum(one["seconds"] for one in side[part])
            assert math.isclose(total, side["seconds"])
        assert math.isclose(sum(one["operation_share"] for one in side["kinds"]), 1)
    # The convolution's operands: an image, its weight and bias, and its result.
    before, after = (
        next(one["bytes"] for one in side["layers"] if one["op"] == "Conv")
        for side in found["sides"]
    )
    assert before == 4 * (3 * 12 * 12 + 16 * 27 + 16 + 16 * 5 * 5)
    assert after < before / 2
    assert "quantized, static: layers" in told
    assert "PyTorch's operators" in told
    page = Path("profile.html").read_text()
    assert page.count("<figure>") == page.count("<svg") == 2
    assert "<code>" in page


def test_a_network_that_is_compiled_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = Net()
    table = net.weight(1000, 24, bits=None)
    rows = net("Gather", table, net.input("batch", dtype="int64"), axis=0)
    net("MatMul", net("Relu", rows), net.weight(24, 10, bits=None))
    save(net.graph(), "net.safetensors")
    told = _run("explain", "network", "net.safetensors", "--threads", "1", "--json", "profile.json")
    assert "as compiled: layers" in told
    assert "PyTorch" not in told
    (side,) = json.loads(Path("profile.json").read_text())["sides"]
    products = [one for one in side["layers"] if one["multiply_adds"]]
    assert [(one["op"], one["multiply_adds"], one["bytes"]) for one in products] == [
        ("MatMul", 240, 4 * (24 + 240 + 10))
    ]
    # The index, the row that is read, and the row that is written; not the whole table.
    assert [one["bytes"] for one in side["layers"] if one["op"] == "Gather"] == [8 + 2 * 4 * 24]


def test_what_is_no_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert "no model is called 'nothing'" in _fails("explain", "network", "nothing")
    assert "threads is 0; it must be at least 1" in _fails(
        "explain", "network", "nothing", "--threads", "0"
    )
    Path("profiled_again.py").write_text(MODULE)
    told = _fails("explain", "network", "profiled_again:pair", "--config", "int3")
    assert "config 'int3' is not known" in told


@pytest.mark.parametrize(
    ("seconds", "spread", "said"),
    [
        (1e-12, 0.0, "faster than its measured limit"),
        (0.0, 0.0, "no time was seen to pass"),
        (1e-3, 4.0, "its runs differ by 400% of their median"),
        (1e-3, 0.1, ""),
    ],
)
def test_what_was_not_measured_well_is_marked(
    seconds: float, spread: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times as a busy machine with late threads makes them."""
    monkeypatch.chdir(tmp_path)
    net = Net()
    net("MatMul", net("Relu", net.input(64, 64)), net.weight(64, 64, bits=None))
    save(net.graph(), "net.safetensors")
    real = Session.profile

    def profile(self: Session, **arguments: Any) -> list[NodeTime]:
        times = real(self, **arguments)
        last = replace(times[-1], seconds=seconds, spread=spread)
        return [*(replace(one, seconds=1e-3, spread=0.0) for one in times[:-1]), last]

    monkeypatch.setattr(Session, "profile", profile)
    files = ("--json", "profile.json", "--html", "profile.html")
    shown = _run("explain", "network", "net.safetensors", "--threads", "2", *files)
    (side,) = json.loads(Path("profile.json").read_text())["sides"]
    *others, layer = side["layers"]
    assert layer["op"] == "MatMul"
    assert said in layer["doubt"]
    assert bool(layer["doubt"]) is bool(said)
    assert not any(one["doubt"] for one in others)
    assert sum(one["doubtful"] for one in side["kinds"]) == bool(said)
    assert all(0 <= one["share"] <= 1 for part in ("layers", "kinds") for one in side[part])
    assert math.isclose(sum(one["share"] for one in side["layers"]), 1)
    assert ("Not measured well, marked ?: 1 of" in shown) is bool(said)
    assert shown.count(" ? ") >= 2 * bool(said)
