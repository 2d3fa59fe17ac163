"""Operators of ONNX with inputs and attributes of all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SEED = 7


class Case(NamedTuple):
    """A node and its inputs: an array, None if left out, a shape of random numbers."""

    op: str
    inputs: tuple[Any, ...]
    attributes: Mapping[str, Any] = {}
    outputs: int = 1
    opset: int = 21
    close: float = 2e-6

    def __str__(self) -> str:
        shown = [list(one.shape) if isinstance(one, np.ndarray) else one for one in self.inputs]
        return f"{self.op} {shown} {dict(self.attributes)} {self.opset}"


def n(*shape: int) -> Array:
    """Numbers of both signs."""
    return np.random.default_rng(SEED + len(shape)).normal(size=shape).astype(np.float32)


def p(*shape: int) -> Array:
    """Positive numbers."""
    return np.abs(n(*shape)) + np.float32(0.1)


def i(*values: int) -> Array:
    return np.array(values, np.int64)


def whole(dtype: str, *shape: int) -> Array:
    """Integers over the full range of a dtype."""
    info = np.iinfo(dtype)
    return np.random.default_rng(SEED).integers(info.min, info.max + 1, shape).astype(dtype)


def f(value: float, dtype: str = "float32") -> Array:
    return np.array(value, dtype)


def truth(*shape: int) -> Array:
    return n(*shape) > 0


IMAGE = n(2, 6, 9, 8)

ACTIVATIONS = [
    Case(op, (n(2, 3, 5) * 3,), attributes)
    for op, attributes in (
        ("Relu", {}),
        ("LeakyRelu", {}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("ThresholdedRelu", {"alpha": 0.7}),
        ("Elu", {}),
        ("Elu", {"alpha": 0.4}),
        ("Celu", {"alpha": 1.7}),
        ("Selu", {}),
        ("Selu", {"alpha": 1.1, "gamma": 2.0}),
        ("Sigmoid", {}),
        ("HardSigmoid", {}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("HardSwish", {}),
        ("Tanh", {}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Mish", {}),
        ("Gelu", {}),
        ("Gelu", {"approximate": "tanh"}),
        ("Erf", {}),
        ("Exp", {}),
        ("Reciprocal", {}),
        ("Sin", {}),
        ("Cos", {}),
        *((op, {}) for op in ("Tan", "Sinh", "Cosh", "Atan", "Asinh")),
        ("Abs", {}),
        ("Neg", {}),
        ("Sign", {}),
        ("Floor", {}),
        ("Ceil", {}),
        ("Round", {}),
        ("IsNaN", {}),
        ("Identity", {}),
        ("Softmax", {}),
        ("Softmax", {"axis": 1}),
        ("LogSoftmax", {"axis": 0}),
        ("LpNormalization", {"axis": 1, "p": 2}),
        ("LpNormalization", {"axis": -1, "p": 1}),
    )
]
ELEMENTWISE = [
    Case("Log", (p(3, 4),)),
    Case("Sqrt", (p(3, 4),)),
    *(Case(op, (np.tanh(n(3, 7)),)) for op in ("Asin", "Acos", "Atanh")),
    Case("Acosh", (1 + p(3, 4),)),
    *(
        Case(f"Bitwise{op}", (whole(dtype, 3, 4), whole(dtype, 4)))
        for op in ("And", "Or", "Xor")
        for dtype in ("uint8", "int32", "int64")
    ),
    Case("BitShift", (whole("uint32", 3, 4), whole("uint32", 4) % 32), {"direction": "LEFT"}),
    Case("BitShift", (whole("uint8", 3, 4), whole("uint8", 4) % 8), {"direction": "RIGHT"}),
    Case("BitwiseNot", (whole("int64", 3, 5).T,)),
    Case("OneHot", (i(1, -1, 5, 3), f(4, "int64"), n(2)), {"axis": 0}),
    Case("CastLike", (n(3, 4) * 9, i(1))),
    Case("NonZero", (truth(3, 4),)),
    *(
        Case("GridSample", (IMAGE, np.tanh(n(2, 3, 4, 2)) * 2), {"mode": mode}, opset=20)
        for mode in ("linear", "nearest", "cubic")
    ),
    Case("Hardmax", (n(2, 3, 4),), {"axis": 1}),
    Case("EyeLike", (n(3, 4),), {"k": -1, "dtype": 7}),
    Case("Clip", (n(3, 4), f(-0.2), f(0.5))),
    Case("Clip", (n(3, 4), None, f(0.5))),
    Case("Clip", (n(3, 4),)),
    Case("Clip", (whole("int8", 3, 4), f(-5, "int8"), f(7, "int8"))),
    Case("PRelu", (n(2, 3, 4), n(3, 1))),
    Case("Pow", (p(3, 4), n(4))),
    Case("Pow", (n(3, 4), f(2, "int64"))),
    Case("Mod", (whole("int32", 3, 4), whole("int32", 4))),
    Case("Mod", (n(3, 4) * 9, n(4)), {"fmod": 1}),
    Case("Div", (whole("int32", 30), whole("int32", 30) // 9999)),
    Case("Max", (n(3, 4), n(4), n(1, 1))),
    Case("Min", (n(3, 4), n(4))),
    Case("Sum", (n(3, 4), n(4), n(1, 1))),
    Case("Mean", (n(3, 4), n(4), n(1, 1))),
    Case("Where", (truth(3, 1), n(3, 4), n(4))),
    *(
        Case("IsInf", (np.array([1, -np.inf, np.inf], np.float32),), attributes)
        for attributes in ({}, {"detect_negative": 0}, {"detect_positive": 0})
    ),
    Case("Not", (truth(3, 4),)),
    Case("Cast", (n(3, 4) * 50,), {"to": 7}),
    Case("Cast", (n(3, 4),), {"to": 9}),
    Case("Cast", (n(3, 4),), {"to": 10}),
    Case("Cast", (whole("int32", 3, 4),), {"to": 1}),
    Case("Add", (n(3, 4).astype(np.float16), n(4).astype(np.float16))),
    *(Case(op, (n(3, 1, 4), n(2, 1))) for op in ("Add", "Sub", "Mul", "Div")),
    *(
        Case(op, (np.round(n(3, 4)), np.round(n(4))))
        for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    ),
    *(Case(op, (truth(3, 4), truth(4))) for op in ("And", "Or", "Xor")),
]
CONVOLUTIONS = [
    Case("Conv", (IMAGE, n(4, 6, 3, 3))),
    Case("Conv", (IMAGE, n(4, 6, 3, 3), n(4)), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
    Case("Conv", (IMAGE, n(4, 3, 3, 2), n(4)), {"group": 2, "dilations": [2, 3]}),
    Case("Conv", (IMAGE, n(12, 1, 5, 5)), {"group": 6, "pads": [2, 2, 2, 2], "strides": [2, 2]}),
    Case("Conv", (IMAGE, n(4, 6, 4, 3)), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    Case("Conv", (IMAGE, n(4, 6, 4, 3)), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    Case("Conv", (IMAGE, n(4, 6, 4, 3)), {"auto_pad": "VALID"}),
    Case("Conv", (n(2, 3, 11), n(5, 3, 4), n(5)), {"pads": [3, 1], "strides": [2]}),
    Case("Conv", (n(2, 4, 5, 6, 7), n(6, 2, 2, 3, 3)), {"group": 2, "pads": [1, 1, 0, 0, 1, 2]}),
    Case("ConvTranspose", (IMAGE, n(6, 4, 3, 3))),
    Case(
        "ConvTranspose",
        (IMAGE, n(6, 4, 3, 3), n(4)),
        {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [1, 2]},
    ),
    Case("ConvTranspose", (IMAGE, n(6, 2, 2, 2), n(6)), {"group": 3, "strides": [2, 2]}),
    Case("ConvTranspose", (IMAGE, n(6, 4, 3, 2)), {"dilations": [2, 2], "strides": [3, 1]}),
    Case("ConvTranspose", (IMAGE, n(6, 4, 3, 3)), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("ConvTranspose", (IMAGE, n(6, 4, 3, 3)), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    Case("ConvTranspose", (IMAGE, n(6, 4, 3, 3)), {"output_shape": [18, 15], "strides": [2, 2]}),
    Case("ConvTranspose", (n(2, 3, 7), n(3, 2, 4)), {"strides": [2], "pads": [1, 1]}),
    Case("ConvTranspose", (n(1, 2, 3, 4, 5), n(2, 3, 2, 2, 3)), {"strides": [2, 1, 2]}),
]
POOLS = [
    Case(op, (n(2, 3, 9, 8),), {"kernel_shape": [3, 2], **attributes})
    for op in ("MaxPool", "AveragePool")
    for attributes in (
        {},
        {"strides": [2, 2], "pads": [1, 0, 1, 1]},
        {"strides": [2, 3], "ceil_mode": 1},
        {"strides": [3, 2], "pads": [1, 1, 2, 1], "ceil_mode": 1},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "VALID", "strides": [2, 2]},
        {"dilations": [2, 2]},
    )
] + [
    Case(
        "AveragePool",
        (n(2, 3, 9, 8),),
        {"kernel_shape": [3, 3], "strides": s, "pads": [1, 1, 1, 1], "count_include_pad": 1, **c},
    )
    for s in ([1, 1], [2, 2])
    for c in ({}, {"ceil_mode": 1})
]
POOLS += [
    Case("MaxPool", (n(2, 3, 11),), {"kernel_shape": [3], "strides": [2]}),
    Case("MaxPool", (n(1, 2, 5, 6, 7),), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2]}),
    Case("MaxPool", (whole("int8", 1, 2, 5, 6),), {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}),
    Case("GlobalAveragePool", (IMAGE,)),
    Case("GlobalMaxPool", (IMAGE,)),
]
PRODUCTS = [
    Case("MatMul", (n(3, 4), n(4, 5))),
    Case("MatMul", (n(2, 1, 3, 4), n(6, 4, 5))),
    Case("MatMul", (n(4), n(2, 4, 5))),
    Case("MatMul", (n(2, 3, 4), n(4))),
    Case("Gemm", (n(3, 4), n(4, 5))),
    Case("Gemm", (n(3, 4), n(4, 5), n(5)), {"alpha": 0.5, "beta": 2.0}),
    Case("Gemm", (n(4, 3), n(5, 4), n(3, 1)), {"transA": 1, "transB": 1}),
    Case("Attention", (n(2, 4, 5, 8), n(2, 2, 6, 8), n(2, 2, 6, 3)), opset=23),
    Case("Attention", (n(2, 4, 5, 8), n(2, 4, 5, 8), n(2, 4, 5, 8), n(5, 5)), opset=23),
    Case(
        "Attention",
        (n(2, 4, 5, 8), n(2, 4, 5, 8), n(2, 4, 5, 8)),
        {"is_causal": 1, "scale": 0.2},
        opset=23,
    ),
    Case("Einsum", (n(2, 3, 4), n(2, 5, 4)), {"equation": "b t c, bsc -> bts"}),
    Case("Einsum", (n(3, 4), n(4)), {"equation": "ij,j"}),
    Case("Einsum", (n(3, 3),), {"equation": "ii->i"}),
    Case("MatMulInteger", (whole("uint8", 3, 40), whole("int8", 40, 5))),
    Case(
        "MatMulInteger",
        (whole("uint8", 3, 40), whole("int8", 40, 5), f(130, "uint8"), f(-3, "int8")),
    ),
    Case(
        "MatMulInteger",
        (whole("uint8", 3, 40), whole("int8", 40, 5), f(130, "uint8"), whole("int8", 5)),
    ),
    Case(
        "ConvInteger",
        (whole("uint8", 1, 3, 6, 6), whole("uint8", 4, 3, 3, 3), f(7, "uint8"), f(99, "uint8")),
        {"pads": [1, 1, 1, 1]},
    ),
]
SHAPES = [
    Case("Concat", (n(2, 3), n(2, 1), n(2, 4)), {"axis": -1}),
    Case("Split", (n(2, 7), i(3, 4)), {"axis": 1}, outputs=2),
    Case("Split", (n(7, 2),), {"num_outputs": 3}, outputs=3),
    Case("Slice", (n(5, 6), i(1, -3), i(4, 100))),
    Case("Slice", (n(5, 6), i(-1), i(-100), i(1), i(-2))),
    Case("Slice", (n(5, 6), i(4, 5), i(0, -4), i(0, 1), i(-1, -1))),
    Case("Gather", (n(5, 6), np.array([[0, -1], [2, 3]])), {"axis": 1}),
    Case("Gather", (n(5, 6), f(2, "int64"))),
    Case("GatherElements", (n(3, 4), np.array([[0, -1], [2, 1], [3, 3]])), {"axis": 1}),
    Case("Reshape", (n(2, 3, 4), i(0, -1))),
    Case("Reshape", (n(0, 3), i(3, 0)), {"allowzero": 1}),
    Case("Flatten", (n(2, 3, 4),)),
    Case("Flatten", (n(2, 3, 4),), {"axis": 0}),
    Case("Flatten", (n(2, 3, 4),), {"axis": -1}),
    Case("Transpose", (n(2, 3, 4),)),
    Case("Transpose", (n(2, 3, 4),), {"perm": [1, 2, 0]}),
    Case("Squeeze", (n(1, 3, 1),)),
    Case("Squeeze", (n(1, 3, 1), i(-1))),
    Case("Unsqueeze", (n(3, 4), i(0, -1))),
    Case("Expand", (n(3, 1), i(2, 1, 4))),
    Case("Tile", (n(3, 2), i(2, 3))),
    Case("Shape", (n(3, 4, 5),)),
    Case("Shape", (n(3, 4, 5),), {"start": 1, "end": -1}),
    Case("Size", (n(3, 4, 5),)),
    Case("ConstantOfShape", (i(2, 3),)),
    Case("ConstantOfShape", (i(2, 3),), {"value": np.array([5], np.int64)}),
    Case("Range", (f(3, "int64"), f(11, "int64"), f(3, "int64"))),
    Case("Range", (f(1.0), f(-1.0), f(-0.3))),
    Case("Dropout", (n(3, 4),)),
    Case("Trilu", (n(4, 5),), {"upper": 0}),
    Case("Trilu", (n(4, 5), f(1, "int64"))),
    Case("DepthToSpace", (n(1, 8, 2, 3),), {"blocksize": 2}),
    Case("DepthToSpace", (n(1, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", (n(1, 2, 4, 6),), {"blocksize": 2}),
    *(
        Case("Pad", (n(3, 4), i(1, 2, 0, 1)), {"mode": mode})
        for mode in ("constant", "reflect", "edge", "wrap")
    ),
    Case("Pad", (n(3, 4), i(1, -2, 0, 1), f(2.5))),
    Case("Pad", (n(3, 4), i(1, 2), f(2.5), i(-1))),
]
RESIZES = [
    Case(
        "Resize",
        (n(1, 2, 5, 6), None, np.array([1, 1, *scales], np.float32)),
        {"mode": mode, "coordinate_transformation_mode": where, "nearest_mode": nearest},
        close=2e-5,
    )
    for scales in ((2, 3), (0.6, 1.7))
    for mode, where, nearest in (
        ("nearest", "asymmetric", "floor"),
        ("nearest", "half_pixel", "round_prefer_floor"),
        ("nearest", "half_pixel", "round_prefer_ceil"),
        ("nearest", "align_corners", "ceil"),
        ("linear", "half_pixel", "floor"),
        ("linear", "pytorch_half_pixel", "floor"),
        ("linear", "align_corners", "floor"),
        ("linear", "asymmetric", "floor"),
        ("linear", "half_pixel_symmetric", "floor"),
        ("cubic", "half_pixel", "floor"),
        ("cubic", "align_corners", "floor"),
    )
] + [
    Case("Resize", (n(1, 2, 5, 6), None, None, i(1, 2, 11, 4)), {"mode": "linear"}),
    Case("Resize", (n(1, 2, 5, 6), None, None, i(11, 4)), {"mode": "linear", "axes": [2, 3]}),
    Case(
        "Resize",
        (n(1, 2, 5, 6), None, None, i(1, 2, 1, 12)),
        {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
    ),
]
REDUCTIONS = [
    Case(f"Reduce{kind}", (n(2, 3, 4), *axes), attributes)
    for kind in ("Mean", "Sum", "Max", "Min", "L2", "L1", "Prod", "SumSquare", "LogSumExp")
    for axes, attributes in (
        ((i(1, -1),), {}),
        ((i(0),), {"keepdims": 0}),
        ((), {}),
        ((i(),), {"noop_with_empty_axes": 1}),
    )
] + [
    Case("ReduceMean", (n(2, 3, 4),), {"axes": [-1]}, opset=13),
    Case("ReduceSum", (whole("int32", 40, 3) // 100, i(0))),
    Case("ArgMax", (n(2, 3, 4),), {"axis": 1}),
    Case("ArgMax", (np.round(n(2, 3, 4)),), {"axis": -1, "keepdims": 0, "select_last_index": 1}),
    Case("ArgMin", (n(2, 3, 4),), {"axis": 1}),
    Case("CumSum", (n(2, 3, 4), f(1, "int64"))),
    Case("CumSum", (n(2, 3, 4), f(-1, "int64")), {"exclusive": 1, "reverse": 1}),
]
TIES = np.round(n(3, 5, 4) * 2) / 2
ORDERS = [
    Case("TopK", (TIES, i(2)), outputs=2),
    Case("TopK", (TIES, i(5)), {"axis": 1, "largest": 0}, outputs=2),
    Case("TopK", (TIES, i(1)), {"axis": -3, "sorted": 0}, outputs=2),
    Case("TopK", (whole("int64", 4, 6), i(3)), {"axis": 0}, outputs=2),
    Case("TopK", (whole("int32", 7), i(0)), outputs=2),
    Case("ScatterND", (n(5, 4), np.array([[1], [-2]]), n(2, 4))),
    Case("ScatterND", (n(3, 4, 5), np.array([[[0, 1], [2, -1]]]), n(1, 2, 5))),
    Case("ScatterND", (n(4, 3), np.array([[1], [1]]), n(2, 3)), {"reduction": "add"}),
    Case("ScatterND", (n(4, 3), np.array([[1], [1]]), n(2, 3)), {"reduction": "max"}),
    Case("ScatterND", (n(4), np.array([[1], [1]]), n(2)), {"reduction": "mul"}),
    Case("ScatterElements", (n(3, 5), np.array([[0, -1], [2, 1]]), n(2, 2)), {"axis": 1}),
    Case("ScatterElements", (n(3, 5), np.array([[0, 2, 1, 0, 2]]), n(1, 5))),
    Case("ScatterElements", (n(3, 5), np.array([[1, 1, 0]]), n(1, 3)),
         {"axis": -1, "reduction": "add"}),
    Case("ScatterElements", (whole("int64", 3, 5), np.array([[1, 1, 0]]), whole("int64", 1, 3)),
         {"axis": -1, "reduction": "min"}),
    Case("ScatterElements", (n(6) > 0, i(1, 4), n(2) > 0)),
]  # fmt: skip
NORMALIZATIONS = [
    Case("BatchNormalization", (IMAGE, n(6), n(6), n(6), p(6)), {"epsilon": 1e-3}, close=1e-5),
    Case("BatchNormalization", (n(5, 6), n(6), n(6), n(6), p(6)), close=1e-5),
    Case("LayerNormalization", (n(2, 3, 4), n(4), n(4)), close=1e-5),
    Case("LayerNormalization", (n(2, 3, 4), n(3, 4)), {"axis": 1, "epsilon": 0.1}, close=1e-5),
    Case("GroupNormalization", (IMAGE, n(6), n(6)), {"num_groups": 3}, close=1e-5),
    Case("GroupNormalization", (IMAGE, n(3), n(3)), {"num_groups": 3}, opset=18, close=1e-5),
    Case("RMSNormalization", (n(2, 3, 4), n(4)), opset=23, close=1e-5),
    Case("RMSNormalization", (n(2, 3, 4), n(3, 4)), {"axis": 1}, opset=23, close=1e-5),
    Case("InstanceNormalization", (IMAGE, n(6), n(6)), {"epsilon": 1e-2}, close=1e-5),
]
SCALES = np.array([0.5, 0.03, 1.5], np.float32)
QUANTIZATIONS = [
    Case("QuantizeLinear", (n(4, 5) * 9, f(0.05), f(130, "uint8"))),
    Case("QuantizeLinear", (n(4, 5) * 9, f(0.07), f(-3, "int8"))),
    Case("QuantizeLinear", (n(4, 5), f(0.05))),
    Case("QuantizeLinear", (n(2, 3, 5), SCALES, whole("int8", 3))),
    Case("QuantizeLinear", (n(5, 3), SCALES, whole("uint8", 3)), {"axis": -1}),
    Case("DequantizeLinear", (whole("uint8", 4, 5), f(0.05), f(130, "uint8"))),
    Case("DequantizeLinear", (whole("int8", 2, 3, 5), SCALES, whole("int8", 3))),
    Case("DequantizeLinear", (whole("int32", 3, 5), SCALES), {"axis": 0}),
    Case("DynamicQuantizeLinear", (n(4, 5),), outputs=3),
    Case("DynamicQuantizeLinear", (p(4, 5),), outputs=3),
    Case("DynamicQuantizeLinear", (-p(4, 5),), outputs=3),
    Case(
        "QLinearMatMul",
        (
            whole("uint8", 3, 8), f(0.02), f(120, "uint8"),
            whole("int8", 8, 5), f(0.01), f(3, "int8"),
            f(0.05), f(128, "uint8"),
        ),
    ),
    Case(
        "QLinearConv",
        (
            whole("uint8", 1, 2, 6, 6), f(0.02), f(120, "uint8"),
            whole("int8", 3, 2, 3, 3), SCALES / 30, np.zeros(3, np.int8),
            f(0.5), f(128, "uint8"), whole("int32", 3) >> 22,
        ),
        {"pads": [1, 1, 0, 0]},
    ),
]  # fmt: skip
RECURRENT = [
    Case(op, (n(4, 2, 3), n(1, gates * 5, 3), n(1, gates * 5, 5), n(1, gates * 10)),
         {"hidden_size": 5}, outputs, close=1e-5)
    for op, gates, outputs in (("RNN", 1, 2), ("GRU", 3, 2), ("LSTM", 4, 3))
]  # fmt: skip
PLACES = [
    Case("GatherND", (n(2, 3, 4), np.array([[0, 2], [-1, 1]]))),
    Case("GatherND", (n(2, 3, 4), np.array([[2], [-3]])), {"batch_dims": 1}),
    Case("Col2Im", (n(2, 8, 12), i(4, 5), i(2, 2)), {"strides": (1, 1)}),
    Case("Col2Im", (n(1, 12, 9), i(3, 5), i(2, 3)), {"strides": (1, 2), "pads": (0, 1, 1, 1),
                                                     "dilations": (1, 1)}),
]  # fmt: skip
CASES = [
    *ACTIVATIONS, *ELEMENTWISE, *CONVOLUTIONS, *POOLS, *PRODUCTS, *SHAPES, *RESIZES, *REDUCTIONS,
    *ORDERS, *NORMALIZATIONS, *QUANTIZATIONS, *RECURRENT, *PLACES,
]  # fmt: skip
