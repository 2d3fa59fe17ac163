"""`quantize_`: turn the layers of a model into quantized ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit.numerics.methods import Activations
from lowbit.torch.arguments import check_batches
from lowbit.torch.capture.export import bind
from lowbit.torch.capture.mode import evaluating
from lowbit.torch.config import QuantizeConfig, StaticInt8Config
from lowbit.torch.kinds import STAYS, become_quantized
from lowbit.torch.plan import Filter, Plan, Shared, plan
from lowbit.torch.progress import Progress, check_progress, told
from lowbit.torch.static import quantize_static
from lowbit.torch.summary import some, summary
from lowbit.torch.weight import QuantizedWeight

# What the inputs of a model's weights are, seen while data runs through it.

_MOST = 2 << 30  # bytes of means of products that are kept at a time

aten = torch.ops.aten


class _Watch(TorchDispatchMode):
    """Sees every product with one of the weights, whichever layer or function makes it."""

    def __init__(self, weights: Sequence[Shared]) -> None:
        super().__init__()
        self.by_memory = {one.weight.untyped_storage().data_ptr(): one for one in weights}
        self.seen: dict[int, Activations] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default):
            x, weight = args[-2:] if func is not aten.linear.default else args[:2]
            found = self.by_memory.get(weight.untyped_storage().data_ptr())
            if found is not None:
                self._add(found, x)
        return func(*args, **(kwargs or {}))

    def _add(self, shared: Shared, x: Tensor) -> None:
        key = id(shared.weight)
        try:
            new = Activations.of(x.detach().to("cpu", torch.float32).numpy())
        except ValueError as error:
            raise ValueError(f"the input of layer {shared.places[0].name!r}: {error}") from None
        self.seen[key] = self.seen[key] + new if key in self.seen else new


def observed(
    model: nn.Module, weights: Sequence[Shared], batches: Iterable[Any] | None, progress: Progress
) -> Iterator[tuple[list[Shared], dict[int, Activations]]]:
    """Weights, some at a time, and the inputs of each, by the `id` of its parameter.

    As many at a time as their means of products, [K, K] in float64, fit into 2 GiB; the batches
    are run anew for each time. Weights that need no data (embeddings) come with the first.
    ValueError: there is no batch, an input is NaN or infinite, or a layer is never reached.
    """
    data = list(batches or ())
    if not data:
        raise ValueError("no data to calibrate with: give at least one batch as calibration")
    free = [one for one in weights if not one.format.needs_activations]
    for portion in _portions([one for one in weights if one.format.needs_activations]):
        watch = _Watch(portion)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # which hides its products
        try:
            with evaluating(model), watch:
                for batch in told("Running calibration data", data, len(data), progress):
                    _call(model, batch)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        missing = [one.places[0].name for one in portion if id(one.weight) not in watch.seen]
        if missing:
            raise ValueError(
                f"the calibration data never reach {', '.join(map(repr, missing[:5]))}: leave them "
                "out with filter_fn, or give data that do"
            )
        yield free + portion, watch.seen
        free = []


def _call(model: nn.Module, batch: Any) -> None:
    import inspect

    args, kwargs = bind(inspect.signature(model.forward), batch)
    model(*args, **kwargs)


def _portions(weights: Sequence[Shared]) -> Iterator[list[Shared]]:
    portion: list[Shared] = []
    held = 0
    for one in weights:
        each = 8 * one.weight.shape[0 if one.transposed else 1] ** 2
        if portion and held + each > _MOST:
            yield portion
            portion, held = [], 0
        portion.append(one)
        held += each
    yield portion


_log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


def quantize_(
    model: Model,
    config: QuantizeConfig | StaticInt8Config,
    filter_fn: Filter | None = None,
    *,
    calibration: Iterable[Any] | None = None,
    progress: Progress = None,
) -> Model:
    """Quantize `model` in place, and return it. `lowbit.torch.summary(model)` says what became of
    each layer, and so does the log at level INFO.

    A StaticInt8Config takes the whole network, and batches of its inputs as `calibration`: tensors,
    tuples of positional arguments, or dicts of keywords. The model becomes a CompiledModule, which
    is called as before; what it consisted of is gone. See docs/networks.md.

    The other configurations take layers of four kinds, of exactly these classes, since a subclass
    may need a float weight: nn.Linear, the Conv1D of transformers, nn.MultiheadAttention (its
    projections), and nn.Embedding, unless `config.embeddings` is None. Of these, the layers are
    quantized for which `filter_fn(module, fully_qualified_name)`, when given, is true. Layers that
    are quantized already stay as they are; where their configuration is another, a warning in the
    log says so. Layers that share a weight share the quantized one. Where a weight is shared with
    what is not quantized, that keeps the float weight, the two are separate from then on, and a
    warning says so.

    calibration: for a `config.method` that needs data, batches as above, which are run through the
    float model. progress: a function of (what is done, steps finished, steps in all); by default a
    line on stderr, where that is a terminal and it takes more than a second; False: nothing.

    Either every layer that was selected is quantized, or the model is unchanged:
    TypeError for a wrong argument or a weight of a dtype that cannot be quantized, ValueError
    for a weight that holds NaN or infinity or is on a device that has no kernel for it, each naming
    the layer, for calibration that is missing or not needed, and if the model has no layer that
    `config` applies to.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to quantize, got {type(model).__name__}")
    check_progress(progress)
    check_batches("calibration", calibration)
    if isinstance(config, StaticInt8Config):
        if calibration is None:
            raise ValueError("a StaticInt8Config needs data: pass calibration=[batch, ...]")
        return quantize_static(model, config, calibration, filter_fn)
    if not isinstance(config, QuantizeConfig):
        raise TypeError(f"expected a configuration such as Int8DynamicConfig(), got {config!r}")
    needed = _needs_data(config, calibration is not None)
    made = plan(model, config, filter_fn)
    weights: dict[int, nn.Parameter] = {}
    passes = (
        observed(model, made.weights, calibration, progress) if needed else [(made.weights, {})]
    )
    for some_weights, seen in passes:
        what = "Quantizing weights"
        for shared in told(what, some_weights, len(some_weights), progress):
            weights[id(shared)] = _quantized(shared, config, seen)
    for shared in made.weights:
        for place in shared.places:
            become_quantized(place.layer, {place.parameter: weights[id(shared)]}, config)
    _tell(model, config, made)
    return model


