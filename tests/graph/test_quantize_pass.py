"""Static quantization of graphs, without PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lowbit.graph.calibrate import Calibration, calibrate
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor, numbers
from lowbit.graph.passes.quantization_regions import demanded, sharing
from lowbit.graph.passes.quantize import Setting, decide, observed, quantized
from lowbit.graph.passes.sequence_axes import with_positions
from lowbit.graph.passes.weights import WeightSetting, correction, equalized, smoothed, smoothings
from lowbit.graph.sensitivity import sqnr
from lowbit.numerics import QTensor, dequantize_affine

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def graph(
    nodes: list[Node], constants: dict[str, Any], *outputs: str, x: tuple[int | str, ...]
) -> Graph:
    return Graph(("x",), outputs, tuple(nodes), constants, {"x": Tensor("float32", x)})


def layer(op: str, x: str, out: str, *more: str, **attributes: Any) -> Node:
    return Node(op, (x, f"{out}.w", *more), (out,), attributes, out)


def done(given: Graph, batches: list[np.ndarray], **how: Any) -> Graph:
    seen = Calibration(given, decide(given), **how)
    calibrate(seen, [{"x": one} for one in batches])
    seen = seen.smoothed()
    return quantized(seen.graph, seen.decisions, seen.ranges, None, seen.seen, seen.means)


def ratio(made: Graph, given: Graph, x: np.ndarray) -> float:
    return sqnr([evaluate(made, {"x": x})], [evaluate(given, {"x": x})])


def conv(x: str, out: str, *more: str, **attributes: Any) -> Node:
    return layer("Conv", x, out, *more, pads=(1, 1, 1, 1), **attributes)


def test_only_what_products_read_is_kept_in_8_bits() -> None:
    """`a` is read by a product and by a float node, `b` through nodes that move, `t` by no product,
    and `y`, which is an output too, has a copy for the product that reads it."""
    given = graph(
        [
            conv("x", "a"), Node("Tanh", ("a",), ("t",)), conv("a", "b"),
            Node("MaxPool", ("b",), ("p",), {"kernel_shape": (2, 2)}),
            Node("Concat", ("p", "p"), ("c",), {"axis": 1}), conv("c", "y", "", "", group=2),
            conv("y", "z"), Node("Mul", ("t", "t"), ("u",)),
        ],
        {f"{name}.w": normal(*shape) for name, shape in {
            "a": (4, 3, 3, 3), "b": (4, 4, 3, 3), "y": (4, 4, 3, 3), "z": (2, 4, 3, 3)}.items()},
        "z", "y", "u", x=("batch", 3, 8, 8),
    )  # fmt: skip
    kept = observed(given, decide(given))
    assert kept == {"x", "a", "b", "p", "c", "y"}
    assert sharing(given, kept)["b"] == sharing(given, kept)["c"]
    assert len({*sharing(given, kept).values()}) == 4
    x = normal(3, 3, 8, 8)
    made = done(given, [x])
    assert {name for name, one in made.tensors.items() if one.scale is not None} == {
        "x.8bit", "a", "b", "p", "c", "y.8bit",
    }  # fmt: skip
    assert made.outputs == given.outputs
    assert ratio(made, given, x) > 30
    assert demanded(given, {"a"}) == {"x"}


def test_what_an_8_bit_value_stands_for() -> None:
    """The product computes on rounded inputs, and saturates where calibration saw less."""
    given = graph([layer("Linear", "x", "y")], {"y.w": np.eye(2, dtype=np.float32)}, "y", x=(1, 2))
    made = done(given, [np.array([[-1.0, 1.55]], np.float32)])
    tensor = made.tensors["x.8bit"]
    assert tensor.scale == pytest.approx(0.01)
    assert tensor.zero_point == 100
    (got,) = evaluate(made, {"x": np.array([[-3.0, 0.504]], np.float32)}).values()
    np.testing.assert_allclose(got, [[-1.0, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Linear"])
def test_weights_have_a_scale_for_each_output_channel(op: str) -> None:
    weight = normal(6, 4) if op == "Linear" else normal(6, 4, 3, 2)
    shape = (2, 4) if op == "Linear" else (2, 6 if op == "ConvTranspose" else 4, 5, 5)
    given = graph([layer(op, "x", "y")], {"y.w": weight}, "y", x=shape)
    made = done(given, [normal(*shape)])
    (found,) = made.constants.values()
    assert isinstance(found, QTensor)
    axis = int(op == "ConvTranspose")
    others = tuple(i for i in range(weight.ndim) if i != axis)
    np.testing.assert_allclose(found.scale, np.abs(weight).max(others) / 127, rtol=1e-6)
    assert found.axis == axis
    spread = found.scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    assert np.abs(dequantize_affine(found.values, spread, 0) - weight).max() < found.scale.max()


def test_decisions_say_why() -> None:
    given = graph(
        [
            layer("ConvTranspose", "x", "a", group=2), layer("Conv", "a", "b"),
            Node("MatMul", ("b", "b"), ("c",)), Node("Linear", ("c", "b"), ("y",)),
        ],
        {"a.w": normal(4, 1, 1, 1), "b.w": np.full((2, 2, 1, 1), np.nan, np.float32)},
        "y", x=(1, 4, 2, 2),
    )  # fmt: skip
    whys = {one.output: (one.choice, one.why) for one in decide(given)}
    assert whys == {
        "a": ("float", "a transposed convolution in groups has no scale for each output channel"),
        "b": ("float", "its weight holds NaN or infinity"),
        "c": ("float", "both of its operands are activations"),
        "y": ("float", "its weight is not a constant"),
    }
    assert not observed(given, decide(given))


def test_values_that_were_not_observed_are_named() -> None:
    given = graph([layer("Linear", "x", "y")], {"y.w": normal(2, 2)}, "y", x=(1, 2))
    with pytest.raises(ValueError, match="the value 'x' was not observed"):
        quantized(given, decide(given), {})
    with pytest.raises(ValueError, match="unknown method 'awq' for weights"):
        WeightSetting(method="awq")


def uneven() -> Graph:
    """Two convolutions, one depthwise, between which channels differ a thousandfold."""
    factors = np.geomspace(1, 1000, 8).astype(np.float32)
    constants = {
        "a.w": normal(8, 3, 3, 3) * factors[:, None, None, None], "a.b": normal(8) * factors,
        "b.w": normal(8, 1, 3, 3) / factors[:, None, None, None], "b.b": normal(8),
        "c.w": normal(5, 8),
    }  # fmt: skip
    nodes = [
        conv("x", "a", "a.b", post_ops=(("relu",),)),
        conv("a", "b", "b.b", group=8, post_ops=(("relu",),)),
        Node("GlobalAveragePool", ("b",), ("p",)), Node("Flatten", ("p",), ("f",), {"axis": 1}),
        layer("Linear", "f", "c"),
    ]  # fmt: skip
    return graph(nodes, constants, "c", x=("batch", 3, 6, 6))


def test_equalized() -> None:
    given, x = uneven(), normal(4, 3, 6, 6)
    made = equalized(given)
    assert ratio(made, given, x) > 100
    ranges = [np.abs(numbers(made.constants[f"{n}.w"])).reshape(8, -1).max(1) for n in "ab"]
    np.testing.assert_allclose(*ranges, rtol=0.02)
    plain = ratio(done(given, [x]), given, x)
    assert ratio(done(made, [x]), given, x) > plain + 3


def test_a_shared_weight_is_not_equalized() -> None:
    nodes = [layer("Linear", "x", "a"), Node("Linear", ("a", "a.w"), ("y",))]
    given = graph(nodes, {"a.w": normal(4, 4)}, "y", x=(2, 4))
    assert equalized(given).constants["a.w"] is given.constants["a.w"]


@pytest.mark.parametrize("order", [("Conv", "Linear"), ("Linear", "Conv")])
def test_layers_whose_channels_are_on_other_axes_are_not_equalized(order: tuple[str, str]) -> None:
    """There are as many channels as columns, so that the factors would fit."""
    weights = {"Conv": normal(8, 8, 1, 1), "Linear": normal(8, 8)}
    nodes = [layer(order[0], "x", "a"), layer(order[1], "a", "y")]
    constants = {f"{node.outputs[0]}.w": weights[node.op] for node in nodes}
    given = graph(nodes, constants, "y", x=(2, 8, 5, 8))
    assert equalized(given).constants == given.constants


def outlying() -> Graph:
    """A norm one of whose channels is a hundred times as large as the others."""
    scale = np.ones(16, np.float32)
    scale[3] = 100
    constants = {
        "n.s": scale, "n.b": normal(16), "a.w": normal(8, 16), "b.w": normal(8, 16) * 0.5,
    }  # fmt: skip
    nodes = [
        Node("LayerNormalization", ("x", "n.s", "n.b"), ("n",), {"axis": -1}),
        layer("Linear", "n", "a"), layer("Linear", "n", "b"), Node("Add", ("a", "b"), ("y",)),
    ]  # fmt: skip
    constants["a.w"][:, 3] *= 0.01
    constants["b.w"][:, 3] *= 0.01
    return graph(nodes, constants, "y", x=("batch", 16))


def test_smoothed() -> None:
    given, x = outlying(), normal(64, 16)
    (place,) = smoothings(given)
    assert (place.value, len(place.readers)) == ("n", 2)
    (norm,) = (evaluate(Graph(**{**vars(given), "outputs": ("n",)}), {"x": x})).values()
    made, factors = smoothed(given, {"n": np.abs(norm).max(0)}, 0.5)
    assert ratio(made, given, x) > 100
    assert factors["n"][3] == factors["n"].max()
    plain = ratio(done(given, [x]), given, x)
    assert ratio(done(given, [x], smooth=0.5), given, x) > plain + 10
    twice = Graph(**{**vars(given), "outputs": ("y", "n")})
    assert not smoothings(twice)


@pytest.mark.parametrize("group", [1, 2])
def test_biases_make_up_for_the_mean_error(group: int) -> None:
    """The mean error of what is computed becomes nothing but that of the activations' rounding."""
    x = normal(16, 4, 5, 5) + np.arange(4, dtype=np.float32)[:, None, None]
    constants = {"y.w": normal(4, 4 // group, 1, 1), "y.b": normal(4)}
    given = graph([layer("Conv", "x", "y", "y.b", group=group)], constants, "y", x=x.shape)
    plain, corrected = done(given, [x]), done(given, [x], with_means=True)
    (wanted,) = evaluate(given, {"x": x}).values()
    off = [
        np.abs((evaluate(made, {"x": x})["y"] - wanted).mean((0, 2, 3))).max()
        for made in (plain, corrected)
    ]
    assert off[1] < off[0] / 3
    node = given.nodes[0]
    exact = WeightSetting().quantized(node, constants["y.w"], "int8")
    assert correction(node, exact.dequantize(), exact, np.ones(4)).tolist() == [0] * 4


@pytest.mark.parametrize("width", [4, 6])
def test_biases_of_a_convolution_and_a_linear_layer_that_read_the_same(width: int) -> None:
    x = normal(64, 4, 5, width) + np.arange(4, dtype=np.float32)[:, None, None]
    nodes = [layer("Conv", "x", "y"), layer("Linear", "x", "z")]
    given = graph(nodes, {"y.w": normal(4, 4, 1, 1), "z.w": normal(3, width)}, "y", "z", x=x.shape)
    plain, corrected = done(given, [x]), done(given, [x], with_means=True)
    wanted = evaluate(given, {"x": x})
    for name, axes in (("y", (0, 2, 3)), ("z", (0, 1, 2))):
        before, after = (
            np.abs((evaluate(made, {"x": x})[name] - wanted[name]).mean(axes)).max()
            for made in (plain, corrected)
        )
        assert after < before / 2


def test_positions_are_followed_through_nodes() -> None:
    """There are as many channels, and heads, as positions: b and what is made of it is turned. What
    the convolution reads is no position's; and c is one because of what it is added to."""
    turn, back = {"perm": (0, 2, 1)}, np.array([2, 4, 4])
    nodes = [
        layer("Linear", "x", "a"), Node("Transpose", ("a",), ("b",), turn), layer("Conv", "b", "t"),
        layer("Linear", "t", "u"), Node("Transpose", ("u",), ("v",), turn),
        Node("Reshape", ("v", "back"), ("w",)), layer("Linear", "w", "c"),
        Node("Add", ("a", "c"), ("d",)), layer("Conv", "d", "y"), layer("Linear", "m", "n"),
    ]  # fmt: skip
    constants = {f"{name}.w": normal(4, 4) for name in "aucn"}
    constants |= {f"{name}.w": normal(4, 4, 1) for name in "ty"} | {"back": back}
    tensors = {"x": Tensor("float32", (2, 4, 4)), "m": Tensor("float32", (2, 4))}
    given = Graph(("x", "m"), ("y", "n"), tuple(nodes), constants, tensors)
    assert with_positions(given, "m") == {"x", "a", "v", "w", "c"}
    batch = {"x": normal(2, 4, 4), "m": np.array([[1, 1, 1, 0]] * 2, np.float32)}
    seen = Calibration(given, decide(given), with_inputs=True, with_means=True, mask="m")
    seen.observe(batch)
    low, high = (float(end) for end in seen.ranges["x"].range())
    assert (low, high) == (batch["x"][:, :3].min(), batch["x"][:, :3].max())
    empty = Calibration(given, decide(given), mask="m")
    with pytest.raises(ValueError, match=r"'x' has no elements in the .* where 'm' is not 0"):
        calibrate(empty, [{**batch, "m": np.zeros((2, 4), np.float32)}])


def test_batches_that_cannot_be_calibrated_with() -> None:
    given = uneven()
    for batch, message in (
        (normal(0, 3, 6, 6), "the value 'x' has no elements in the calibration data$"),
        (normal(2, 3, 6), r"x must have shape \[.*, 3, 6, 6\], got \[2, 3, 6\]"),
        (normal(2, 3, 6, 5), r"x must have shape \[.*, 3, 6, 6\], got \[2, 3, 6, 5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            done(given, [batch])


_INF, _NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("exact", "got", "ratio"),
    [
        ([3, -_INF, _NAN], [2.7, -_INF, _NAN], 20), ([3, -_INF], [3, -_INF], _INF),
        ([3, -_INF], [3, 5], -_INF), ([3, _INF], [3, -_INF], -_INF), ([3, 4], [3, _NAN], -_INF),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_no_noise_where_it_is_the_same(
    exact: list[float], got: list[float], ratio: float
) -> None:
    assert sqnr([{"y": np.array(got)}], [{"y": np.array(exact)}]) == pytest.approx(ratio)


def test_activations_of_other_formats() -> None:
    given, x = uneven(), normal(2, 3, 6, 6)
    seen = Calibration(given, decide(given), "percentile", {"percentile": 99.0})
    calibrate(seen, [{"x": x}])
    made = quantized(given, seen.decisions, seen.ranges, Setting(dtype="int8", symmetric=True))
    kept = [one for one in made.tensors.values() if one.scale is not None]
    assert {(one.dtype, one.zero_point) for one in kept} == {("int8", 0)}
