"""Loops, branches and sequences of ONNX files whose counts are known, written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, naming, operators
from lowbit.registry import Registry

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

_TURNS = 4096  # of a loop that is written out, at most

_FEW = 4096  # numbers of a value that is followed
MOST_NODES = 1 << 17
"""That are written out, also in loops that turn out to have no known count."""

Names = dict[str, str]
Handler = Callable[["Unrolling", "NodeProto", Names], bool]  # False: the node stays
handlers: Registry[Handler] = Registry("operator that is written out")


def unrolled(graph: GraphProto, as_node: Callable[[NodeProto], Node]) -> None:
    """Write out, in place, what is known of control flow and sequences. What is not known stays.

    as_node: a node of ours for one of ONNX."""
    if not any(node.op_type in handlers.load() for node in graph.node):
        return
    unrolling = Unrolling(graph, as_node)
    unrolling.run(graph.node, {}, "")
    del graph.node[:]
    graph.node.extend(unrolling.nodes)


class Unrolling:
    """A graph on its way to one without subgraphs and sequences.

    known: few numbers that inputs do not change. sequences: the names of the tensors in them."""

    def __init__(self, graph: GraphProto, as_node: Callable[[NodeProto], Node]) -> None:
        self.nodes: list[NodeProto] = []
        self.known: dict[str, Array] = {}
        self.sequences: dict[str, list[str]] = {}
        self._graph = graph
        self._as_node = as_node
        self._scopes = 0
        self._written = 0
        self._take(graph, {})

    def run(self, nodes: Sequence[NodeProto], names: Names, scope: str) -> None:
        """Write nodes, with the names of a scope; `names` gets those of what they make."""
        from onnx import NodeProto

        for each in nodes:
            self._written += 1
            if self._written > MOST_NODES:
                raise ValueError(
                    f"written out, its loops are more than {MOST_NODES:,} nodes, as of "
                    f"{each.op_type} {each.name!r}: export it without loops"
                )
            node = NodeProto()
            node.CopyFrom(each)
            node.input[:] = [names.get(name, name) for name in each.input]
            names.update({name: name + scope for name in each.output if name})
            node.output[:] = [names.get(name, name) for name in each.output]
            node.name += scope if node.name else ""
            own = handlers.load().get(node.op_type) if not node.domain else None
            if own is None or not own(self, node, names):
                self.nodes.append(node)
                self._follow(node)

    def body(self, graph: GraphProto, names: Names, inputs: Sequence[str]) -> list[str]:
        """Write a subgraph, of these inputs; the names of its outputs."""
        self._scopes += 1
        scope, inner = f"/{self._scopes}", dict(names)
        inner.update(zip((one.name for one in graph.input), inputs, strict=True))
        self._take(graph, inner, scope)
        self.run(graph.node, inner, scope)
        return [inner.get(one.name, one.name) for one in graph.output]

    def add(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Write a node."""
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        self._follow(self.nodes[-1])
        return output

    def constant(self, value: Any, name: str) -> str:
        """Add a constant of the graph."""
        from onnx import numpy_helper

        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        self.known[name] = np.asarray(value)
        return name

    def same(self, source: str, name: str) -> None:
        """Give a tensor or a sequence another name, too."""
        if source in self.sequences:
            self.sequences[name] = list(self.sequences[source])
        else:
            self.add("Identity", [source], name)

    def position(self, node: NodeProto, number: int, default: int) -> int | None:
        """An input that is a position, or None if it is not known."""
        if len(node.input) <= number or not node.input[number]:
            return default
        known = self.known.get(node.input[number])
        return None if known is None else int(known)

    def size(self, name: str, axis: int) -> int | None:
        """How long an axis of a value of the graph is, if the file says it."""
        for one in (*self._graph.input, *self._graph.value_info, *self._graph.output):
            sizes = one.type.tensor_type.shape.dim
            if one.name == name and -len(sizes) <= axis < len(sizes):
                return sizes[axis].dim_value if sizes[axis].HasField("dim_value") else None
        return None

    def _take(self, graph: GraphProto, names: Names, scope: str = "") -> None:
        """Make the constants of a graph known, and those of a subgraph the graph's."""
        from onnx import numpy_helper

        for tensor in graph.initializer:
            if scope:
                names[tensor.name] = tensor.name + scope
                self.constant(numpy_helper.to_array(tensor), tensor.name + scope)
            elif np.prod(tensor.dims) <= _FEW:
                self.known[tensor.name] = numpy_helper.to_array(tensor)

    def _follow(self, node: NodeProto) -> None:
        """Compute what a node makes of few numbers that are known."""
        from onnx import helper, numpy_helper

        if node.op_type == "Constant":
            (attribute,) = node.attribute
            value = helper.get_attribute_value(attribute)
            array = numpy_helper.to_array(value) if attribute.name == "value" else np.array(value)
            self.known[node.output[0]] = array
            return
        inputs = [self.known.get(name) for name in node.input if name]
        if not inputs or node.op_type not in operators.names() or len(inputs) < len(node.input):
            return
        arrays = [array for array in inputs if array is not None]
        if len(arrays) < len(inputs) or sum(array.size for array in arrays) > _FEW:
            return
        record, own = operators.get(node.op_type), self._as_node(node)
        tensors = [Tensor(array.dtype.name, array.shape) for array in arrays]
        with naming(own, arrays):
            outputs = record.infer(own, tensors, arrays)
            if sum(prod(output.sizes) for output in outputs) > _FEW:
                return
            made = record.compute(own, *arrays)
        self.known.update(zip(node.output, map(np.asarray, made), strict=False))


