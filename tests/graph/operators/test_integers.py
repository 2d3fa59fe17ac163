"""Integers of networks are computed as themselves: definition and kernels against Python's own
integers, which have no limits, wrapped to their dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nets import Net

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph
from lowbit.graph.passes import simplified
from lowbit.numerics.formats import whole_part

Array = np.ndarray
DTYPES = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"]


def full_range(random: np.random.Generator, dtype: str, *shape: int) -> Array:
    """The ends of the range, any numbers of it, and small ones."""
    limits = np.iinfo(dtype)
    whole = random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    small = random.integers(-3, 9, shape).astype(dtype)
    made = np.where(random.random(shape) < 0.4, small, whole)
    made.flat[:2] = limits.min, limits.max
    return made


def wrapped(values: list[int], like: Array) -> Array:
    """Integers of Python in a dtype, of which the last bits stay."""
    whole = np.array([value % 2**64 for value in values], np.uint64)
    return whole.astype(like.dtype).reshape(like.shape)


def same(graph: Graph, inputs: dict[str, Array], expected: dict[str, Array]) -> None:
    """Both the definition and the kernels give the numbers and dtypes that are expected."""
    found = evaluate(graph, inputs), Session(graph, threads=1).run(**inputs)
    for outputs in found:
        for name, value in expected.items():
            assert outputs[name].dtype == value.dtype
            np.testing.assert_array_equal(outputs[name], value, err_msg=name)


def _divided(a: int, b: int) -> int:
    sign = 1 if (a < 0) == (b < 0) else -1
    return sign * (abs(a) // abs(b)) if b else 0


def _shifted(bits: int) -> Callable[[int, int], int]:
    return lambda a, b: a >> min(b, bits) if b >= 0 else a >> bits


BINARY: dict[str, tuple[str, dict[str, Any], Callable[[int, int], int]]] = {
    "add": ("Add", {}, lambda a, b: a + b),
    "sub": ("Sub", {}, lambda a, b: a - b),
    "mul": ("Mul", {}, lambda a, b: a * b),
    "min": ("Min", {}, min),
    "max": ("Max", {}, max),
    "div": ("Div", {}, _divided),
    "floor": ("FloorDiv", {}, lambda a, b: a // b if b else 0),
    "mod": ("Mod", {"fmod": 0}, lambda a, b: a % b if b else 0),
    "fmod": ("Mod", {"fmod": 1}, lambda a, b: a - b * _divided(a, b) if b else 0),
    "and": ("BitwiseAnd", {}, lambda a, b: a & b),
    "or": ("BitwiseOr", {}, lambda a, b: a | b),
    "xor": ("BitwiseXor", {}, lambda a, b: a ^ b),
    "left": ("BitShift", {"direction": "LEFT"}, lambda a, b: a << b if 0 <= b < 64 else 0),
    "right": ("BitShift", {"direction": "RIGHT"}, _shifted(64)),
}
UNARY: dict[str, tuple[str, Callable[[int], int]]] = {
    "neg": ("Neg", lambda a: -a),
    "abs": ("Abs", abs),
    "sign": ("Sign", lambda a: (a > 0) - (a < 0)),
    "not": ("BitwiseNot", lambda a: ~a),
    "relu": ("Relu", lambda a: max(a, 0)),
    "floor": ("Floor", lambda a: a),
}
COMPARED: dict[str, Callable[[int, int], bool]] = {
    "Less": lambda a, b: a < b,
    "LessOrEqual": lambda a, b: a <= b,
    "Greater": lambda a, b: a > b,
    "GreaterOrEqual": lambda a, b: a >= b,
    "Equal": lambda a, b: a == b,
    "NotEqual": lambda a, b: a != b,
}


class Expressions:
    """A network of random operators, and what each of its values is."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.net = Net()
        self.inputs: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        for shape in ((3, 7), (3, 7), (7,)):
            name = self.net.input(*shape, dtype=dtype)
            self.inputs[name] = full_range(self.random, dtype, *shape)
            self.values[name] = np.broadcast_to(self.inputs[name], (3, 7))

    def grow(self, kind: str) -> None:
        """One more operator, of values that there are."""
        names = list(self.values)
        x = self.random.choice([name for name in names if name != "x2"])  # which is broadcast
        y = self.random.choice(names)
        left, right = (self.values[name].ravel().tolist() for name in (x, y))
        if kind in UNARY:
            op, function = UNARY[kind]
            made = self.net(op, x)
            numbers = [function(a) for a in left]
        elif kind in COMPARED:
            condition = self.net(kind, x, y)
            made = self.net("Where", condition, x, y)
            numbers = [a if COMPARED[kind](a, b) else b for a, b in zip(left, right, strict=True)]
        else:
            op, attributes, meaning = BINARY[kind]
            made = self.net(op, x, y, **attributes)
            numbers = [meaning(a, b) for a, b in zip(left, right, strict=True)]
        self.values[made] = wrapped(numbers, self.values[x])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_expressions(dtype: str, part: int) -> None:
    expressions = Expressions(dtype, DTYPES.index(dtype))
    kinds = [*BINARY, *UNARY, *COMPARED]
    for kind in expressions.random.permutation(kinds[part::2]):
        expressions.grow(str(kind))
    made = {
        name: value for name, value in expressions.values.items()
        if name not in expressions.inputs
    }  # fmt: skip
    same(expressions.net.graph(*made), expressions.inputs, made)


