"""Operators that no kernel serves as they are, as several that kernels serve.

It is done where all sizes are known, right before nodes become steps. Between the parts numbers are
float32; what only moves keeps its format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, numbers
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.composite import Composite
from lowbit.graph.operators.shapes import space_to_depth_order
from lowbit.graph.passes.infer import inferred
from lowbit.graph.passes.recurrent import recurrent


class Parts:
    """What becomes of one node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.node = node
        self.attributes: dict[str, Any] = dict(node.attributes)
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {}
        self.formats: dict[str, Tensor] = {}
        self._graph = graph

    def tensor(self, name: str) -> Tensor:
        """What a value of the graph is."""
        known = self._graph.constants.get(name)
        if known is None:
            return self._graph.tensors[name]
        return Tensor(known.dtype.name if isinstance(known, np.ndarray) else "float32", known.shape)

    def known(self, name: str) -> np.ndarray | None:
        """A constant's numbers, if it is one."""
        found = self._graph.constants.get(name)
        return found if isinstance(found, np.ndarray) else None

    def numbers(self, name: str) -> Array | None:
        """What a constant stands for, of the graph's or of those that were added here."""
        found = self.constants.get(name, self._graph.constants.get(name))
        return None if found is None else numbers(found)

    def _new(self, what: str) -> str:
        """A name that nothing has: what becomes of a node may be taken apart again."""
        name = f"{next(filter(None, self.node.outputs))} {what}"
        while name in self._graph.tensors or name in self._graph.constants:
            name += "'"
        return name

    def constant(self, value: Any) -> str:
        name = self._new(f"part {len(self.constants)}")
        self.constants[name] = np.asarray(value)
        return name

    def add(self, op: str, *inputs: str, like: Tensor | None = None, **attributes: Any) -> str:
        """A node in the middle; its output's name. like: whose format it keeps."""
        name = self._new(f"step {len(self.nodes)}")
        self.nodes.append(Node(op, inputs, (name,), attributes, self.node.name or name))
        if like is not None and like.scale is not None:
            self.formats[name] = like
        return name

    def end(self, op: str, *inputs: str, output: int = 0, **attributes: Any) -> bool:
        """The last node, or the last of what makes this output."""
        made = self.node.outputs[output]
        self.nodes.append(Node(op, inputs, (made,), attributes, self.node.name or made))
        return True

    def shaped(self, x: str, shape: Sequence[int], like: Tensor | None = None) -> str:
        sizes = self.constant(np.array(shape, np.int64))
        return self.add("Reshape", x, sizes, like=like, allowzero=1)

    def end_shaped(self, x: str, shape: Sequence[int]) -> bool:
        return self.end("Reshape", x, self.constant(np.array(shape, np.int64)), allowzero=1)


Decompose = Callable[[Parts, Node], bool]  # False: the node stays


def decomposed(graph: Graph) -> Graph:
    """A graph of which every value's tensor is known (`inferred`), in operators with kernels."""
    changed = True
    while changed:
        nodes, changed = list[Node](), False
        constants, tensors = dict(graph.constants), dict(graph.tensors)
        for node in graph.nodes:
            parts = Parts(graph, node)
            operator = operators.get(node.op)
            rule = operator.expand if isinstance(operator, Composite) else RULES.get(node.op)
            if rule is None or not rule(parts, node):
                nodes.append(node)
                continue
            changed = True
            nodes += parts.nodes
            constants |= parts.constants
            tensors |= parts.formats
        if changed:
            made = graph.replaced(nodes=tuple(nodes), constants=constants, tensors=tensors)
            graph = inferred(made)
    return graph


def _chain(op: str) -> Decompose:
    """Two by two."""

    def rule(parts: Parts, node: Node) -> bool:
        if len(node.inputs) == 2 and node.op == op:
            return False
        if len(node.inputs) == 1:
            return parts.end("Identity", *node.inputs)
        first, *middle, last = node.inputs
        for name in middle:
            first = parts.add(op, first, name)
        return parts.end(op, first, last)

    return rule


def _mean(parts: Parts, node: Node) -> bool:
    first, *others = node.inputs
    whole = parts.add("Sum", first, *others) if others else first
    return parts.end("Div", whole, parts.constant(np.float32(len(node.inputs))))


