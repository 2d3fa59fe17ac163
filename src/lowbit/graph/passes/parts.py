"""Parts of what was put together are read where they come from."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.passes.rewriting import Replacement, Values


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