def _reduced(x: Array, axis: int, function: Callable[[list[int]], int]) -> Array:
    lines = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    shape = np.delete(x.shape, axis)
    return wrapped([function(line) for line in lines.tolist()], np.zeros(shape, x.dtype))


def _product(numbers: list[int]) -> int:
    made = 1
    for number in numbers:
        made = made * number
    return made


REDUCED: dict[str, Callable[[list[int]], int]] = {
    "ReduceSum": sum,
    "ReduceMax": max,
    "ReduceMin": min,
    "ReduceProd": _product,
    "ReduceL1": lambda numbers: sum(map(abs, numbers)),
    "ReduceSumSquare": lambda numbers: sum(a * a for a in numbers),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype: str, axis: int) -> None:
    net = Net()
    x = net.input(5, 41, dtype=dtype)
    given = full_range(np.random.default_rng(axis), dtype, 5, 41)
    expected: dict[str, Array] = {}
    # Norms are sums of what expressions test: of half of the dtypes.
    some = [op for op in REDUCED if DTYPES.index(dtype) % 2 == axis or op[6] in "SM"]
    for op in some:
        made = net(op, x, net.constant(np.array([axis])), keepdims=0)
        expected[made] = _reduced(given, axis, REDUCED[op])
    for op, find in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
        expected[net(op, x, axis=axis, keepdims=0)] = find(given, axis)
    sums = net("CumSum", x, net.constant(np.array(axis)), reverse=axis)
    turned = np.flip(given, axis) if axis else given
    total = turned.cumsum(axis, dtype=dtype)
    expected[sums] = np.flip(total, axis) if axis else total
    same(net.graph(*expected), {x: given}, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_have_no_fraction(dtype: str) -> None:
    """Also where the sum is beyond the dtype, of 32 bits and less."""
    net = Net()
    x = net.input(3, 21, dtype=dtype)
    given = full_range(np.random.default_rng(1), dtype, 3, 21)
    if np.dtype(dtype).itemsize == 8:
        given = given // 32
    mean = net("ReduceMean", x, net.constant(np.array([1])), keepdims=0)
    expected = _reduced(given, 1, lambda numbers: _divided(sum(numbers), len(numbers)))
    same(net.graph(mean), {x: given}, {mean: expected})


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_order(dtype: str, largest: int) -> None:
    net = Net()
    x = net.input(4, 19, dtype=dtype)
    given = full_range(np.random.default_rng(2), dtype, 4, 19)
    made = net("TopK", x, net.constant(np.array([6])), axis=1, largest=largest)
    ordered = np.sort(given, axis=1)
    same(net.graph(made), {x: given}, {made: (ordered[:, ::-1] if largest else ordered)[:, :6]})


@pytest.mark.parametrize("source", [*DTYPES, "bool", "float32"])
def test_casts_keep_the_last_bits(source: str) -> None:
    net, random = Net(), np.random.default_rng(3)
    x = net.input(2, 37, dtype=source)
    if source == "float32":
        sizes = 10.0 ** random.uniform(0, 22, (2, 37))
        given = (random.normal(size=(2, 37)) * sizes).astype(source)
        given.flat[:4] = np.nan, np.inf, -np.inf, -0.9
    elif source == "bool":
        given = random.random((2, 37)) < 0.5
    else:
        given = full_range(random, source, 2, 37)
    expected: dict[str, Array] = {}
    for dtype in [*DTYPES, "bool", "float32"]:
        if dtype == source:
            continue
        whole = source == "float32" and dtype != "bool"
        with np.errstate(all="ignore"):
            value = whole_part(given, dtype) if whole else given.astype(dtype)
        expected[net("Cast", x, to=dtype)] = value
    same(net.graph(*expected), {x: given}, expected)


def test_floats_that_an_integer_does_not_hold() -> None:
    """As x86 makes them, and so NumPy and PyTorch there."""
    x = np.array([300.7, -1.5, 3e9, -3e9, 1e30, np.nan], np.float32)
    least = -(2**31)
    assert whole_part(x, "uint8").tolist() == [44, 255, 0, 0, 0, 0]
    assert whole_part(x, "int32").tolist() == [300, -1, least, least, least, least]
    assert whole_part(x, "int64").tolist() == [300, -1, 3 * 10**9, -3 * 10**9, -(2**63), -(2**63)]
    top = np.array([2.0**63, 1.5 * 2.0**63], np.float32)
    assert whole_part(top, "uint64").tolist() == [2**63, 3 * 2**62]


@pytest.mark.parametrize("exponents", ["int8", "int64", "float32"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_powers(dtype: str, exponents: str) -> None:
    net, random = Net(), np.random.default_rng(4)
    x, y = net.input(60, dtype=dtype), net.input(60, dtype=exponents)
    base = full_range(random, dtype, 60)
    power = random.integers(0 if exponents == "float32" else -3, 70, 60).astype(exponents)
    numbers = []
    for a, b in zip(base.tolist(), power.astype(np.int64).tolist(), strict=True):
        negative = {1: 1, -1: (-1) ** (b % 2)}.get(a, 0)
        numbers.append(pow(a, b, 2**64) if b >= 0 else negative)
    expected = {net("Pow", x, y): wrapped(numbers, base)}
    for b in (0, 1, 2, 3, 5):
        made = net("Pow", x, net.constant(np.array(b, exponents)))
        expected[made] = wrapped([a**b for a in base.tolist()], base)
    with np.errstate(all="ignore"):
        same(net.graph(*expected), {x: base, y: power}, expected)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8"])
def test_bounds(dtype: str) -> None:
    """Known ones, which are beyond float64, and others."""
    net, limits = Net(), np.iinfo(dtype)
    x, low = net.input(90, dtype=dtype), net.input(dtype=dtype)
    given = full_range(np.random.default_rng(5), dtype, 90)
    least, greatest = (np.array(one, dtype) for one in (limits.max // 3, limits.max - 5))
    bounds = net.constant(least), net.constant(greatest)
    expected = {
        net("Clip", x, *bounds): np.minimum(np.maximum(given, least), greatest),
        net("Clip", x, "", bounds[1]): np.minimum(given, greatest),
        net("Clip", x, low): np.maximum(given, least),
    }
    same(net.graph(*expected), {x: given, low: least}, expected)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32"])
def test_products_of_matrices(dtype: str) -> None:
    net, random = Net(), np.random.default_rng(6)
    x, y = net.input(2, 5, 7, dtype=dtype), net.input(7, 4, dtype=dtype)
    inputs = {x: full_range(random, dtype, 2, 5, 7), y: full_range(random, dtype, 7, 4)}
    constant = full_range(random, dtype, 7, 3)
    first = inputs[x][0]
    matrix = net("Squeeze", net("Slice", x, *(net.constant(np.array([n])) for n in (0, 1, 0))),
                 net.constant(np.array([0])))  # fmt: skip
    c = full_range(random, dtype, 4)
    expected = {
        net("MatMul", x, y): inputs[x] @ inputs[y],
        net("MatMul", x, net.constant(constant)): inputs[x] @ constant,
        net("Gemm", matrix, y, net.constant(c), alpha=3.0): first @ inputs[y] * 3 + c,
        net("Einsum", matrix, y, equation="ik,kj->ji"): (first @ inputs[y]).T,
    }
    expected = {name: value.astype(dtype) for name, value in expected.items()}
    with np.errstate(all="ignore"):
        same(net.graph(*expected), inputs, expected)


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_written_numbers(reduction: str) -> None:
    net, random = Net(), np.random.default_rng(7)
    dtype = {"add": "uint8", "mul": "int64", "max": "uint64", "min": "int32"}[reduction]
    x, updates = net.input(3, 5, dtype=dtype), net.input(3, 9, dtype=dtype)
    inputs = {x: full_range(random, dtype, 3, 5), updates: full_range(random, dtype, 3, 9)}
    places = random.integers(0, 5, (3, 9))
    made = net("ScatterElements", x, net.constant(places), updates, axis=1, reduction=reduction)
    expected = inputs[x].copy()
    function = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    rows = np.arange(3)[:, None]
    with np.errstate(all="ignore"):
        function.at(expected, (rows, places), inputs[updates])
    same(net.graph(made), inputs, {made: expected})


def test_booleans_are_true_or_false() -> None:
    """Also where two that are true are added."""
    net, random = Net(), np.random.default_rng(8)
    x, y = net.input(50, dtype="bool"), net.input(50, dtype="bool")
    inputs = {x: random.random(50) < 0.5, y: random.random(50) < 0.5}
    a, b = inputs.values()
    expected = {
        net("Add", x, y): a | b, net("Mul", x, y): a & b, net("Not", x): ~a,
        net("BitwiseNot", y): ~b, net("Xor", x, y): a ^ b, net("NotEqual", x, y): a ^ b,
        net("Where", x, x, y): a | b, net("Less", x, y): ~a & b,
    }  # fmt: skip
    same(net.graph(*expected), inputs, expected)


def test_a_formula_of_integers_is_no_activation() -> None:
    """x · min(max(x + 3, 0), 6) / 6 is HardSwish, of numbers whose quotients have fractions."""
    net = Net()
    x = net.input(40, dtype="int64")
    three, zero, six = (net.constant(np.array(one)) for one in (3, 0, 6))
    gate = net("Clip", net("Add", x, three), zero, six)
    made = net("Div", net("Mul", x, gate), six)
    given = np.arange(-20, 20)
    expected = np.trunc(given * np.clip(given + 3, 0, 6) / 6).astype(np.int64)
    same(simplified(net.graph(made)), {x: given}, {made: expected})


def test_what_integers_cannot_be_computed_in_is_named() -> None:
    net = Net()
    x, y = net.input(3, dtype="int64"), net.input(3, dtype="uint64")
    with pytest.raises(NotImplementedError, match=r"Sin .*int64.* Cast to float32"):
        Session(net.graph(net("Sin", x))).run(x0=np.arange(3), x1=np.arange(3, dtype=np.uint64))
    net = Net()
    x, y = net.input(3, dtype="int64"), net.input(3, dtype="uint64")
    with pytest.raises(NotImplementedError, match="no integers hold all of int64, uint64"):
        Session(net.graph(net("Pow", x, y))).run(x0=np.arange(3), x1=np.arange(3, dtype=np.uint64))


def test_an_input_that_a_dtype_does_not_hold_is_refused() -> None:
    net = Net()
    x = net.input(2, dtype="int32")
    session = Session(net.graph(net("Neg", x)))
    assert session.run(x0=np.array([5, 2**31 - 1]))["v0"].tolist() == [-5, 1 - 2**31]
    with pytest.raises(ValueError, match=r"x0 must be int32.*2147483648"):
        session.run(x0=np.array([5, 2**31]))
