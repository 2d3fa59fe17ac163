"""Operators that move or choose numbers, and which are served: what their kernels make of them is
what they mean."""

from __future__ import annotations

import numpy as np
import pytest
from lowered import F, Make, formatted, ints, op, same
from nets import Net, random_inputs

from lowbit.graph import Session
from lowbit.graph.operator import operators

# Operators that have a meaning and no kernel, and why.
NOT_SERVED = {
    "ConstantOfShape": "a constant once sizes are known",
    "NonZero": "a constant of known numbers, else refused",
    "Range": "a constant once sizes are known",
    "Shape": "a constant once sizes are known",
    "Size": "a constant once sizes are known",
    "ConvInteger": "an importer makes a quantized Conv of it",
    "MatMulInteger": "an importer makes a quantized Linear of it",
    "QLinearConv": "an importer makes a quantized Conv of it",
    "QLinearMatMul": "an importer makes a quantized Linear of it",
    "DynamicQuantizeLinear": "an importer makes a Linear of rows quantized on the way of it",
    "ReduceProd": "met in computations of shapes, which are constants by then",
}


def test_every_operator_is_served_or_listed() -> None:
    every = operators.load().items()
    assert {name for name, one in every if not one.lowering and not one.parts} == NOT_SERVED.keys()


@pytest.mark.parametrize(("index", "axis"), [
    (np.int64(2), 0), (np.int64(-1), 1), (ints(3, 1), 1), (ints(0, 2, 1, 2), 2), (ints(0, 1), 0),
    (np.array([[0, 3], [2, -4]]), 1), (np.array([], np.int64), 1),
])  # fmt: skip
def test_known_indices(index: np.ndarray, axis: int) -> None:
    net = Net()
    y = net("Gather", net.input(3, 4, 5), net.constant(index), axis=axis)
    same(net.graph(y), random_inputs(net.graph(y)))
    if index.size:
        formatted(net, y, 1)


