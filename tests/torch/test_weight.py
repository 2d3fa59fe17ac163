"""The weight as a tensor: what it holds, what can be done with it and with models around it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowbit.numerics import quantize
from lowbit.torch import Int8DynamicConfig, QuantizedWeight, quantize_


@pytest.fixture
def weight() -> QuantizedWeight:
    torch.manual_seed(3)
    return QuantizedWeight.from_float(torch.randn(37, 70))


def parts(weight: Any) -> list[torch.Tensor]:
    return [weight.panels, weight.column_sums, weight.scale]


def test_holds_what_the_reference_says() -> None:
    torch.manual_seed(3)
    original = torch.randn(37, 70)
    weight = QuantizedWeight.from_float(original)
    expected = quantize(original.numpy(), "int8", axis=0)
    np.testing.assert_array_equal(weight.int_values().numpy(), expected.values, strict=True)
    np.testing.assert_array_equal(weight.scales().numpy(), expected.scale.reshape(-1))
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected.dequantize(), strict=True)
    np.testing.assert_array_equal(
        weight.column_sums[:37].numpy(), expected.values.astype(np.int32).sum(axis=1)
    )
    assert (weight.dequantize() - original).abs().max() <= weight.scale.max() * 0.501


def test_all_256_values_survive_packing() -> None:
    values = torch.arange(-128, 128).to(torch.int8).repeat(3, 1)
    weight = QuantizedWeight.from_values(values, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(weight.int_values(), values)


def test_shape_dtype_and_text(weight: QuantizedWeight) -> None:
    assert weight.shape == (37, 70)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert "int8 [37, 70]" in repr(weight)
    assert "float32" in repr(weight)


def test_takes_about_a_quarter_of_the_memory() -> None:
    weight = QuantizedWeight.from_float(torch.randn(512, 512))
    assert sum(part.nbytes for part in parts(weight)) < 0.26 * 4 * 512 * 512


def test_float_weight_is_freed_and_nothing_else_refers_to_it() -> None:
    layer = nn.Linear(64, 64)
    original = weakref.ref(layer.weight)
    quantize_(layer, Int8DynamicConfig())
    gc.collect()
    assert original() is None


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone])
def test_copies_are_independent(weight: QuantizedWeight, copied: Any) -> None:
    other = copied(weight)
    assert isinstance(other, QuantizedWeight)
    for ours, theirs in zip(parts(weight), parts(other), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert other.panels.data_ptr() % 64 == 0


def test_detach_shares(weight: QuantizedWeight) -> None:
    assert parts(weight.detach())[0].data_ptr() == weight.panels.data_ptr()


def test_casting_shows_another_dtype_and_keeps_the_values(weight: QuantizedWeight) -> None:
    half = weight.to(torch.bfloat16)
    assert isinstance(half, QuantizedWeight)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.int_values(), weight.int_values())
    assert torch.equal(half.scale, weight.scale)
    assert half.dequantize().dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"not as torch\.float64"):
        weight.to(torch.float64)
    with pytest.raises(NotImplementedError, match="cannot be moved to 'meta'"):
        weight.to("meta")


def test_copy_quantizes_adopts_and_dequantizes(weight: QuantizedWeight) -> None:
    original = torch.randn(37, 70)
    panels = weight.panels
    expected = QuantizedWeight.from_float(original)
    weight.copy_(original)
    assert weight.panels is panels
    assert torch.equal(weight.dequantize(), expected.dequantize())
    weight.copy_(QuantizedWeight.from_float(-original))
    assert torch.equal(weight.dequantize(), -expected.dequantize())
    plain = torch.zeros(37, 70)
    plain.copy_(weight)
    assert torch.equal(plain, weight.dequantize())
    with pytest.raises(ValueError, match=r"\[37, 69\] into one of \[37, 70\]"):
        weight.copy_(torch.zeros(37, 69))


def test_other_operations_say_what_to_do(weight: QuantizedWeight) -> None:
    for operation in (
        lambda: weight + 1,
        lambda: nn.functional.linear(torch.zeros(2, 70), weight),
        lambda: weight.T,
        lambda: weight[0],
    ):
        with pytest.raises(NotImplementedError, match="dequantize"):
            operation()


def test_refuses_what_cannot_be_quantized() -> None:
    with pytest.raises(TypeError, match=r"got torch\.int8"):
        QuantizedWeight.from_float(torch.zeros(3, 3, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"shape \[out, in\], got \[3\]"):
        QuantizedWeight.from_float(torch.zeros(3))
    with pytest.raises(ValueError, match="nan"):
        QuantizedWeight.from_float(torch.full((3, 3), float("nan")))


def test_pickled_model(model: nn.Module, tokens: torch.Tensor) -> None:
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(tokens), model(tokens))


def test_deep_copied_model(model: nn.Module, tokens: torch.Tensor) -> None:
    again = copy.deepcopy(model)
    assert torch.equal(again(tokens), model(tokens))
    again.get_parameter("first.weight").copy_(torch.zeros(70, 40))
    assert not torch.equal(again(tokens), model(tokens))


def test_model_in_shared_memory(model: nn.Module, tokens: torch.Tensor) -> None:
    expected = model(tokens)
    model.share_memory()
    weight = model.get_parameter("first.weight")
    assert isinstance(weight, QuantizedWeight)
    assert all(part.is_shared() for part in parts(weight))
    assert weight.panels.data_ptr() % 64 == 0
    assert torch.equal(model(tokens), expected)


def test_moving_a_model(model: nn.Module, tokens: torch.Tensor) -> None:
    expected = model(tokens)
    assert torch.equal(model.to("cpu").eval().requires_grad_(False)(tokens), expected)
    with pytest.raises(NotImplementedError, match="cannot be moved to 'meta'"):
        model.to("meta")


def test_state_dict_through_torch_save(model: nn.Module, tokens: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    expected = model(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.ones(parameter.shape))
    model.load_state_dict(state)
    assert torch.equal(model(tokens), expected)


def test_float_state_dict_is_quantized(
    float_model: nn.Module, model: nn.Module, tokens: torch.Tensor
) -> None:
    expected = model(tokens)
    other = quantize_(type(float_model)(), Int8DynamicConfig())
    weight = other.get_parameter("first.weight")
    assert not torch.equal(other(tokens), expected)
    other.load_state_dict(float_model.state_dict())
    assert other.get_parameter("first.weight") is weight
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(other(tokens), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_quantized_state_dict_is_adopted(
    float_model: nn.Module, model: nn.Module, tokens: torch.Tensor, assign: bool
) -> None:
    other = quantize_(type(float_model)(), Int8DynamicConfig())
    assert model.state_dict().keys() == float_model.state_dict().keys()
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other(tokens), model(tokens))


def test_state_dicts_that_do_not_fit(float_model: nn.Module, model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="must be a QuantizedWeight"):
        model.load_state_dict(float_model.state_dict(), assign=True)
    state = float_model.state_dict()
    state["first.weight"] = torch.full((70, 40), float("inf"))
    with pytest.raises(RuntimeError, match=r"first\.weight.*inf"):
        model.load_state_dict(state)
    state["first.weight"] = torch.zeros(71, 40)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
