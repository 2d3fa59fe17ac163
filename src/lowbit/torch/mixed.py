"""Which layers of a model suffer from few bits, and which bits each gets within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lowbit.graph import sensitivity as of_graphs
from lowbit.graph.graph import Graph
from lowbit.graph.passes import simplified
from lowbit.graph.passes.quantize import Choice
from lowbit.graph.sensitivity import Sensitivity
from lowbit.torch.arguments import check_batches
from lowbit.torch.capture.export import bind, capture
from lowbit.torch.config import StaticInt8Config
from lowbit.torch.network import arrays_of
from lowbit.torch.static import calibration_of, free_sizes


def sensitivity(
    model: nn.Module | Graph,
    data: Iterable[Any],
    choices: Sequence[Choice] = ("int8",),
    config: StaticInt8Config | None = None,
) -> tuple[Sensitivity, ...]:
    """What each layer alone does to the outputs, as each of the choices; the worst first.

    data: batches of inputs, as for `quantize_`, or, for a graph, dicts of arrays; all of them are
    calibrated with and then compared. config: how what is chosen is quantized; its own choices do
    not count. A layer is a weight: one that is called twice is quantized in both places.
    ValueError: there is no data, or it holds NaN or infinity.
    """
    config = config or StaticInt8Config()
    check_batches("data", data)
    if isinstance(model, Graph):
        graph, batches = simplified(model), list(data)
    else:
        data = list(data)
        if not data:
            raise ValueError("no data to calibrate with: give at least one batch")
        captured = capture(model, data[0], dynamic_shapes=free_sizes(data))
        graph = simplified(captured.graph)
        with torch.no_grad():
            batches = [arrays_of(captured, *bind(captured.signature, batch)) for batch in data]
    return of_graphs.sensitivity(calibration_of(graph, config), batches, choices, config.setting)


def mixed(
    model: nn.Module | Graph,
    data: Iterable[Any],
    budget: int,
    config: StaticInt8Config | None = None,
) -> dict[str, Choice]:
    """What each layer is to be so that all weights together take at most `budget` bytes and the
    outputs differ least: `StaticInt8Config(choices=mixed(...))`.

    Linear layers may be "int4", "int8" or "float", convolutions "int8" or "float". Errors are taken
    to add up. It takes as many runs of the network as there are layers, times choices, times
    batches. ValueError: the budget is too small, with the least that there is.
    """
    found = sensitivity(model, data, ("int4", "int8", "float"), config)
    return of_graphs.mixed(found, budget)