def _get(node: NodeProto, name: str, default: Any = None) -> Any:
    from onnx import helper

    values = (helper.get_attribute_value(one) for one in node.attribute if one.name == name)
    return next(values, default)


@handlers.register("If")
def _if(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    condition = unrolling.known.get(next(iter(node.input), ""))
    branch = _get(node, "then_branch" if condition is not None and condition else "else_branch")
    if condition is None or branch is None:
        return False
    for source, name in zip(unrolling.body(branch, names, ()), node.output, strict=True):
        unrolling.same(source, name)
    return True


@handlers.register("Loop")
def _loop(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    """As often as is known before each turn."""
    trips, condition, *carried = (*node.input, "", "")[: max(2, len(node.input))]
    known, body = unrolling.known, _get(node, "body")
    count = int(known[trips]) if trips in known else None
    if body is None or (count is None and trips) or len(body.input) != 2 + len(carried):
        return False
    begin, scans = len(unrolling.nodes), list[list[str]]()
    name = next(filter(None, node.output), "loop")
    condition = condition or unrolling.constant(np.True_, f"{name}/true")
    turn = 0
    while condition in known and known[condition] and (count is None or turn < count):
        number = unrolling.constant(np.int64(turn), f"{name}/turn{turn}")
        condition, *made = unrolling.body(body, names, (number, condition, *carried))
        carried, scanned = made[: len(carried)], made[len(carried) :]
        scans.append(scanned)
        turn += 1
        if turn > _TURNS:
            break
    scanned_outputs = [one for one in node.output[len(carried) :] if one]
    if (
        turn > _TURNS
        or (condition not in known and turn != count)
        or (scanned_outputs and not turn)
    ):
        del unrolling.nodes[begin:]
        return False
    for source, output in zip(carried, node.output, strict=False):
        unrolling.same(source, output)
    for index, output in enumerate(node.output[len(carried) :]):
        _joined(unrolling, [scanned[index] for scanned in scans], output, 0, stacked=True)
    return True


def _joined(
    unrolling: Unrolling, parts: Sequence[str], output: str, axis: int, stacked: bool
) -> None:
    """Tensors one after another along an axis; stacked: along one that they do not have."""
    if stacked:
        axes = unrolling.constant(np.array([axis]), f"{output}/axis")
        parts = [
            unrolling.add("Unsqueeze", [part, axes], f"{output}/{number}")
            for number, part in enumerate(parts)
        ]
    unrolling.add("Concat", parts, output, axis=axis)


@handlers.register("Identity")
def _identity(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    if node.input[0] not in unrolling.sequences:
        return False
    unrolling.same(node.input[0], node.output[0])
    return True


@handlers.register("SequenceEmpty")
@handlers.register("SequenceConstruct")
def _construct(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    unrolling.sequences[node.output[0]] = list(node.input)
    return True


@handlers.register("SequenceInsert")
def _insert(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    parts = list(unrolling.sequences.get(node.input[0], ()))
    position = unrolling.position(node, 2, len(parts))
    if node.input[0] not in unrolling.sequences or position is None:
        return False
    parts.insert(position, node.input[1])
    unrolling.sequences[node.output[0]] = parts
    return True


@handlers.register("SequenceErase")
def _erase(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    parts, position = _element(unrolling, node)
    if position is None:
        return False
    unrolling.sequences[node.output[0]] = [*parts[:position], *parts[position + 1 :]]
    return True


@handlers.register("SequenceAt")
def _at(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    parts, position = _element(unrolling, node)
    if position is None:
        return False
    unrolling.add("Identity", [parts[position]], node.output[0])
    return True


def _element(unrolling: Unrolling, node: NodeProto) -> tuple[list[str], int | None]:
    """A sequence and a position in it, not negative; None: one of them is not known.
    ValueError: there is no such element."""
    parts = unrolling.sequences.get(node.input[0])
    position = unrolling.position(node, 1, -1)
    if parts is None or position is None:
        return [], None
    if not -len(parts) <= position < len(parts):
        raise ValueError(f"{node.op_type} {node.name!r}: no element {position} of {len(parts)}")
    return parts, position % len(parts)


@handlers.register("SequenceLength")
def _length(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    if node.input[0] not in unrolling.sequences:
        return False
    unrolling.constant(np.int64(len(unrolling.sequences[node.input[0]])), node.output[0])
    return True


@handlers.register("ConcatFromSequence")
def _concat(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    parts = unrolling.sequences.get(node.input[0])
    if not parts:
        return False
    _joined(unrolling, parts, node.output[0], _get(node, "axis"), bool(_get(node, "new_axis", 0)))
    return True


@handlers.register("SplitToSequence")
def _split(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    """Into parts of sizes that are known, or of one size, where it is known of how many."""
    from onnx import helper

    x, given, axis = node.input[0], (*node.input, "")[1], _get(node, "axis", 0)
    split, whole = (unrolling.known.get(given) if given else np.array(1)), unrolling.size(x, axis)
    if split is None or (not split.ndim and whole is None):
        return False
    sizes = split.tolist()
    if not split.ndim:
        count = whole or 0
        sizes = [min(sizes, count - first) for first in range(0, count, sizes)]
    output = node.output[0]
    parts = [f"{output}/{number}" for number in range(len(sizes))]
    lengths = unrolling.constant(np.array(sizes, np.int64), f"{output}/sizes")
    unrolling.nodes.append(helper.make_node("Split", [x, lengths], parts, name=output, axis=axis))
    if not given and not _get(node, "keepdims", 1):
        axes = unrolling.constant(np.array([axis]), f"{output}/axis")
        parts = [unrolling.add("Squeeze", [part, axes], f"{part}/element") for part in parts]
    unrolling.sequences[output] = parts
    return True


@handlers.register("SequenceMap")
def _map(unrolling: Unrolling, node: NodeProto, names: Names) -> bool:
    """The body once for each element of the first input, and of others that are sequences."""
    sequences, body = unrolling.sequences, _get(node, "body")
    if node.input[0] not in sequences or body is None:
        return False
    made = [
        unrolling.body(body, names, [
            sequences[name][number] if name in sequences else name for name in node.input
        ])
        for number in range(len(sequences[node.input[0]]))
    ]  # fmt: skip
    for index, output in enumerate(node.output):
        sequences[output] = [outputs[index] for outputs in made]
    return True
