"""Which weights of a model a configuration makes integers of, which it leaves, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from lowbit.torch.arguments import FLOATS
from lowbit.torch.config import QuantizeConfig
from lowbit.torch.kinds import QuantizedModule, kind_of, kinds
from lowbit.torch.outside import outside_uses
from lowbit.weights.format import WeightFormat

Filter = Callable[[nn.Module, str], bool]


class Place(NamedTuple):
    """Where a weight is held: a layer, its name, and the parameter's name in it."""

    layer: nn.Module
    name: str
    parameter: str

    @property
    def key(self) -> str:
        """The parameter's name in the model."""
        return f"{self.name}.{self.parameter}" if self.name else self.parameter


@dataclass
class Shared:
    """One weight, and all places that hold it and become integers together."""

    weight: nn.Parameter
    format: WeightFormat
    transposed: bool
    packing: str | None  # None: that of the device
    places: list[Place]


@dataclass
class Plan:
    """What is to be done. stays: layers that could have been taken, and why they are not;
    already: those that were quantized before; separated: what keeps a float weight that it has
    shared so far, and with what."""

    weights: list[Shared] = field(default_factory=list)
    stays: dict[str, str] = field(default_factory=dict)
    already: list[tuple[str, QuantizedModule]] = field(default_factory=list)
    separated: dict[str, str] = field(default_factory=dict)


def plan(model: nn.Module, config: QuantizeConfig, filter_fn: Filter | None) -> Plan:
    """What `config` makes of a model. ValueError: nothing. TypeError: for a layer whose weight or
    bias cannot be taken, with its name."""
    made, outside = Plan(), outside_uses(model)
    taken: list[tuple[type[QuantizedModule], Place]] = []
    found = 0
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            continue
        possible = isinstance(module, QuantizedModule) or kind.format(config) is not None
        found += possible
        if possible and filter_fn is not None and not filter_fn(module, name):
            if not isinstance(module, QuantizedModule):
                made.stays[name] = "filter_fn left it out"
        elif isinstance(module, QuantizedModule):
            made.already.append((name, module))
        elif not possible:
            made.stays[name] = f"{type(config).__name__}(embeddings=None) leaves it in float"
        elif refusal := kind.refusal(module):
            made.stays[name] = refusal
        elif module in outside:
            made.stays[name] = f"{outside[module]} uses its weight, which has to be float there"
        else:
            places = (Place(module, name, one) for one in kind.weight_names(module))
            taken += [(kind, place) for place in places]
    _group(made, taken, config)
    if not made.weights and not made.already:
        reason = (
            f"filter_fn accepted none of its {found} layers"
            if found
            else f"it has no layer of a kind that {type(config).__name__} quantizes, which are "
            + ", ".join(name for name in kinds.names() if kinds.get(name).format(config))
        )
        raise ValueError(f"nothing to quantize in this {type(model).__name__}: {reason}")
    made.separated = _separated(model, made)
    return made


def _group(
    made: Plan, taken: list[tuple[type[QuantizedModule], Place]], config: QuantizeConfig
) -> None:
    """Find out who shares a weight with whom, and what that becomes."""
    holders: dict[tuple[int, bool], list[tuple[type[QuantizedModule], Place]]] = {}
    for kind, place in taken:
        weight = place.layer._parameters.get(place.parameter)
        key = id(weight) if weight is not None else id(place.layer)
        holders.setdefault((key, kind.transposed), []).append((kind, place))
    for group in holders.values():
        multiplying = [kind for kind, _ in group if kind.multiplies]
        kind = (multiplying or [group[0][0]])[0]
        places = [place for _, place in group]
        format = kind.format(config)
        assert format is not None  # or it would not have been taken
        for place in places:
            _check(place)
        weight = places[0].layer._parameters[places[0].parameter]
        assert weight is not None
        packing = None if multiplying else "rows"
        made.weights.append(Shared(weight, format, kind.transposed, packing, places))


def _separated(model: nn.Module, made: Plan) -> dict[str, str]:
    """Parameters that stay in float though what has shared them does not."""
    keys = {place.key for shared in made.weights for place in shared.places}
    first = {id(shared.weight): shared.places[0].key for shared in made.weights}
    return {
        name: first[id(one)]
        for name, one in model.named_parameters(remove_duplicate=False)
        if id(one) in first and name not in keys and not _alias(model, name, keys)
    }


def _alias(model: nn.Module, name: str, keys: set[str]) -> bool:
    """Whether a parameter is one of `keys` by another name of the same module."""
    owner, _, parameter = name.rpartition(".")
    module = model.get_submodule(owner)
    return any(
        key.rpartition(".")[2] == parameter
        and model.get_submodule(key.rpartition(".")[0]) is module
        for key in keys
    )


def _check(place: Place) -> None:
    """TypeError unless a weight, and the bias beside it, are plain parameters of a float dtype."""
    layer, name = place.layer, repr(place.name) if place.name else "the model itself"
    weight = layer._parameters.get(place.parameter)
    if type(weight) is not nn.Parameter:
        got = type(getattr(layer, place.parameter)).__name__
        raise TypeError(
            f"layer {name}: expected a plain torch.nn.Parameter as weight, got {got}; remove "
            "weight_norm or other wrappers first"
        )
    for bias in (getattr(layer, "bias", None), layer._parameters.get("in_proj_bias")):
        if bias is not None and (bias.device != weight.device or bias.dtype not in FLOATS):
            raise TypeError(
                f"layer {name}: expected a float32, bfloat16 or float16 bias on "
                f"{str(weight.device)!r}, got {bias.dtype} on {str(bias.device)!r}; convert the "
                "model with .float(), or move it to one device"
            )
