"""Runs a float graph over batches, and watches what quantization needs to know of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowbit.graph.evaluate import Compute, evaluate
from lowbit.graph.graph import Graph, Node
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.quantize import Decision, observed
from lowbit.graph.passes.sequence_axes import with_positions
from lowbit.graph.passes.weights import rows, smoothed, smoothings
from lowbit.numerics.methods import Activations
from lowbit.numerics.observers import Observer, observers


@dataclass
class Calibration:
    """What was observed of a float, fused graph.

    - ranges: by value. seen: of the inputs of products, by the products' outputs; only where
      `with_inputs`.
    - with_means: whether the means of the channels of what products read are kept too, in `means`.
    - smooth: the share, alpha, of outliers that `smoothed` moves into weights; None: it moves none.
    - mask: an input [batch, length] that is 0 at positions which only fill, as after the end of a
      sentence: what values are there is not seen (`passes.positions`).
    - compute: what computes operators faster than their definition does, by name.
    """

    graph: Graph
    decisions: tuple[Decision, ...]
    observer: str = "minmax"
    options: Mapping[str, Any] = field(default_factory=dict)
    with_inputs: bool = False
    with_means: bool = False
    smooth: float | None = None
    mask: str | None = None
    compute: Mapping[str, Compute] | None = None
    batches: int = field(default=0, init=False)
    ranges: dict[str, Observer] = field(init=False)
    seen: dict[str, Activations] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.mask is not None and self.mask not in self.graph.inputs:
            known = ", ".join(self.graph.inputs)
            raise ValueError(f"no input is called {self.mask!r}, which mask names; known: {known}")
        kind, minmax = observers.get(self.observer), observers.get("minmax")
        names = observed(self.graph, self.decisions)
        names = sorted(names, key=lambda name: (name not in self.graph.inputs, name))
        self.ranges = {name: kind(**self.options) for name in names}
        places = () if self.smooth is None else smoothings(self.graph)
        self._channels = {place.value: minmax(axis=-1) for place in places}
        chosen = {one.output for one in self.decisions if one.choice != "float"}
        self._readers = [node for node in self.graph.nodes if node.outputs[0] in chosen]
        self._totals: dict[str, tuple[Array, int]] = {}

    def observe(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch and see its values; the outputs. ValueError names what is not finite, or is
        of a shape that the graph is not for."""
        shapes = {name: np.shape(inputs[name]) for name in self.graph.inputs}
        bound = self.graph.bound(self.graph.sizes(shapes))
        masked = frozenset[str]() if self.mask is None else with_positions(bound, self.mask)
        counted = self.mask and np.asarray(inputs[self.mask]) != 0

        def watch(name: str, value: Array) -> None:
            value = value[counted] if name in masked else value
            for observer in (self.ranges.get(name), self._channels.get(name)):
                try:
                    if observer is not None:
                        observer.observe(value)
                except ValueError as error:
                    where = "the input" if name in self.graph.inputs else "the value"
                    raise ValueError(f"{where} {name!r}: {error}") from error
            readers = [node for node in self._readers if node.inputs[0] == name]
            if readers and value.size:
                self._see(readers, value)

        outputs = evaluate(self.graph, inputs, watch, self.compute)
        self.batches += 1
        return outputs

    def _see(self, readers: Sequence[Node], x: Array) -> None:
        """See what products read."""
        for node in readers if self.with_inputs else ():
            given = rows(node, x, self.graph.constants[node.inputs[1]].shape)
            if given is not None:
                output, new = node.outputs[0], Activations.of(given)
                self.seen[output] = self.seen[output] + new if output in self.seen else new
        for node in readers if self.with_means else ():
            weight = operators.get(node.op).weight
            output, axis = node.outputs[0], 1 if weight is None else weight.channels
            each = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
            total, count = self._totals.get(output, (0, 0))
            new_total = total + each.sum(1, dtype=np.float64)
            self._totals[output] = new_total, count + each.shape[1]

    @property
    def means(self) -> dict[str, Array]:
        """Of each channel of what products read, by their outputs; empty without `with_means`."""
        return {name: total / count for name, (total, count) in self._totals.items()}

    def smoothed(self) -> Calibration:
        """The same of the graph in which outliers have moved from norms' outputs into weights; with
        `smooth` left out, this itself. Ranges of what changed are from the least to the greatest.
        """
        if not self._channels or self.smooth is None:
            return self
        ends = {name: np.stack(one.range()) for name, one in self._channels.items()}
        largest = {name: np.abs(pair).max(0) for name, pair in ends.items()}
        made = copy(self)
        made.graph, factors = smoothed(self.graph, largest, self.smooth)
        made.ranges, made.seen = dict(self.ranges), dict(self.seen)
        made._totals = dict(self._totals)
        for name, each in factors.items():
            if name in made.ranges:
                made.ranges[name] = observers.get("minmax")()
                made.ranges[name].observe(ends[name] / each)
            for output in (one.outputs[0] for one in self._readers if one.inputs[0] == name):
                if output in made.seen:
                    made.seen[output] = made.seen[output].divided(each)
                if output in made._totals:
                    total, count = made._totals[output]
                    made._totals[output] = total / each, count
        return made

    def check(self) -> None:
        """ValueError unless something was seen of every value."""
        if not self.batches:
            raise ValueError("no data to calibrate with: give at least one batch")
        for name, one in (*self.ranges.items(), *self._channels.items()):
            try:
                one.summary()
            except ValueError:
                where = "" if self.mask is None else f" where {self.mask!r} is not 0"
                raise ValueError(
                    f"the value {name!r} has no elements in the calibration data{where}"
                ) from None


def calibrate(calibration: Calibration, batches: Iterable[Mapping[str, Array]]) -> Calibration:
    """See all batches. ValueError: there are none, or one holds NaN or infinity."""
    for batch in batches:
        calibration.observe({name: np.asarray(one) for name, one in batch.items()})
    calibration.check()
    return calibration
