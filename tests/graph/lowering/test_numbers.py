"""Operators that compute numbers: what their kernels make of them is what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowered import SETS, F, Make, formatted, ints, op, same
from nets import Net, random_inputs, with_formats

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate

UNARY: dict[str, Make] = {
    **{name: op(name) for name in (
        "Relu", "Sigmoid", "Silu", "HardSwish", "Tanh", "Softplus", "Softsign", "Mish", "Neg",
        "Abs", "Sign", "Exp", "Erf", "Sin", "Cos", "Floor", "Ceil", "Round", "Gelu", "LeakyRelu",
        "ThresholdedRelu", "Elu", "Celu", "Selu", "HardSigmoid", "Identity", "Erfc", "Expm1",
        "Exp2", "Trunc",
    )},
    "gelu tanh": op("Gelu", approximate="tanh"),
    "leaky": op("LeakyRelu", alpha=0.3),
    "thresholded": op("ThresholdedRelu", alpha=0.4),
    "elu": op("Elu", alpha=0.7),
    "celu": op("Celu", alpha=1.7),
    "selu": op("Selu", alpha=1.5, gamma=1.2),
    "hard sigmoid": op("HardSigmoid", alpha=1 / 6, beta=0.4),
    "clip": op("Clip", F(-0.3), F(0.8)),
    "clip above": lambda net, x: net("Clip", x, "", net.constant(F(0.2))),
    "square": op("Pow", F(2)),
    "cube": op("Pow", F(3)),
    "add number": op("Add", F(0.7)),
    "times number": op("Mul", F(-1.3)),
    "from number": lambda net, x: net("Sub", net.constant(F(2)), x),
    "twice": lambda net, x: net("Mul", x, x),
}  # fmt: skip
POSITIVE: dict[str, Make] = {
    **{name: op(name) for name in ("Log", "Sqrt", "Reciprocal", "Log1p", "Log2", "Log10")},
    **{f"power {y}": op("Pow", F(y)) for y in (0.5, -0.5, -1, 1, 1.7, -2.3)},
    "mod": op("Mod", F(0.37), fmod=0),
}


@pytest.mark.deep("Expm1", "Celu", "Softplus", "Sigmoid", "Exp2")
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str) -> None:
    net = Net()
    y = UNARY[name](net, net.input(3, 5, 7))
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


@pytest.mark.parametrize("name", POSITIVE)
def test_functions_of_positive_numbers(name: str) -> None:
    net = Net()
    y = POSITIVE[name](net, net("Add", net("Abs", net.input(3, 37)), net.constant(F(0.1))))
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)


@pytest.mark.parametrize("name", ["Mish", "Gelu", "Sigmoid", "Exp", "Elu"])
def test_tables_of_bytes_are_exact(name: str) -> None:
    net = Net()
    x = net.input(2, 4, 3, 5)
    y = net(name, net("Transpose", x, perm=(0, 2, 3, 1)))
    z = net("Identity", y)
    graph = with_formats(net.graph(z), *net.graph(z).tensors, "v0", y)
    graph = graph.replaced(tensors={**graph.tensors, "v0": graph.tensors["v0"]})
    inputs = random_inputs(graph)
    for isa in SETS:
        np.testing.assert_array_equal(Session(graph, isa=isa).run(**inputs)[z],
                                      evaluate(graph, inputs)[z])  # fmt: skip


def test_ends_of_floats() -> None:
    for name in ("Exp", "Log", "Sqrt", "Abs", "Relu", "Softplus", "Floor", "IsNaN", "IsInf", "Erf",
                 "Log1p", "Expm1", "Trunc"):  # fmt: skip
        net = Net()
        net(name, net.input(9))
        x = np.array([0, -1, np.inf, -np.inf, np.nan, 1e-40, 88.6, 300, -300], np.float32)
        same(net.graph(), {"x0": x})


SHAPES = [((3, 4, 5), (3, 4, 5)), ((3, 4, 5), (4, 1)), ((1, 4, 1), (3, 1, 5)), ((), (2, 3)),
          ((2, 3, 0), (3, 1))]  # fmt: skip


@pytest.mark.deep("Add-shapes0", "Min-shapes0", "Mul-shapes0", "Sub-shapes0")
@pytest.mark.pairs
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(
    "name",
    ["Add", "Sub", "Mul", "Div", "Min", "Max", "PRelu", "Less", "Greater", "LessOrEqual",
     "GreaterOrEqual", "Equal", "Mean", "Sum", "NotEqual", "Hypot", "Atan2"],
)  # fmt: skip
def test_functions_of_two(name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    net = Net()
    y = net(name, *(net.input(*shape) for shape in shapes))
    same(net.graph(y), random_inputs(net.graph(y)))
    if name in ("Add", "Sub", "Mul", "Min", "Max", "PRelu") and shapes[0] == (3, 4, 5):
        formatted(net, y, 1)


@pytest.mark.parametrize("name", ["Sum", "Mean", "Min", "Max"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_functions_of_many(name: str, count: int) -> None:
    net = Net()
    y = net(name, *(net.input(*shape) for shape in ((2, 3), (3,), (2, 1), (1,), (2, 3))[:count]))
    same(net.graph(y), random_inputs(net.graph(y)))


@pytest.mark.deep
def test_integers_and_booleans() -> None:
    net = Net()
    a, b = net.input(3, 5, dtype="int64"), net.input(5, dtype="int32")
    b = net("Cast", b, to="int64")
    less, equal = net("Less", a, b), net("Equal", a, b)
    outputs = [less, equal, net("Not", less)]
    outputs += [net(name, less, equal) for name in ("And", "Or", "Xor")]
    outputs += [net(name, a, b) for name in ("Add", "Sub", "Mul", "Min", "Max")]
    divisor = net("Add", b, net.constant(ints(1)))
    outputs += [net("Div", a, divisor), net("Mod", a, divisor)]
    outputs += [net("Where", less, a, b), net("Cast", a, to="bool"), net("Cast", a, to="float32")]
    outputs += [net("Cast", a, to="int32"), net("Cast", less, to="int64"), net("Neg", a)]
    outputs += [net("ReduceSum", a, net.constant(ints(1)), keepdims=0), net("ReduceMax", a)]
    outputs += [net("CumSum", a, net.constant(ints(1)), **how) for how in (
        {}, {"exclusive": 1}, {"reverse": 1}, {"reverse": 1, "exclusive": 1})]  # fmt: skip
    outputs += [net("CumSum", a, net.constant(ints(0)))]
    graph = net.graph(*outputs)
    same(graph, random_inputs(graph))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_elements_of_each_line(dtype: str, axis: int) -> None:
    net = Net()
    x = net.input(3, 4, 6, dtype=dtype)
    shape = [3, 4, 6]
    shape[axis] = 9
    indices = np.random.default_rng(0).integers(-3, 3, shape)
    outputs = [net("GatherElements", x, net.constant(indices.astype(kind)), axis=axis)
               for kind in ("int64", "int32")]  # fmt: skip
    graph = net.graph(*outputs)
    same(graph, random_inputs(graph))


def test_an_element_that_does_not_exist() -> None:
    net = Net()
    x, index = net.input(2, 4), net.input(2, 3, dtype="int64")
    session = Session(net.graph(net("GatherElements", x, index, axis=1)), threads=1)
    values, places = np.arange(8, dtype=np.float32).reshape(2, 4), ints(0, -4, 3)
    got = session(values, np.stack([places, places]))
    np.testing.assert_array_equal(got, [[0, 0, 3], [4, 4, 7]])
    with pytest.raises(IndexError, match="out of range for an axis of 4"):
        session(values, np.stack([places, ints(0, 1, 4)]))


def test_casts_of_floats_go_towards_zero() -> None:
    net = Net()
    x = net.input(7, 9)
    wide = net("Mul", x, net.constant(F(20)))
    graph = net.graph(*(net("Cast", wide, to=to) for to in ("int64", "int32", "int8", "bool")))
    same(graph, random_inputs(graph))


REDUCED = [((2, 3, 4, 5), (2, 3)), ((2, 3, 4, 5), (1,)), ((4, 37), (-1,)), ((3, 4, 5), None),
           ((2, 3, 4, 5), (0, 2)), ((2, 3, 4, 5), (2,))]  # fmt: skip


@pytest.mark.pairs
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), REDUCED)
@pytest.mark.parametrize(
    "name", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2",
             "ReduceSumSquare", "ReduceLogSumExp"],
)  # fmt: skip
def test_reductions(
    name: str, shape: tuple[int, ...], axes: tuple[int, ...] | None, keepdims: int
) -> None:
    net = Net()
    given = () if axes is None else (net.constant(ints(*axes)),)
    y = net(name, net.input(*shape), *given, keepdims=keepdims)
    same(net.graph(y), random_inputs(net.graph(y)))
    if keepdims and axes == (2, 3):
        formatted(net, y, 1)


@pytest.mark.deep("LogSoftmax--1")
@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax", "LpNormalization"])
def test_softmax(name: str, axis: int) -> None:
    net = Net()
    y = net(name, net.input(3, 5, 17), axis=axis)
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


@pytest.mark.deep("LayerNormalization--1")
@pytest.mark.parametrize("axis", [-1, 1, -2])
@pytest.mark.parametrize("name", ["LayerNormalization", "RMSNormalization"])
def test_rows_are_normalized(name: str, axis: int) -> None:
    net = Net()
    shape = (3, 5, 17)[axis:]
    biases = (net.weight(*shape, bits=None),) if name[0] == "L" else ()
    y = net(name, net.input(3, 5, 17), net.weight(*shape, bits=None), *biases, axis=axis,
            epsilon=1e-4)  # fmt: skip
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


@pytest.mark.deep("Instance-*", "Batch-*")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["Batch", "Instance", "Group"])
def test_channels_are_normalized(name: str, last: bool) -> None:
    net = Net()
    x = net.input(2, 4, 3, 6) if last else net.input(2, 6, 4, 3)
    x = net("Transpose", x, perm=(0, 3, 1, 2)) if last else x
    vectors = [net.bias(6), net.bias(6)]
    if name == "Batch":
        vectors += [net.bias(6), net.constant(np.abs(net.random.normal(1, 0.1, 6)).astype(F))]
    attributes = {"num_groups": 3} if name == "Group" else {}
    y = net(f"{name}Normalization", x, *vectors, **attributes)
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


MASKS = [None, (2, 1, 5, 9), (2, 1, 1, 9), (5, 9), (1, 4, 5, 1)]


@pytest.mark.deep("mask1-*", "None-False")
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attention(mask: tuple[int, ...] | None, boolean: bool) -> None:
    net = Net()
    q, k, v = net.input(2, 4, 5, 16), net.input(2, 2, 9, 16), net.input(2, 2, 9, 12)
    given = ()
    if mask is not None:
        given = (net.input(*mask),)
        if boolean:
            given = (net("Less", given[0], net.constant(F(0.5))),)
    y = net("Attention", q, k, v, *given, scale=0.3)
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)
    if mask is None:
        formatted(net, y, 2, limit=4e-3)  # weights are rounded to bfloat16


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_attention_of_other_ranks(rank: int) -> None:
    net = Net()
    shape = (2, 3, 2, 7, 8)[5 - rank :]
    qkv = [net.input(*shape) for _ in range(3)]
    y = net("Attention", *qkv, is_causal=1)
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)


def test_heads_are_views() -> None:
    """Queries, keys and values as one product made them; the output as rows."""
    net = Net()
    x = net.input("batch", 7, 24)
    qkv = net("Linear", x, net.weight(72, 24, bits=None), net.bias(72))
    heads = net("Transpose", net("Reshape", qkv, net.constant(ints(0, 7, 3, 4, 6))),
                perm=(2, 0, 3, 1, 4))  # fmt: skip
    parts = [net("Gather", heads, net.constant(np.int64(i)), axis=0) for i in range(3)]
    rows = net("Transpose", net("Attention", *parts), perm=(0, 2, 1, 3))
    y = net("Reshape", rows, net.constant(ints(0, 7, -1)))
    graph = net.graph(y).bound({"batch": 2})
    inputs = random_inputs(graph)
    same(graph, inputs, limit=1e-5)
    kernels = [one.program.name for one in Session(graph, threads=1).plan(inputs).steps]
    assert kernels.count("elementwise") <= 1  # the heads side by side


@pytest.mark.deep
def test_where_and_clip_of_tensors() -> None:
    net = Net()
    x, low, high = net.input(3, 5), net.input(5), net.input(3, 1)
    clipped = net("Clip", x, low, high)
    upper = net("Clip", x, "", high)
    chosen = net("Where", net("Less", x, low), x, high)
    power = net("Pow", net("Abs", x), low)
    graph = net.graph(clipped, upper, chosen, power)
    same(graph, random_inputs(graph), limit=1e-5)


@pytest.mark.parametrize("equation", ["bhld,bhsd->bhls", "ij,jk->ki", "bij,bkj->bik", "abc,cd->abd",
                                      "bhwc,hkc->bhwk", "i,ij->j"])  # fmt: skip
def test_einsum(equation: str) -> None:
    sizes = dict(zip("abcdhijklsw", (2, 3, 4, 5, 3, 2, 4, 5, 3, 6, 2), strict=True))
    net = Net()
    read = equation.split("->")[0].split(",")
    y = net("Einsum", *(net.input(*(sizes[x] for x in one)) for one in read), equation=equation)
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)


@pytest.mark.parametrize("shapes", [((3, 4), (4,)), ((4,), (4, 5)), ((4,), (4,)), ((2, 3, 4), (4,)),
                                    ((4,), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2))])  # fmt: skip
def test_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    net = Net()
    y = net("MatMul", *(net.input(*shape) for shape in shapes))
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)


@pytest.mark.parametrize(
    "attributes", [{}, {"transA": 1}, {"transB": 1, "alpha": 0.5, "beta": 2.0}]
)
@pytest.mark.parametrize("added", [None, (5,), (3, 1)])
def test_gemm(attributes: dict[str, Any], added: tuple[int, ...] | None) -> None:
    net = Net()
    a = net.input(*((4, 3) if attributes.get("transA") else (3, 4)))
    b = net.input(*((5, 4) if attributes.get("transB") else (4, 5)))
    y = net("Gemm", a, b, *([] if added is None else [net.input(*added)]), **attributes)
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)


TRANSPOSED: list[dict[str, Any]] = [
    {"strides": (2, 2)}, {"strides": (2, 3), "pads": (1, 0, 1, 2), "output_padding": (1, 2)},
    {"dilations": (2, 1)}, {"group": 2, "strides": (3, 3)},
    {"strides": (2, 2), "post_ops": (("relu",),)},
]  # fmt: skip


@pytest.mark.deep("attributes3-kernel0")
@pytest.mark.parametrize("kernel", [(2, 2), (3, 2)])
@pytest.mark.parametrize("attributes", TRANSPOSED)
def test_transposed_convolution_of_floats(
    attributes: dict[str, Any], kernel: tuple[int, int]
) -> None:
    net = Net()
    made = 6 // attributes.get("group", 1)
    y = net("ConvTranspose", net.input(2, 4, 5, 4), net.weight(4, made, *kernel, bits=None),
            net.bias(6), **attributes)  # fmt: skip
    same(net.graph(y), random_inputs(net.graph(y)), limit=1e-5)