def _needs_data(config: QuantizeConfig, given: bool) -> bool:
    """Whether a configuration has to know inputs. ValueError unless that is what is given."""
    needed = config.weight_format.needs_activations
    if given and not needed:
        raise ValueError(
            f"calibration is for StaticInt8Config and methods that need data; {config!r} needs none"
        )
    if needed and not given:
        raise ValueError(f"{config!r} needs data: pass calibration=[batch, ...]")
    return needed


def _quantized(
    shared: Shared, config: QuantizeConfig, seen: Mapping[int, Activations]
) -> nn.Parameter:
    place = shared.places[0]
    try:
        weight = QuantizedWeight.from_float(
            shared.weight, shared.format, shared.packing, seen.get(id(shared.weight)), config,
            shared.transposed,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        where = f"layer {place.name!r}" if place.name else "the model itself"
        raise type(error)(f"{where}: {error}") from error
    weight.key = place.key
    return nn.Parameter(weight, requires_grad=False)


def _tell(model: nn.Module, config: QuantizeConfig, made: Plan) -> None:
    """Leave the reasons with the layers, and log what was done."""
    for name, reason in made.stays.items():
        setattr(model.get_submodule(name), STAYS, reason)
    for name, other in made.separated.items():
        _log.warning("%s keeps the float weight that it shared with %s; they are separate now",
                     name, other)  # fmt: skip
    if others := [(name, one.config) for name, one in made.already if one.config != config]:
        _log.warning(
            "%d layers are quantized already, with %s, and stay as they are: %s. To change them, "
            "begin with the float model",
            len(others), some(str(one) for _, one in dict.fromkeys(others)),
            some(name for name, _ in others),
        )  # fmt: skip
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", summary(model))
