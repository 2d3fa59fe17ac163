"""Files that ONNX Runtime quantizes mean here what it computes, and their formats are found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.onnx_runtime import SATURATES

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.onnx import from_onnx, imported
from lowbit.graph.passes import simplified
from lowbit.graph.passes.infer import inferred
from lowbit.graph.session import Session
from lowbit.numerics import QTensor, quantize

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
quantization = pytest.importorskip("onnxruntime.quantization")

NETWORKS = ("resnet", "mobilenet", "transformer", "unet")


@pytest.fixture
def quantized(exported: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Quantizes a network by ONNX Runtime: a file, the input and what comes out of it."""

    def make(name: str, how: str, **options: Any) -> Any:
        model, x = exported(name, opset=17)
        before, after = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
        onnx.save(model, before)
        ready = tmp_path / "ready.onnx"
        quantization.quant_pre_process(before, ready, skip_symbolic_shape=True)

        class Reader(quantization.CalibrationDataReader):
            def __init__(self) -> None:
                self.left = [{"x": x * factor} for factor in (1.0, 0.7)]

            def get_next(self) -> Any:
                return self.left.pop() if self.left else None

        logging.disable(logging.WARNING)
        try:
            if how == "static":
                quantization.quantize_static(ready, after, Reader(), **options)
            else:
                quantization.quantize_dynamic(ready, after, reduce_range=SATURATES, **options)
        finally:
            logging.disable(logging.NOTSET)
        # As written: what optimizes the file rounds elsewhere.
        exactly = onnxruntime.SessionOptions()
        exactly.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(after, exactly)
        return after, x, session.run(None, {"x": x})[0]

    return make


def left(graph: Graph) -> set[str]:
    """Nodes of quantization that were not absorbed."""
    return {node.op for node in graph.nodes if node.op.endswith("tizeLinear")}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["int8", "uint8 by channel"])
def test_static_quantization_becomes_formats(
    quantized: Callable[..., Any], name: str, kind: str
) -> None:
    types = quantization.QuantType
    path, x, expected = quantized(
        name,
        "static",
        quant_format=quantization.QuantFormat.QDQ,
        per_channel="channel" in kind,
        activation_type=types.QInt8 if kind == "int8" else types.QUInt8,
        weight_type=types.QInt8,
    )
    graph = from_onnx(path)
    assert not left(graph)
    weights = [
        graph.constants[node.inputs[1]]
        for node in graph.nodes
        if node.op in ("Conv", "Linear", "ConvTranspose")
    ]
    assert weights
    assert all(isinstance(one, QTensor) for one in weights)
    tensor = graph.tensors[graph.outputs[0]]
    assert tensor.dtype == kind.split()[0]
    assert tensor.scale is not None
    (found,) = evaluate(graph, {"x": x}).values()
    (written,) = evaluate(imported(onnx.load(path)), {"x": x}).values()
    np.testing.assert_array_equal(found, written)
    # A value next to a half is rounded to the other side where sums are float32 (interpolation
    # between integers makes many); what is computed from it then differs by a step or two.
    steps = np.abs(found - expected) / tensor.scale
    assert steps.max() < 2.5
    assert (steps > 0.5).mean() < 0.1
    bound = inferred(simplified(graph.bound({"batch": len(x)})))
    (again,) = evaluate(bound, {"x": x}).values()
    np.testing.assert_array_equal(again, found)
    assert bound.tensors[graph.outputs[0]].sizes == found.shape


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_operators_on_integers_become_formats(quantized: Callable[..., Any], name: str) -> None:
    path, x, expected = quantized(
        name, "static", quant_format=quantization.QuantFormat.QOperator,
        weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    model = onnx.load(path)
    assert any(node.domain == "com.microsoft" for node in model.graph.node)
    graph = from_onnx(path)
    assert not left(graph)
    scale = graph.tensors[graph.outputs[0]].scale
    assert scale is not None
    (found,) = evaluate(graph, {"x": x}).values()
    (written,) = evaluate(imported(model), {"x": x}).values()
    np.testing.assert_array_equal(found, written)
    assert np.abs(found - expected).max() / scale < 1.5


@pytest.mark.parametrize("by_channel", [False, True])
def test_dynamic_quantization_becomes_products_of_rows(
    quantized: Callable[..., Any], by_channel: bool
) -> None:
    path, x, expected = quantized("transformer", "dynamic", per_channel=by_channel)
    (written,) = evaluate(imported(onnx.load(path)), {"x": x}).values()
    np.testing.assert_allclose(written, expected, rtol=1e-4, atol=1e-5)
    graph = from_onnx(path)
    linear = [node for node in graph.nodes if node.op == "Linear"]
    assert len(linear) == 5
    assert all(node.get("activations") == "dynamic" for node in linear)
    assert all(isinstance(graph.constants[node.inputs[1]], QTensor) for node in linear)
    assert not any(node.op == "DynamicQuantizeLinear" for node in graph.nodes)
    # A scale a row is finer than one for all of them: nearer to floats, and not the same.
    (found,) = evaluate(graph, {"x": x}).values()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["resnet", "mobilenet", "unet"])
