"""Images read at places between their pixels, which a grid of coordinates names."""

from __future__ import annotations

from functools import reduce
from itertools import product

from lowbit.graph.graph import Node
from lowbit.graph.operator import Sizes, operators
from lowbit.graph.operators.composite import Composite
from lowbit.graph.parts import Parts

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

    def plus(self, x: str, value: float) -> str:
        return self.parts.add(x, self.parts.float32(value))

    def times(self, x: str, value: float) -> str:
        return self.parts.mul(x, self.parts.float32(value))

    def clipped(self, x: str) -> str:
        return self.parts.clip(x, self.parts.float32(0), self.parts.float32(self.size - 1))

    def inside(self, x: str) -> str:
        """Coordinates outside of the image as `padding_mode` has them."""
        if self.padding == "reflection":
            low = 0.0 if self.aligned else -0.5
            span = self.size - 1 if self.aligned else self.size
            if not span:
                return self.times(x, 0)
            parts, period = self.parts, self.parts.float32(2 * span)
            away = parts.abs(parts.sub(x, parts.float32(low)))
            turn = parts.mod(away, period, fmod=True)
            x = self.plus(parts.minimum(turn, parts.sub(period, turn)), low)
        return x if self.padding == "zeros" else self.clipped(x)

    def taps(self, coordinate: str) -> list[Tap]:
        """The pixels that count, as int64, and their weights."""
        parts, span = self.parts, self.size - 1 if self.aligned else self.size
        x = self.plus(self.times(coordinate, span / 2), (self.size - 1) / 2)
        if self.mode in _NEAREST:
            return [self.tap(parts.round(self.inside(x)), "")]
        x = x if self.mode in _CUBIC else self.inside(x)
        first = parts.floor(x)
        rest = parts.sub(x, first)
        if self.mode in _CUBIC:
            return [self.tap(self.plus(first, step), self.cubic(rest, step))
                    for step in (-1, 0, 1, 2)]  # fmt: skip
        left = parts.sub(parts.float32(1), rest)
        return [self.tap(first, left), self.tap(self.plus(first, 1), rest)]

    def cubic(self, rest: str, step: int) -> str:
        """The weight of the pixel that lies so many steps on: a polynomial of its distance."""
        a, outer = _SHARPNESS, step in (-1, 2)
        away = self.parts.abs(self.parts.sub(rest, self.parts.float32(step)))
        weights = (a, -5 * a, 8 * a, -4 * a) if outer else (a + 2, -a - 3, 0.0, 1.0)
        made = self.parts.float32(weights[0])
        for weight in weights[1:]:
            made = self.plus(self.parts.mul(made, away), weight)
        return made

    def tap(self, pixel: str, weight: str) -> Tap:
        if self.mode in _CUBIC:
            pixel = self.inside(pixel)
        near = self.clipped(pixel)
        weight = weight or self.plus(self.times(near, 0), 1)
        if self.padding == "zeros":
            weight = self.parts.where(self.parts.equal(near, pixel), weight, self.parts.float32(0))
        return self.parts.cast(near, "int64"), weight


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
    last = parts.transpose(x, (0, *range(2, rank + 2), 1))
    flat = parts.reshape(grid, (batch, -1, rank))
    axes = [
        _Axis(parts, node, size).taps(parts.gather(flat, parts.ints([rank - 1 - axis]), axis=2))
        for axis, size in enumerate(image)
    ]
    total = ""
    for taps in product(*axes):
        places = parts.concat([place for place, _ in taps], axis=2)
        weight = reduce(parts.mul, (weight for _, weight in taps))
        part = parts.mul(parts.op("GatherND", last, places, batch_dims=1), weight)
        total = parts.add(total, part) if total else part
    turned = parts.transpose(total, (0, 2, 1))
    return parts.end(parts.shaped(turned, (batch, channels, *out)))


def _sizes(node: Node, x: Sizes, grid: Sizes) -> Sizes:
    return *x[:2], *grid[1:-1]


operators.add("GridSample", Composite(parts=_parts, shape=_sizes, dtype="float32"))
