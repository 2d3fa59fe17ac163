"""Formulas that exporters write for one function, and the function they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowbit.graph.graph import Node
from lowbit.graph.passes.rewriting import Replacement, Rule, Values

Product = tuple[float, tuple[str, ...]]


def _close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=1e-4)


def _factors(values: Values, name: str, inside: bool = True) -> Product:
    """A value as a product of a number and of values, through Mul and Div by a number."""
    number = values.number(name)
    if number is not None:
        return number, ()
    node = values.only(name, "Mul", "Div") if inside else values.maker(name, "Mul", "Div")
    if node is None:
        return 1.0, (name,)
    left = _factors(values, node.inputs[0])
    if node.op == "Div":
        divisor = values.number(node.inputs[1])
        return (left[0] / divisor, left[1]) if divisor else (1.0, (name,))
    right = _factors(values, node.inputs[1])
    return left[0] * right[0], left[1] + right[1]


def _plus(values: Values, name: str) -> tuple[float, str] | None:
    """A value as the sum of a number and another."""
    node = values.maker(name, "Add")
    if node is None:
        return None
    for number, other in (node.inputs, node.inputs[::-1]):
        found = values.number(number)
        if found is not None:
            return found, other
    return None


def activation(values: Values, node: Node) -> Replacement | None:
    """GELU, SiLU, Mish and hardswish: products of x and a function of x."""
    if node.op not in ("Mul", "Div"):
        return None
    coefficient, parts = _factors(values, node.outputs[0], inside=False)
    if len(parts) != 2:
        return None
    for x, gate in (parts, parts[::-1]):
        found = _gated(values, coefficient, x, gate)
        if found is not None:
            op, attributes = found
            return Replacement([Node(op, (x,), node.outputs, attributes, node.name)])
    return None


def _gated(values: Values, coefficient: float, x: str, gate: str) -> tuple[str, dict] | None:
    """The function that coefficient · x · gate is, where the gate is made from x too."""
    made = values.maker(gate, "Sigmoid", "HardSigmoid", "Clip", "Tanh", "Add")
    if made is None:
        return None
    source = made.inputs[0]
    if made.op == "Sigmoid" and source == x and coefficient == 1:
        return "Silu", {}
    if made.op == "HardSigmoid" and source == x and coefficient == 1:
        sixth = _close(made.get("alpha", 0.2), 1 / 6) and _close(made.get("beta", 0.5), 0.5)
        return ("HardSwish", {}) if sixth else None
    if made.op == "Clip" and _plus(values, source) == (3, x) and _close(coefficient, 1 / 6):
        bounds = tuple(values.number(name) for name in made.inputs[1:])
        return ("HardSwish", {}) if bounds == (0, 6) else None
    if made.op == "Tanh" and coefficient == 1:
        inner = values.maker(source, "Softplus")
        return ("Mish", {}) if inner is not None and inner.inputs[0] == x else None
    one = _plus(values, gate) if made.op == "Add" and _close(coefficient, 0.5) else None
    if one is None or one[0] != 1:
        return None
    inner = values.maker(one[1], "Erf", "Tanh")
    if inner is None:
        return None
    scale, terms = _factors(values, inner.inputs[0])
    if inner.op == "Erf":
        return ("Gelu", {}) if terms == (x,) and _close(scale, math.sqrt(0.5)) else None
    if len(terms) == 1 and _close(scale, math.sqrt(2 / math.pi)) and _cubic(values, x, terms[0]):
        return "Gelu", {"approximate": "tanh"}
    return None


def _cubic(values: Values, x: str, name: str) -> bool:
    """Whether a value is x + 0.044715 x³."""
    node = values.maker(name, "Add")
    if node is None or x not in node.inputs:
        return False
    other = node.inputs[1] if node.inputs[0] == x else node.inputs[0]
    scale, terms = _factors(values, other)
    power = values.maker(terms[0], "Pow") if len(terms) == 1 else None
    cube = terms == (x, x, x) or (
        power is not None and power.inputs[0] == x and values.number(power.inputs[1]) == 3
    )
    return cube and _close(scale, 0.044715)


def layer_normalization(values: Values, node: Node) -> Replacement | None:
    """(x - mean) / sqrt(variance + epsilon) · scale, as written before opset 17."""
    if node.op != "Mul":
        return None
    for quotient, scale in (node.inputs, node.inputs[::-1]):
        vector, divide = values.array(scale), values.maker(quotient, "Div")
        if vector is None or divide is None:
            continue
        centred = values.maker(divide.inputs[0], "Sub")
        root = values.maker(divide.inputs[1], "Sqrt")
        if centred is None or root is None:
            continue
        variance = _plus(values, root.inputs[0])
        mean = _mean(values, centred.inputs[1])
        square = None if variance is None else _mean(values, variance[1])
        if variance is None or mean is None or square is None:
            continue
        x, axes = centred.inputs[0], tuple(range(-vector.ndim, 0))
        base = _squared(values, square[0])
        again = None if base is None else values.maker(base, "Sub")  # the mean as before
        if mean == (x, axes) and square[1] == axes and again and again.inputs[0] == x:
            attributes = {"axis": axes[0], "epsilon": variance[0]}
            made = Node("LayerNormalization", (x, scale), node.outputs, attributes, node.name)
            return Replacement([made])
    return None


def rms_normalization(values: Values, node: Node) -> Replacement | None:
    """x / sqrt(mean(x²) + epsilon) · scale, as written before opset 23."""
    if node.op != "Mul":
        return None
    for quotient, scale in (node.inputs, node.inputs[::-1]):
        vector = values.array(scale)
        if vector is None:
            continue
        for x, root in _over_roots(values, quotient):
            square = _plus(values, root.inputs[0])
            mean = None if square is None else _mean(values, square[1])
            if square is None or mean is None or _squared(values, mean[0]) != x:
                continue
            axes = tuple(range(-vector.ndim, 0))
            if mean[1] == axes:
                attributes = {"axis": axes[0], "epsilon": square[0]}
                made = Node("RMSNormalization", (x, scale), node.outputs, attributes, node.name)
                return Replacement([made])
    return None


def _over_roots(values: Values, name: str) -> Iterator[tuple[str, Node]]:
    """Whatever a value is x over, if that is a square root, and x."""
    node = values.maker(name, "Div", "Mul")
    if node is None:
        return
    for x, other in (node.inputs, node.inputs[::-1]):
        if node.op == "Div":
            root = values.maker(other, "Sqrt") if x == node.inputs[0] else None
        else:
            inverse = values.maker(other, "Reciprocal", "Div")
            one = inverse and (inverse.op == "Reciprocal" or values.number(inverse.inputs[0]) == 1)
            root = values.maker(inverse.inputs[-1], "Sqrt") if inverse and one else None
        if root is not None:
            yield x, root


def _mean(values: Values, name: str) -> tuple[str, tuple[int, ...]] | None:
    """What a value is the mean of, along which axes, which it keeps."""
    node = values.maker(name, "ReduceMean")
    if node is None or not node.get("keepdims", 1):
        return None
    given = _axes(values, node)
    return None if given is None else (node.inputs[0], tuple(sorted(given)))


def _axes(values: Values, node: Node) -> list[int] | None:
    """The axes of a reduction, if they are known."""
    inputs = (*node.inputs, "")
    given = values.array(inputs[1]) if inputs[1] else node.get("axes")
    return None if given is None else [int(one) for one in given]


def _squared(values: Values, name: str) -> str | None:
    """What a value is the square of."""
    node = values.maker(name, "Pow", "Mul")
    if node is None:
        return None
    base, other = node.inputs
    twice = base == other if node.op == "Mul" else values.number(other) == 2
    return base if twice else None


def layer_bias(values: Values, node: Node) -> Replacement | None:
    """A vector that is added to a LayerNormalization becomes its bias."""
    if node.op != "Add":
        return None
    for made, bias in (node.inputs, node.inputs[::-1]):
        layer, vector = values.only(made, "LayerNormalization"), values.array(bias)
        if layer is None or vector is None or any(layer.inputs[2:]):
            continue
        scale = values.array(layer.inputs[1])
        if scale is not None and scale.shape == vector.shape:
            new = layer.replaced(inputs=(*layer.inputs, bias), outputs=node.outputs)
            return Replacement([new])
    return None


def average(values: Values, node: Node) -> Replacement | None:
    """The mean over all of an image, of two axes or more, is GlobalAveragePool."""
    if node.op != "ReduceMean" or not node.get("keepdims", 1):
        return None
    given = _axes(values, node)
    rank = values.rank(node.inputs[0]) if given else None
    if given is None or rank is None or rank < 4:
        return None
    if sorted(axis % rank for axis in given) != list(range(2, rank)):
        return None
    return Replacement([Node("GlobalAveragePool", node.inputs[:1], node.outputs, {}, node.name)])


FUNCTION_RULES: tuple[Rule, ...] = (
    activation,
    layer_normalization,
    layer_bias,
    rms_normalization,
    average,
)
