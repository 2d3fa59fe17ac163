"""Products with constants: MatMul and Gemm become Linear, and what follows goes into the weight."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from lowbit.graph.graph import Constant, Node
from lowbit.graph.operator import Array, Weight, operators
from lowbit.graph.passes.rewriting import Replacement, Rule, Values
from lowbit.numerics import QTensor, int_format


def transposed(weight: Array | QTensor) -> Constant:
    """A matrix [K, N] as [N, K], in rows."""
    if isinstance(weight, np.ndarray):
        return np.ascontiguousarray(weight.T)
    turned = weight.T
    return QTensor(
        np.ascontiguousarray(turned.values), turned.scale, turned.zero_point, turned.format,
        turned.axis, turned.group_size, turned.group_axis,
    )  # fmt: skip


def _of_floats(weight: Constant | None) -> TypeGuard[Array | QTensor]:
    """Whether it is a weight, of floats or of what stands for them."""
    if isinstance(weight, np.ndarray):
        return weight.dtype.kind not in "iub"
    return isinstance(weight, QTensor)


def matmul(values: Values, node: Node) -> Replacement | None:
    """MatMul with a constant matrix on the right."""
    if node.op != "MatMul":
        return None
    weight = values.constant(node.inputs[1])
    if not _of_floats(weight) or len(weight.shape) != 2:
        return None
    if values.constant(node.inputs[0]) is not None:
        return None
    name = f"{node.inputs[1]}.T"
    made = Node("Linear", (node.inputs[0], name, ""), node.outputs, {}, node.name)
    return Replacement([made], {name: transposed(weight)})


def gemm(values: Values, node: Node) -> Replacement | None:
    """Gemm with a constant B, and with a constant C of one row or none."""
    if node.op != "Gemm" or node.get("transA", 0):
        return None
    weight, c = values.constant(node.inputs[1]), (*node.inputs, "")[2]
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    if not _of_floats(weight) or (alpha != 1 and isinstance(weight, QTensor)):
        return None
    name, constants = node.inputs[1], dict[str, Constant]()
    if not node.get("transB", 0):
        name, weight = f"{name}.T", transposed(weight)
        constants[name] = weight
    if alpha != 1 and isinstance(weight, np.ndarray):
        name = f"{node.outputs[0]}.weight"
        constants[name] = (weight * alpha).astype(weight.dtype)
    bias = values.array(c) if c else None
    if c and (bias is None or (bias.size > 1 and bias.shape[-1:] != (bias.size,))):
        return None
    if bias is not None:
        c = f"{node.outputs[0]}.bias"
        row = np.broadcast_to(bias.reshape(-1), weight.shape[:1])
        constants[c] = (row * beta).astype(bias.dtype)
    made = Node("Linear", (node.inputs[0], name, c), node.outputs, {}, node.name)
    return Replacement([made], constants)


def bias(values: Values, node: Node) -> Replacement | None:
    """A constant of one number a channel that is added to a product becomes its bias."""
    if node.op != "Add":
        return None
    for made, added in (node.inputs, node.inputs[::-1]):
        layer, vector = values.layer(made), values.array(added)
        if layer is None or vector is None or layer.get("post_ops"):
            continue
        if any((*layer.inputs, "", "")[2:4]) or not _by_channel(values, layer, vector):
            continue
        name = f"{node.outputs[0]}.bias"
        new = layer.replaced(inputs=(*layer.inputs[:2], name), outputs=node.outputs)
        return Replacement([new], {name: vector.reshape(-1)})
    return None


def bias_of_runs(values: Values, node: Node) -> Replacement | None:
    """A bias that is no constant, which kernels do not take, is added behind the product."""
    if operators.get(node.op).weight is None or node.get("post_ops"):
        return None
    x, weight, bias, residual = (*node.inputs, "", "")[:4]
    known = values.constant(weight)
    if not bias or residual or known is None or values.constant(bias) is not None:
        return None
    out, shape = node.outputs[0], np.array([-1, *(1,) * (len(known.shape) - 2)])
    product, column, sizes = f"{out}.product", f"{out}.bias", f"{out}.sizes"
    return Replacement([
        node.replaced(inputs=(x, weight), outputs=(product,)),
        Node("Reshape", (bias, sizes), (column,), {}, column),
        Node("Add", (product, column), (out,), {}, f"{node.name}.bias"),
    ], {sizes: shape})  # fmt: skip


def _channels(values: Values, layer: Node) -> int | None:
    """How many channels a product has, if its weight is a constant."""
    weight = values.constant(layer.inputs[1])
    if weight is None:
        return None
    axis = _record(layer).outputs
    return weight.shape[axis] * (layer.get("group", 1) if axis else 1)


def _record(layer: Node) -> Weight:
    found = operators.get(layer.op).weight
    assert found is not None
    return found


def _by_channel(values: Values, layer: Node, vector: Array) -> bool:
    """Whether an array broadcasts to a product's output as one number a channel."""
    count, weight = _channels(values, layer), values.constant(layer.inputs[1])
    if count is None or weight is None or vector.size != count:
        return False
    if _record(layer).channels == -1:
        rank = values.rank(layer.outputs[0]) if vector.ndim > 1 else 1
        return vector.shape[-1] == count and rank is not None and vector.ndim <= rank
    after = (1,) * (len(weight.shape) - 2)
    return vector.shape in ((count, *after), (1, count, *after))