def test_dynamic_convolutions_keep_their_weights(quantized: Callable[..., Any], name: str) -> None:
    path, x, expected = quantized(name, "dynamic")
    (written,) = evaluate(imported(onnx.load(path)), {"x": x}).values()
    np.testing.assert_allclose(written, expected, rtol=1e-4, atol=1e-5)
    graph = from_onnx(path)
    layers = [node for node in graph.nodes if node.op in ("Conv", "ConvInteger")]
    assert {node.op for node in layers} == {"Conv"}
    assert all(isinstance(graph.constants[node.inputs[1]], QTensor) for node in layers)
    # What comes in is not rounded.
    (found,) = Session(graph).run(x).values()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("op", ["BatchNormalization", "GroupNormalization", "LayerNormalization"])
def test_vectors_of_normalizations_may_be_integers(op: str) -> None:
    rng = np.random.default_rng(7)
    width = 5 if op == "LayerNormalization" else 6
    names = ("s", "b", "m", "v") if op == "BatchNormalization" else ("s", "b")
    vectors = {name: rng.uniform(0.5, 2, width).astype(np.float32) for name in names}
    constants = {name: quantize(one, "uint8") for name, one in vectors.items()}
    how = {"num_groups": 2} if op == "GroupNormalization" else {}
    x = rng.normal(0, 1, (2, 6, 4, 5)).astype(np.float32)
    tensors = {"x": Tensor("float32", x.shape)}
    graph = Graph(("x",), ("y",), (Node(op, ("x", *names), ("y",), how),), constants, tensors)
    (wanted,) = evaluate(graph, {"x": x}).values()
    (found,) = Session(graph).run(x).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [np.inf, 0.0, np.nan, -0.5])
def test_a_scale_that_is_none_is_named(scale: float) -> None:
    pair = (Node("QuantizeLinear", ("x", "scale", "zero"), ("q",), {}, "round"),
            Node("DequantizeLinear", ("q", "scale", "zero"), ("y",), {}, "back"))  # fmt: skip
    constants = {"scale": np.float32(scale), "zero": np.uint8(3)}
    graph = Graph(("x",), ("y",), pair, constants, {"x": Tensor("float32", (4,))})
    with pytest.raises(ValueError, match="'back' of 'q': a scale has to be positive and finite"):
        simplified(graph)


def test_infinities_are_the_ends_of_a_format() -> None:
    tensors = {"x": Tensor("float32", (4,)), "y": Tensor("uint8", (4,), 0.5, 3)}
    graph = Graph(("x",), ("y",), (Node("Relu", ("x",), ("y",)),), {}, tensors)
    x = np.array([np.inf, -np.inf, 1, 1e30], np.float32)
    for run in (lambda: evaluate(graph, {"x": x}), lambda: Session(graph).run(x)):
        assert run()["y"].tolist() == [126, 0, 1, 126]


