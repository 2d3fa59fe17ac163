from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    QuantizedLinear,
    QuantizedWeight,
    quantize_,
)

CONFIG = Int8DynamicConfig()


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def test_in_place_and_close(
    float_model: nn.Module, config: QuantizeConfig, tokens: torch.Tensor
) -> None:
    expected = float_model(tokens)
    keys = list(float_model.state_dict())
    layer = float_model.get_submodule("first")
    assert quantize_(float_model, config) is float_model
    assert float_model.get_submodule("first") is layer
    assert quantized_names(float_model) == {"first", "second", "head"}
    assert list(float_model.state_dict()) == keys
    out = float_model(tokens)
    least = 0.98 if config.weight_format.four_bits else 0.999
    assert nn.functional.cosine_similarity(out, expected, dim=-1).min() > least
    assert not torch.equal(out, expected)


def test_filter(float_model: nn.Module) -> None:
    seen: list[str] = []

    def only_first(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear | nn.Embedding)
        seen.append(name)
        return name == "first"

    quantize_(float_model, CONFIG, only_first)
    assert seen == ["embedding", "first", "second", "head"]
    assert quantized_names(float_model) == {"first"}


def test_quantized_layers_are_left_as_they_are(float_model: nn.Module) -> None:
    quantize_(float_model, CONFIG, lambda _, name: name == "first")
    weight = float_model.get_parameter("first.weight")
    quantize_(float_model, Int8DynamicConfig(symmetric=True))
    assert float_model.get_parameter("first.weight") is weight
    configs = {n: float_model.get_submodule(n).config for n in quantized_names(float_model)}
    assert configs == {
        "first": CONFIG,
        "second": Int8DynamicConfig(symmetric=True),
        "head": Int8DynamicConfig(symmetric=True),
    }
    quantize_(float_model, CONFIG)
    assert float_model.get_submodule("head").config == Int8DynamicConfig(symmetric=True)


def test_root_hooks_and_training_flag_stay(config: QuantizeConfig) -> None:
    layer = nn.Linear(8, 4).train()
    calls: list[str] = []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    quantize_(layer, config)
    assert isinstance(layer, QuantizedLinear)
    assert layer.training
    assert not layer.weight.requires_grad
    layer(torch.zeros(2, 8))
    assert calls == ["forward"]
    assert repr(config) in repr(layer)


def test_nothing_to_quantize(float_model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"this ReLU: it has no layer of a kind .* Linear"):
        quantize_(nn.ReLU(), CONFIG)
    with pytest.raises(ValueError, match="filter_fn accepted none of its 4 layers"):
        quantize_(float_model, CONFIG, lambda module, name: False)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_layers_are_not_quantized() -> None:
    model = nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2))
    quantize_(model, CONFIG)
    assert quantized_names(model) == {"1"}


def test_transformer_layer_calls_the_quantized_layers() -> None:
    # In inference, PyTorch's own layer hands its weights to a fused kernel if it can.
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    linear: nn.Linear = layer.linear1
    x = torch.randn(2, 5, 32)
    with torch.inference_mode():
        expected = layer(x)
        calls: list[str] = []
        quantize_(layer, CONFIG)
        linear.register_forward_hook(lambda *_: calls.append("linear1"))
        out = layer(x)
    assert calls == ["linear1"]
    assert quantized_names(layer) == {"linear1", "linear2", "self_attn.out_proj"}
    assert isinstance(layer.self_attn.in_proj_weight, QuantizedWeight)
    torch.testing.assert_close(out, expected, atol=0.1, rtol=0)


def test_tied_linear_layers_stay_tied(config: QuantizeConfig) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    quantize_(model, config)
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 3
    again = copy.deepcopy(model)
    assert again[0].weight is again[1].weight
    model.to(torch.bfloat16)
    assert model[0].weight is model[1].weight
    assert model[1].weight.dtype == torch.bfloat16


def test_shared_module_is_quantized_once() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    quantize_(model, CONFIG)
    assert model[0] is model[2] is layer
    assert isinstance(layer.weight, QuantizedWeight)


def spoil_with_nan(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[2, 3] = float("nan")


def spoil_with_infinity(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[0, 1] = float("-inf")


def spoil_with_float64(layer: nn.Linear) -> None:
    layer.double()


def spoil_with_meta(layer: nn.Linear) -> None:
    layer.to("meta")


def spoil_with_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.zeros(23, dtype=torch.float64))


def spoil_with_hook(layer: nn.Linear) -> None:
    weight = layer.weight.detach()
    del layer.weight
    object.__setattr__(layer, "weight", weight)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (spoil_with_nan, ValueError, r"layer 'head': .*nan.*\(2, 3\)"),
        (spoil_with_infinity, ValueError, r"layer 'head': .*inf"),
        (spoil_with_float64, TypeError, r"layer 'head': .*torch\.float64"),
        (spoil_with_meta, (TypeError, ValueError), r"layer 'head': .*'meta'"),
        (spoil_with_bias, TypeError, r"layer 'head': .*bias.*torch\.float64"),
        (spoil_with_hook, TypeError, r"layer 'head': .*torch\.nn\.Parameter"),
    ],
)
def test_a_bad_layer_leaves_the_model_unchanged(
    float_model: nn.Module, spoil: Any, error: Any, message: str
) -> None:
    spoil(float_model.get_submodule("head"))
    parameters = dict(float_model.named_parameters())
    with pytest.raises(error, match=message):
        quantize_(float_model, CONFIG)
    assert quantized_names(float_model) == set()
    assert {n: id(p) for n, p in float_model.named_parameters()} == {
        name: id(parameter) for name, parameter in parameters.items()
    }


def test_wrong_arguments(float_model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module .* got OrderedDict"):
        quantize_(float_model.state_dict(), CONFIG)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"expected a configuration .* got 'int8'"):
        quantize_(float_model, "int8")  # type: ignore[arg-type]


def test_a_layer_whose_sums_could_overflow_is_refused() -> None:
    model = nn.Sequential(nn.Linear(70000, 2))
    with pytest.raises(ValueError, match="could overflow int32; at most 65793"):
        quantize_(model, Int8DynamicConfig())
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", [Int4WeightOnlyConfig, Int4DynamicConfig])
def test_groups_bound_sums(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(1 << 21, 1, bias=False))
    with pytest.raises(ValueError, match=r"layer '0': .* overflow int32; .*; use groups"):
        quantize_(model, kind(group_size=None))
    assert type(model[0]) is nn.Linear
    assert isinstance(quantize_(model, kind())[0], QuantizedLinear)


@pytest.mark.parametrize("config", [Int8DynamicConfig(), Int4WeightOnlyConfig(32)], ids=repr)
def test_a_model_moves_within_inference_mode(config: Any) -> None:
    """There `to` reaches a weight whole, not as what it consists of."""
    model = quantize_(nn.Sequential(nn.Linear(64, 32, bias=False)), config)
    x = torch.ones(1, 64)
    with torch.inference_mode():
        before = model(x)
        assert model.to(torch.bfloat16)[0].weight.dtype == torch.bfloat16
        model.to("cpu", torch.float32)
        assert torch.equal(model(x), before)
