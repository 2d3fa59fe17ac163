"""Which values are kept in 8 bits, and which of them in the same format."""

from __future__ import annotations

from collections.abc import Set

from lowbit.graph.graph import Graph, Node, live, numbers
from lowbit.graph.operator import Array, operators
from lowbit.graph.writer import identity


def moves(graph: Graph, node: Node) -> bool:
    """Whether what a node makes has the format of what it reads: elements of it, zeros, or means of
    neighbours."""
    record = operators.get(node.op)

    def known(name: str) -> Array | None:
        return numbers(graph.constants[name]) if name in graph.constants else None

    condition = record.eight_bits_if
    kept = record.eight_bits in ("moved", "format")
    return kept and (condition is None or condition(known, node))


def readers_of_8_bits(graph: Graph, products: Set[str]) -> dict[str, tuple[str, ...]]:
    """By first output of each node that is to work on 8 bits, what it reads so.

    These are the `products`, named by their outputs, and the nodes between that can work on 8 bits
    too. It is found backwards, so a value that only float nodes read is in none of them.
    """
    read: dict[str, tuple[str, ...]] = {}
    wanted: set[str] = set()
    for node in reversed(graph.nodes):
        record = operators.get(node.op)
        inputs = record.data_inputs(node)
        for_8_bits = bool(wanted.intersection(node.outputs))
        if record.weight is not None:
            taken = node.outputs[0] in products
            inputs = inputs if for_8_bits else inputs[:1]  # the residual as the output
        elif record.eight_bits == "rescaled":
            taken = for_8_bits and not any(name in graph.constants for name in inputs)
        else:
            taken = for_8_bits and moves(graph, node)
        if taken:
            read[node.outputs[0]] = inputs
            wanted.update(name for name in inputs if name not in graph.constants)
    return read


def demanded(graph: Graph, products: Set[str]) -> frozenset[str]:
    """The values that are kept in 8 bits for the `products`. Constants are none of them."""
    read = readers_of_8_bits(graph, products).values()
    return frozenset(name for names in read for name in names if name not in graph.constants)


def sharing(graph: Graph, wanted: Set[str]) -> dict[str, str]:
    """By name of each value in `wanted`, one value that stands for all that have its format."""
    leader = {name: name for name in wanted}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for node in graph.nodes:
        if moves(graph, node):
            read = operators.get(node.op).data_inputs(node)
            same = [name for name in (*read, *node.outputs) if name in leader]
            for name in same[1:]:
                leader[find(name)] = find(same[0])
    return {name: find(name) for name in wanted}


def with_copies(graph: Graph, products: Set[str]) -> tuple[Graph, dict[str, str]]:
    """The graph with copies of the inputs and outputs that nodes read in 8 bits, so that they
    themselves stay in floats; and the copies' names."""
    read = readers_of_8_bits(graph, products)
    wanted = {name for names in read.values() for name in names}
    copies = {name: f"{name}.8bit" for name in (*graph.inputs, *graph.outputs) if name in wanted}
    nodes: list[Node] = []

    def copy(names: tuple[str, ...]) -> None:
        nodes.extend(identity(name, copies[name]) for name in names if name in copies)

    copy(graph.inputs)
    for node in graph.nodes:
        own = read.get(node.outputs[0], ())
        inputs = tuple(copies.get(name, name) if name in own else name for name in node.inputs)
        nodes.append(node.replaced(inputs=inputs))
        copy(node.outputs)
    return graph.replaced(nodes=live(nodes, graph.outputs)), copies


def only_for_attention(graph: Graph, products: Set[str]) -> frozenset[str]:
    """The values from the `products`, by their outputs, to the queries, keys and values of
    attention, which nobody else reads: it multiplies bfloat16 twice as fast as float32. Where not
    all three of an attention are such values, none of them is."""
    refused: set[str] = set()
    while True:
        wanted = _only_for(graph, refused)
        made: set[str] = set()
        for node in graph.nodes:
            record = operators.get(node.op)
            from_products = record.weight is not None and node.outputs[0] in products
            moved = moves(graph, node) and made.issuperset(record.data_inputs(node))
            if from_products or moved:
                made.update(wanted.intersection(node.outputs))
        found = {
            node.outputs[0] for node in graph.nodes
            if node.op == "Attention" and not made.issuperset(node.inputs[:3])
        }  # fmt: skip
        if found <= refused:
            return frozenset(made)
        refused |= found


def _only_for(graph: Graph, refused: Set[str]) -> set[str]:
    """The values that end in nothing but attentions, but those `refused`, and nodes that move."""
    wanted: set[str] = set()
    others = set(graph.outputs)
    for node in reversed(graph.nodes):
        taken: tuple[str, ...] = ()
        if node.op == "Attention" and node.outputs[0] not in refused:
            taken = node.inputs[:3]
        elif moves(graph, node) and wanted.issuperset(filter(None, node.outputs)):
            taken = operators.get(node.op).data_inputs(node)
        wanted.update(taken)
        others.update(set(node.inputs) - set(taken))
        others.update(node.inputs[3:] if node.op == "Attention" else ())
        wanted -= others
    return wanted - others
