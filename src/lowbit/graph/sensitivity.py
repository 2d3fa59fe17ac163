"""Which layers suffer from few bits, and which bits each gets within a budget of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowbit.graph.calibrate import Calibration
from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Constant, Graph
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.quantize import Choice, Setting, decide, quantized
from lowbit.numerics import QTensor

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class Sensitivity:
    """What a layer alone does to the outputs of a network that else is in float32.

    - layer: its name. choice: what it was, see `passes.quantize.Choice`.
    - sqnr: the outputs' signal-to-quantization-noise ratio, in decibels; infinite where nothing
      differs. nbytes: of its weight, with scales and zero points.
    """

    layer: str
    choice: Choice
    sqnr: float
    nbytes: int

    @property
    def noise(self) -> float:
        """The squared error of the outputs, in units of the outputs' squares."""
        return 10 ** (-self.sqnr / 10)


def layers(graph: Graph) -> dict[str, list[str]]:
    """By name, the outputs of each layer's nodes: of all that read one weight."""
    by_weight: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for node in graph.nodes:
        if operators.get(node.op).weight and node.inputs[1] in graph.constants:
            weight = node.inputs[1]
            by_weight.setdefault(weight, []).append(node.outputs[0])
            name = node.name or node.outputs[0]
            names.setdefault(weight, name if name not in names.values() else weight)
    return {names[weight]: outputs for weight, outputs in by_weight.items()}


def sensitivity(
    calibration: Calibration,
    batches: Sequence[Mapping[str, Array]],
    choices: Sequence[Choice] = ("int8",),
    setting: Setting | None = None,
) -> tuple[Sensitivity, ...]:
    """Each layer of a calibration's graph as each of the choices, the one of most noise first.

    calibration: of all products, which has seen nothing yet. A layer that is called twice is
    quantized in both places. One that cannot be what is chosen is left out. It takes a run of the
    network for each layer, choice and batch. ValueError: there are no batches, or one holds NaN or
    infinity.
    """
    exact = [calibration.observe(batch) for batch in batches]
    calibration.check()
    seen, found = calibration.smoothed(), []
    for layer, outputs in layers(seen.graph).items():
        for choice in choices:
            decisions = decide(seen.graph, dict.fromkeys(outputs, choice), "float")
            if not any(one.output in outputs and one.choice == choice for one in decisions):
                continue
            made = quantized(seen.graph, decisions, seen.ranges, setting, seen.seen, seen.means)
            got = (evaluate(made, batch, compute=seen.compute) for batch in batches)
            weight = next(node.inputs[1] for node in made.nodes if node.outputs[0] in outputs)
            size = nbytes(made.constants[weight])
            found.append(Sensitivity(layer, choice, sqnr(got, exact), size))
    return tuple(sorted(found, key=lambda one: one.sqnr))


def sqnr(got: Iterable[Outputs], exact: Iterable[Outputs]) -> float:
    """The ratio, in decibels, of the squares of the exact outputs to those of their errors.

    What is not finite in the exact ones is no error where it is the same (a masked score), else one
    without limit."""
    signal = noise = 0.0
    for ours, wanted in zip(got, exact, strict=True):
        for name, one in wanted.items():
            right, have = one.astype(np.float64), ours[name].astype(np.float64)
            finite = np.isfinite(right)
            if not np.array_equal(right[~finite], have[~finite], equal_nan=True):
                return -math.inf
            signal += float(np.square(right[finite]).sum())
            noise += float(np.square(have[finite] - right[finite]).sum())
    if not math.isfinite(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise and signal else math.inf


def nbytes(weight: Constant) -> int:
    """Of a weight as it is stored: two 4-bit integers are a byte, zero points too."""
    if not isinstance(weight, QTensor):
        return weight.nbytes
    zeros = weight.zero_point.size if weight.zero_point.any() else 0
    return -(-weight.values.size * weight.format.bits // 8) + weight.scale.nbytes + zeros


def mixed(found: Sequence[Sensitivity], budget: int) -> dict[str, Choice]:
    """What each layer is to be, so that all weights together take at most `budget` bytes.

    found: of every layer in all its choices, float among them. Noise is taken as additive, as
    errors of different layers hardly depend on each other: each layer starts as its smallest
    choice, and those that save most noise per byte grow while there is room. (The greedy way
    through the lower convex hulls: Sinha, Zoltners 1979, "The Multiple-Choice Knapsack Problem".)

    ValueError: the smallest choices do not fit.
    """
    hulls: dict[str, list[Sensitivity]] = {}
    for one in found:
        hulls.setdefault(one.layer, []).append(one)
    hulls = {layer: _hull(points) for layer, points in hulls.items()}
    chosen = {layer: points[0] for layer, points in hulls.items()}
    left = budget - sum(one.nbytes for one in chosen.values())
    if left < 0:
        raise ValueError(
            f"a budget of {budget:,} bytes is too small: the layers take {budget - left:,} at least"
        )
    steps = [pair for points in hulls.values() for pair in pairwise(points)]
    for before, after in sorted(steps, key=lambda pair: _gain(*pair), reverse=True):
        cost = after.nbytes - before.nbytes
        if chosen[before.layer] is before and cost <= left:
            chosen[before.layer], left = after, left - cost
    return {layer: one.choice for layer, one in chosen.items()}


def _gain(before: Sensitivity, after: Sensitivity) -> float:
    """The noise that is saved per byte."""
    return (before.noise - after.noise) / (after.nbytes - before.nbytes)


def _hull(points: Sequence[Sensitivity]) -> list[Sensitivity]:
    """Those of more and more bytes and less noise, each step of which gains less per byte."""
    hull: list[Sensitivity] = []
    for one in sorted(points, key=lambda one: (one.nbytes, one.noise)):
        if hull and (one.noise >= hull[-1].noise or one.nbytes == hull[-1].nbytes):
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull
