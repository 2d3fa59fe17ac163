"""Networks as one call: the numbers are those of their definition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from nets import NETS, QUANTIZED, Net, basic_block, random_inputs, with_formats

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.isa import available
from lowbit.numerics import quantize

SETS = available()


def _close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], graph: Graph) -> None:
    """To some quanta of what lies between, or to float32's rounding."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape
        spread = float(np.abs(value).max(initial=1e-6))
        rounded = any(one.scale is not None for one in graph.tensors.values())
        dynamic = any(node.get("activations") for node in graph.nodes)
        limit = 0.02 if rounded or dynamic else 1e-5
        assert np.abs(got[name] - value).max(initial=0) <= limit * spread


@pytest.mark.deep("avx512-*", "*-basic_block", "avx2-*", "generic-mobile_block", "generic-u_net")
@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set(make: Callable[[], Graph], name: str) -> None:
    graph = make()
    if make in QUANTIZED:
        graph = with_formats(graph, batch=3)
    inputs = random_inputs(graph, batch=3)
    want = evaluate(graph.bound({"batch": 3}), inputs)
    made = [Session(graph, threads=count, isa=name).run(**inputs) for count in (1, 3)]
    _close(made[0], want, graph)
    for output in graph.outputs:
        np.testing.assert_array_equal(made[0][output], made[1][output])


@pytest.mark.deep
@pytest.mark.parametrize("make", QUANTIZED)
def test_the_same_bits_on_every_instruction_set(make: Callable[[], Graph]) -> None:
    graph = with_formats(make(), batch=2)
    inputs = random_inputs(graph, batch=2)
    first, *rest = (Session(graph, threads=1, isa=name).run(**inputs) for name in SETS)
    for other in rest:
        for output in graph.outputs:
            np.testing.assert_array_equal(first[output], other[output])


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_product_is_within_one_quantum(dtype: str) -> None:
    net = Net(6)
    x = net.input(5, 33)
    y = net("Linear", x, net.weight(20, 33), net.bias(20), post_ops=(("relu",),))
    z = net("Identity", y)
    graph = with_formats(net.graph(z), x, y, dtype=dtype)
    inputs = random_inputs(graph)
    got, want = Session(graph, threads=1).run(**inputs)[z], evaluate(graph, inputs)[z]
    scale = graph.tensors[y].scale
    assert scale is not None
    steps = np.rint((got - want) / scale)
    assert np.abs(steps).max() <= 1
    assert np.count_nonzero(steps) <= 1  # only where a sum lies in the middle between two


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_residual_has_a_format_of_its_own(dtype: str) -> None:
    net = Net(8)
    x = net.input(5, 33)
    wide = net("Linear", x, net.weight(20, 33), net.bias(20))
    other = net("Mul", wide, net.constant(np.float32(0.3)))
    y = net("Linear", x, net.weight(20, 33), net.bias(20), other, post_ops=(("residual",),))
    z = net("Identity", y)
    graph = with_formats(net.graph(z), x, wide, other, y, dtype=dtype)
    inputs = random_inputs(graph)
    got, want = Session(graph, threads=1).run(**inputs)[z], evaluate(graph, inputs)[z]
    scales = [graph.tensors[name].scale for name in (other, y)]
    assert None not in scales
    assert abs(scales[0] / scales[1] - 1) > 0.2  # type: ignore[operator]
    assert np.abs(np.rint((got - want) / scales[1])).max() <= 1


@pytest.mark.pairs
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("activations", ["dynamic", "symmetric", "grouped", "float"])
@pytest.mark.parametrize(("dtype", "group"), [("int8", 32), ("uint8", 16), ("int4", 128)])
def test_products_with_weights_in_groups(
    name: str, activations: str, dtype: Any, group: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 75), np.float32), rng.standard_normal((37, 75), np.float32)
    weight = quantize(w, dtype, axis=0, group_size=group, symmetric=False)
    how = {"activations": activations, "group_size": group}
    node = Node("Linear", ("x", "w"), ("y",), how)
    tensors = {"x": Tensor("float32", x.shape)}
    graph = Graph(("x",), ("y",), (node,), {"w": weight}, tensors)
    want = evaluate(graph, {"x": x})["y"]
    session = Session(graph, isa=name)
    np.testing.assert_allclose(session.run(x=x)["y"], want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert any(step.program.name == "product" for step in session.plan({"x": x}).steps)


@pytest.mark.parametrize(("axis", "group"), [(0, 12), (1, 8)])
def test_groups_that_panels_do_not_hold_become_floats(axis: int, group: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 72), np.float32), rng.standard_normal((37, 72), np.float32)
    node = Node("Linear", ("x", "w"), ("y",), {"activations": "dynamic"})
    weight = quantize(w, axis=axis, group_size=group, group_axis=1 - axis)
    tensors = {"x": Tensor("float32", x.shape)}
    graph = Graph(("x",), ("y",), (node,), {"w": weight}, tensors)
    want = x @ weight.dequantize().T
    np.testing.assert_allclose(Session(graph).run(x=x)["y"], want, rtol=1e-5, atol=1e-4)


@pytest.mark.deep
def test_batches_are_planned_as_they_come() -> None:
    graph = with_formats(basic_block(), batch=4)
    session = Session(graph, threads=1)
    inputs = random_inputs(graph, batch=4)["x0"]
    whole = session(inputs)
    for batch in (1, 2, 4, 1):
        np.testing.assert_array_equal(session(inputs[:batch]), whole[:batch])
    assert session(inputs[:0]).shape == (0, 10)


