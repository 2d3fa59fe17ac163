"""Operators mean what ONNX Runtime computes, on random inputs and many attributes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.graph.operators.cases import CASES, Array, Case, n
from tests.helpers.onnx_runtime import SATURATES

from lowbit.graph import operator
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.onnx import OPSETS, imported
from lowbit.graph.operator import operators
from lowbit.graph.passes.infer import inferred
from lowbit.numerics import quantize_rows

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ONNX = sorted(name for name, one in operators.load().items() if one.onnx)
SHAPING = {
    "Reshape", "Squeeze", "Unsqueeze", "Split", "Slice", "Expand", "Tile", "ConstantOfShape",
    "Range", "Pad", "Resize", "Col2Im", "TopK", "OneHot", "NonZero",
    *(op for op in operators.names() if op.startswith("Reduce")),
}  # fmt: skip
"""Those whose inputs have to be constants, all or from the second on."""


def model_of(case: Case) -> tuple[Any, dict[str, Array]]:
    """The node as a model, and what it is given."""
    helper = onnx.helper
    names, given, constants, inputs = [], {}, [], []
    for index, one in enumerate(case.inputs):
        name = "" if one is None else f"x{index}"
        names.append(name)
        if one is None:
            continue
        if case.op in SHAPING and (index or case.op in ("Range", "ConstantOfShape", "NonZero")):
            constants.append(onnx.numpy_helper.from_array(one, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(one.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, one.shape))
            given[name] = one
    attributes = {
        key: onnx.numpy_helper.from_array(one) if isinstance(one, np.ndarray) else one
        for key, one in case.attributes.items()
    }
    outputs = [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, **attributes)
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "one", inputs, made, constants)
    opsets = [helper.make_opsetid("", case.opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), given


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_is_that_of_onnx(case: Case) -> None:
    if SATURATES and case.op in ("MatMulInteger", "QLinearMatMul", "QLinearConv"):
        pytest.skip("ONNX Runtime cuts off sums on this machine")
    model, given = model_of(case)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, given)
    graph = imported(model)
    found = evaluate(graph, given)
    tensors = inferred(graph).tensors
    for name, right in zip(graph.outputs, expected, strict=True):
        made = found[name]
        assert made.shape == right.shape
        assert made.dtype.name == tensors[name].dtype
        assert made.shape == tensors[name].sizes
        if right.dtype.name == "float32":
            scale = max(1.0, float(np.abs(right).max(initial=0)))
            assert np.abs(made - right).max(initial=0) <= case.close * scale
        else:
            np.testing.assert_array_equal(made.view(right.dtype), right)


IGNORED = {
    "Attention": {  # Refused where they are given, or without effect on the first output.
        "kv_num_heads",
        "q_num_heads",
        "softcap",
        "softmax_precision",
        "qk_matmul_output_mode",
    },
    "Cast": {"saturate"},  # of 8-bit floats
    "CastLike": {"saturate"},
    "Dropout": {"seed"},  # in training
    "Resize": {"extrapolation_value"},  # of images that are cropped, which is refused
    "BatchNormalization": {"momentum"},  # in training
    "LayerNormalization": {"stash_type"},  # sums are float64
    "GroupNormalization": {"stash_type"},
    "RMSNormalization": {"stash_type"},
    "MaxPool": {"storage_order"},  # of indices, which are refused
    "QuantizeLinear": {"saturate", "block_size", "precision"},  # scales in blocks are refused
    "DequantizeLinear": {"block_size"},
}


@pytest.mark.parametrize("op", ONNX)
def test_no_attribute_of_an_operator_is_overlooked(op: str) -> None:
    folder = Path(operator.__file__).parent / "operators"
    known = {
        word for path in folder.glob("*.py") for word in re.findall(r"\b\w+\b", path.read_text())
    }
    schemas = [onnx.defs.get_schema(op, opset) for opset in OPSETS if _exists(op, opset)]
    named = {name for schema in schemas for name in schema.attributes}
    assert named - known == IGNORED.get(op, set()) - known
    assert schemas


def _exists(op: str, opset: int) -> bool:
    try:
        return bool(onnx.defs.get_schema(op, opset))
    except onnx.defs.SchemaError:
        return False


def test_linear_has_rows_of_8_bits_and_post_operations() -> None:
    x, weight, bias, residual = n(2, 3, 8), n(5, 8), n(5), n(2, 3, 5)
    steps = (("residual",), ("clamp", -0.5, 1.5), ("silu",))
    tensors = {"x": Tensor("float32", x.shape), "r": Tensor("float32", residual.shape)}

    def run(**attributes: Any) -> Array:
        node = Node("Linear", ("x", "w", "b", "r"), ("y",), attributes)
        constants = {"w": weight, "b": bias}
        graph = Graph(("x", "r"), ("y",), (node,), constants, tensors)
        assert inferred(graph).tensors["y"] == Tensor("float32", (2, 3, 5))
        return evaluate(graph, {"x": x, "r": residual})["y"]

    def after(value: Array) -> Array:
        value = np.clip(value + bias + residual, -0.5, 1.5)
        return value / (1 + np.exp(-value))

    np.testing.assert_allclose(run(post_ops=steps), after(x @ weight.T), rtol=1e-5, atol=1e-6)
    q, scale, zero = quantize_rows(x.reshape(6, 8), symmetric=False)
    rows = ((q - zero[:, None].astype(np.float64)) * scale[:, None]).reshape(x.shape)
    found = run(post_ops=steps, activations="dynamic")
    np.testing.assert_allclose(found, after(rows @ weight.T), rtol=1e-5, atol=1e-6)
    assert np.abs(found - run(post_ops=steps)).max() > 1e-4
    with pytest.raises(ValueError, match="no post-operation is called 'cube'"):
        run(post_ops=(("cube",),))
    with pytest.raises(ValueError, match="'float' or left out, got 'static'"):
        run(activations="static")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_are_rounded_once(dtype: str) -> None:
    x = n(3, 8).astype(dtype)
    wide = x.astype(np.float64)
    for op, expected in (
        ("Silu", wide / (1 + np.exp(-wide))),
        ("Exp", np.exp(wide)),
        ("ReduceSum", wide.sum(axis=1, keepdims=True)),
    ):
        attributes = {"axes": (1,)} if op == "ReduceSum" else {}
        (found,) = operators.get(op).compute(Node(op, ("x",), ("y",), attributes), x)
        assert found.dtype.name == dtype
        np.testing.assert_array_equal(found, expected.astype(dtype))


def test_every_operator_is_tested() -> None:
    assert {case.op for case in CASES} == set(ONNX)


def test_the_page_lists_all_operators() -> None:
    page = (Path(__file__).parents[3] / "docs" / "graph.md").read_text()
    table = page.partition("| family | operators |")[2].partition("\n\n")[0]
    assert set(re.findall(r"\b[A-Z]\w+", table)) == set(operators.names())
