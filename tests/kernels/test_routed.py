"""Products of groups of rows with parts of one matrix, and the order that makes such groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit import isa as instruction_sets
from lowbit.graph import Session
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.operator import operators
from lowbit.isa import SETS, available
from lowbit.kernels.cpu.integer.routed import routed_product
from lowbit.kernels.cpu.tensors.route import route, routed_sum
from lowbit.numerics import quantize
from lowbit.product import requests
from lowbit.weights.panels import PackedMatrix

FORMS = {
    "int8": ("int8", None, "dynamic"), "int4": ("int4", 32, "dynamic"),
    "int4, grouped": ("int4", 32, "grouped"), "int8, grouped": ("int8", 32, "grouped"),
    "uint4": ("uint4", 32, "dynamic"), "int4, floats": ("int4", 64, "float"),
    "uint4, floats": ("uint4", 32, "float"), "floats": ("", None, None),
}  # fmt: skip
# Rows of each expert: none, few, many; and N, K.
ROWS = ((0, 3, 40, 1), (1, 0, 0, 0), (0, 0, 0, 9), (2, 2, 2, 2))


def weights(form, n, k) -> list[Any]:
    """A constant of four experts, and one of each."""
    dtype, group, _ = FORMS[form]
    values = np.random.default_rng(5).standard_normal((4 * n, k)).astype(np.float32)
    parts = values, *np.split(values, 4)
    if not dtype:
        return list(parts)
    if group is None:
        return [lowbit.pack(quantize(one, dtype, axis=0).T) for one in parts]
    symmetric = dtype == "int4"
    made = [
        quantize(one, dtype, axis=0, group_size=group, group_axis=1, symmetric=symmetric)
        for one in parts
    ]
    return [lowbit.pack(one.T) for one in made]


def panel_format(weight, isa):
    return requests.panel_format(weight, isa)._replace(split=None)


def network(op, x, weight, activations, **others):
    tensors = {"x": Tensor("float32", x.shape)}
    tensors |= {name: Tensor("int64", one.shape) for name, one in others.items()}
    attributes = {"activations": activations} if activations else {}
    if isinstance(weight, PackedMatrix) and weight.group_size:
        attributes["group_size"] = weight.group_size
    node = Node(op, ("x", "w", *others), ("out",), attributes)
    return Graph(("x", *others), ("out",), (node,), {"w": weight}, tensors)


@pytest.mark.deep(
    "*-avx512_vnni",
    "*-avx512",
    "*-avx2",
    "*-int8-*",
    "(80, 200)-floats-generic",
    "*-amx*",
    "*-avx2_vnni",
)
@pytest.mark.pairs
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(48, 96), (80, 200)], ids=str)
def test_experts_are_linear_layers(sizes, form, isa):
    whole, *each = weights(form, *sizes)
    for rows in ROWS:
        ends = np.cumsum(rows)
        x = np.random.default_rng(6).standard_normal((ends[-1], sizes[1])).astype(np.float32)
        graph = network("RoutedLinear", x, whole, FORMS[form][2], ends=ends)
        outs = [
            Session(graph, threads=threads, isa=isa).run(x=x, ends=ends)["out"]
            for threads in (1, 3)
        ]
        assert (outs[0] == outs[1]).all()
        for weight, part, out in zip(
            each, np.split(x, ends[:-1]), np.split(outs[0], ends[:-1]), strict=True
        ):
            if len(part):
                one = network("Linear", part, weight, FORMS[form][2])
                want = Session(one, threads=1, isa=isa).run(x=part)["out"]
                np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.deep("int4, grouped-amx", "int8, grouped-amx", "uint4-amx")
@pytest.mark.pairs
@pytest.mark.parametrize("isa", list(SETS))
@pytest.mark.parametrize("form", [one for one in FORMS if one != "floats"])
def test_the_text_on_sets_of_any_machine(form, isa, monkeypatch):
    """By the interpreter, which checks each access."""
    n, k = 48, 72
    whole, *each = weights(form, n, k)
    active = instruction_sets.active
    monkeypatch.setattr(instruction_sets, "active", lambda name="": SETS.get(name) or active())
    monkeypatch.setattr(routed_product, "program", lambda *_, **__: None)
    ends, activations = np.cumsum([0, 3, 19, 1]), FORMS[form][2]
    x = np.random.default_rng(6).standard_normal((23, k)).astype(np.float32)
    prepared = requests.routed(23, panel_format(whole, isa), 4, 1, isa, activations)
    (launch,), plan, product = prepared.launches, prepared.plan, prepared.request
    out, groups = np.full((23, n), np.nan, np.float32), whole.scale.size // (4 * n)
    routed_product.interpret(plan.isa, {
        **launch.numbers, "a": x, "ends": ends, "out": out, "row_zero": np.zeros(23, np.int32),
        "row_scale": np.zeros(23 * groups, np.float32), "row_sum": np.zeros(23 * groups, np.int32),
        "panels": whole.panels, "column_sum": whole.column_sums.view(np.int32),
        "column_scale": whole.scale, "private": np.zeros(plan.private_bytes, np.uint8),
        "packed": np.zeros(plan.packed_bytes, np.uint8),
        "column_zero": None if whole.zero_points is None else whole.zero_points.view(np.int32),
    }, micro=plan.micro, shape=plan.shape, a_format=product.a, epilogue=product.epilogue,
        weight=product.b.stored)  # fmt: skip
    for weight, part, made in zip(
        each, np.split(x, ends[:-1]), np.split(out, ends[:-1]), strict=True
    ):
        if len(part):
            want = Session(network("Linear", part, weight, activations), threads=1).run(x=part)
            np.testing.assert_allclose(made, want["out"], atol=1e-5, rtol=1e-5)


def test_the_meaning_is_that_of_the_kernel():
    whole = weights("int4", 48, 96)[0]
    ends = np.array([3, 3, 7, 9])
    x = np.random.default_rng(6).standard_normal((9, 96)).astype(np.float32)
    graph = network("RoutedLinear", x, whole, "dynamic", ends=ends)
    want = operators.get("RoutedLinear").meaning(graph.nodes[0], x, whole.dequantize().T, ends)
    got = Session(graph, threads=1).run(x=x, ends=ends)["out"]
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("isa", list(SETS))
def test_pairs_in_the_order_of_experts(isa):
    experts = np.random.default_rng(7).integers(0, 6, (11, 3))
    node = Node("Route", ("experts",), ("rows", "places", "ends"), {"count": 7})
    want = operators.get("Route").meaning(node, experts)
    got = [np.full(shape, -1) for shape in (33, (11, 3), 7)]
    route.interpret(SETS[isa], {
        "rows": got[0], "places": got[1], "ends": got[2], "experts": experts, "count": 33,
        "each": 3, "groups": 7,
    })  # fmt: skip
    for one, other in zip(got, want, strict=True):
        assert (one == other).all()
    graph = Graph(("experts",), node.outputs, (node,), {}, {"experts": Tensor("int64", (11, 3))})
    for one, other in zip(Session(graph).run(experts=experts).values(), want, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("isa", list(SETS))
@pytest.mark.parametrize("width", [1, 40, 200])
def test_sums_of_what_experts_made(width, isa):
    rng = np.random.default_rng(8)
    given = {
        "x": rng.standard_normal((15, width)).astype(np.float32),
        "places": rng.permutation(15).reshape(5, 3),
        "shares": rng.random((5, 3)).astype(np.float32),
        "residual": rng.standard_normal((5, width)).astype(np.float32),
    }
    node = Node("RoutedSum", tuple(given), ("out",))
    want = operators.get("RoutedSum").meaning(node, *given.values())
    out = np.full((5, width), np.nan, np.float32)
    routed_sum.interpret(SETS[isa], {**given, "out": out, "rows": 5, "each": 3, "width": width})
    np.testing.assert_allclose(out, want, atol=1e-6)
    tensors = {name: Tensor(one.dtype.name, one.shape) for name, one in given.items()}
    graph = Graph(tuple(given), ("out",), (node,), {}, tensors)
    if isa in available():
        made = Session(graph, threads=2, isa=isa).run(**given)["out"]
        assert (made == out).all()


def test_parts_that_are_no_whole_panels():
    x, ends = np.zeros((2, 96), np.float32), np.array([0, 2])
    weight = weights("int4", 12, 96)[0]
    graph = network("RoutedLinear", x, weight, "dynamic", ends=ends)
    with pytest.raises(ValueError, match="whole panels"):
        Session(graph).run(x=x, ends=ends)
