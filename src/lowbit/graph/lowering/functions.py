"""Operators that compute each element by itself: expressions, and tables of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, is_dense, lowerings, order_of
from lowbit.graph.lowering.elementwise import compute, plain
from lowbit.graph.operator import operators
from lowbit.graph.step import View
from lowbit.kernels.cpu.tensors.elementwise import Step
from lowbit.kernels.cpu.tensors.lookup import lookup, lookup_set
from lowbit.numerics import dequantize_affine, int_format, quantize_affine

Formula = tuple[tuple[Step, ...], tuple[float, ...]]
N = "number"


def lower(
    expression: Sequence[Step],
    lowering: Lowering,
    node: Node,
    values: Sequence[float] = (),
    inputs: Sequence[View] | None = None,
) -> None:
    """An operator that is an expression of its inputs. A function of one value that is kept in 8
    bits, with a result in 8 bits, is looked up instead, and is what the definition says."""
    if _looked_up(lowering, node):
        return
    given = [lowering.view(name) for name in node.inputs if name] if inputs is None else inputs
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    like = next((one for one in given if one.shape == shape), None)
    out = lowering.output(node.outputs[0], None if like is None else order_of(like))
    compute(lowering, out, given, expression, values)


def _looked_up(lowering: Lowering, node: Node) -> bool:
    """Whether that served, which needs all other inputs to be single numbers."""
    made = lowering.graph.tensors[node.outputs[0]]
    constants = lowering.graph.constants
    changing = {name for name in node.inputs if name and name not in constants}
    fixed = [numbers(constants[name]) for name in node.inputs if name in constants]
    if len(changing) != 1 or made.scale is None or any(one.size != 1 for one in fixed):
        return False
    (name,) = changing
    view = lowering.view(name)
    if view.tensor.scale is None or len(view.shape) != len(made.shape):
        return False
    view = view if is_dense(view, order_of(view)) else plain(lowering, view)
    stored = np.arange(256, dtype=np.uint8).view(view.tensor.dtype)
    x = dequantize_affine(stored, np.float32(view.tensor.scale), np.int32(view.tensor.zero_point))
    given = [
        x if one == name else np.ravel(numbers(constants[one])) if one else None
        for one in node.inputs
    ]
    values = operators.get(node.op).compute(node, *given)[0]
    ends = float(np.finfo(np.float32).max)  # which NaN and infinity are kept as
    values = np.nan_to_num(values, nan=-ends, posinf=ends, neginf=-ends)
    table = quantize_affine(
        values, np.float32(made.scale), np.int32(made.zero_point), int_format(made.dtype)
    )
    out = lowering.output(node.outputs[0], order_of(view))
    lowering.add(lookup.program(lookup_set(lowering.isa)), {
        "out": out.place, "x": view.place, "table": lowering.known(table),
        "count": math.prod(view.shape),
    })  # fmt: skip
    return True


_NOT_EQUAL_ZERO = (N, 0, N, "equal", "sub")
_FORMULAS: dict[str, Formula] = {
    # Of two
    "Add": ((0, 1, "add"), ()),
    "Sub": ((0, 1, "sub"), ()),
    "Mul": ((0, 1, "mul"), ()),
    "Min": ((0, 1, "min"), ()),
    "Max": ((0, 1, "max"), ()),
    "Less": ((0, 1, "less"), ()),
    "Greater": ((1, 0, "less"), ()),
    "LessOrEqual": ((0, 1, "less", 0, 1, "equal", "max"), ()),
    "GreaterOrEqual": ((1, 0, "less", 0, 1, "equal", "max"), ()),
    "Equal": ((0, 1, "equal"), ()),
    "And": ((0, 1, "min"), ()),
    "Or": ((0, 1, "max"), ()),
    "Xor": ((0, 1, "sub", "abs"), ()),
    "PRelu": ((0, N, "less", 0, 1, "mul", 0, "where"), (0,)),
    "Where": ((0, 1, 2, "where"), ()),
    # Of one
    "Relu": ((0, "relu"), ()),
    "Sigmoid": ((0, "sigmoid"), ()),
    "Silu": ((0, "silu"), ()),
    "HardSwish": ((0, "hardswish"), ()),
    "Tanh": ((0, "tanh"), ()),
    "Softplus": ((0, "softplus"), ()),
    "Softsign": ((0, N, 0, "abs", "add", "div"), (1,)),
    "Mish": ((0, "mish"), ()),
    "Neg": ((0, "neg"), ()),
    "Abs": ((0, "abs"), ()),
    "Sign": ((N, 0, "less", 0, N, "less", "sub"), (0, 0)),
    "Exp": ((0, "exp"), ()),
    "Log": ((0, "log"), ()),
    "Sqrt": ((0, "sqrt"), ()),
    "Reciprocal": ((N, 0, "div"), (1,)),
    "Erf": ((0, "erf"), ()),
    "Sin": ((0, "sin"), ()),
    "Cos": ((0, "cos"), ()),
    "Floor": ((0, "floor"), ()),
    "Ceil": ((0, "ceil"), ()),
    "Round": ((0, "nearest"), ()),
    "Not": ((N, 0, "sub"), (1,)),
    "IsNaN": ((N, 0, 0, "equal", "sub"), (1,)),
}


def _of_attributes(node: Node) -> Formula:
    """The formula of an operator whose numbers are attributes."""

    def given(name: str, default: float) -> float:
        return float(node.get(name, default))

    if node.op == "Gelu":
        return (0, "gelu_tanh" if node.get("approximate") == "tanh" else "gelu"), ()
    if node.op == "LeakyRelu":
        return (0, N, "less", 0, N, "mul", 0, "where"), (0, given("alpha", 0.01))
    if node.op == "ThresholdedRelu":
        return (N, 0, "less", 0, N, "where"), (given("alpha", 1.0), 0)
    if node.op == "Elu":
        return (0, N, "elu"), (given("alpha", 1.0),)
    if node.op == "Celu":
        alpha = given("alpha", 1.0)
        return (0, N, "mul", N, "elu", N, "mul"), (1 / alpha, 1, alpha)
    if node.op == "Selu":
        return (0, N, "elu", N, "mul"), (given("alpha", 1.6732632), given("gamma", 1.0507010))
    if node.op == "HardSigmoid":
        return (0, N, "mul", N, "add", "clamp"), (given("alpha", 0.2), given("beta", 0.5), 0, 1)
    assert node.op == "IsInf"
    negative, positive = (bool(node.get(f"detect_{s}", 1)) for s in ("negative", "positive"))
    if negative and positive:
        return (0, "abs", N, "equal"), (math.inf,)
    if not negative and not positive:
        return (0, 0, "equal", N, "min"), (0,)
    return (0, N, "equal"), (math.inf if positive else -math.inf,)


def _by_formula(formula: Formula, lowering: Lowering, node: Node) -> None:
    lower(formula[0], lowering, node, formula[1])


def _by_attributes(lowering: Lowering, node: Node) -> None:
    _by_formula(_of_attributes(node), lowering, node)


for _op in ("Tan", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh"):
    _FORMULAS[_op] = (0, _op.lower()), ()
for _op, _formula in _FORMULAS.items():
    lowerings.add(_op, partial(_by_formula, _formula))
for _op in (
    "Gelu", "LeakyRelu", "ThresholdedRelu", "Elu", "Celu", "Selu", "HardSigmoid", "IsInf",
):  # fmt: skip
    lowerings.add(_op, _by_attributes)


def _whole(lowering: Lowering, name: str) -> bool:
    """Whether a value is of integers that stand for themselves."""
    tensor = lowering.view(name).tensor
    return tensor.scale is None and np.dtype(tensor.dtype).kind in "iu"


@lowerings.register("Div")
def _divide(lowering: Lowering, node: Node) -> None:
    whole = _whole(lowering, node.inputs[0])
    lower((0, 1, "div", "trunc") if whole else (0, 1, "div"), lowering, node)


@lowerings.register("Mod")
def _modulo(lowering: Lowering, node: Node) -> None:
    """What is left of x, of its sign; without fmod, of the divisor's. Where the whole quotient is
    0, so is what is taken away, of an infinite divisor too."""
    whole = 0, 1, "div", "trunc"
    left = 0, *whole, *whole, 1, "mul", *whole, "where", "sub"
    if node.get("fmod", 0):
        lower(left, lowering, node)
        return
    opposite = *left, N, "less", 1, N, "less", "sub", "abs"
    turned = *left, *left, 1, "add", *left, "where"  # what is 0 stays so
    lower((*opposite, *turned, *left, "where"), lowering, node, (0, 0))


@lowerings.register("Clip")
def _clip(lowering: Lowering, node: Node) -> None:
    """Bounds that are known are numbers, others are broadcast."""
    low, high = (*node.inputs[1:], "", "")[:2]
    known = [lowering.graph.constants.get(name) if name else default
             for name, default in ((low, -math.inf), (high, math.inf))]  # fmt: skip
    if all(one is not None and np.size(one) == 1 for one in known):  # type: ignore[arg-type]
        x = [lowering.view(node.inputs[0])]
        bounds = [float(np.asarray(one).item()) for one in known]
        lower((0, "clamp"), lowering, node, bounds, x)
        return
    steps: list[Step] = [0]
    for name, step in ((low, "max"), (high, "min")):
        if name:
            steps += [(len(steps) + 1) // 2, step]
    lower(steps, lowering, node)


@lowerings.register("Pow")
def _power(lowering: Lowering, node: Node) -> None:
    """Of exponents that are known and common, a formula."""
    known = lowering.graph.constants.get(node.inputs[1])
    each = np.unique(known) if isinstance(known, np.ndarray) else np.zeros(0)
    exponent = each.item() if each.size == 1 else 0
    formulas: dict[float, Formula] = {
        1: ((0,), ()),
        2: ((0, 0, "mul"), ()),
        3: ((0, 0, "mul", 0, "mul"), ()),
        0.5: ((0, "sqrt"), ()),
        -0.5: ((N, 0, "sqrt", "div"), (1,)),
        -1: ((N, 0, "div"), (1,)),
    }
    if exponent not in formulas:
        whole = all(_whole(lowering, name) for name in node.inputs)
        few = (1, N, "equal", 0, 1, N, "equal", 0, 0, "mul", 1, N, "equal", 0, 0, "mul", 0, "mul")
        exact = *few, 0, 1, "power", "nearest", "where", "where", "where"
        lower(exact if whole else (0, 1, "power"), lowering, node, (1, 2, 3) if whole else ())
        return
    steps, values = formulas[exponent]
    lower(steps, lowering, node, values, [lowering.view(node.inputs[0])])


@lowerings.register("Cast")
def _cast(lowering: Lowering, node: Node) -> None:
    """Of numbers to booleans: whether they are not 0; to integers of 8 bits: floats towards 0, and
    other integers their last 8 bits."""
    made = lowering.graph.tensors[node.outputs[0]]
    x = lowering.view(node.inputs[0])
    if made.dtype == "bool" and x.tensor.dtype != "bool":
        lower(_NOT_EQUAL_ZERO, lowering, node, (1, 0))
    elif made.scale is None and made.dtype in ("uint8", "int8") and x.tensor.dtype != made.dtype:
        wraps = (0, 0, N, "add", N, "div", "floor", N, "mul", "sub")
        given = 128 if made.dtype == "int8" else 0, 256, 256
        whole = _whole(lowering, node.inputs[0])
        lower(wraps if whole else (0, "trunc"), lowering, node, given if whole else ())
    else:
        lower((0,), lowering, node)


def _scaled(lowering: Lowering, node: Node, view: View) -> View:
    """A view of stored integers as what they stand for. NotImplementedError: by channel."""
    scale, zero = ([lowering.graph.constants.get(name) for name in node.inputs[1:]] + [None])[:2]
    if not isinstance(scale, np.ndarray) or scale.size != 1 or np.size(zero) != 1:  # type: ignore[arg-type]
        raise NotImplementedError(f"{node.op} is served with one scale that is a constant")
    number = 0 if zero is None else int(np.asarray(zero).item())
    tensor = Tensor(view.tensor.dtype, view.shape, float(scale.item()), number)
    return View(tensor, view.place, view.strides)


@lowerings.register("QuantizeLinear")
def _quantize(lowering: Lowering, node: Node) -> None:
    x = lowering.view(node.inputs[0])
    out = lowering.output(node.outputs[0], order_of(x))
    compute(lowering, _scaled(lowering, node, out), [x], (0,))


@lowerings.register("DequantizeLinear")
def _dequantize(lowering: Lowering, node: Node) -> None:
    x = _scaled(lowering, node, lowering.view(node.inputs[0]))
    compute(lowering, lowering.output(node.outputs[0], order_of(x)), [x], (0,))
