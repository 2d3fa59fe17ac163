"""Static quantization of whole networks: `prepare`, run data through it, `convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowbit.graph import sensitivity as of_graphs
from lowbit.graph.calibrate import Calibration
from lowbit.graph.graph import Graph
from lowbit.graph.operator import operators
from lowbit.graph.passes import simplified
from lowbit.graph.passes.quantize import Choice, decide, quantized
from lowbit.graph.passes.weights import equalized
from lowbit.graph.sensitivity import Sensitivity, layers
from lowbit.torch.arguments import check_batches
from lowbit.torch.capture.compute import COMPUTE
from lowbit.torch.capture.export import Captured, bind, capture
from lowbit.torch.config import StaticInt8Config
from lowbit.torch.network import CompiledModule, arrays_of, become_compiled, results_of

Filter = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)


class PreparedModule(nn.Module):
    """A network in float32 that watches the values it computes: call it with calibration data.

    It takes and gives what the model did that it was made from.
    """

    def __init__(
        self, captured: Captured, config: StaticInt8Config, calibration: Calibration
    ) -> None:
        super().__init__()
        self.captured, self.config, self.calibration = captured, config, calibration

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arrays = arrays_of(self.captured, args, kwargs)
        try:
            self.captured.graph.sizes({name: one.shape for name, one in arrays.items()})
        except ValueError as error:
            raise ValueError(
                f"{error}: for sizes that differ, give calibration as a list of all batches, or "
                "prepare(..., dynamic_shapes=True)"
            ) from None
        return results_of(self.captured, self.calibration.observe(arrays))

    def extra_repr(self) -> str:
        seen = self.calibration
        return f"{seen.graph.name}, {self.config}, {seen.batches} batches seen"


def prepare(
    model: nn.Module,
    config: StaticInt8Config,
    example: Any,
    filter_fn: Filter | None = None,
    *,
    batch: bool = True,
    dynamic_shapes: Any = None,
) -> PreparedModule:
    """The first of two steps: a copy of the network that watches its values when it is called.

    example, batch and dynamic_shapes are those of `to_graph`, whose errors this has too.
    filter_fn(module, name): whether a layer of the model may be quantized. The model is left as it
    is. ValueError: there is nothing to quantize, or the configuration names a layer that the model
    does not have.
    """
    captured = capture(model, example, batch=batch, dynamic_shapes=dynamic_shapes)
    graph = simplified(captured.graph)
    calibration = calibration_of(graph, config, _wishes(model, graph, config, filter_fn))
    if all(one.choice == "float" for one in calibration.decisions):
        whys = dict.fromkeys(str(one) for one in calibration.decisions)
        reason = f": {'; '.join(whys)}" if whys else ", which has no convolution or linear layer"
        raise ValueError(f"nothing to quantize in this {type(model).__name__}{reason}")
    return PreparedModule(captured, config, calibration)


def calibration_of(
    graph: Graph, config: StaticInt8Config, wishes: Mapping[str, Choice] | None = None
) -> Calibration:
    """What watches a simplified graph, and equalizes it before, as a configuration says."""
    graph = equalized(graph) if config.equalize else graph
    return Calibration(
        graph, decide(graph, wishes), config.observer, config.observer_options,
        with_inputs=config.setting.weights.needs_activations, with_means=config.correct_bias,
        smooth=config.smooth, mask=config.mask, compute=COMPUTE,
    )  # fmt: skip


def _wishes(
    model: nn.Module, graph: Graph, config: StaticInt8Config, filter_fn: Filter | None
) -> dict[str, Choice]:
    """What is asked for, by output. ValueError: `choices` names a layer that there is not."""
    found = layers(graph)
    if unknown := config.choices.keys() - found.keys():
        raise ValueError(f"no layer is called {', '.join(sorted(unknown))}; known: {list(found)}")
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {node.outputs[0]: operators.get(node.op).weight for node in graph.nodes}
    served = {output: one.choices for output, one in weights.items() if one is not None}
    wishes: dict[str, Choice] = {}
    for name, outputs in found.items():
        owner = name
        while owner not in modules:  # a weight of a module that has several
            owner = owner.rpartition(".")[0]
        for output in outputs:
            if filter_fn is not None and not filter_fn(modules[owner], name):
                wishes[output] = "float"
            elif name in config.choices:
                wishes[output] = config.choices[name]
            elif config.linear == "dynamic" and "dynamic" in served[output]:
                wishes[output] = "dynamic"
    return wishes


def convert(prepared: PreparedModule) -> CompiledModule:
    """The second step: the network in 8 bits, from what the prepared one has seen.

    Its `report` says what became of each product. ValueError: it has seen no data.
    """
    prepared.calibration.check()
    seen, setting = prepared.calibration.smoothed(), prepared.config.setting
    graph = quantized(seen.graph, seen.decisions, seen.ranges, setting, seen.seen, seen.means)
    return CompiledModule(prepared.captured, graph, seen.decisions)


def quantize_static(
    model: Model, config: StaticInt8Config, batches: Iterable[Any], filter_fn: Filter | None = None
) -> Model:
    """`prepare`, run all batches, `convert`, and let the model be what that gives.

    batches: as `example` of `to_graph`, one after another; the first serves as the example too.
    Where a list has batches of several shapes, all sizes are free that the model allows.
    """
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        raise ValueError("no data to calibrate with: give at least one batch as calibration")
    prepared = prepare(model, config, first, filter_fn, dynamic_shapes=free_sizes(batches))
    for batch in chain((first,), remaining):
        args, kwargs = bind(prepared.captured.signature, batch)
        with torch.no_grad():
            prepared(*args, **kwargs)
    made = convert(prepared)
    become_compiled(model, prepared.captured, made.graph, made.report)
    return model


def free_sizes(batches: Iterable[Any]) -> bool | None:
    """The `dynamic_shapes` for batches: True where a list has several shapes, else None."""
    several = isinstance(batches, Sequence) and len({_lengths(one) for one in batches}) > 1
    return several or None


def _lengths(batch: Any) -> tuple[Any, ...]:
    """The shapes of a batch's tensors, but for their first sizes."""
    leaves = pytree.tree_leaves(batch)
    return tuple(one.shape[1:] for one in leaves if isinstance(one, torch.Tensor))


# Which layers of a model suffer from few bits, and which bits each gets within a budget.


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