@pytest.mark.deep
def test_plans_share_packed_weights_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = with_formats(basic_block(), batch=2)
    session = Session(graph, threads=1)
    plans = {batch: session.plan(random_inputs(graph, batch=batch)) for batch in (1, 2, 3)}
    packed = session._weights.holds()
    assert plans[1] is session.plan(random_inputs(graph, batch=1))
    assert session._weights.holds() == packed
    monkeypatch.setattr("lowbit.graph.session._PLANS", 3)
    session.plan(random_inputs(graph, batch=4))  # in place of the one not used for longest
    assert plans[1] is session.plan(random_inputs(graph, batch=1))
    assert plans[2] is not session.plan(random_inputs(graph, batch=2))
    monkeypatch.setattr("lowbit.graph.session._BYTES", plans[2].nbytes)
    session.plan(random_inputs(graph, batch=5))
    assert len(session._plans) == 1


@pytest.mark.deep
def test_a_plan_owns_little_beside_its_arena() -> None:
    """Float weights, which are turned, are one for all plans; and no plan outlives its place."""
    net = Net()
    x = net("Linear", net.input("batch", 300), net.weight(400, 300, bits=None))
    session = Session(net.graph(net("Linear", x, net.weight(200, 400, bits=None))), threads=1)
    rows = np.ones((5, 300), np.float32)
    for batch in range(1, 6):
        session(rows[:batch])
    assert all(one.nbytes < one.peak_bytes + 10_000 for one in session._plans.values())
    (plan, *_) = session._plans.values()
    plan.forget()
    assert not plan._idle


def test_several_threads_share_a_session() -> None:
    graph = with_formats(basic_block(), batch=2)
    session = Session(graph, threads=2)
    batches = [random_inputs(graph, seed, batch=2)["x0"] for seed in range(6)]
    want = [session(one) for one in batches]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not np.array_equal(session(batches[number]), want[number]):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong


def test_outputs_belong_to_the_caller() -> None:
    graph = with_formats(basic_block(), batch=1)
    session = Session(graph, threads=1)
    inputs = random_inputs(graph, batch=1)["x0"]
    first = session(inputs)
    kept = first.copy()
    session(inputs + 1)
    np.testing.assert_array_equal(first, kept)


def test_bound_inputs_are_read_when_it_runs() -> None:
    net = Net()
    session = Session(net.graph(net("Add", net.input("batch", 3), net.input("batch", 3))))
    x, y = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    run = session.bind(x, x1=y)
    (first,) = run()
    y[:] = 5
    np.testing.assert_array_equal(run()[0], x + y)
    np.testing.assert_array_equal(first, 2)
    with pytest.raises(ValueError, match="x1 must be contiguous, of float32"):
        session.bind(x, y[:, ::-1])
    with pytest.raises(ValueError, match="x0 must be contiguous, of float32"):
        session.bind(x.astype(np.float64), y)


def test_a_profile_names_all_nodes_and_sums_up() -> None:
    graph = with_formats(basic_block(), batch=1)
    inputs = random_inputs(graph, batch=1)["x0"]
    session = Session(graph, threads=1)
    start = perf_counter()
    times = session.profile(inputs, runs=3)
    passed = perf_counter() - start
    computing = [node.name for node in graph.nodes if node.op != "Flatten"]
    assert [one.node for one in times if one.node in computing] == computing
    assert all(one.seconds >= 0 and one.kernels for one in times)
    assert 0 < sum(one.seconds for one in times) <= passed


def test_memory_is_used_again() -> None:
    net = Net(7)
    x = net.input(1, 8, 32, 32)
    for _ in range(10):
        x = net("Conv", x, net.weight(8, 8, 3, 3), "", pads=(1,) * 4)
    graph = with_formats(net.graph())
    inputs = random_inputs(graph)
    plan = Session(graph, threads=1).plan(inputs)
    assert plan.peak_bytes < 4 * 8 * 32 * 32 + (1 << 17)


def test_what_no_kernel_serves_is_named_before_anything_runs() -> None:
    net = Net()
    x = net.input(2, 3)
    net("NonZero", net("CumProd", x))
    with pytest.raises((NotImplementedError, ValueError), match=r"NonZero|CumProd"):
        Session(net.graph())(np.zeros((2, 3), np.float32))


def test_inputs_are_checked() -> None:
    net = Net()
    x, y = net.input("batch", 3), net.input("batch", 3)
    session = Session(net.graph(net("Add", x, y)))
    one = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(session(one, x1=one), one + one)
    np.testing.assert_array_equal(session(one.astype(np.float64), one[:, ::-1]), one + one)
    for given, named, text in (
        ((one,), {}, "x1"),
        ((one, one, one), {}, "x0, x1"),
        ((one, one), {"x0": one}, "x0"),
        ((one, one), {"z": one}, "z"),
        ((one, one[:, :2]), {}, r"\[batch, 3\]"),
        ((one, one[:1]), {}, "batch is 2"),
    ):
        with pytest.raises(ValueError, match=text):
            session(*given, **named)
    with pytest.raises(TypeError, match="float32"):
        session(one, one.astype(complex))
