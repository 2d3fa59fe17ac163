"""Steps that read or write a part of an input or output, which is the caller's memory."""

from __future__ import annotations

import numpy as np

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.session import Session


def test_groups_write_their_parts_of_an_output() -> None:
    """With one pixel, the output lies as its groups write it: nothing is copied afterwards."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 3, 3)).astype(np.float32)
    weight = rng.normal(size=(8, 3, 3, 3)).astype(np.float32)
    node = Node("Conv", ("x", "w"), ("y",), {"group": 2})
    graph = Graph(("x",), ("y",), (node,), {"w": weight}, {"x": Tensor("float32", x.shape)})
    (wanted,) = evaluate(graph, {"x": x}).values()
    np.testing.assert_allclose(Session(graph)(x), wanted, atol=1e-5)


def test_a_part_of_an_input() -> None:
    x = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
    node = Node("Split", ("x", "sizes"), ("a", "b"), {"axis": 1})
    total = Node("Add", ("a", "b"), ("y",))
    sizes = {"sizes": np.array([2, 2])}
    graph = Graph(("x",), ("y",), (node, total), sizes, {"x": Tensor("float32", x.shape)})
    np.testing.assert_array_equal(Session(graph)(x), x[:, :2] + x[:, 2:])
