"""What all values of a graph are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lowbit.graph.graph import Graph, Node, Tensor, numbers
from lowbit.graph.operator import Array, naming, operators
from lowbit.graph.parts import Parts
from lowbit.numerics import QTensor
from lowbit.weights.panels import PackedMatrix

_FEW = 4096  # Numbers that are followed through nodes: those of shapes and indices.


def inferred(graph: Graph) -> Graph:
    """The graph with the tensors of all its values but constants; formats stay.

    Numbers that can be known are followed, so that shapes may be computed from shapes. ValueError
    names the node whose inputs do not fit, or the input whose sizes are not known yet."""
    return described(graph, facts(graph)[0])


def described(graph: Graph, tensors: Mapping[str, Tensor]) -> Graph:
    """The graph with the tensors, of `facts`, of all its values but constants."""
    return graph.replaced(
        tensors={name: one for name, one in tensors.items() if name not in graph.constants}
    )


def facts(graph: Graph) -> tuple[dict[str, Tensor], dict[str, Array]]:
    """What all values are, constants too, and the numbers of those that inputs do not change."""
    tensors: dict[str, Tensor] = {}
    known: dict[str, Array] = {}
    for name, constant in graph.constants.items():
        if isinstance(constant, QTensor):
            tensors[name] = Tensor("float32", constant.shape)
            if math.prod(constant.shape) <= _FEW:
                known[name] = numbers(constant)
        elif isinstance(constant, PackedMatrix):
            tensors[name] = Tensor("float32", constant.shape[::-1])
        else:
            known[name] = constant
            tensors[name] = Tensor(constant.dtype.name, constant.shape)
    for name in graph.inputs:
        tensors[name] = graph.tensors[name]
        _ = tensors[name].sizes
    for node in graph.nodes:
        every = _outputs(node, tensors, known)
        if any(node.outputs[len(every) :]):
            raise ValueError(f"{node.op} {node.name!r} makes {len(every)} values, not more")
        for name, made in zip(node.outputs, every, strict=False):
            given = graph.tensors.get(name)
            if given is not None:
                made = replace(given, shape=made.shape)
            tensors[name] = made
        known.update(_numbers(node, tensors, known))
    return tensors, known


def views(graph: Graph) -> tuple[dict[str, Tensor], ...]:
    """What all values are: once where all sizes are numbers, else for two choices of the others.

    What is the same in both holds for all but very odd sizes. None at all: shapes of one of the
    choices do not fit, or depend on data."""
    named = graph.open_sizes
    if not named:
        return (facts(graph)[0],)
    found, free = [], replace(graph, ranges={}, conditions=())  # sizes are of no call
    for first in (3, 31):
        # Multiples of 32, which networks that halve images several times ask for.
        sizes = {size: 32 * (first + 2 * index) for index, size in enumerate(named)}
        try:
            found.append(facts(free.bound(sizes))[0])
        except ValueError:
            return ()
    return tuple(found)


def _outputs(node: Node, tensors: dict[str, Tensor], known: dict[str, Array]) -> tuple[Tensor, ...]:
    # Numbers that are kept in bfloat16 are float32 to operators, as `evaluate` has them.
    read = [
        replace(one, dtype="float32") if one and one.dtype == "bfloat16" else one
        for one in (tensors[name] if name else None for name in node.inputs)
    ]
    with naming(node, read):
        return operators.get(node.op).infer(node, read, [known.get(name) for name in node.inputs])


def _numbers(node: Node, tensors: dict[str, Tensor], known: dict[str, Array]) -> dict[str, Array]:
    """What a node makes of few numbers that are known, or of nothing but a shape."""
    made = [tensors[name] for name in node.outputs if name]
    if any(one.scale is not None or math.prod(one.sizes) > _FEW for one in made):
        return {}
    record, read = operators.get(node.op), list[Array | None]()
    for name in node.inputs:
        one = known.get(name)
        if one is None and name and record.sizes_only:
            one = np.broadcast_to(np.zeros((), np.int8), tensors[name].sizes)
        if name and one is None:
            return {}
        read.append(one)
    with naming(node, read):
        values = record.compute(node, *read)
    made = zip(node.outputs, values, strict=False)
    return {name: np.asarray(value) for name, value in made if name}


# Operators that no kernel serves as they are, as several that kernels serve.
#
# It is done where all sizes are known, right before nodes become steps. Between the parts numbers
# are float32; what only moves keeps its format.


def decomposed(graph: Graph) -> Graph:
    """A graph of which every value's tensor is known (`inferred`), in operators with kernels."""
    changed = True
    while changed:
        nodes, changed = list[Node](), False
        constants, tensors = dict(graph.constants), dict(graph.tensors)
        for node in graph.nodes:
            parts = Parts(graph, node)
            rule = operators.get(node.op).parts
            with naming(node, graph.described(node)):
                replaced = rule is not None and rule(parts, node)
            if not replaced:
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
