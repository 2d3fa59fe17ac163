"""Networks in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets import NETS, QUANTIZED, Net, random_inputs, with_formats

from lowbit.graph import Session, load, save
from lowbit.graph.files import _FILE
from lowbit.graph.graph import Graph
from lowbit.numerics import QTensor, quantize
from lowbit.weights.tensor_file import StoredTensor

PARTS = "values", "scale", "zero_point"


def _same(a: Graph, b: Graph) -> None:
    assert (a.name, a.inputs, a.outputs, a.nodes, a.tensors) == (
        b.name, b.inputs, b.outputs, b.nodes, b.tensors,
    )  # fmt: skip
    assert list(a.constants) == list(b.constants)
    for one, other in zip(a.constants.values(), b.constants.values(), strict=True):
        assert type(one) is type(other)
        parts: list[Any] = [(one, other)]
        if isinstance(one, QTensor):
            assert isinstance(other, QTensor)
            assert (one.format, one.axis, one.group_size) == (
                other.format, other.axis, other.group_size,
            )  # fmt: skip
            names = ("values", "scale", "zero_point")
            parts = [(getattr(one, name), getattr(other, name)) for name in names]
        for x, y in parts:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


@pytest.mark.deep("video", "mobile_block", "basic_block", "perceptron", "u_net")
@pytest.mark.parametrize("make", NETS)
def test_what_is_loaded_is_what_was_saved(make: Callable[[], Graph], tmp_path: Path) -> None:
    graph = make()
    if make in QUANTIZED:
        graph = with_formats(graph, batch=2)
    save(graph, tmp_path / "net")
    loaded = load(tmp_path / "net", verify=True)
    _same(graph, loaded)
    inputs = random_inputs(graph, batch=2)
    want, got = (Session(one, threads=1).run(**inputs) for one in (graph, loaded))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


def test_constants_of_all_kinds(tmp_path: Path) -> None:
    net = Net()
    x = net.input(3)
    for dtype in ("float32", "float16", "int64", "int32", "bool", "uint8"):
        x = net("Where", net.constant(np.array([1, 0, 1]).astype(dtype)), x, x)
    x = net("Add", x, net.constant(np.array(2, np.float32)))
    save(net.graph(), tmp_path / "net")
    _same(net.graph(), load(tmp_path / "net"))


@pytest.mark.parametrize("width", [1, 6, 7])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_4_bit_weights_take_half_a_byte(dtype: Any, width: int, tmp_path: Path) -> None:
    net = Net()
    weight = quantize(np.linspace(-1, 1, 64 * width, dtype=np.float32).reshape(64, width), dtype)
    net.constants["w"] = weight
    graph = net.graph(net("Linear", net.input(width), "w"))
    save(graph, tmp_path / "net")
    _same(graph, load(tmp_path / "net", verify=True))
    stored = _FILE.read(tmp_path / "net", verify=False)[1]
    assert stored["0.values"].data.nbytes == 64 * (-(-width // 2))


def test_4_bit_weights_of_older_files_are_bytes(tmp_path: Path) -> None:
    net = Net()
    net.constants["w"] = quantize(np.eye(4, 6, dtype=np.float32), "int4")
    graph = net.graph(net("Linear", net.input(6), "w"))
    path = tmp_path / "net"
    save(graph, path)
    metadata, stored = _FILE.read(path, verify=False)
    fields = json.loads(metadata["network"])
    fields["constants"]["w"].pop()
    parts = {f"0.{part}": StoredTensor.of(getattr(net.constants["w"], part)) for part in PARTS}
    _FILE.write(path, {"network": json.dumps(fields)}, {**stored, **parts})
    _same(graph, load(path))


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    save(with_formats(QUANTIZED[0](), batch=1), tmp_path / "net")
    whole = (tmp_path / "net").read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut"):
            load(tmp_path / "cut")


def test_damaged_numbers_are_noticed_when_asked_for(tmp_path: Path) -> None:
    save(with_formats(QUANTIZED[0](), batch=1), tmp_path / "net")
    whole = bytearray((tmp_path / "net").read_bytes())
    whole[-1] ^= 1
    (tmp_path / "bad").write_bytes(whole)
    load(tmp_path / "bad")
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "bad", verify=True)


def test_another_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        load(tmp_path / "nothing")
    (tmp_path / "text").write_text(json.dumps({"a": 1}) * 9)
    with pytest.raises(ValueError, match="text"):
        load(tmp_path / "text")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("nodes"),
        lambda d: d["nodes"][0].pop("op"),
        lambda d: d["nodes"].reverse(),
        lambda d: d["nodes"][0]["inputs"].__setitem__(0, "nobody"),
        lambda d: d["constants"].__setitem__("c0", [99]),
        lambda d: d["constants"].__setitem__("c0", ["a", "b"]),
        lambda d: d.__setitem__("outputs", ["nobody"]),
        lambda d: d.__setitem__("tensors", {}),
        lambda d: d.__setitem__("tensors", []),
    ],
)
def test_forged_headers(change: object, tmp_path: Path) -> None:
    """Whose digests are right."""
    from lowbit.graph import files

    assert callable(change)
    save(with_formats(QUANTIZED[0](), batch=1), tmp_path / "net")
    metadata, tensors = files._FILE.read(tmp_path / "net", verify=True)
    described = json.loads(metadata["network"])
    change(described)
    files._FILE.write(tmp_path / "forged", {"network": json.dumps(described)}, tensors)
    with pytest.raises(ValueError, match="forged"):
        load(tmp_path / "forged")