def _gemm(parts: Parts, node: Node) -> bool:
    a, b, c = (*node.inputs, "")[:3]
    a = parts.add("Transpose", a, perm=(1, 0), like=parts.tensor(a)) if node.get("transA") else a
    b = parts.add("Transpose", b, perm=(1, 0), like=parts.tensor(b)) if node.get("transB") else b
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    if alpha == 1 and not c:
        return parts.end("MatMul", a, b)
    made = parts.add("MatMul", a, b)
    if alpha != 1:
        factor = parts.constant(np.float32(alpha))
        if not c:
            return parts.end("Mul", made, factor)
        made = parts.add("Mul", made, factor)
    if beta != 1:
        c = parts.add("Mul", c, parts.constant(np.float32(beta)))
    return parts.end("Add", made, c)


def _einsum(parts: Parts, node: Node) -> bool:
    """Of two operands with sums over what both have: a product of matrices."""
    left, _, made = node.get("equation").replace(" ", "").partition("->")
    read = left.split(",")
    if not made or len(read) != 2 or any(len(set(one)) < len(one) for one in (*read, made)):
        return False
    a, b = read
    batch = [x for x in made if x in a and x in b]
    summed = [x for x in a if x in b and x not in made]
    rows, columns = ([x for x in made if x in one and x not in batch] for one in (a, b))
    if (
        len(batch) + len(summed) + len(rows) != len(a)
        or len(columns) + len(batch) != len(made) - (len(rows))
        or len(batch) + len(summed) + len(columns) != len(b)
    ):
        return False
    sizes: dict[str, int] = {}
    matrices = []
    for name, labels, order, tail in (
        (node.inputs[0], a, [batch, rows, summed], (rows, summed)),
        (node.inputs[1], b, [batch, summed, columns], (summed, columns)),
    ):
        tensor = parts.tensor(name)
        sizes |= dict(zip(labels, tensor.sizes, strict=True))
        perm = tuple(labels.index(x) for group in order for x in group)
        moved = parts.add("Transpose", name, perm=perm, like=tensor)
        shape = [sizes[x] for x in batch]
        shape += [int(np.prod([sizes[x] for x in group])) for group in tail]
        matrices.append(parts.shaped(moved, shape, tensor))
    product = parts.add("MatMul", *matrices)
    ordered = [*batch, *rows, *columns]
    shaped = parts.shaped(product, [sizes[x] for x in ordered])
    return parts.end("Transpose", shaped, perm=tuple(ordered.index(x) for x in made))


def _between(before: str, op: str, after: str) -> Decompose:
    """A reduction of what an operator makes, and one that follows."""

    def rule(parts: Parts, node: Node) -> bool:
        x, *axes = node.inputs
        x = parts.add(before, *((x, x) if before == "Mul" else (x,)))
        if not after:
            return parts.end(op, x, *axes, **parts.attributes)
        made = parts.add(op, x, *axes, **parts.attributes)
        return parts.end(after, made)

    return rule


def _log_sum_exp(parts: Parts, node: Node) -> bool:
    x, *axes = node.inputs
    kept = {**parts.attributes, "keepdims": 1}
    greatest = parts.add("ReduceMax", x, *axes, **kept)
    powers = parts.add("Exp", parts.add("Sub", x, greatest))
    total = parts.add("ReduceSum", powers, *axes, **parts.attributes)
    shape = parts.tensor(node.outputs[0]).sizes
    return parts.end("Add", parts.add("Log", total), parts.shaped(greatest, shape))


def _as_floats(parts: Parts, node: Node) -> bool:
    """Sums and the like of integers, exact up to 2^24, are made of float32."""
    tensor = parts.tensor(node.inputs[0])
    if tensor.scale is not None or tensor.dtype not in ("int64", "int32", "bool"):
        return False
    x = parts.add("Cast", node.inputs[0], to="float32")
    made = parts.add(node.op, x, *node.inputs[1:], **parts.attributes)
    if tensor.dtype == "bool":  # of no numbers at all the greatest is -inf, and false
        return parts.end("Greater", made, parts.constant(np.zeros((), np.float32)))
    return parts.end("Cast", made, to=parts.tensor(node.outputs[0]).dtype)


def _either(first: Decompose, second: Decompose) -> Decompose:
    return lambda parts, node: first(parts, node) or second(parts, node)


