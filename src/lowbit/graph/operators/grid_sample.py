"""Images read at places between their pixels, which a grid of coordinates names."""

from __future__ import annotations

from itertools import product

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Sizes, operators
from lowbit.graph.operators.composite import Composite, Parts

_NEAREST, _LINEAR, _CUBIC = {"nearest"}, {"bilinear", "linear"}, {"bicubic", "cubic"}
_SHARPNESS = -0.75  # of the cubic convolution (Keys 1981), as PyTorch has it
Tap = tuple[str, str]


class _Axis:
    """What is computed of the coordinates along one axis."""

    def __init__(self, parts: Parts, node: Node, size: int) -> None:
        self.parts, self.size = parts, size
        self.padding = node.get("padding_mode", "zeros")
        self.mode = node.get("mode", "linear")
        self.aligned = bool(node.get("align_corners", 0))

    def number(self, value: float) -> str:
        return self.parts.constant(np.float32(value))

    def op(self, op: str, x: str, value: float) -> str:
        return self.parts.add(op, x, self.number(value))

    def clipped(self, x: str) -> str:
        return self.parts.add("Clip", x, self.number(0), self.number(self.size - 1))

    def inside(self, x: str) -> str:
        """Coordinates outside of the image as `padding_mode` has them."""
        if self.padding == "reflection":
            low = 0.0 if self.aligned else -0.5
            span = self.size - 1 if self.aligned else self.size
            if not span:
                return self.op("Mul", x, 0)
            away = self.parts.add("Abs", self.op("Sub", x, low))
            turn = self.parts.add("Mod", away, self.number(2 * span), fmod=1)
            back = self.parts.add("Sub", self.number(2 * span), turn)
            x = self.op("Add", self.parts.add("Min", turn, back), low)
        return x if self.padding == "zeros" else self.clipped(x)

    def taps(self, coordinate: str) -> list[Tap]:
        """The pixels that count, as int64, and their weights."""
        span = self.size - 1 if self.aligned else self.size
        x = self.op("Add", self.op("Mul", coordinate, span / 2), (self.size - 1) / 2)
        if self.mode in _CUBIC:
            first = self.parts.add("Floor", x)
            rest = self.parts.add("Sub", x, first)
            return [self.tap(self.op("Add", first, step), self.cubic(rest, step))
                    for step in (-1, 0, 1, 2)]  # fmt: skip
        x = self.inside(x)
        if self.mode in _NEAREST:
            return [self.tap(self.parts.add("Round", x), "")]
        first = self.parts.add("Floor", x)
        rest = self.parts.add("Sub", x, first)
        left = self.parts.add("Sub", self.number(1), rest)
        return [self.tap(first, left), self.tap(self.op("Add", first, 1), rest)]

    def cubic(self, rest: str, step: int) -> str:
        """The weight of the pixel that lies so many steps on: a polynomial of its distance."""
        a, outer = _SHARPNESS, step in (-1, 2)
        away = self.parts.add("Abs", self.op("Sub", rest, step))
        weights = (a, -5 * a, 8 * a, -4 * a) if outer else (a + 2, -a - 3, 0.0, 1.0)
        made = self.number(weights[0])
        for weight in weights[1:]:
            made = self.op("Add", self.parts.add("Mul", made, away), weight)
        return made

    def tap(self, pixel: str, weight: str) -> Tap:
        if self.mode in _CUBIC:
            pixel = self.inside(pixel)
        near = self.clipped(pixel)
        weight = weight or self.op("Add", self.op("Mul", near, 0), 1)
        if self.padding == "zeros":
            there = self.parts.add("Equal", near, pixel)
            weight = self.parts.add("Where", there, weight, self.number(0))
        return self.parts.add("Cast", near, to="int64"), weight


def _parts(parts: Parts, node: Node) -> bool:
    """x [N, C, D1, ..., Dr] at coordinates of grid [N, O1, ..., Or, r], the last axis first: from
    -1 to 1, which are the centres of the outermost pixels (align_corners) or their outer edges.

    Attributes: mode, padding_mode ("zeros", "border", "reflection"), align_corners. It is the sum
    over the pixels around each coordinate of their values by their weights, where all channels of a
    pixel are read at once."""
    x, grid = node.inputs
    batch, channels, *image = parts.tensor(x).sizes
    rank, out = len(image), parts.tensor(grid).sizes[1:-1]
    if node.get("mode", "linear") not in _NEAREST | _LINEAR | _CUBIC:
        return False
    last = parts.add("Transpose", x, perm=(0, *range(2, rank + 2), 1))
    flat = _shaped(parts, grid, (batch, -1, rank))
    axes = [
        _Axis(parts, node, size).taps(
            parts.add("Gather", flat, parts.constant(np.array([rank - 1 - axis])), axis=2)
        )
        for axis, size in enumerate(image)
    ]
    total = ""
    for taps in product(*axes):
        places = parts.add("Concat", *(place for place, _ in taps), axis=2)
        weight = taps[0][1]
        for _, other in taps[1:]:
            weight = parts.add("Mul", weight, other)
        read = parts.add("GatherND", last, places, batch_dims=1)
        part = parts.add("Mul", read, weight)
        total = parts.add("Add", total, part) if total else part
    turned = parts.add("Transpose", total, perm=(0, 2, 1))
    shape = parts.constant(np.array([batch, channels, *out]))
    return parts.end("Reshape", turned, shape, allowzero=1)


def _shaped(parts: Parts, x: str, shape: tuple[int, ...]) -> str:
    return parts.add("Reshape", x, parts.constant(np.array(shape)))


def _sizes(node: Node, x: Sizes, grid: Sizes) -> Sizes:
    return *x[:2], *grid[1:-1]


operators.add("GridSample", Composite(parts=_parts, shape=_sizes, dtype="float32"))
