"""`quantize_`: turn the layers of a model into quantized ones, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from lowbit.torch.arguments import FLOATS
from lowbit.torch.config import QuantizeConfig
from lowbit.torch.linear import QuantizedLinear, become_quantized
from lowbit.torch.weight import QuantizedWeight
from lowbit.weights.format import WeightFormat

Filter = Callable[[nn.Module, str], bool]
Model = TypeVar("Model", bound=nn.Module)


def quantize_(model: Model, config: QuantizeConfig, filter_fn: Filter | None = None) -> Model:
    """Quantize the linear layers of `model` in place, and return it.

    A layer is quantized if it is an `nn.Linear` (exactly: a subclass may have a forward of its
    own that needs a float weight) and `filter_fn(module, fully_qualified_name)`, when given, is
    true. Layers that are quantized already are left as they are. Layers that share a weight
    share the quantized one; where a weight is shared with something that is not quantized (an
    embedding, say), that keeps the float weight and the two are separate from then on.

    Either every layer that was selected is quantized, or the model is unchanged:
    TypeError for a wrong argument or a weight of a dtype that cannot be quantized, ValueError
    for a weight that holds NaN or infinity or is on a device that has no kernel for it, each naming
    the layer, and
    ValueError if the model has no layer that `config` applies to.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to quantize, got {type(model).__name__}")
    if not isinstance(config, QuantizeConfig):
        raise TypeError(f"expected a configuration such as Int8DynamicConfig(), got {config!r}")
    targets = _select(model, filter_fn)
    weights: dict[int, nn.Parameter] = {}
    for name, layer in targets:
        if id(layer.weight) not in weights:
            weights[id(layer.weight)] = _quantized_weight(name, layer, config.weight_format)
        else:
            _check_bias(name, layer)
    for _, layer in targets:
        become_quantized(layer, weights[id(layer.weight)], config)
    return model


def _select(model: nn.Module, filter_fn: Filter | None) -> list[tuple[str, nn.Linear]]:
    targets: list[tuple[str, nn.Linear]] = []
    found = quantized = 0
    for name, module in model.named_modules():
        if not (is_plain_linear(module) or isinstance(module, QuantizedLinear)):
            continue
        found += 1
        if filter_fn is not None and not filter_fn(module, name):
            continue
        if isinstance(module, QuantizedLinear):
            quantized += 1
        else:
            assert isinstance(module, nn.Linear)
            targets.append((name, module))
    if not targets and not quantized:
        reason = (
            f"filter_fn accepted none of its {found} linear layers"
            if found
            else "it has no layer of type torch.nn.Linear"
        )
        raise ValueError(f"nothing to quantize in this {type(model).__name__}: {reason}")
    return targets


def is_plain_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer that can be quantized: no subclass, and not empty."""
    return type(module) is nn.Linear and module.in_features > 0 and module.out_features > 0


def _quantized_weight(name: str, layer: nn.Linear, format: WeightFormat) -> nn.Parameter:
    where = repr(name) if name else "the model itself"
    _check_bias(name, layer)
    if type(layer._parameters.get("weight")) is not nn.Parameter:
        raise TypeError(
            f"layer {where}: expected a plain torch.nn.Parameter as weight, got "
            f"{type(layer.weight).__name__}; remove weight_norm or other wrappers first"
        )
    try:
        weight = QuantizedWeight.from_float(layer.weight, format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {where}: {error}") from error
    return nn.Parameter(weight, requires_grad=False)


def _check_bias(name: str, layer: nn.Linear) -> None:
    bias = layer.bias
    if bias is None:
        return
    if bias.device != layer.weight.device or bias.dtype not in FLOATS:
        raise TypeError(
            f"layer {name!r}: expected a float32, bfloat16 or float16 bias on "
            f"{str(layer.weight.device)!r}, got {bias.dtype} on {str(bias.device)!r}"
        )
