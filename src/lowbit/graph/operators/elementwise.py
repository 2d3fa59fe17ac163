"""Operators that compute each element by itself, their inputs broadcast."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from lowbit.graph import expression as f
from lowbit.graph.expression import NUMBER as N
from lowbit.graph.expression import POST_OPS, Expression
from lowbit.graph.graph import Node, Tensor, numbers
from lowbit.graph.lower import Lowering, is_dense, order_of
from lowbit.graph.lowering.elementwise import compute, is_whole, plain, whole_dtype
from lowbit.graph.lowering.movement import identity
from lowbit.graph.operator import Array, Operator, finite, operators, real, required
from lowbit.graph.parts import Parts
from lowbit.graph.step import View
from lowbit.kernels.cpu.tensors.elementwise import Step, lookup, lookup_set
from lowbit.numerics import dequantize_affine, int_format, quantize_affine
from lowbit.numerics.formats import whole_part

_ALMOST_LINEAR = 20.0  # where softplus is its argument in float32
Formula = tuple[tuple[Step, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Elementwise(Operator):
    """meaning: of the inputs, and of attributes, which are keywords with defaults: on arrays what
    the operator computes, on expressions what its kernel does. wide: on arrays in float64, rounded
    once to the first input's dtype."""

    wide: bool = False

    @property
    def required(self) -> int:
        return required(self.meaning)

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        self.check_given(inputs)
        with np.errstate(all="ignore"):
            if not self.wide:
                return (np.asarray(self.meaning(*inputs, **self._attributes(node))),)
            given = [one if one is None else one.astype(np.float64) for one in inputs]
            made = np.asarray(self.meaning(*given, **self._attributes(node)))
            assert inputs[0] is not None
            return (made.astype(inputs[0].dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        self.check_given(tensors)
        shape = np.broadcast_shapes(*(one.sizes for one in tensors if one is not None))
        ones = [None if one is None else np.zeros((), real(one)) for one in tensors]
        return (Tensor(self.compute(node, *ones)[0].dtype.name, shape),)

    def expression(self, node: Node, whole: Sequence[bool]) -> Expression:
        """Of inputs that are, or are not, of integers which stand for themselves."""
        inputs = [Expression((number,), (), one) for number, one in enumerate(whole)]
        return self.meaning(*inputs, **self._attributes(node))

    @property
    def keywords(self) -> dict[str, Any]:
        """Its attributes, and what they are where a node does not say."""
        return _keywords(self.meaning)

    def _attributes(self, node: Node) -> dict[str, Any]:
        return {
            name: type(default)(node.get(name, default)) for name, default in self.keywords.items()
        }


@cache
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a function, and their defaults."""
    if isinstance(function, f.Primitive | np.ufunc):
        return {}
    every = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in every if one.kind is one.KEYWORD_ONLY}


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
    values = finite(values)
    table = quantize_affine(
        values, np.float32(made.scale), np.int32(made.zero_point), int_format(made.dtype)
    )
    out = lowering.output(node.outputs[0], order_of(view))
    lowering.add(lookup.program(lookup_set(lowering.isa)), {
        "out": out.place, "x": view.place, "table": lowering.known(table),
        "count": math.prod(view.shape),
    })  # fmt: skip
    return True


def _expressed(lowering: Lowering, node: Node) -> None:
    """By the expression that the definition says."""
    record = operators.get(node.op)
    assert isinstance(record, Elementwise)
    inputs = [name for name in node.inputs if name]
    whole = _whole(lowering, node)
    if whole and record.wide:
        dtype = lowering.graph.tensors[node.outputs[0]].dtype
        raise NotImplementedError(f"of {dtype} it has no kernel: Cast to float32 before")
    found = record.expression(node, [whole] * len(inputs))
    lower(found.steps, lowering, node, found.numbers)


def _whole(lowering: Lowering, node: Node) -> bool:
    """Whether a node is computed in integers."""
    inputs = [lowering.view(name).tensor for name in node.inputs if name]
    return whole_dtype(lowering.graph.tensors[node.outputs[0]], inputs) is not None


def _post_op(node: Node, number: Callable[[str], float | None]) -> tuple[Any, ...] | None:
    """A function of one number that is a single step."""
    record = operators.get(node.op)
    assert isinstance(record, Elementwise)
    if record.required != 1:
        return None
    found = record.expression(node, [False])
    single = len(found.steps) == 2 and found.steps[1] in POST_OPS
    return found.steps[1:] if single else None


def _add(name: str, meaning: Callable[..., Any], **traits: Any) -> None:
    """Make an operator known. Its samples are treated alone, if other inputs broadcast."""
    defaults: dict[str, Any] = {
        "lowering": _expressed, "data": None, "positions": "kept", "post_op": _post_op,
    }  # fmt: skip
    defaults["samples"] = "alone" if required(meaning) == 1 else "broadcast"
    defaults |= traits
    operators.add(name, Elementwise(meaning=meaning, **defaults))


# Activations


def _leaky_relu(x: Any, *, alpha: float = 0.01) -> Any:
    return f.where(x < 0, x * alpha, x)


def _thresholded_relu(x: Any, *, alpha: float = 1.0) -> Any:
    return f.where(x > alpha, x, 0)


def _elu(x: Any, *, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """input_scale: of what is below 0 alone."""
    made = f.elu(x, alpha) if input_scale == 1 else _below(x, f.elu(x * input_scale, alpha))
    return made if scale == 1 else made * scale


def _below(x: Any, made: Any) -> Any:
    """x, or below 0 something else, which may be beyond float32 above."""
    return f.where(x < 0, made, x)


def _softplus(x: Any, *, slope: float = 1.0, threshold: float = _ALMOST_LINEAR) -> Any:
    """Beyond the threshold x itself."""
    if slope == 1 and threshold >= _ALMOST_LINEAR:
        return f.softplus(x)
    return f.where(x * slope > threshold, x, f.softplus(x * slope) / slope)


def _celu(x: Any, *, alpha: float = 1.0) -> Any:
    return _below(x, f.elu(x * (1 / alpha), 1) * alpha)


def _selu(x: Any, *, alpha: float = 1.6732632, gamma: float = 1.0507010) -> Any:
    return f.elu(x, alpha) * gamma


def _hard_sigmoid(x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    return f.clamp(x * alpha + beta, 0, 1)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    return f.gelu_tanh(x) if approximate == "tanh" else f.gelu(x)


def _clip(x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _clipped(lowering: Lowering, node: Node) -> None:
    """Bounds that are known are numbers, others are broadcast."""
    low, high = (*node.inputs[1:], "", "")[:2]
    known = [lowering.graph.constants.get(name) if name else default
             for name, default in ((low, -math.inf), (high, math.inf))]  # fmt: skip
    if not _whole(lowering, node) and all(one is not None and np.size(one) == 1 for one in known):  # type: ignore[arg-type]
        x = [lowering.view(node.inputs[0])]
        bounds = [float(np.asarray(one).item()) for one in known]
        lower((0, "clamp"), lowering, node, bounds, x)
        return
    steps: list[Step] = [0]
    for name, step in ((low, "max"), (high, "min")):
        if name:
            steps += [(len(steps) + 1) // 2, step]
    lower(steps, lowering, node)


def _clip_behind(node: Node, number: Callable[[str], float | None]) -> tuple[Any, ...] | None:
    bounds = (*node.inputs[1:], "", "")[:2]
    low, high = (number(name) if name else None for name in bounds)
    if (bounds[0] and low is None) or (bounds[1] and high is None):
        return None
    if low == 0 and high is None:
        return ("relu",)
    return "clamp", -math.inf if low is None else low, math.inf if high is None else high


_add("Relu", f.relu, aten=("relu",), eight_bits="rescaled")
_add("LeakyRelu", _leaky_relu, wide=True, qlinear=True,
     aten=("leaky_relu",), arguments={"alpha": "negative_slope"})  # fmt: skip
_add("ThresholdedRelu", _thresholded_relu, wide=True)
_add("PRelu", lambda x, slope: f.where(x < 0, x * slope, x))
_add("Elu", _elu, wide=True, aten=("elu",),
     arguments={name: name for name in ("alpha", "scale", "input_scale")})  # fmt: skip
_add("Celu", _celu, wide=True)
_add("Selu", _selu, wide=True)
_add("Clip", _clip, data=1, eight_bits="rescaled", lowering=_clipped, post_op=_clip_behind)
_add("Sigmoid", f.sigmoid, wide=True, aten=("sigmoid",), qlinear=True)
_add("HardSigmoid", _hard_sigmoid, wide=True)
_add("HardSwish", f.hardswish, wide=True, aten=("hardswish",), formulas=({},))
_add("Tanh", f.tanh, wide=True, aten=("tanh",))
_add("Softplus", _softplus, wide=True, aten=("softplus",),
     arguments={"slope": "beta", "threshold": "threshold"})  # fmt: skip
_add("Softsign", lambda x: x / (1 + abs(x)), wide=True)
_add("Mish", f.mish, wide=True, aten=("mish",), formulas=({},))
_add("Gelu", _gelu, wide=True, aten=("gelu",), arguments={"approximate": "approximate"},
     formulas=({}, {"approximate": "tanh"}))  # fmt: skip
_add("Silu", f.silu, wide=True, onnx=False, aten=("silu",), formulas=({},))


# Functions of one number


def _infinite(x: Any, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    if isinstance(x, Expression) and x.whole:
        return f.negated(f.equal(x, x))
    if detect_negative and detect_positive:
        return f.equal(abs(x), math.inf)
    if not detect_negative and not detect_positive:
        return f.minimum(f.equal(x, x), False)
    return f.equal(x, math.inf if detect_positive else -math.inf)


def _sign(x: Any, *, of_nan: int = 1) -> Any:
    """of_nan: whether that of NaN is NaN, as ONNX has it; else 0, as in PyTorch."""
    return f.where(f.equal(x, x), f.sign(x), x) if of_nan else f.sign(x)


def _rounded(x: Any, *, decimals: int = 0) -> Any:
    power = 10.0 ** abs(decimals)
    if decimals < 0:
        return f.nearest(x / power) * power
    return f.nearest(x * power) / power if decimals else f.nearest(x)


def _cast(x: Array, *, to: str = "float32") -> Array:
    """To booleans: whether they are not 0; to integers: floats without their fractions, and of
    other integers the last bits."""
    dtype = np.dtype(to)
    return whole_part(x, to) if dtype.kind in "iu" and x.dtype.kind == "f" else x.astype(dtype)


_add("Erf", f.erf, wide=True, aten=("erf",))
_add("Exp", f.exp, wide=True, aten=("exp",))
_add("Log", f.log, wide=True, aten=("log",))
_add("Erfc", f.erfc, wide=True, onnx=False, aten=("erfc",))
# Which loses nothing near 0.
_add("Expm1", lambda x: (f.exp(x) + 1) * f.tanh(x * 0.5), wide=True, onnx=False, aten=("expm1",))
_add("Exp2", f.exp2, wide=True, onnx=False, aten=("exp2",))
_add("Log1p", f.log1p, wide=True, onnx=False, aten=("log1p",))
_add("Log2", lambda x: f.log(x) / math.log(2), wide=True, onnx=False, aten=("log2",))
_add("Log10", lambda x: f.log(x) / math.log(10), wide=True, onnx=False, aten=("log10",))
_add("Trunc", f.trunc, onnx=False)
_add("Sqrt", f.sqrt, wide=True, aten=("sqrt",))
_add("Reciprocal", lambda x: 1 / x, wide=True, aten=("reciprocal",))
_add("Sin", f.sin, wide=True, aten=("sin",))
_add("Cos", f.cos, wide=True, aten=("cos",))
_add("Tan", f.tan, wide=True, aten=("tan",))
_add("Sinh", f.sinh, wide=True, aten=("sinh",))
_add("Cosh", f.cosh, wide=True, aten=("cosh",))
_add("Asin", f.asin, wide=True, aten=("asin",))
_add("Acos", f.acos, wide=True, aten=("acos",))
_add("Atan", f.atan, wide=True, aten=("atan",))
_add("Asinh", f.asinh, wide=True, aten=("asinh",))
_add("Acosh", f.acosh, wide=True, aten=("acosh",))
_add("Atanh", f.atanh, wide=True, aten=("atanh",))
_add("Abs", lambda x: abs(x), aten=("abs",))
_add("Neg", lambda x: -x, aten=("neg",))
_add("Sign", _sign, aten=("sign",), arguments={"of_nan": 0})
_add("Floor", f.floor, aten=("floor",))
_add("Ceil", f.ceil, aten=("ceil",))
_add("Round", _rounded)
_add("IsNaN", f.nan, aten=("isnan",))
_add("IsInf", _infinite, aten=("isinf",))
_add("Not", f.negated, aten=("logical_not",))
_add("Cast", _cast, data=1, lowering=partial(lower, (0,)), post_op=None,
     idle=lambda node, same, dtype: dtype() == node.get("to"))  # fmt: skip
_add("Identity", lambda x: x, data=1, eight_bits="moved", lowering=identity, post_op=None,
     idle=lambda node, same, dtype: True)  # fmt: skip


# Of several


def _powered(lowering: Lowering, node: Node) -> None:
    """Of exponents that are known and common, a formula."""
    known = lowering.graph.constants.get(node.inputs[1])
    each = set(known.flat) if isinstance(known, np.ndarray) else set()
    exponent = each.pop().item() if len(each) == 1 else 0
    if _whole(lowering, node):
        squares = 0 < exponent < 4
        steps = (*(0,) * exponent, *("mul",) * (exponent - 1)) if squares else (0, 1, "power")
        inputs = [lowering.view(name) for name in node.inputs[: 1 if squares else 2]]
        lower(steps, lowering, node, (), inputs)
        return
    formulas: dict[float, Formula] = {
        1: ((0,), ()),
        2: ((0, 0, "mul"), ()),
        3: ((0, 0, "mul", 0, "mul"), ()),
        0.5: ((0, "sqrt"), ()),
        -0.5: ((N, 0, "sqrt", "div"), (1,)),
        -1: ((N, 0, "div"), (1,)),
    }
    if exponent not in formulas:
        lower((0, 1, "power"), lowering, node)
        return
    steps, values = formulas[exponent]
    lower(steps, lowering, node, values, [lowering.view(node.inputs[0])])


def _power_in_parts(parts: Parts, node: Node) -> bool:
    """Integers to the power of floats: to that of integers, where these are such."""
    x, y = node.inputs
    base, exponent = parts.tensor(x), parts.tensor(y)
    if not is_whole(base) or is_whole(exponent):
        return False
    whole = parts.cast(y, "int64")
    exact = parts.power(x, whole)
    rounded = parts.cast(parts.power(parts.cast(x, "float32"), y), base.dtype)
    return parts.end(parts.where(parts.equal(parts.cast(whole, "float32"), y), exact, rounded))


def _chain(op: str) -> Callable[[Parts, Node], bool]:
    """Two by two."""

    def rule(parts: Parts, node: Node) -> bool:
        if len(node.inputs) == 2 and node.op == op:
            return False
        return parts.end(reduce(partial(parts.op, op), node.inputs))

    return rule


def _mean(*inputs: Array) -> Array:
    return np.divide(reduce(np.add, inputs), len(inputs), dtype=inputs[0].dtype)


def _mean_in_parts(parts: Parts, node: Node) -> bool:
    whole = reduce(parts.add, node.inputs)
    return parts.end(parts.div(whole, parts.float32(len(node.inputs))))


_VARIADIC: dict[str, Any] = {
    "post_op": None,
    "idle": lambda node, same, dtype: len(node.inputs) == 1,
}

_add("Add", lambda x, y: x + y, eight_bits="rescaled", qlinear=True)
_add("Sub", lambda x, y: x - y)
_add("Mul", lambda x, y: x * y, aten=("mul",), eight_bits="rescaled", qlinear=True)
_add("Div", f.quotient)
_add("FloorDiv", f.floor_quotient, onnx=False)
_add("Mod", lambda x, y, *, fmod=0: (f.fmod if fmod else f.remainder)(x, y))
_add("Hypot", f.hypot, wide=True, onnx=False, aten=("hypot",))
_add("Atan2", f.atan2, wide=True, onnx=False, aten=("atan2",))
_add("Pow", f.power, aten=("pow",), lowering=_powered, parts=_power_in_parts)
_add("Min", lambda *inputs: reduce(f.minimum, inputs), aten=("minimum",), parts=_chain("Min"),
     **_VARIADIC)  # fmt: skip
_add("Max", lambda *inputs: reduce(f.maximum, inputs), aten=("maximum",), parts=_chain("Max"),
     **_VARIADIC)  # fmt: skip
_add("Sum", lambda *inputs: reduce(np.add, inputs), parts=_chain("Add"), **_VARIADIC)
_add("Mean", _mean, parts=_mean_in_parts, **_VARIADIC)
_add("Equal", f.equal, aten=("eq",))
_add("NotEqual", lambda x, y: f.negated(f.equal(x, y)), onnx=False, aten=("ne",))
_add("Less", lambda x, y: x < y, aten=("lt",))
_add("LessOrEqual", lambda x, y: f.maximum(x < y, f.equal(x, y)), aten=("le",))
_add("Greater", lambda x, y: x > y, aten=("gt",))
_add("GreaterOrEqual", lambda x, y: f.maximum(x > y, f.equal(x, y)), aten=("ge",))
_add("And", f.minimum, aten=("logical_and",))
_add("Or", f.maximum, aten=("logical_or",))
_add("Xor", f.either, aten=("logical_xor",))
_add("Where", f.where)


# Of bits


def _shift(x: Any, count: Any, *, direction: str = "LEFT") -> Any:
    """By more than all bits: 0, or −1 of what is less and shifted to the right."""
    return (f.shift_left if direction == "LEFT" else f.shift_right)(x, count)


def _negation_in_parts(parts: Parts, node: Node) -> bool:
    """Of a boolean, whether it is false."""
    boolean = parts.tensor(node.inputs[0]).dtype == "bool"
    return boolean and parts.end(parts.logical_not(node.inputs[0]))


_add("BitwiseAnd", f.bits_and, post_op=None, aten=("bitwise_and",))
_add("BitwiseOr", f.bits_or, post_op=None, aten=("bitwise_or",))
_add("BitwiseXor", f.bits_xor, post_op=None, aten=("bitwise_xor",))
_add("BitwiseNot", f.bits_not, post_op=None, parts=_negation_in_parts)
_add("BitShift", _shift, post_op=None)
