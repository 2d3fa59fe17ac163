"""Passes leave what a graph means, and find what they look for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_graphs import SCALES, C, graph, n, ops, pair, same

from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.passes import simplified
from lowbit.graph.passes.fold import folded
from lowbit.graph.passes.fuse import fused
from lowbit.graph.passes.infer import inferred

HALF, ROOT, THREE = C(0.5), C(np.sqrt(2)), C(3)
FORMULAS = {
    "Gelu of Div": [
        ("Div", "x root", "a"), ("Erf", "a", "b"), ("Add", "b one", "c"), ("Mul", "x c", "d"),
        ("Mul", "d half", "y"),
    ],
    "Gelu of Mul": [
        ("Mul", "unroot x", "a"), ("Erf", "a", "b"), ("Add", "one b", "c"), ("Mul", "half x", "d"),
        ("Mul", "c d", "y"),
    ],
    "Gelu of Pow": [
        ("Pow", "x three", "a"), ("Mul", "cubic a", "b"), ("Add", "x b", "c"), ("Mul", "c pi", "d"),
        ("Tanh", "d", "e"), ("Add", "e one", "f"), ("Mul", "x half", "g"), ("Mul", "g f", "y"),
    ],
    "Gelu of cubes": [
        ("Mul", "x x", "a"), ("Mul", "a x", "b"), ("Mul", "b cubic", "c"), ("Add", "c x", "d"),
        ("Mul", "pi d", "e"), ("Tanh", "e", "f"), ("Add", "one f", "g"), ("Mul", "g x", "h"),
        ("Mul", "h half", "y"),
    ],
    "Silu": [("Sigmoid", "x", "a"), ("Mul", "a x", "y")],
    "Mish": [("Softplus", "x", "a"), ("Tanh", "a", "b"), ("Mul", "x b", "y")],
    "HardSwish of HardSigmoid": [
        ("HardSigmoid", "x", "a", {"alpha": 1 / 6}), ("Mul", "x a", "y")
    ],
    "HardSwish of Clip": [
        ("Add", "x three", "a"), ("Clip", "a zero six", "b"), ("Mul", "x b", "c"),
        ("Div", "c six", "y"),
    ],
}  # fmt: skip
NUMBERS = {
    "root": ROOT, "unroot": 1 / ROOT, "one": C(1), "half": HALF, "three": THREE, "zero": C(0),
    "six": C(6), "cubic": C(0.044715), "pi": C(np.sqrt(2 / np.pi)), "other": C(0.7),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_becomes_a_function(name: str) -> None:
    whole = graph(*FORMULAS[name], constants=NUMBERS)
    found = folded(whole)
    assert ops(found) == [name.split()[0]]
    same(whole, found)


@pytest.mark.parametrize("name", FORMULAS)
def test_another_formula_stays(name: str) -> None:
    """With one number changed, or one value that something else reads, it is what it was."""
    for number in ("root", "unroot", "one", "cubic", "pi", "six"):
        whole = graph(*FORMULAS[name], constants={**NUMBERS, number: C(0.7)})
        if any(number in node.inputs for node in whole.nodes):
            found = folded(whole)
            assert len(found.nodes) == len(whole.nodes)
            same(whole, found)
    alpha = graph(("HardSigmoid", "x", "a", {"alpha": 0.2}), ("Mul", "x a", "y"))
    assert ops(folded(alpha)) == ["HardSigmoid", "Mul"]


def test_how_a_formula_is_written_does_not_matter() -> None:
    """Nor what its value is rounded to; but what differs far away, or compares, is another."""
    negative = ("Neg", "x", "a"), ("Exp", "a", "b"), ("Add", "b one", "c"), ("Div", "x c", "y")
    numbers = {**NUMBERS, "least": C(-100), "most": C(500)}
    whole = graph(*negative, constants=numbers)
    assert ops(folded(whole)) == ["Silu"]
    same(whole, folded(whole))
    rounded = simplified(graph(*FORMULAS["Silu"][:1], ("Mul", "a x", "b"), *pair("b", "y"),
                               constants=SCALES))  # fmt: skip
    assert ops(rounded) == ["Silu"]
    for last in (("Clip", "s least most", "y"), ("Where", "m s s", "y")):
        other = graph(("Sigmoid", "x", "a"), ("Mul", "a x", "s"), ("IsNaN", "x", "m"), last,
                      constants=numbers, outputs=("y", "s"))  # fmt: skip
        assert last[0] in ops(folded(other))


@pytest.mark.parametrize("square", ["Pow", "Mul"])
def test_layer_normalization_in_parts_becomes_one(square: str) -> None:
    power = ("Pow", "d two", "p") if square == "Pow" else ("Mul", "d d", "p")
    mean = {"axes": (-1,)}
    whole = graph(
        ("ReduceMean", "x", "m", mean), ("Sub", "x m", "d"), power, ("ReduceMean", "p", "v", mean),
        ("Add", "v eps", "e"), ("Sqrt", "e", "s"), ("Div", "d s", "q"), ("Mul", "q scale", "w"),
        ("Add", "w bias", "y"),
        constants={"eps": C(1e-3), "two": C(2), "scale": n(8), "bias": n(8) + 1},
        shape=(2, 3, 8),
    )  # fmt: skip
    found = folded(whole)
    assert ops(found) == ["LayerNormalization"]
    same(whole, found)


RMS = {
    "Div": [("Div", "x s", "q")],
    "Reciprocal": [("Reciprocal", "s", "r"), ("Mul", "x r", "q")],
    "one over": [("Div", "one s", "r"), ("Mul", "r x", "q")],
}
OTHERS = {
    "another number": [("Div", "other s", "r"), ("Mul", "x r", "q")],
    "another value": [("Div", "p s", "q")],
    "the root over x": [("Div", "s x", "q")],
}


def _over_root(*quotient: Any, axes: tuple[int, ...] = (-1,)) -> Graph:
    return graph(
        ("Pow", "x two", "p"), ("ReduceMean", "p", "v", {"axes": axes}), ("Add", "v eps", "e"),
        ("Sqrt", "e", "s"), *quotient, ("Mul", "scale q", "y"),
        constants={"eps": C(1e-3), "two": C(2), "one": C(1), "other": C(2), "scale": n(8)},
        shape=(2, 3, 8),
    )  # fmt: skip


@pytest.mark.parametrize("quotient", RMS)
def test_rms_normalization_in_parts_becomes_one(quotient: str) -> None:
    whole = _over_root(*RMS[quotient])
    found = folded(whole)
    assert ops(found) == ["RMSNormalization"]
    same(whole, found)


@pytest.mark.parametrize("quotient", OTHERS)
def test_what_is_no_rms_normalization_stays(quotient: str) -> None:
    whole = _over_root(*OTHERS[quotient])
    assert "RMSNormalization" not in ops(folded(whole))
    assert "RMSNormalization" not in ops(folded(_over_root(*RMS["Div"], axes=(1,))))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("bias", ["b", "_"])
def test_batch_normalization_goes_into_a_weight(op: str, groups: int, bias: str) -> None:
    shape = (4, 6 // groups, 3, 3) if op == "Conv" else (6, 4 // groups, 3, 3)
    vectors = {name: n(4) for name in ("b", "scale", "shift", "mean")}
    whole = graph(
        (op, f"x w {bias}", "c", {"group": groups}),
        ("BatchNormalization", "c scale shift mean var", "y", {"epsilon": 0.1}),
        constants={"w": n(*shape), "var": np.abs(n(4)), **vectors},
    )
    found = folded(whole)
    assert ops(found) == [op]
    same(whole, found)
    seen = graph(*[], constants={}, outputs=("x",))
    assert folded(seen) == seen
    twice = Graph(("x",), ("y", "c"), whole.nodes, whole.constants, whole.tensors)
    assert ops(folded(twice)) == [op, "BatchNormalization"]


@pytest.mark.parametrize("shape", [(2, 8), (2, 3, 8)])
@pytest.mark.parametrize("names", ["x w", "x w b"])
@pytest.mark.parametrize("attributes", [{}, {"alpha": 0.5, "beta": 3.0}, {"transB": 1}])
def test_products_with_constants_become_linear(
    shape: tuple[int, ...], names: str, attributes: dict[str, Any]
) -> None:
    weight = n(5, 8) if attributes.get("transB") else n(8, 5)
    constants = {"w": weight, "b": n(1, 5), "v": n(5)}
    if len(shape) == 2:
        whole = graph(("Gemm", names, "y", attributes), constants=constants, shape=shape)
        found = folded(whole)
        assert ops(found) == ["Linear"]
        same(whole, found)
    whole = graph(
        ("MatMul", "x w", "a"), ("Add", "v a", "y"),
        constants={**constants, "w": n(8, 5)}, shape=shape,
    )  # fmt: skip
    found = folded(whole)
    assert ops(found) == ["Linear"]
    same(whole, found)


def test_a_bias_may_have_leading_axes() -> None:
    constants = {"w": n(8, 5), "v": n(1, 1, 5)}
    for shape in ((2, 3, 8), ("n", "m", 8)):
        whole = graph(("MatMul", "x w", "a"), ("Add", "a v", "y"), constants=constants, shape=shape)
        found = folded(whole)
        assert ops(found) == ["Linear"]
        same(whole, found, shape=(2, 3, 8))


def test_a_sum_that_is_no_bias_stays() -> None:
    """Of another rank, or of another number of channels, it broadcasts otherwise."""
    for added in (n(1, 1, 5), n(2, 1), n(1)):
        whole = graph(
            ("MatMul", "x w", "a"), ("Add", "a v", "y"),
            constants={"w": n(8, 5), "v": added}, shape=(2, 8),
        )  # fmt: skip
        found = simplified(whole)
        assert ops(found) == ["Linear", "Add"]
        same(whole, found)


def test_what_does_nothing_is_left_out() -> None:
    whole = graph(
        ("Identity", "x", "a"), ("Reshape", "a shape", "b"), ("Cast", "b", "c", {"to": "float32"}),
        ("Transpose", "c", "d", {"perm": (0, 1, 2, 3)}), ("Relu", "d", "e"), ("Dropout", "e", "y"),
        constants={"shape": np.array([2, -1, 8, 8])},
    )  # fmt: skip
    found = folded(whole)
    assert found.nodes == (Node("Relu", ("x",), ("y",), {}, "e"),)
    same(whole, found)
    only = graph(("Identity", "x", "y"))
    assert folded(only).nodes == only.nodes
    both = graph(("Relu", "x", "a"), ("Identity", "a", "y"), outputs=("y", "a"))
    assert ops(folded(both)) == ["Relu", "Identity"]


@pytest.mark.parametrize(("start", "end", "kept"), [
    (0, 1, []), (1, 2**63 - 1, []), (-2, -1, []), (0, 2, ["Concat"]), (1, 1, ["Concat"]),
])  # fmt: skip
def test_a_part_of_what_was_put_together_is_read_alone(
    start: int, end: int, kept: list[str]
) -> None:
    token = {"t": n(2, 1, 5), "s": np.array([start]), "e": np.array([end]), "a": np.array([1])}
    nodes = ("Concat", "t x", "c", {"axis": 1}), ("Slice", "c s e a", "p"), ("Relu", "p", "y")
    one = graph(*nodes, constants=token, shape=(2, 4, 5))
    made = simplified(one)
    assert [op for op in ops(made) if op == "Concat"] == kept
    same(one, made, 0)


def test_what_is_computed_twice_is_computed_once() -> None:
    whole = graph(
        ("Relu", "x", "a"), ("Relu", "x", "b"), ("LeakyRelu", "x", "c", {"alpha": 0.5}),
        ("LeakyRelu", "x", "d"), ("Sum", "a b c d", "e"), ("Relu", "x", "y"), outputs=("y", "e"),
    )  # fmt: skip
    found = folded(whole)
    assert ops(found) == ["Relu", "LeakyRelu", "LeakyRelu", "Sum", "Relu"]
    assert found.nodes[3].inputs == ("a", "a", "c", "d")
    same(whole, found, close=0)
    own = graph(
        ("Relu", "x", "a"), *pair("a", "b"), *pair("a", "c"), ("Add", "b c", "y"),
        constants=SCALES,
    )  # fmt: skip
    found = simplified(own)
    assert ops(found) == ["Relu", "Add"]
    same(own, found, close=0)


def test_shapes_are_computed_once_sizes_are_known() -> None:
    whole = graph(
        ("Shape", "x", "s"), ("Gather", "s zero", "n"), ("Unsqueeze", "n axis", "u"),
        ("Concat", "u rest", "t", {"axis": 0}), ("Reshape", "x t", "y"),
        constants={"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])},
        shape=("n", 6, 8, 8),
    )  # fmt: skip
    assert ops(simplified(whole)) == ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape"]
    bound = simplified(whole.bound({"n": 3}))
    assert ops(bound) == ["Reshape"]
    assert inferred(bound).tensors["y"].sizes == (3, 384)
    same(whole, bound, shape=(3, 6, 8, 8))


CONV = {"w": n(6, 6, 1, 1), "b": n(6), "low": C(-0.3), "high": C(0.4), "zero": C(0)}
STEPS = {
    "Relu c": ("relu",),
    "Clip c low high": ("clamp", float(C(-0.3)), float(C(0.4))),
    "Clip c zero": ("relu",),
    "Clip c low": ("clamp", float(C(-0.3)), float("inf")),
    "Sigmoid c": ("sigmoid",),
    "Silu c": ("silu",),
    "HardSwish c": ("hardswish",),
    "Gelu c": ("gelu",),
    "Add c x": ("residual",),
    "Add x c": ("residual",),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", [(2, 6, 8, 8), ("n", 6, "h", 8)])
def test_what_follows_becomes_a_post_operation(step: str, shape: tuple[Any, ...]) -> None:
    op, _, inputs = step.partition(" ")
    conv = ("Conv", "x w b", "c")
    whole = graph(conv, (op, inputs, "d"), ("Relu", "d", "y"), constants=CONV, shape=shape)
    found = fused(whole)
    (node,) = found.nodes
    assert node.get("post_ops") == (STEPS[step], ("relu",))
    assert node.inputs[3:] == (("x",) if op == "Add" else ())
    same(whole, found, close=0, shape=(2, 6, 8, 8))
    # Not where the value between is wanted too, or rounded.
    nodes = whole.nodes[:2]
    kept = Graph(("x",), ("d", "c"), nodes, whole.constants, whole.tensors)
    assert len(fused(kept).nodes) == 2
    tensors = {**whole.tensors, "c": Tensor("int8", (2, 6, 8, 8), 0.1)}
    assert len(fused(Graph(("x",), ("d",), nodes, whole.constants, tensors)).nodes) == 2


PADS = {"pads": np.array([0, 1]), "axes": np.array([3]), "zero": np.float32(0)}


@pytest.mark.parametrize(("inputs", "pads"), [
    ("x all", (2, 0, 0, 3)), ("x pads zero axes", (1, 0, 0, 2)), ("x pads _ axes", (1, 0, 0, 2)),
])  # fmt: skip
def test_zeros_around_an_image_become_pads(inputs: str, pads: tuple[int, ...]) -> None:
    constants = {**PADS, "all": np.array([0, 0, 1, 0, 0, 0, 0, 2]), "w": n(4, 6, 3, 3)}
    conv = ("Conv", "p w", "y", {"pads": (1, 0, 0, 1)})
    whole = graph(("Pad", inputs, "p"), conv, constants=constants)
    found = fused(whole)
    assert ops(found) == ["Conv"]
    assert found.nodes[0].get("pads") == pads
    same(whole, found)


@pytest.mark.parametrize(("pad", "more"), [
    (("Pad", "x pads one axes", "p"), {}),
    (("Pad", "x pads _ axes", "p", {"mode": "reflect"}), {}),
    (("Pad", "x less _ axes", "p"), {}),
    (("Pad", "x pads _ channels", "p"), {"w": n(4, 7, 3, 3)}),
])  # fmt: skip
def test_other_padding_stays(pad: tuple[Any, ...], more: dict[str, Any]) -> None:
    constants = {**PADS, "w": n(4, 6, 3, 3), "one": np.float32(1), "less": np.array([0, -1]),
                 "channels": np.array([1])} | more  # fmt: skip
    assert ops(fused(graph(pad, ("Conv", "p w", "y"), constants=constants))) == ["Pad", "Conv"]
    both = (("Pad", "x pads _ axes", "p"), ("Conv", "p w", "y"))
    read_twice = graph(*both, constants=constants, outputs=("y", "p"))
    assert ops(fused(read_twice)) == ["Pad", "Conv"]


def test_zeros_around_quantized_images_become_pads_if_the_format_stays() -> None:
    nodes = (
        Node("Identity", ("x",), ("q",)),
        Node("Pad", ("q", "pads", "", "axes"), ("p",)),
        Node("Conv", ("p", "w"), ("y",)),
    )
    for zero, expected in ((5, ["Identity", "Conv"]), (6, ["Identity", "Pad", "Conv"])):
        tensors = {name: Tensor("uint8", ("?",), 0.1, z) for name, z in (("q", 5), ("p", zero))}
        tensors["x"] = Tensor("float32", (2, 6, 8, 8))
        whole = Graph(("x",), ("y",), nodes, {**PADS, "w": n(4, 6, 3, 3)}, tensors)
        assert ops(fused(whole)) == expected
        same(whole, fused(whole))


def test_sums_of_other_shapes_are_no_residual() -> None:
    conv = ("Conv", "x w b", "c")
    channels = graph(conv, ("GlobalAveragePool", "x", "g"), ("Add", "c g", "y"), constants=CONV)
    assert ops(fused(channels)) == ["Conv", "GlobalAveragePool", "Add"]
    twice = graph(conv, ("Add", "c c", "y"), constants=CONV)
    assert ops(fused(twice)) == ["Conv", "Add"]
    more = graph(
        conv, ("Conv", "x w", "d"), ("Add", "c d", "e"), ("Add", "e x", "f"), ("Add", "f f", "y"),
        constants=CONV,
    )  # fmt: skip
    found = fused(more)
    assert ops(found) == ["Conv", "Conv", "Add", "Add"]
    same(more, found, close=0)


def test_errors_of_shapes_name_the_node() -> None:
    one = graph(("Relu", "x", "a"), ("Add", "a b", "y"), constants={"b": n(5)})
    with pytest.raises(ValueError, match=r"Add 'y' of inputs \[2, 6, 8, 8\], \[5\]"):
        inferred(one)
    with pytest.raises(ValueError, match="the sizes n are not known yet: bind the graph"):
        inferred(graph(("Relu", "x", "y"), shape=("n", 3)))
    with pytest.raises(ValueError, match=r"MatMul 'y' of inputs .* an input is missing"):
        inferred(graph(("MatMul", "x _", "y")))
    shape = graph(
        ("Shape", "x", "s"), ("Gather", "s nine", "t"), ("Expand", "x t", "y"),
        constants={"nine": np.array([9])},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"Gather 't' of inputs \[4\], \[1\]: indices from 0 to 9"):
        folded(shape)
