"""Windows put back where they were taken from, and summed."""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.operators.shapes import Moving, ints
from lowbit.graph.operators.windows import windows
from lowbit.product.geometry import Geometry


def summed_windows(
    node: Node, x: tuple[int, ...], image: Array, block: Array
) -> tuple[Geometry, int]:
    """Where the windows of x [N, C · taps, L] lie, and the channels C. ValueError: they do not
    fit."""
    over = windows(node, ints(image), ints(block))
    taps = math.prod(over.kernel)
    if len(x) != 3 or x[1] % taps or x[2] != math.prod(over.output):
        raise ValueError(
            f"expected [N, C times {taps}, {math.prod(over.output)}] of windows, got {list(x)}"
        )
    return over, x[1] // taps


def _col2im(node: Node, x: Array, image: Array, block: Array) -> Array:
    over, channels = summed_windows(node, x.shape, image, block)
    windowed = x.reshape(len(x), channels, *over.kernel, *over.output).astype(np.float64)
    reach = [n + b + a for n, b, a in zip(over.size, over.before, over.after, strict=True)]
    whole = np.zeros((len(x), channels, *reach))
    for tap in product(*map(range, over.kernel)):
        places = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, over.dilation, over.output, over.stride, strict=True)
        )
        whole[(..., *places)] += windowed[(slice(None), slice(None), *tap)]
    inside = tuple(slice(b, b + n) for b, n in zip(over.before, over.size, strict=True))
    return whole[(..., *inside)].astype(x.dtype)


def _shape(node: Node, x: tuple[int, ...], image: Array, block: Array) -> tuple[int, ...]:
    return x[0], summed_windows(node, x, image, block)[1], *ints(image)


operators.add("Col2Im", Moving(_col2im, 1, _shape))
