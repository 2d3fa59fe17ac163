"""Fewer nodes: what is known is computed, what does nothing is left out, and nodes that are one
operator in parts become that operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, live
from lowbit.graph.operator import Array, naming, operators
from lowbit.graph.passes.functions import FUNCTION_RULES
from lowbit.graph.passes.infer import facts
from lowbit.graph.passes.linear import LINEAR_RULES
from lowbit.graph.passes.rewriting import Replacement, Values, rewritten
from lowbit.numerics import QTensor
from lowbit.weights.panels import PackedMatrix

_FOLDED_BYTES = 1 << 30
_GROWTH = 16  # times a file's own constants, which several nodes of a chain may widen or copy


def most_bytes(graph: Graph) -> int:
    """What the constants of a network that was read may take, once those that follow from others
    are computed: a file of few bytes can ask for any number."""
    return _GROWTH * _bytes(graph.constants.values()) + _FOLDED_BYTES


def _bytes(constants: Iterable[Constant]) -> int:
    """What they take; a repeated element each time, views of other arrays nothing."""
    return sum(one.nbytes for one in constants if not _is_view(one))


def _is_view(constant: Constant) -> bool:
    if not isinstance(constant, np.ndarray) or constant.base is None:
        return False
    repeated = [n for n, stride in zip(constant.shape, constant.strides, strict=True) if not stride]
    return prod(repeated) <= 1


# Parts of what was put together are read where they come from.


def slice_of_concat(values: Values, node: Node) -> Replacement | None:
    """A Slice of a Concat that lies in one of its parts becomes that of the part: what the other
    parts are then decides neither its format nor when it is there."""
    if node.op != "Slice" or len(node.inputs) < 4:
        return None
    made, *inputs = node.inputs
    whole, limits = values.maker(made, "Concat"), [values.array(name) for name in inputs]
    given = [one for one in limits if one is not None and one.size == 1]
    if whole is None or len(given) < len(inputs) or not values.views:
        return None
    start, end, axis, step = (*(int(one.item()) for one in given), 1)[:4]
    shapes = [[view[name].sizes for name in whole.inputs] for view in values.views]
    rank = len(shapes[0][0])
    if step != 1 or axis % rank != whole.get("axis") % rank:
        return None
    lengths = {tuple(shape[axis] for shape in view) for view in shapes}
    if len(lengths) > 1:
        return None
    bounds = [*accumulate(lengths.pop(), initial=0)]
    start, end, _ = slice(start, end).indices(bounds[-1])
    for name, (first, last) in zip(whole.inputs, pairwise(bounds), strict=True):
        if first <= start < end <= last:
            new = {f"{node.outputs[0]}.{word}": np.array([at - first])
                   for word, at in (("start", start), ("end", end))}  # fmt: skip
            return Replacement([node.replaced(inputs=(name, *new, *node.inputs[3:]))], new)
    return None


def folded(graph: Graph, most: int | None = None) -> Graph:
    """The same network in fewer nodes, of constants of so many bytes; by default `most_bytes`.

    Results differ by rounding only: where a batch normalization or a factor goes into a weight, and
    where a formula becomes the operator it stands for. One thing is more: rows of dynamically
    quantized products get scales of their own, where ONNX has one for the whole tensor."""
    most = most_bytes(graph) if most is None else most
    while True:
        before = graph
        graph = without_copies(without_identities(with_constants(graph, most=most)))
        graph = rewritten(graph, (*FUNCTION_RULES, *LINEAR_RULES, slice_of_concat))
        if graph is before or graph.nodes == before.nodes:
            return graph


def with_constants(
    graph: Graph, known: Mapping[str, Array] | None = None, most: int | None = None
) -> Graph:
    """Nodes of nothing but constants, computed; where all sizes are numbers also those of shapes,
    which are among what is `known`, if `facts` were asked before.

    most: bytes of all constants; by default some more than they have. A node beyond that stays.
    ValueError: it can't, since no kernel serves it. DequantizeLinear of a constant stays:
    fold_qdq.py makes a QTensor of it."""
    room = _FOLDED_BYTES
    if most is not None:
        room = most - _bytes(graph.constants.values())
    values, constants = Values(graph), dict(graph.constants)
    if known is None and not graph.open_sizes:
        known = facts(graph)[1]
    if known is not None:
        quantized = _quantized_floats(graph, known)
        constants.update({
            name: one for name, one in known.items() if name not in constants | quantized
        })  # fmt: skip
    nodes = []
    for node in graph.nodes:
        if all(name in constants for name in node.outputs if name):
            continue
        if node.op == "DequantizeLinear" or not _all_known(node, values, constants):
            nodes.append(node)
            continue
        read = [constants[name] if name else None for name in node.inputs]
        arrays = [one for one in read if not isinstance(one, QTensor | PackedMatrix)]
        if len(arrays) == len(read) and _fits(node, arrays, room):
            with naming(node, arrays):
                made = operators.get(node.op).compute(node, *arrays)
            named = zip(node.outputs, map(np.asarray, made), strict=False)
            outputs = {name: array for name, array in named if name}
            room -= _bytes(outputs.values())
            constants |= outputs
        elif node.op == "Transpose" and isinstance(read[0], QTensor) and _swaps(node, read[0]):
            constants[node.outputs[0]] = read[0].T
        else:
            nodes.append(node)
    if len(nodes) == len(graph.nodes):
        return graph
    return graph.replaced(nodes=live(nodes, graph.outputs), constants=constants)


def _fits(node: Node, inputs: Sequence[Array | None], room: int) -> bool:
    """Whether what a node makes of constants takes no more than so many bytes. ValueError: it
    takes more, and no kernel can make it when the network runs."""
    record = operators.get(node.op)
    tensors = [
        array if array is None else Tensor(array.dtype.name, array.shape) for array in inputs
    ]
    with naming(node, inputs):
        outputs = record.infer(node, tensors, inputs)
        size = sum(prod(output.sizes) * output.itemsize for output in outputs)
        if size > room and record.lowering is None:
            raise ValueError(
                f"it makes {size:,} bytes of nothing but constants, and {max(room, 0):,} are left "
                "of what they may take: make it an input of the network"
            )
    return size <= room


def _quantized_floats(graph: Graph, known: Mapping[str, Array]) -> dict[str, Array]:
    """Of what is known, the floats that come of quantized constants: those keep their integers."""
    floats = {name for name, one in graph.constants.items() if isinstance(one, QTensor)}
    for node in graph.nodes:
        if node.op == "DequantizeLinear" or floats.intersection(node.inputs):
            made = (name for name in node.outputs if name in known)
            floats.update(name for name in made if known[name].dtype.kind == "f")
    return {name: known[name] for name in floats & known.keys()}


def _all_known(node: Node, values: Values, constants: Mapping[str, Constant]) -> bool:
    """Whether a node's inputs are constants, and its outputs not rounded to a format."""
    if not node.inputs or any(values.formatted(name) for name in node.outputs):
        return False
    return all(name in constants for name in node.inputs if name)


