"""What products make for attention is kept in bfloat16, where nobody else reads it."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.graph import Session
from lowbit.graph.calibrate import Calibration, calibrate
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.passes.infer import inferred
from lowbit.graph.passes.quantization_regions import only_for_attention
from lowbit.graph.passes.quantize import decide, quantized
from lowbit.graph.sensitivity import sqnr

SIZE, HEADS, ROWS = 32, 2, 12
NARROW = {"qkv", "q", "k", "v", "qh", "kh", "vh", "qt", "kt", "vt"}


def encoder(*more: Node, outputs: tuple[str, ...] = ("y",)) -> Graph:
    """Heads split from one product, attention, and a product of what comes out."""
    rng = np.random.default_rng(0)
    heads = [
        node
        for one in "qkv"
        for node in (
            Node("Reshape", (one, "shape"), (f"{one}h",)),
            Node("Transpose", (f"{one}h",), (f"{one}t",), {"perm": (0, 2, 1, 3)}),
        )
    ]
    nodes = (
        Node("Linear", ("x", "qkv.w"), ("qkv",), name="in"),
        Node("Split", ("qkv",), ("q", "k", "v"), {"axis": 2, "num_outputs": 3}),
        *heads,
        Node("Attention", ("qt", "kt", "vt"), ("a",), {"is_causal": 0}),
        Node("Transpose", ("a",), ("at",), {"perm": (0, 2, 1, 3)}),
        Node("Reshape", ("at", "flat"), ("joined",)),
        Node("Linear", ("joined", "y.w"), ("y",), name="out"),
        *more,
    )
    constants = {
        "qkv.w": rng.standard_normal((3 * SIZE, SIZE)).astype(np.float32),
        "y.w": rng.standard_normal((SIZE, SIZE)).astype(np.float32),
        "shape": np.array([0, 0, HEADS, SIZE // HEADS]),
        "flat": np.array([0, 0, SIZE]),
    }
    return Graph(("x",), outputs, nodes, constants, {"x": Tensor("float32", ("n", ROWS, SIZE))})


@pytest.mark.deep
@pytest.mark.parametrize("choice", ["int8", "dynamic"])
def test_kernels_compute_what_evaluate_says(choice: str) -> None:
    given = encoder()
    x = np.random.default_rng(1).standard_normal((3, ROWS, SIZE)).astype(np.float32)
    decisions = decide(given, default=choice)  # type: ignore[arg-type]
    seen = Calibration(given, decisions)
    calibrate(seen, [{"x": x}])
    made = quantized(given, decisions, seen.ranges)
    assert {name for name, one in made.tensors.items() if one.dtype == "bfloat16"} == NARROW
    facts = inferred(made.bound({"n": 3})).tensors
    assert facts["y"].dtype == "float32"
    (ours,) = Session(made, threads=1).run(x).values()
    meant = evaluate(made, {"x": x})["y"]
    assert (ours.dtype, meant.dtype) == (np.float32, np.float32)
    assert sqnr([{"y": ours}], [{"y": meant}]) > 40
    assert sqnr([{"y": meant}], [evaluate(given, {"x": x})]) > 20


def test_what_somebody_else_reads_stays() -> None:
    products = {"qkv", "y"}
    assert only_for_attention(encoder(), products) == NARROW
    assert only_for_attention(encoder(), {"y"}) == frozenset()
    assert only_for_attention(encoder(outputs=("y", "kt")), products) == frozenset()
    other = Node("Tanh", ("v",), ("t",))
    assert only_for_attention(encoder(other, outputs=("y", "t")), products) == frozenset()
