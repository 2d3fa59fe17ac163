"""Slices of a batch: the same numbers, where samples are treated alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from nets import Net, basic_block, mobile_block, random_inputs, with_formats

from lowbit.graph import Session
from lowbit.graph import layer_tiling as module
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.layer_tiling import _alone, _choice
from lowbit.graph.passes.infer import inferred
from lowbit.numerics import quantize

BATCH = 6


def _plan(
    graph: Graph, samples: int, nodes: int, patch: pytest.MonkeyPatch, threads: int = 1
) -> Session:
    patch.setattr(module, "_choice", lambda *_: (nodes, samples))
    return Session(graph, threads=threads)


def _concatenated() -> Graph:
    net = Net(3)
    x = net.input("batch", 8, 10, 10)
    left = net("Conv", x, net.weight(8, 8, 3, 3), net.bias(8), pads=(1,) * 4)
    net("Concat", net("Relu", left), net("Add", left, x), axis=1)
    return net.graph()


@pytest.mark.deep("1-mobile_block")
@pytest.mark.parametrize("make", [basic_block, mobile_block, _concatenated])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_any_slices_give_the_same(
    make: Callable[[], Graph], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = with_formats(make(), batch=BATCH)
    inputs = random_inputs(graph, batch=BATCH)
    want = _plan(graph, BATCH, 0, monkeypatch).run(**inputs)
    whole = len(_plan(graph, BATCH, 0, monkeypatch).plan(inputs).steps)
    most = len(list(_alone(inferred(graph.bound({"batch": BATCH})), BATCH)))
    assert most > 2
    for count in range(1, most + 1):
        session = _plan(graph, samples, count, monkeypatch)
        assert len(session.plan(inputs).steps) > whole
        for name, value in session.run(**inputs).items():
            np.testing.assert_array_equal(value, want[name])
    several = _plan(graph, samples, most, monkeypatch, threads=2)
    assert len(several.plan(inputs).steps) == whole


@pytest.mark.deep
def test_results_may_be_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(0)
    made = net("Conv", net.input("batch", 8, 6, 6), net.weight(8, 8, 3, 3), "", pads=(1,) * 4)
    same = net("Identity", made)
    graph = with_formats(net.graph(net("Concat", made, same, axis=1)), "x0", made, batch=BATCH)
    tensors = {**graph.tensors, same: graph.tensors[made]}
    graph = graph.replaced(tensors=tensors)
    inputs = random_inputs(graph, batch=BATCH)
    (want,) = _plan(graph, BATCH, 0, monkeypatch).run(**inputs).values()
    for samples in (1, 2, 3):
        (found,) = _plan(graph, samples, 2, monkeypatch).run(**inputs).values()
        np.testing.assert_array_equal(found, want)


def _sized(*layers: tuple[int, int, int, int], batch: int) -> Graph:
    """1×1 convolutions: (channels, outputs, height, width) each."""
    nodes, tensors, constants, name = [], {}, {}, "x"
    tensors["x"] = Tensor("uint8", (batch, layers[0][0], *layers[0][2:]), 0.1, 0)
    for number, (channels, outputs, *size) in enumerate(layers):
        weight, made = f"w{number}", f"y{number}"
        ones = np.ones((outputs, channels, 1, 1), np.float32)
        constants[weight] = quantize(ones, "int8", axis=0, symmetric=True)
        nodes.append(Node("Conv", (name, weight), (made,)))
        tensors[made] = Tensor("uint8", (batch, outputs, *size), 0.1, 0)
        name = made
    return Graph(("x",), (name,), tuple(nodes), constants, tensors)


@pytest.mark.parametrize(("room", "batch", "found"), [
    (40_000, 16, (2, 8)),   # 4,096 bytes a sample fit by eights; the last weights are larger
    (10_000, 16, (2, 2)),
    (3_000, 16, (0, 16)),   # a sample is too large
    (1 << 20, 16, (0, 16)),  # the batch fits
    (20_000, 7, (2, 1)),    # seven has no other divisors
])  # fmt: skip
def test_slices_are_as_large_as_fit(room: int, batch: int, found: tuple[int, int]) -> None:
    graph = _sized((2, 2, 32, 32), (2, 2, 32, 32), (2048, 2048, 1, 1), batch=batch)
    assert _choice(graph, batch, room) == found


def _ended(nodes: Iterable[Node], **constants: Any) -> int:
    tensors = {"x": Tensor("float32", (4, 6, 8, 8))}
    graph = inferred(Graph(("x",), ("y",), tuple(nodes), constants, tensors))
    return len(list(_alone(graph, 4)))


def test_what_mixes_samples_ends_them() -> None:
    relu = Node("Relu", ("x",), ("a",))
    assert _ended([relu, Node("Relu", ("a",), ("y",))]) == 2
    assert _ended([relu, Node("Softmax", ("a",), ("y",), {"axis": 0})]) == 1
    assert _ended([relu, Node("Transpose", ("a",), ("y",), {"perm": (1, 0, 2, 3)})]) == 1
    one_each, row = np.ones((4, 1, 1, 1), np.float32), np.ones((1, 6, 1, 1), np.float32)
    assert _ended([relu, Node("Add", ("a", "c"), ("y",))], c=one_each) == 1
    assert _ended([relu, Node("Add", ("c", "a"), ("y",))], c=row) == 2
    weight = np.ones((6, 6, 1, 1), np.float32)
    assert _ended([relu, Node("Conv", ("a", "c"), ("y",))], c=weight) == 1
