"""`quantize_`: turn the layers of a model into quantized ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from lowbit.numerics.methods import Activations
from lowbit.torch.arguments import check_batches
from lowbit.torch.config import QuantizeConfig, StaticInt8Config
from lowbit.torch.kinds import STAYS, become_quantized
from lowbit.torch.observed import observed
from lowbit.torch.plan import Filter, Plan, Shared, plan
from lowbit.torch.progress import Progress, check_progress, told
from lowbit.torch.static import quantize_static
from lowbit.torch.summary import some, summary
from lowbit.torch.weight import QuantizedWeight

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