def test_known_indices_that_do_not_exist() -> None:
    net = Net()
    net("Gather", net.input(3, 4), net.constant(ints(4)), axis=1)
    with pytest.raises(ValueError, match="4 elements"):
        Session(net.graph())(np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(("shape", "indices", "own"), [
    ((3, 4, 5), (7, 2), 0), ((3, 4, 5), (2, 6, 3), 0), ((3, 4, 5), (3, 2, 1), 1),
    ((2, 3, 4, 5), (2, 3, 6, 2), 2), ((3, 4), (1,), 0), ((3, 4), (0, 2), 0), ((2, 3), (2, 4, 0), 1),
    ((0, 4), (0, 2, 1), 1),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("known", [True, False])
def test_indices_of_several_axes(
    shape: tuple[int, ...], indices: tuple[int, ...], own: int, dtype: str, known: bool
) -> None:
    limits = np.array(shape[own : own + indices[-1]])
    places = np.random.default_rng(3).integers(-limits, limits, indices).astype(dtype)
    net = Net()
    x = net.input(*shape)
    y = net("GatherND", x, net.constant(places) if known else net.input(*indices, dtype=dtype),
            batch_dims=own)  # fmt: skip
    graph = net.graph(y)
    given = {} if known else {"x1": places}
    same(graph, {"x0": random_inputs(graph)["x0"], **given})
    if known and places.size and 0 not in shape:
        formatted(net, y, 1)


def test_indices_of_several_axes_that_do_not_exist() -> None:
    """Also those whose place in memory would be another element."""
    net = Net()
    session = Session(net.graph(net("GatherND", net.input(3, 4), net.input(2, 2, dtype="int64"))))
    x = np.zeros((3, 4), np.float32)
    for wrong in ((0, 4), (3, 0), (0, -5), (-4, 0)):
        with pytest.raises(IndexError, match="out of range"):
            session(x, np.array([(2, 3), wrong]))
        net = Net()
        net("GatherND", net.input(3, 4), net.constant(np.array([(2, 3), wrong])))
        with pytest.raises(ValueError, match=r"out of range for axes of \[3, 4\]"):
            Session(net.graph())(x)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("bits", [None, 8])
def test_embeddings(dtype: str, bits: int | None) -> None:
    net = Net()
    ids = net.input("batch", 7, dtype=dtype)
    table = net.weight(11, 6, bits=bits)
    y = net("Gather", table, ids, axis=0)
    graph = net.graph(y)
    bound = graph.bound({"batch": 3})
    ids = np.random.default_rng(0).integers(-11, 11, (3, 7)).astype(dtype)
    same(bound, {"x0": ids})
    session = Session(graph, threads=2)
    good = session(ids)
    for wrong in (11, -12):
        bad = ids.copy()
        bad[1, 3] = wrong
        with pytest.raises(IndexError, match="11"):
            session(bad)
        np.testing.assert_array_equal(session(ids), good)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_places_of_extremes(name: str, axis: int, keepdims: int) -> None:
    net = Net()
    y = net(name, net.input(3, 5, 19), axis=axis, keepdims=keepdims)
    same(net.graph(y), random_inputs(net.graph(y)))


PADS = [(0, 1, 2, 0, 3, 0), (0, 0, 2, 1, 0, 2), (1, -1, 1, 0, 2, -2)]


@pytest.mark.parametrize("pads", PADS)
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_pad(mode: str, pads: tuple[int, ...]) -> None:
    net = Net()
    value = (net.constant(F(0.7)),) if mode == "constant" else ()
    y = net("Pad", net.input(3, 5, 6), net.constant(ints(*pads)), *value, mode=mode)
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


@pytest.mark.deep("scales0-linear-align_corners", "scales0-linear-half_pixel")
@pytest.mark.parametrize("how", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [(2, 2), (1.5, 0.7), (3, 1), (0.5, 2)])
def test_resize(mode: str, scales: tuple[float, float], how: str) -> None:
    net = Net()
    y = net("Resize", net.input(2, 3, 6, 8), "", net.constant(np.array([1, 1, *scales], F)),
            mode=mode, coordinate_transformation_mode=how)  # fmt: skip
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


MOVED: dict[str, tuple[tuple[int, ...], Make]] = {
    "tile": ((2, 3, 4), op("Tile", ints(2, 1, 3))),
    "deep": ((2, 8, 3, 5), op("DepthToSpace", blocksize=2)),
    "deep CRD": ((2, 8, 3, 5), op("DepthToSpace", blocksize=2, mode="CRD")),
    "flat": ((2, 3, 4, 6), op("SpaceToDepth", blocksize=2)),
    "triangle": ((2, 4, 5), op("Trilu")),
    "lower": ((4, 5), op("Trilu", np.int64(-1), upper=0)),
    "split": ((2, 7), lambda net, x: net("Concat", *_split(net, x), axis=0)),
    "reshape": ((2, 3, 4), op("Reshape", ints(4, 6))),
    "merged": ((2, 3, 4, 5), lambda net, x: net(
        "Reshape", net("Transpose", x, perm=(0, 2, 3, 1)), net.constant(ints(2, 20, 3)))),
    "not merged": ((2, 3, 4), lambda net, x: net(
        "Reshape", net("Transpose", x, perm=(0, 2, 1)), net.constant(ints(2, 6, 2)))),
    "backwards": ((6, 5), op("Slice", ints(-1, 4), ints(-99, 0), ints(0, 1), ints(-2, -1))),
    "wide": ((3, 1), op("Expand", ints(2, 3, 4))),
}  # fmt: skip


def _split(net: Net, x: str) -> tuple[str, str]:
    first = net("Slice", x, net.constant(ints(0)), net.constant(ints(3)), net.constant(ints(1)))
    return first, net("Slice", x, *(net.constant(ints(i)) for i in (4, 7, 1)))


@pytest.mark.parametrize("name", MOVED)
def test_what_moves(name: str) -> None:
    shape, make = MOVED[name]
    net = Net()
    y = make(net, net.input(*shape))
    same(net.graph(y), random_inputs(net.graph(y)))
    formatted(net, y, 1)


def test_integers_move() -> None:
    net = Net()
    x = net.input(3, 4, dtype="int64")
    wide = net("Expand", net("Unsqueeze", x, net.constant(ints(1))), net.constant(ints(3, 2, 4)))
    y = net("Concat", *[net("Transpose", wide, perm=(2, 0, 1))] * 2, axis=1)
    large = np.arange(12).reshape(3, 4) + (1 << 40)
    same(net.graph(y), {"x0": large})


def test_shapes_are_known_when_sizes_are() -> None:
    net = Net()
    x = net.input("batch", "length", 6)
    batch = net("Gather", net("Shape", x), net.constant(ints(0)))
    shape = net("Concat", batch, net.constant(ints(-1)), axis=0)
    flat = net("Reshape", x, shape)
    y = net("Add", flat, net("ConstantOfShape", net("Shape", flat), value=1.0))
    graph = net.graph(y)
    session = Session(graph)
    for batch_size, length in ((2, 3), (1, 5)):
        inputs = random_inputs(graph, batch=batch_size, length=length)
        np.testing.assert_array_equal(session.run(**inputs)[y],
                                      inputs[x].reshape(batch_size, -1) + 1)  # fmt: skip


def test_what_is_not_served_says_what_to_do() -> None:
    net = Net()
    net("ReduceProd", net.input(2, 3))
    with pytest.raises(NotImplementedError, match=r"ReduceProd.*evaluate"):
        Session(net.graph())(np.zeros((2, 3), np.float32))