def _swaps(node: Node, weight: QTensor) -> bool:
    return weight.values.ndim == 2 and tuple(node.get("perm", (1, 0))) == (1, 0)


def without_identities(graph: Graph) -> Graph:
    """Without nodes whose output is their first input."""
    values, nodes = Values(graph), []
    tensors, renamed = dict(graph.tensors), dict[str, str]()
    for node in graph.nodes:
        node = node.replaced(inputs=tuple(renamed.get(name, name) for name in node.inputs))
        if not _does_nothing(values, node):
            nodes.append(node)
            continue
        (source, *_), (made, *_) = node.inputs, node.outputs
        if not values.leaves(made):
            renamed[made] = source
            continue
        # An output keeps its name: it is given to what makes it, where that is a node.
        before = next((one for one in nodes if source in one.outputs), None)
        if before is None or values.leaves(source):
            nodes.append(node)
            continue
        if source in tensors:
            tensors[made] = tensors[source]
        renamed = {old: made if new == source else new for old, new in renamed.items()}
        renamed[source] = made
        nodes = [_renamed(one, source, made) for one in nodes]
    if len(nodes) == len(graph.nodes):
        return graph
    return graph.replaced(nodes=tuple(nodes), tensors=tensors)


def without_copies(graph: Graph) -> Graph:
    """Without nodes that compute what another one does."""
    values, first = Values(graph), dict[str, Node]()
    nodes, renamed = [], dict[str, str]()
    for node in graph.nodes:
        node = node.replaced(inputs=tuple(renamed.get(name, name) for name in node.inputs))
        formats = [graph.tensors.get(name) for name in node.outputs]
        key = repr((node.op, node.inputs, sorted(node.attributes.items()), formats))
        same = first.setdefault(key, node)
        if same is node or any(values.leaves(name) for name in node.outputs):
            nodes.append(node)
        else:
            renamed.update(zip(node.outputs, same.outputs, strict=True))
    if len(nodes) == len(graph.nodes):
        return graph
    return graph.replaced(nodes=tuple(nodes))


def _renamed(node: Node, old: str, new: str) -> Node:
    if old not in node.inputs and old not in node.outputs:
        return node
    inputs, outputs = (
        tuple(new if name == old else name for name in names)
        for names in (node.inputs, node.outputs)
    )
    return node.replaced(inputs=inputs, outputs=outputs)


def _does_nothing(values: Values, node: Node) -> bool:
    source, made = node.inputs[0] if node.inputs else "", node.outputs[0]
    if any(node.outputs[1:]) or not source:
        return False
    tensors = values.graph.tensors
    if values.formatted(made) and tensors.get(source) != tensors[made]:
        return False
    idle = operators.get(node.op).idle
    if idle is None:
        return False

    def dtype() -> str:
        return values.views[0][source].dtype if values.views else ""

    return idle(node, lambda: values.same_shape(source, made), dtype)
