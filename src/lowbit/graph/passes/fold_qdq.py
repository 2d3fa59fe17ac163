"""QuantizeLinear and DequantizeLinear become formats of values, and constants with scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, live
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.rewriting import Replacement, Values, rewritten
from lowbit.graph.writer import identity
from lowbit.numerics import QTensor, int_format

_INTEGERS = ("int8", "uint8")
UNKNOWN = ("?",)
"""The shape of a tensor that only says a format; infer.inferred finds the shape."""


def absorbed(graph: Graph) -> Graph:
    """The graph with formats in place of pairs of QuantizeLinear and DequantizeLinear.

    Integers with a scale that are constants become QTensors, int32 biases float32. What is
    quantized in another way (per channel, to other types, or for an operator on integers) stays.
    The result is the same. ValueError: a scale is not positive and finite."""
    graph = rewritten(graph, (_without_integers, _moved))
    graph = _with_weights(graph)
    return _with_formats(graph)


def _without_integers(values: Values, node: Node) -> Replacement | None:
    """QLinearConv and QLinearMatMul: operators on what their integers stand for."""
    op = node.op.removeprefix("QLinear")
    if node.op not in ("QLinearConv", "QLinearMatMul"):
        return None
    x, xs, xz, w, ws, wz, ys, yz, *rest = node.inputs
    x_scale, w_scale = values.array(xs), values.array(ws)
    if x_scale is None or w_scale is None or values.array(ys) is None:
        return None
    out, constants, nodes = node.outputs[0], dict[str, Constant](), []

    def read(name: str, scale: str, zero: str, to: str) -> str:
        value = f"{out}.{to}"
        nodes.append(Node("DequantizeLinear", (name, scale, zero), (value,), along, value))
        return value

    along = {"axis": 0 if node.op == "QLinearConv" else -1}  # of scales, where there are several
    inputs = [read(x, xs, xz, "x"), read(w, ws, wz, "weight")]
    if rest and rest[0]:
        scale = f"{out}.bias_scale"
        constants[scale] = np.asarray(x_scale.reshape(()) * w_scale, np.float32)
        inputs.append(read(rest[0], scale, "", "bias"))
    nodes.append(Node(op, tuple(inputs), (f"{out}.float",), node.attributes, node.name))
    nodes.append(Node("QuantizeLinear", (f"{out}.float", ys, yz), (out,), {}, f"{out}.quantize"))
    return Replacement(nodes, constants)


def _moved(values: Values, node: Node) -> Replacement | None:
    """Integers with a scale that are only moved: in their place what they stand for."""
    record = operators.get(node.op)
    moved = record.eight_bits == "moved" and record.data == 1
    if not moved or not node.inputs or len(node.outputs) != 1:
        return None
    made = values.maker(node.inputs[0], "QuantizeLinear")
    if made is None or len(made.inputs) < 3:
        return None
    scale = values.array(made.inputs[1])
    if scale is None or scale.size != 1:
        return None
    (x, *others), out = node.inputs, node.outputs[0]
    real, output = f"{out}.real", f"{out}.moved"
    pair = made.inputs[1:3]
    return Replacement([
        Node("DequantizeLinear", (x, *pair), (real,), {}, real),
        node.replaced(inputs=(real, *others), outputs=(output,)),
        Node("QuantizeLinear", (output, *pair), (out,), {}, f"{out}.quantize"),
    ])  # fmt: skip


def _with_weights(graph: Graph) -> Graph:
    """DequantizeLinear of constants, done."""
    values, nodes, constants = Values(graph), [], dict(graph.constants)
    for node in graph.nodes:
        made = _constant(values, node) if node.op == "DequantizeLinear" else None
        if made is None:
            nodes.append(node)
        else:
            constants[node.outputs[0]] = made
    return graph.replaced(nodes=tuple(nodes), constants=constants)


def _scale(values: Values, node: Node) -> Array | None:
    """The scale of a QuantizeLinear or DequantizeLinear, if it is known. ValueError: it is none, as
    some tools write it for values with infinities."""
    scale = values.array(node.inputs[1])
    if scale is not None and not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(
            f"{node.op} {node.name!r} of {node.inputs[0]!r}: a scale has to be positive and finite,"
            f" and one is {scale.min()}; leave what it belongs to in float"
        )
    return scale


def _constant(values: Values, node: Node) -> Constant | None:
    """What a DequantizeLinear makes of a constant of 8 bits or int32."""
    q, scale = values.array(node.inputs[0]), _scale(values, node)
    zero_name = (*node.inputs, "")[2]
    zero = values.array(zero_name) if zero_name else np.zeros((), np.int32)
    if q is None or scale is None or zero is None or scale.dtype != np.float32 or scale.ndim > 1:
        return None
    axis = node.get("axis", 1) % q.ndim if scale.size > 1 else None
    scale = scale.reshape(() if axis is None else -1)
    zero = np.broadcast_to(zero.reshape(() if zero.size == 1 else -1), scale.shape)
    if q.dtype.name in _INTEGERS:
        return QTensor(q, scale, zero.astype(np.int32), int_format(q.dtype.name), axis)
    if q.dtype != np.int32:
        return None
    spread = [-1 if i == axis else 1 for i in range(q.ndim)] if axis is not None else ()
    steps = q - zero.astype(np.int32).reshape(spread)
    return steps.astype(np.float32) * scale.reshape(spread)


def _with_formats(graph: Graph) -> Graph:
    """Pairs that round a value to one format: an Identity whose output has it, or the format of
    what makes the value, where nothing else reads it."""
    values = Values(graph)
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    tensors, renamed, dropped = dict(graph.tensors), dict[str, str](), set[str]()
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.outputs[0] in dropped:
            continue
        node = node.replaced(inputs=tuple(renamed.get(name, name) for name in node.inputs))
        pairs = readers.get(node.outputs[0], []) if node.op == "QuantizeLinear" else []
        tensor = _format(values, node, pairs)
        if tensor is None:
            nodes.append(node)
            continue
        made = [pair.outputs[0] for pair in pairs]
        kept = next((name for name in made if values.leaves(name)), made[0])
        source, dropped = node.inputs[0], dropped.union(made)
        others = [name for name in made if name != kept]
        renamed.update(dict.fromkeys((one for one in others if not values.leaves(one)), kept))
        if tensors.get(source) == tensor and source not in graph.inputs and not values.leaves(kept):
            renamed.update(dict.fromkeys(made, source))
        elif _takes_format(values, graph, source, tensors):
            nodes = [_naming(one, source, kept) for one in nodes]
            tensors[kept] = tensor
        else:
            nodes.append(identity(source, kept, node.name))
            tensors[kept] = tensor
        nodes += [identity(kept, one, one) for one in others if values.leaves(one)]
    return graph.replaced(nodes=live(nodes, graph.outputs), tensors=tensors)


def _format(values: Values, node: Node, pairs: Iterable[Node]) -> Tensor | None:
    """The format to which a QuantizeLinear and all that reads it round a value, if they do."""
    pairs = list(pairs)
    if not pairs or values.leaves(node.outputs[0]):
        return None
    found = _parameters(values, node)
    same = (one.op == "DequantizeLinear" and _parameters(values, one) == found for one in pairs)
    return found if found is not None and all(same) else None


def _parameters(values: Values, node: Node) -> Tensor | None:
    """A format by its scale and zero point, where each is one constant number."""
    scale, zero_name = _scale(values, node), (*node.inputs, "")[2]
    zero = values.array(zero_name) if zero_name else np.zeros((), np.uint8)
    if scale is None or zero is None or scale.dtype != np.float32:
        return None
    if scale.size != 1 or zero.size != 1 or zero.dtype.name not in _INTEGERS:
        return None
    if not zero_name and node.get("output_dtype", "uint8") != "uint8":
        return None
    return Tensor(zero.dtype.name, UNKNOWN, scale.item(), int(zero.item()))


def _takes_format(values: Values, graph: Graph, source: str, tensors: dict[str, Tensor]) -> bool:
    """Whether what makes a value may round it itself."""
    made = source in values.producers and source not in graph.inputs
    return made and values.uses[source] == 1 and source not in tensors


def _naming(node: Node, old: str, new: str) -> Node:
    if old not in node.outputs:
        return node
    return node.replaced(outputs=tuple(new if name == old else name for name in node.outputs))


def by_channel(graph: Graph) -> Graph:
    """Weights of one scale for all get it once a channel, which is what kernels take."""
    constants = dict(graph.constants)
    for node in graph.nodes:
        record = operators.get(node.op).weight
        weight = constants.get(node.inputs[1]) if record and not record.outputs else None
        if isinstance(weight, QTensor) and weight.axis is None and weight.group_size is None:
            n = weight.shape[0]
            scale, zero = np.repeat(weight.scale, n), np.repeat(weight.zero_point, n)
            constants[node.inputs[1]] = replace(weight, scale=scale, zero_point=zero, axis=0)
    return graph.replaced(constants=constants)