def batch_normalization(values: Values, node: Node) -> Replacement | None:
    """A batch normalization behind a product with a constant weight goes into that weight."""
    if node.op != "BatchNormalization" or node.get("training_mode", 0) or any(node.outputs[1:]):
        return None
    layer = values.layer(node.inputs[0])
    if layer is None or layer.get("post_ops") or layer.get("activations"):
        return None
    if _record(layer).channels == -1 and values.rank(node.inputs[0]) != 2:
        return None
    weight, given = values.array(layer.inputs[1]), (*layer.inputs, "")[2]
    old = values.array(given) if given else np.zeros(())
    vectors = [values.array(name) for name in node.inputs[1:]]
    if weight is None or old is None or any(one is None for one in vectors):
        return None
    scale, shift, mean, variance = (one.astype(np.float64) for one in vectors if one is not None)
    names = [f"{node.outputs[0]}.{part}" for part in ("weight", "bias")]
    new = layer.replaced(inputs=(layer.inputs[0], *names), outputs=node.outputs)
    with np.errstate(all="ignore"):  # A variance that is none gives NaN here as it does there.
        factor = scale / np.sqrt(variance + float(node.get("epsilon", 1e-5)))
        constants = {
            names[0]: _scaled(layer, weight, factor),
            names[1]: ((old - mean) * factor + shift).astype(weight.dtype),
        }
    return Replacement([new], constants)


def _scaled(layer: Node, weight: Array, factor: Array) -> Array:
    """A weight with a factor for each channel of the output."""
    if not _record(layer).outputs:
        return (weight * factor.reshape(-1, *(1,) * (weight.ndim - 1))).astype(weight.dtype)
    groups = layer.get("group", 1)  # The weight is [group · C, O, ...].
    parts = weight.reshape(groups, -1, *weight.shape[1:])
    shape = (groups, 1, weight.shape[1], *(1,) * (weight.ndim - 2))
    return (parts * factor.reshape(shape)).astype(weight.dtype).reshape(weight.shape)


_INTEGER = {"MatMulInteger": "Linear", "ConvInteger": "Conv"}


def dynamic(values: Values, node: Node) -> Replacement | None:
    """What ONNX Runtime writes for a dynamically quantized product: the integers of
    DynamicQuantizeLinear times a constant, as floats, times both scales. A convolution stays one of
    floats, with a weight of 8 bits."""
    if node.op != "Mul":
        return None
    for product, scales in (node.inputs, node.inputs[::-1]):
        cast, both = values.maker(product, "Cast"), values.maker(scales, "Mul")
        integer = None if cast is None else values.maker(cast.inputs[0], *_INTEGER)
        if both is None or integer is None or len(integer.inputs) < 3:
            continue
        source = values.maker(integer.inputs[0], "DynamicQuantizeLinear")
        if source is None or integer.inputs[2] != source.outputs[2]:
            continue
        scale = [name for name in both.inputs if name != source.outputs[1]]
        weight = len(scale) == 1 and _weight(values, integer, scale[0])
        if isinstance(weight, QTensor):
            name = f"{node.outputs[0]}.weight"
            op, attributes = _INTEGER[integer.op], integer.attributes
            if op == "Linear":
                attributes = {"activations": "dynamic"}
            inputs = source.inputs[0], name, ""
            made = Node(op, inputs, node.outputs, attributes, node.name)
            return Replacement([made], {name: weight})
    return None


def _weight(values: Values, product: Node, scale: str) -> QTensor | None:
    """The right operand of a product of integers, with scales; [K, N] as [N, K]."""
    integers, steps = values.array(product.inputs[1]), values.array(scale)
    if integers is None or steps is None or integers.ndim < 2:
        return None
    if product.op == "MatMulInteger":
        if integers.ndim > 2:
            return None
        integers = integers.T
    zero = values.array(product.inputs[3]) if len(product.inputs) > 3 else np.zeros((), np.int32)
    n = len(integers)
    if zero is None or integers.dtype.name not in ("int8", "uint8") or steps.size not in (1, n):
        return None
    return QTensor(
        np.ascontiguousarray(integers),
        np.broadcast_to(steps.reshape(-1), n).astype(np.float32),
        np.broadcast_to(zero.reshape(-1), n).astype(np.int32),
        int_format(integers.dtype.name),
        axis=0,
    )


LINEAR_RULES: tuple[Rule, ...] = (dynamic, batch_normalization, gemm, matmul, bias)
