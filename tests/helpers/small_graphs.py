"""Graphs for tests of passes, in a line each, and whether two mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor

Array = npt.NDArray[Any]


def n(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def graph(
    *nodes: tuple[Any, ...],
    constants: Mapping[str, Any] | None = None,
    shape: tuple[int | str, ...] = (2, 6, 8, 8),
    outputs: tuple[str, ...] = ("y",),
) -> Graph:
    """Nodes as (op, inputs, output, attributes); the input is x."""
    made = []
    for op, inputs, output, *attributes in nodes:
        read = tuple(inputs.split())
        read = tuple("" if name == "_" else name for name in read)
        made.append(Node(op, read, (output,), *attributes, name=output))
    return Graph(("x",), outputs, tuple(made), constants or {}, {"x": Tensor("float32", shape)})


def ops(one: Graph) -> list[str]:
    return [node.op for node in one.nodes]


def same(one: Graph, other: Graph, close: float = 1e-5, shape: tuple[int, ...] = ()) -> None:
    x = n(*(shape or one.tensors["x"].sizes)) * 2
    for a, b in zip(
        evaluate(one, {"x": x}).values(), evaluate(other, {"x": x}).values(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=close, atol=close)


C = np.float32


def pair(value: str, made: str, scale: str = "s", zero: str = "z") -> list[tuple[Any, ...]]:
    return [
        ("QuantizeLinear", f"{value} {scale} {zero}", f"{made}.q"),
        ("DequantizeLinear", f"{made}.q {scale} {zero}", made),
    ]


SCALES = {"s": C(0.05), "z": np.uint8(120), "t": C(0.02), "k": np.int8(-3)}
SCALES = {name: np.asarray(one) for name, one in SCALES.items()}
