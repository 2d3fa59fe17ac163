"""A batch in slices: the first layers for some samples, then for the next ones.

What lies between the layers of a large batch is read from the third-level cache, or from memory.
Where it is larger than the weights, it is better to read those anew for every slice, which stays in
the second-level cache. (M. Alwani et al., "Fused-Layer CNN Accelerators", 2016.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lowbit.graph.graph import Graph, Node
from lowbit.graph.lower import Lowering, is_dense, order_of
from lowbit.graph.memory import arranged
from lowbit.graph.operator import operators
from lowbit.graph.step import Place, View, Word
from lowbit.isa import host
from lowbit.numerics import QTensor


def sliced(lowering: Lowering) -> int:
    """Add the steps of the first nodes, slice by slice, where that is of use; how many nodes these
    are. With several threads it is not: whole samples go to any of them."""
    graph = lowering.graph
    sizes = {graph.tensors[name].sizes[:1] for name in graph.inputs}
    batch = min(sizes)[0] if len(sizes) == 1 and () not in sizes else 1
    if batch == 1 or lowering.threads > 1:
        return 0
    count, samples = _choice(graph, batch, host.caches()["L2"] * 3 // 4)
    if samples == batch:
        return 0
    return count if _add(lowering, graph.nodes[:count], batch, samples) else 0


def _choice(graph: Graph, batch: int, room: int) -> tuple[int, int]:
    """How many nodes, and samples, so that the least is read from beyond `room`, bytes of a cache;
    (0, batch): whole layers do as well."""
    own = list(_alone(graph, batch))
    best, found = 0, (0, batch)
    for samples in (one for one in range(batch - 1, 0, -1) if batch % one == 0):
        gain = 0
        for count, (weights, each) in enumerate(own, 1):
            far = batch * each if samples * each > room else 0
            whole = batch * each if batch * each > room else 0
            gain += whole - far - weights * (batch // samples - 1)
            if gain > best:
                best, found = gain, (count, samples)
    return found


def _alone(graph: Graph, batch: int) -> Iterator[tuple[int, int]]:
    """Of the first nodes, as long as each treats samples alone and gives integers the same sums in
    every batch: bytes of their weights, and of what they read and write for a sample."""
    known = set(graph.inputs)
    for node in graph.nodes:
        used = [name for name in (*node.inputs, *node.outputs) if name not in graph.constants]
        used = [name for name in used if name]
        if not _treats_alone(graph, node, known, batch):
            return
        known.update(node.outputs)
        tensors = [graph.tensors[name] for name in used]
        each = sum(math.prod(one.sizes[1:]) * one.itemsize for one in tensors)
        weight = graph.constants.get((*node.inputs, "")[1])
        yield (weight.values.nbytes if isinstance(weight, QTensor) else 0), each


def _treats_alone(graph: Graph, node: Node, known: set[str], batch: int) -> bool:
    record = operators.get(node.op)
    if not record.samples or node.get("activations") or len(node.outputs) != 1:
        return False
    shape = graph.tensors[node.outputs[0]].sizes
    constants = [graph.constants[name] for name in node.inputs if name in graph.constants]
    read = [name for name in node.inputs if name and name not in graph.constants]
    if shape[:1] != (batch,) or not read or not known.issuperset(read):
        return False
    if any(len(graph.tensors[name].shape) != len(shape) for name in read):
        return False
    if record.samples == "broadcast":
        return all(one.shape[:1] == (1,) for one in constants if len(one.shape) == len(shape))
    if record.weight is not None:  # of floats, the order of sums may depend on their number
        whole = bool(constants) and isinstance(constants[0], QTensor)
        return whole and graph.tensors[node.inputs[0]].scale is not None
    return node.inputs[0] in known


def _add(lowering: Lowering, nodes: tuple[Node, ...], batch: int, samples: int) -> bool:
    """Lower some nodes for a slice, and add its steps for every one; False: not done, as what they
    make does not lie sample by sample."""
    graph, before = lowering.graph, set(lowering.buffers)
    made = {name for node in nodes for name in node.outputs}
    later = {name for node in graph.nodes[len(nodes) :] for name in node.inputs}
    results = tuple(sorted(made & (later | set(graph.outputs))))
    tensors = dict(graph.tensors)
    for name in made | set(graph.inputs):
        tensors[name] = replace(tensors[name], shape=(samples, *tensors[name].shape[1:]))
    views = {name: replace(lowering.views[name], tensor=tensors[name]) for name in graph.inputs}
    part = graph.replaced(nodes=nodes, tensors=tensors, outputs=results)
    one = replace(lowering, graph=part, views=dict(views), steps=[])
    one.run()
    steps = one.steps
    ends = {name: one.views[name] for name in results}
    for view in ends.values():
        order, place = order_of(view), view.place
        size = math.prod(view.shape) * view.tensor.itemsize
        if order[0] or not is_dense(view, order) or place.buffer in before or place.offset:
            return False
        if lowering.buffers.get(place.buffer) != size:
            return False
    # Where the buffers of a slice are, and how far those of the next one lie behind.
    places = {v.place.buffer: (Place(v.place.buffer), _bytes(v)) for v in views.values()}
    for name, view in ends.items():
        buffer, each = view.place.buffer, _bytes(view)
        if buffer not in places:  # it may be that of several results
            places[buffer] = lowering.scratch(batch // samples * each, name), each
        lowering.views[name] = View(graph.tensors[name], places[buffer][0], view.strides)
    arena = arranged([step.buffers() for step in steps], lowering.buffers, set(places))
    room = lowering.scratch(arena.size, "slice")
    places |= {name: (room + offset, 0) for name, offset in arena.offsets.items()}

    def moved(word: Word, number: int) -> Word:
        if not isinstance(word, Place) or word.buffer not in places:
            return word
        start, each = places[word.buffer]
        return start + (word.offset + number * each)

    for number in range(batch // samples):
        for step in steps:
            words = {name: moved(word, number) for name, word in step.words.items()}
            lowering.steps.append(replace(step, words=words))
    return True


def _bytes(view: View) -> int:
    """From a slice to the next one."""
    return view.shape[0] * view.strides[0] * view.tensor.itemsize