def _lp(parts: Parts, node: Node) -> bool:
    p, x = node.get("p", 2), node.inputs[0]
    if p not in (1, 2):
        return False
    axes = parts.constant(np.array([node.get("axis", -1)]))
    norm = parts.add(f"ReduceL{p}", x, axes)
    tiny = parts.constant(np.finfo(np.float32).tiny)  # so that zeros stay what they are
    return parts.end("Div", x, parts.add("Max", norm, tiny))


def _arg_min(parts: Parts, node: Node) -> bool:
    x = node.inputs[0]
    turned = parts.add("Not" if parts.tensor(x).dtype == "bool" else "Neg", x)
    return parts.end("ArgMax", turned, **parts.attributes)


def _depth_to_space(parts: Parts, node: Node) -> bool:
    x, block = node.inputs[0], node.get("blocksize")
    tensor = parts.tensor(x)
    n, channels, high, wide = tensor.sizes
    columns = node.get("mode", "DCR") == "DCR"
    inner = (
        (block, block, channels // block**2) if columns else (channels // block**2, block, block)
    )
    split = parts.shaped(x, (n, *inner, high, wide), tensor)
    perm = (0, 3, 4, 1, 5, 2) if columns else (0, 1, 4, 2, 5, 3)
    moved = parts.add("Transpose", split, perm=perm, like=tensor)
    return parts.end_shaped(moved, (n, channels // block**2, high * block, wide * block))


def _space_to_depth(parts: Parts, node: Node) -> bool:
    x, block = node.inputs[0], node.get("blocksize")
    tensor = parts.tensor(x)
    n, channels, high, wide = tensor.sizes
    split = parts.shaped(x, (n, channels, high // block, block, wide // block, block), tensor)
    perm = space_to_depth_order(node)
    moved = parts.add("Transpose", split, perm=perm, like=tensor)
    return parts.end_shaped(moved, (n, channels * block**2, high // block, wide // block))


def _tile(parts: Parts, node: Node) -> bool:
    repeats = parts.known(node.inputs[1])
    if repeats is None:
        return False
    x = node.inputs[0]
    tensor = parts.tensor(x)
    pairs = [(1, n) for n in tensor.sizes]
    whole = [(int(r), n) for r, n in zip(repeats, tensor.sizes, strict=True)]
    split = parts.shaped(x, [n for pair in pairs for n in pair], tensor)
    shape = parts.constant(np.array([n for pair in whole for n in pair], np.int64))
    wide = parts.add("Expand", split, shape, like=tensor)
    return parts.end_shaped(wide, [r * n for r, n in whole])


def _triangle(parts: Parts, node: Node) -> bool:
    x, *given = (name for name in node.inputs if name)
    k = parts.known(given[0]) if given else np.zeros(1)
    if k is None:
        return False
    tensor = parts.tensor(x)
    cut = np.triu if node.get("upper", 1) else np.tril
    inside = cut(np.ones(tensor.sizes[-2:], bool), int(np.ravel(k)[0]))
    zero = np.zeros((), "float32" if tensor.scale is not None else tensor.dtype)
    return parts.end("Where", parts.constant(inside), x, parts.constant(zero))


def _instance(parts: Parts, node: Node) -> bool:
    groups = parts.tensor(node.inputs[0]).sizes[1]
    return parts.end("GroupNormalization", *node.inputs, num_groups=groups, **parts.attributes)


RULES: Mapping[str, Decompose] = {
    "Sum": _chain("Add"),
    "Min": _chain("Min"),
    "Max": _chain("Max"),
    "Mean": _mean,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "ReduceMin": _either(_as_floats, _between("Neg", "ReduceMax", "Neg")),
    "ReduceL1": _between("Abs", "ReduceSum", ""),
    "ReduceL2": _between("Mul", "ReduceSum", "Sqrt"),
    "ReduceSumSquare": _between("Mul", "ReduceSum", ""),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceSum": _as_floats,
    "ReduceMax": _as_floats,
    "ReduceMean": _as_floats,
    "MaxPool": _as_floats,
    "AveragePool": _as_floats,
    "LpNormalization": _lp,
    "ArgMin": _arg_min,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Tile": _tile,
    "Trilu": _triangle,
    "InstanceNormalization": _instance,
    "RNN": recurrent,
    "GRU": recurrent,
    "LSTM": recurrent,
}
