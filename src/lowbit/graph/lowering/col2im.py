"""Windows summed where they lie, tap by tap."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, lowerings, strides_of
from lowbit.graph.lowering.elementwise import compute, plain
from lowbit.graph.lowering.shapes import further, integers, settled
from lowbit.graph.operators.col2im import summed_windows
from lowbit.graph.step import View


@lowerings.register("Col2Im")
def _col2im(lowering: Lowering, node: Node) -> None:
    """In an image as large as the windows reach, of which the output is a part."""
    x = plain(lowering, lowering.view(node.inputs[0]))
    image, block = (integers(lowering, node, number) for number in (1, 2))
    over, channels = summed_windows(node, x.shape, np.array(image), np.array(block))
    batch, rank = x.shape[0], len(over.size)
    reach = [n + b + a for n, b, a in zip(over.size, over.before, over.after, strict=True)]
    whole = lowering.fresh(Tensor("float32", (batch, channels, *reach)))
    compute(lowering, whole, [lowering.known_view(np.zeros(1, np.float32))], (0,))
    strides = strides_of((batch, channels, *over.kernel, *over.output))
    outer, inner = strides[:2], strides[2 + rank :]
    shape = (batch, channels, *over.output)
    steps = whole.strides[2:]
    moved = tuple(s * stride for s, stride in zip(over.stride, steps, strict=True))
    for tap in product(*map(range, over.kernel)):
        first = sum(t * s for t, s in zip(tap, strides[2:], strict=False))
        at = sum(t * d * s for t, d, s in zip(tap, over.dilation, steps, strict=True))
        part = View(replace(x.tensor, shape=shape), x.place, (*outer, *inner))
        target = View(replace(whole.tensor, shape=shape), whole.place, (*whole.strides[:2], *moved))
        target = further(target, at)
        compute(lowering, target, [target, further(part, first)], (0, 1, "add"))
    begin = sum(b * s for b, s in zip(over.before, steps, strict=True))
    cut = further(whole, begin)
    settled(lowering, node, View(replace(whole.tensor, shape=(batch, channels, *over.size)),
                                 cut.place, whole.strides))  # fmt: skip
