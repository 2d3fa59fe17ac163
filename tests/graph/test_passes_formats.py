"""Quantization in a graph becomes formats of its tensors, and the graph means the same."""

from __future__ import annotations

import numpy as np
import pytest
from small_graphs import SCALES, C, graph, n, ops, pair, same

from lowbit.graph.evaluate import evaluate
from lowbit.graph.passes import simplified
from lowbit.graph.passes.fold import folded
from lowbit.graph.passes.fold_qdq import absorbed
from lowbit.numerics import QTensor, quantize


def test_pairs_become_formats() -> None:
    whole = graph(
        *pair("x", "a"), ("Relu", "a", "b"), *pair("b", "c", "t", "k"), ("Sigmoid", "c", "d"),
        *pair("d", "y"),
        constants=SCALES,
    )  # fmt: skip
    found = absorbed(whole)
    assert ops(found) == ["Identity", "Relu", "Sigmoid"]
    formats = {name: (one.dtype, one.scale, one.zero_point) for name, one in found.tensors.items()}
    small = float(np.float32(0.05))
    assert formats == {
        "x": ("float32", None, 0),
        "a": ("uint8", small, 120),
        "c": ("int8", float(np.float32(0.02)), -3),
        "y": ("uint8", small, 120),
    }
    same(whole, found, close=0)
    assert simplified(whole).tensors["c"].shape == (2, 6, 8, 8)


def test_pairs_of_one_value_are_shared() -> None:
    """One QuantizeLinear may have several readers, and a value more than its pair."""
    shared = graph(
        ("Relu", "x", "a"), ("QuantizeLinear", "a s z", "q"),
        ("DequantizeLinear", "q s z", "b"), ("DequantizeLinear", "q s z", "c"),
        ("Tanh", "b", "d"), ("Add", "c d", "y"),
        constants=SCALES,
    )  # fmt: skip
    found = absorbed(shared)
    assert ops(found) == ["Relu", "Tanh", "Add"]
    same(shared, found, close=0)
    also = graph(
        ("Relu", "x", "a"), *pair("a", "b"), ("Add", "a b", "y"), constants=SCALES
    )  # fmt: skip
    found = absorbed(also)
    assert ops(found) == ["Relu", "Identity", "Add"]
    same(also, found, close=0)
    again = graph(("Relu", "x", "a"), *pair("a", "b"), *pair("b", "y"), constants=SCALES)
    found = folded(absorbed(again))
    assert ops(found) == ["Relu"]
    same(again, found, close=0)


@pytest.mark.parametrize("case", ["integers leave", "other scale", "by channel", "16 bits"])
def test_what_is_quantized_otherwise_stays(case: str) -> None:
    scales = np.linspace(0.01, 0.1, 6).astype(np.float32)
    constants = {**SCALES, "cs": scales, "cz": np.zeros(6, np.int8)}
    nodes = {
        "integers leave": pair("x", "y"),
        "other scale": [
            ("QuantizeLinear", "x s z", "y.q"), ("DequantizeLinear", "y.q t z", "y")
        ],
        "by channel": pair("x", "y", "cs", "cz"),
        "16 bits": pair("x", "y", "s", "z16"),
    }[case]  # fmt: skip
    outputs = ("y", "y.q") if case == "integers leave" else ("y",)
    whole = graph(*nodes, constants={**constants, "z16": np.asarray(np.uint16(7))}, outputs=outputs)
    found = simplified(whole)
    assert ops(found) == ["QuantizeLinear", "DequantizeLinear"]
    if case == "16 bits":
        with pytest.raises(ValueError, match="expected int8 or uint8, got uint16"):
            evaluate(found, {"x": n(2, 6, 8, 8)})
    else:
        same(whole, found, close=0)


def test_constants_with_scales_become_quantized_tensors() -> None:
    weight = quantize(n(4, 6, 3, 3), "int8", axis=0)
    bias = np.array([1000, -2000, 5, 0], np.int32)
    constants = {
        "w": weight.values, "ws": weight.scale, "wz": weight.zero_point.astype(np.int8),
        "b": bias, "bs": weight.scale * C(0.05), **SCALES,
    }  # fmt: skip
    whole = graph(
        *pair("x", "a"), ("DequantizeLinear", "w ws wz", "v", {"axis": 0}),
        ("DequantizeLinear", "b bs", "c", {"axis": 0}), ("Conv", "a v c", "d"), *pair("d", "y"),
        constants=constants,
    )  # fmt: skip
    found = simplified(whole)
    assert ops(found) == ["Identity", "Conv"]
    made, offset = (found.constants[name] for name in found.nodes[1].inputs[1:3])
    assert isinstance(made, QTensor)
    assert made.axis == 0
    np.testing.assert_array_equal(made.values, weight.values)
    assert isinstance(offset, np.ndarray)
    np.testing.assert_array_equal(offset, bias.astype(np.float32) * constants["bs"])
    same(whole, found, close=0)


def test_scales_are_along_axis_1_where_nothing_else_is_said() -> None:
    weight = quantize(n(8, 5), "int8", axis=1)
    constants = {"w": weight.values, "ws": weight.scale, "wz": weight.zero_point.astype(np.int8)}
    whole = graph(
        ("DequantizeLinear", "w ws wz", "v"), ("MatMul", "x v", "y"), constants=constants
    )  # fmt: skip
    made = absorbed(whole).constants["v"]
    assert isinstance(made, QTensor)
    assert made.axis == 1
    np.testing.assert_array_equal(made.dequantize(), weight.dequantize())


def test_operators_on_integers_become_formats() -> None:
    weight = quantize(n(4, 6, 3, 3), "int8", axis=0)
    constants = {
        "w": weight.values, "ws": weight.scale, "wz": weight.zero_point.astype(np.int8),
        "b": np.array([1000, -2000, 5, 0], np.int32),
        "m": np.arange(-24, 24, dtype=np.int8).reshape(6, 8),
        **SCALES,
    }  # fmt: skip
    whole = graph(
        ("QuantizeLinear", "x s z", "q"), ("QLinearConv", "q s z w ws wz t k b", "c"),
        ("QLinearMatMul", "c t k m t k s z", "d"), ("DequantizeLinear", "d s z", "y"),
        constants=constants,
    )  # fmt: skip
    found = simplified(whole)
    assert ops(found) == ["Identity", "Conv", "Linear"]
    same(whole, found, close=1e-6)
