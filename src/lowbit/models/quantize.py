"""A float graph in 8 or 4 bits, from what batches show of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lowbit.graph import Graph
from lowbit.graph.calibrate import Calibration, calibrate
from lowbit.graph.evaluate import Compute
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes.quantize import Choice, Decision, Setting, decide, quantized
from lowbit.graph.passes.weights import WeightSetting, equalized
from lowbit.numerics.observers import observers
from lowbit.numerics.ranges import Range, check_range

CONFIGS = ("static", "dynamic")
"""All products with formats known beforehand; or linear layers that quantize the rows of their
input when they come."""

_LINEAR: dict[str, Choice] = {"static": "int8", "dynamic": "dynamic", "int4": "int4"}


def check_config(config: str, known: Iterable[str] = CONFIGS) -> None:
    """ValueError, with the names that there are, if there is no such configuration."""
    if config not in known:
        raise ValueError(f"config {config!r} is not known; known are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a network is quantized; ValueError names what is not known, and what is.

    - config: of CONFIGS, or "int4": weights of linear layers have 4 bits, in groups of 128, and
      their activations are floats. Convolutions are static in all of them.
    - rounding: of weights, "nearest" or "gptq". The others are those of `StaticInt8Config`.
    """

    config: str = "static"
    observer: str = "minmax"
    rounding: str = "nearest"
    weight_range: Range = "minmax"
    equalize: bool = False
    smooth: float | None = None
    correct_bias: bool = False

    def __post_init__(self) -> None:
        check_config(self.config, _LINEAR)
        observers.get(self.observer)
        check_range(self.weight_range, "weight_range")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth must be from 0 to 1, got {self.smooth!r}")
        self.setting  # whose error names the methods of rounding  # noqa: B018

    @property
    def setting(self) -> Setting:
        return Setting(weights=WeightSetting(method=self.rounding, range=self.weight_range))

    def __str__(self) -> str:
        """In words, what is not left as it is."""
        words = [self.config, f"ranges by {self.observer}"]
        if self.rounding != "nearest" or self.weight_range != "minmax":
            words.append(f"weights by {self.rounding}, their ranges by {self.weight_range}")
        words += [word for word in ("equalize", "correct_bias") if getattr(self, word)]
        words += [f"smooth {self.smooth}"] if self.smooth is not None else []
        return ", ".join(words)


def quantized_graph(
    graph: Graph,
    batches: Iterable[Mapping[str, Array]],
    method: Method | None = None,
    *,
    mask: str | None = None,
    compute: Mapping[str, Compute] | None = None,
) -> tuple[Graph, tuple[Decision, ...]]:
    """The graph by a method, and what became of each product.

    mask: as of `Calibration`; compute: as of `evaluate`. ValueError: no batch, or one with NaN or
    infinity.
    """
    method = method or Method()
    setting = method.setting
    if method.equalize:
        graph = equalized(graph)
    linear = _LINEAR[method.config]
    wishes: dict[str, Choice] = {}
    if linear != "int8":
        weights = {node.outputs[0]: operators.get(node.op).weight for node in graph.nodes}
        wishes = {name: linear for name, one in weights.items() if one and linear in one.choices}
    calibration = Calibration(
        graph, decide(graph, wishes), method.observer, compute=compute, mask=mask,
        smooth=method.smooth,
        with_inputs=setting.weights.needs_activations, with_means=method.correct_bias,
    )  # fmt: skip
    seen = calibrate(calibration, batches).smoothed()
    made = quantized(seen.graph, seen.decisions, seen.ranges, setting, seen.seen, seen.means)
    return made, seen.decisions