def _single(op: str) -> Any:
    """A model of one operator of ONNX Runtime's on integers, and its inputs."""
    helper, rng = onnx.helper, np.random.default_rng(5)
    bytes_ = (2, 3, 4, 4) if "Pool" in op else (3, 8)
    scales = {"xs": 0.0513, "ys": 0.0217, "ws": 0.031, "zs": 0.0439}
    held = {name: np.float32(value) for name, value in scales.items()}
    held |= {"xz": np.uint8(120), "yz": np.uint8(7), "zz": np.uint8(90), "wz": np.int8(3)}
    held |= {"w": rng.integers(-128, 128, (8, 5), np.int8)}
    held |= {"b": rng.integers(-900, 900, 5, np.int32)}
    x, pair, how = ["x", "xs", "xz"], ["zs", "zz"], {}
    given = {"x": rng.integers(0, 256, bytes_, np.uint8)}
    if op in ("QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearWhere"):
        given["y"] = rng.integers(0, 256, bytes_, np.uint8)
        x += ["y", "ys", "yz"]
    if op == "QLinearConcat":
        inputs, how = [*pair, *x], {"axis": 1}
    elif op == "QLinearWhere":
        given["c"] = rng.random(bytes_) < 0.5
        inputs = ["c", *x, *pair]
    elif op == "QGemm":
        inputs, how = [*x, "w", "ws", "wz", "b", *pair], {"alpha": 0.5}
    else:
        inputs = [*x, *pair]
        how = {
            "QLinearAveragePool": {"kernel_shape": [2, 2]},
            "QLinearLeakyRelu": {"alpha": 0.2},
            "QLinearSoftmax": {"axis": -1, "opset": 17},
        }.get(op, {})
    node = helper.make_node(op, inputs, ["z"], domain="com.microsoft", **how)
    kind = helper.np_dtype_to_tensor_dtype
    ends = [helper.make_tensor_value_info(n, kind(a.dtype), a.shape) for n, a in given.items()]
    kept = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in held.items() if n in inputs]
    out = helper.make_tensor_value_info("z", kind(np.dtype("uint8")), None)
    graph = helper.make_graph([node], "one", ends, [out], kept)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), given


QOPERATORS = (
    "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
)  # fmt: skip


@pytest.mark.parametrize("op", QOPERATORS)
def test_each_operator_on_integers_is_onnx_runtimes(op: str) -> None:
    if SATURATES and op == "QGemm":
        pytest.skip("ONNX Runtime cuts off sums on this machine")
    model, given = _single(op)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (expected,) = session.run(None, given)
    (found,) = evaluate(from_onnx(model), given).values()
    assert found.dtype == expected.dtype
    steps = np.abs(found.astype(np.int32) - expected)
    assert steps.max() <= 1
    assert (steps > 0).mean() <= 0.1


@pytest.mark.parametrize("size", [4, "n"])
def test_pads_and_their_value_come_through_dequantize_linear(size: int | str) -> None:
    """As quantizers write them: the value of a constant, and sizes that were floats."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    constants = {
        "q": np.array([0, 2, 0, 4], np.int8), "scale": np.float32(0.5), "zero": np.int8(0),
        "v": np.int8(-6), "v_scale": np.float32(0.25),
    }  # fmt: skip
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["floats"]),
        helper.make_node("Cast", ["floats"], ["pads"], to=onnx.TensorProto.INT64),
        helper.make_node("DequantizeLinear", ["v", "v_scale", "zero"], ["value"]),
        helper.make_node("Pad", ["x", "pads", "value"], ["y"]),
    ]
    x_info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, size])
    graph = helper.make_graph(
        nodes, "g", [x_info], [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = np.pad(x, ((0, 0), (1, 2)), constant_values=-1.5)
    network = from_onnx(model)
    np.testing.assert_array_equal(evaluate(network, {"x": x})["y"], expected)
    np.testing.assert_array_equal(Session(network, threads=1)(x), expected)
