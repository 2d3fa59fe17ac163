"""ONNX files that are valid and rare: what a session computes is what ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from lowbit.graph import Session, from_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

_RNG = np.random.default_rng(0)
_X = _RNG.standard_normal((2, 4, 6, 6)).astype(np.float32)
_W = _RNG.standard_normal((8, 4, 3, 3)).astype(np.float32)
_B = np.arange(8, dtype=np.float32) * 100
_INTS = np.array([200, 255, -5, 3], np.int32)
_COLUMNS = np.arange(12, dtype=np.float32).reshape(3, 4)

Nodes = Sequence[tuple[str, str, str, Mapping[str, Any]]]
# Nodes as (operator, inputs, outputs, attributes); inputs; constants; names of the outputs.
CASES: dict[str, tuple[Nodes, dict[str, Any], dict[str, Any], str]] = {
    "a bias of runs": ([("Conv", "x w b", "y", {})], {"x": _X, "b": _B}, {"w": _W}, "y"),
    "a bias that is computed": (
        [("Neg", "b", "c", {}), ("Conv", "x w c", "z", {}), ("Relu", "z", "y", {})],
        {"x": _X, "b": _B}, {"w": _W}, "y",
    ),
    "a bias of runs, transposed": (
        [("ConvTranspose", "x w b", "y", {})], {"x": _X, "b": _B[:3]},
        {"w": _W[:4, :3]}, "y",
    ),
    "an output that is an input": ([("Relu", "x", "y", {})], {"x": _X}, {}, "y x"),
    "Identities of one value": (
        [("Relu", "x", "r", {}), ("Identity", "r", "a", {}), ("Identity", "r", "z", {}),
         ("Neg", "a", "y", {})], {"x": _X}, {}, "z y",
    ),
    "sums of absolute integers": ([("ReduceL1", "i a", "y", {})], {"i": _INTS},
                                  {"a": np.array([0])}, "y"),
    "powers of integers": (
        [("Pow", "i p", "y", {})],
        {"i": np.arange(1, 100, dtype=np.int32), "p": np.arange(99, dtype=np.int32) % 4}, {}, "y",
    ),
    "to int8": ([("Cast", "i", "y", {"to": 3})], {"i": _INTS}, {}, "y"),
    "to uint8": ([("Cast", "i", "y", {"to": 2})], {"i": _INTS}, {}, "y"),
    "no rows": ([("MatMul", "x w", "y", {})], {"x": np.ones((0, 3), np.float32)},
                {"w": np.ones((3, 4), np.float32)}, "y"),
    "no depth": ([("Gemm", "x w b", "y", {})], {"x": np.ones((2, 0), np.float32)},
                 {"w": np.ones((0, 8), np.float32), "b": _B}, "y"),
    "elements of some lines": ([("GatherElements", "x i", "y", {"axis": 1})],
                               {"x": _COLUMNS, "i": np.array([[0, 1], [2, 3]])}, {}, "y"),
}  # fmt: skip


def _model(nodes: Nodes, inputs: dict[str, Any], constants: dict[str, Any], outputs: str) -> Any:
    helper = onnx.helper
    made = [helper.make_node(op, a.split(), b.split(), **how) for op, a, b, how in nodes]
    given = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(one.dtype), list(one.shape)
        )
        for name, one in inputs.items()
    ]
    known = [onnx.numpy_helper.from_array(one, name) for name, one in constants.items()]
    results = [onnx.ValueInfoProto(name=name) for name in outputs.split()]
    graph = helper.make_graph(made, "g", given, results, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_onnx_runtime_computes(name: str) -> None:
    nodes, inputs, constants, outputs = CASES[name]
    one = _model(nodes, inputs, constants, outputs)
    # ONNX Runtime wants the types of outputs, which it can find; but not for those of this list.
    typed = onnx.shape_inference.infer_shapes(one)
    kinds = {value.name: value for value in (*typed.graph.value_info, *typed.graph.input)}
    found = Session(from_onnx(one), threads=1).run(*inputs.values())
    for place, name_of in enumerate(outputs.split()):
        if not typed.graph.output[place].type.HasField("tensor_type"):
            typed.graph.output[place].CopyFrom(kinds[name_of])
    expected = onnxruntime.InferenceSession(typed.SerializeToString()).run(None, inputs)
    for (key, have), want in zip(found.items(), expected, strict=True):
        assert (key, have.dtype, have.shape) == (key, want.dtype, want.shape)
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op", ["Conv", "MatMul"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_weights_that_no_packing_holds_stand_for_floats(op: str, dtype: str) -> None:
    """Convolutions take no zero points, and products no scales along K."""
    weight = _RNG.integers(0, 100, _W.shape if op == "Conv" else (6, 5)).astype(dtype)
    scale = np.full(() if op == "Conv" else 6, 0.01, np.float32)
    zero = np.full(scale.shape, 7, dtype)
    x = _X if op == "Conv" else _X[0, 0]
    nodes = [
        ("QuantizeLinear", "x s z", "q", {}), ("DequantizeLinear", "q s z", "xd", {}),
        ("DequantizeLinear", "w ws wz", "wd", {"axis": 0}), (op, "xd wd", "y", {}),
    ]  # fmt: skip
    constants = {"s": np.float32(0.05), "z": np.uint8(100), "w": weight, "ws": scale, "wz": zero}
    graph = from_onnx(_model(nodes, {"x": x}, constants, "y"))
    (found,) = Session(graph, threads=1).run(x).values()
    floats = (weight.astype(np.float32) - 7) * scale.reshape(-1, *(1,) * (weight.ndim - 1))
    rounded = (np.clip(np.rint(x / np.float32(0.05)) + 100, 0, 255) - 100) * np.float32(0.05)
    plain = _model([(op, "x w", "y", {})], {"x": x}, {"w": floats.astype(np.float32)}, "y")
    (want,) = Session(from_onnx(plain), threads=1).run(rounded.astype(np.float32)).values()
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


def test_products_of_integers_may_have_a_scale_for_each_column() -> None:
    x, w = _RNG.integers(0, 255, (3, 6), np.uint8), _RNG.integers(-100, 100, (6, 5), np.int8)
    scale = np.linspace(0.01, 0.05, 5).astype(np.float32)
    constants = {"s": np.float32(0.1), "z": np.uint8(9), "w": w, "ws": scale,
                 "wz": np.zeros(5, np.int8), "ys": np.float32(2), "yz": np.uint8(100)}  # fmt: skip
    nodes = [("QLinearMatMul", "x s z w ws wz ys yz", "y", {})]
    graph = from_onnx(_model(nodes, {"x": x}, constants, "y"))
    (found,) = Session(graph, threads=1).run(x).values()
    sums = (x.astype(np.int64) - 9) @ w * (0.1 * scale.astype(np.float64))
    want = np.clip(np.rint(sums / 2) + 100, 0, 255)
    assert np.abs(found.astype(np.int64) - want).max() <= 1
    assert (found == want).mean() > 0.9


def test_inputs_of_any_name_are_given_by_place() -> None:
    for name in ("self", "runs"):
        session = Session(from_onnx(_model([("Relu", name, "y", {})], {name: _X}, {}, "y")))
        (found,) = session.run(**{name: _X}).values()
        np.testing.assert_array_equal(found, np.maximum(_X, 0))
        assert len(session.profile(_X)) == 1


def test_damaged_files_are_refused_by_what_is_wrong_in_them() -> None:
    weights = {"w": _W, "b": _B[:1]}
    with pytest.raises(ValueError, match=r"expected a bias of shape \(8,\), got \(1,\)"):
        from_onnx(_model([("Conv", "x w b", "y", {})], {"x": _X}, weights, "y"))
    one = _model([("Conv", "x w", "y", {})], {"x": _X}, {"w": _W}, "y")
    one.graph.initializer.append(one.graph.initializer[0])
    with pytest.raises(ValueError, match="two things make the value 'w'"):
        from_onnx(one)
    with pytest.raises(ValueError, match="has no value or no output"):
        from_onnx(_model([("Constant", "", "y", {})], {"x": _X}, {}, "y"))
    with pytest.raises(ValueError, match="makes 1 values, not more"):
        from_onnx(_model([("Relu", "x", "y z", {}), ("Neg", "z", "v", {})], {"x": _X}, {}, "v"))
