"""Graphs to graphs that mean the same: pure functions."""

from __future__ import annotations

from dataclasses import replace

from lowbit.graph.graph import Graph
from lowbit.graph.passes.fold import folded, most_bytes
from lowbit.graph.passes.fold_qdq import absorbed, by_channel
from lowbit.graph.passes.fuse import fused
from lowbit.graph.passes.infer import facts
from lowbit.graph.passes.linear import bias_of_runs
from lowbit.graph.passes.rewriting import rewritten


def simplified(graph: Graph) -> Graph:
    """What every importer does with what it read: fold, absorb, fold again, fuse.

    Once a graph is bound it may get simpler: shapes are then known. ValueError: its sizes are all
    known, and shapes do not fit."""
    most = most_bytes(graph)
    graph = rewritten(absorbed(folded(graph, most)), (bias_of_runs,))
    graph = fused(by_channel(folded(graph, most)))
    if graph.open_sizes:
        return graph
    found = facts(graph)[0]
    tensors = {name: replace(one, shape=found[name].shape) for name, one in graph.tensors.items()}
    return graph.replaced(tensors=tensors)
