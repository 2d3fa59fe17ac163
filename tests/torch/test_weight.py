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
from safetensors.torch import save_model
from torch import nn

from lowbit.numerics import int_format, quantize
from lowbit.torch import Int4DynamicConfig, QuantizeConfig, QuantizedWeight, quantize_
from lowbit.torch.weight import Facts
from lowbit.weights.format import INT8, WeightFormat

FORMATS = [
    INT8,
    WeightFormat("int4", 16),
    WeightFormat("uint4", 64),
    WeightFormat("uint4"),
    WeightFormat("int4"),
]


@pytest.fixture(params=FORMATS, ids=str)
def weight(request: pytest.FixtureRequest) -> QuantizedWeight:
    torch.manual_seed(3)
    return QuantizedWeight.from_float(torch.randn(37, 70), request.param)


def parts(weight: Any) -> list[torch.Tensor]:
    return list(weight.parts.values())


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (37, 70), (16, 128), (48, 65)])
def test_holds_what_the_reference_says(form: WeightFormat, rows: int, depth: int) -> None:
    torch.manual_seed(3)
    original = torch.randn(rows, depth)
    weight = QuantizedWeight.from_float(original, form)
    assert weight.format == form
    groups = {} if form.dtype == "int8" else {"group_size": form.group_size or depth}
    symmetric = form.dtype != "uint4"
    expected = quantize(
        original.numpy(),
        int_format(form.dtype),
        axis=0,
        symmetric=symmetric,
        **groups,  # type: ignore[arg-type]
    )
    values = weight.dequantize()
    np.testing.assert_array_equal(weight.int_values().numpy(), expected.values, strict=True)
    np.testing.assert_array_equal(weight.scales().numpy(), expected.scale, strict=True)
    np.testing.assert_array_equal(values.numpy(), expected.dequantize(), strict=True)
    sums = expected.values if form.dtype == "int8" else values.double().numpy()
    np.testing.assert_allclose(
        weight.column_sums[:rows].numpy(), sums.astype(np.float64).sum(axis=1), rtol=1e-6, atol=1e-5
    )
    assert (values - original).abs().max() <= weight.scale.max() * 0.501


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 256), (17, 71)])
def test_all_values_survive_packing(form: WeightFormat, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(4)
    given = {
        name: np.resize(generator.permutation(256), size).astype(dtype)
        for name, (dtype, size) in form.stored(shape).items()
    }
    given["scale"] += 1
    if form.zero_points:
        given["zero_point"] &= 15
    if form.four_bits and shape[1] % 2:
        given["values"][:, -1] &= 15
    quantized = form.from_stored(given, shape)
    facts = Facts(*shape, torch.float32, form, "panels")
    weight = QuantizedWeight.of(quantized, facts, torch.device("cpu"))
    assert weight.shape == shape
    stored = form.to_stored(weight.record())
    assert stored.keys() == given.keys()
    for name, part in stored.items():
        np.testing.assert_array_equal(part, given[name], strict=True)
    values = weight.int_values()
    assert len(values.unique()) == (16 if form.four_bits else 256)


def test_zero_points_in_the_middle_are_held_too() -> None:
    weight = QuantizedWeight.from_float(torch.tensor([[-1.0, 0.0, 15 / 16]]), WeightFormat("uint4"))
    assert weight.quantized().zero_point.tolist() == [[8]]
    other = QuantizedWeight.from_float(torch.ones(1, 3), WeightFormat("uint4"))
    weight.copy_(other)
    assert torch.equal(weight.dequantize(), torch.ones(1, 3))


def test_shape_dtype_and_text(weight: QuantizedWeight) -> None:
    assert weight.shape == (37, 70)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert f"[37, 70] of {weight.format}" in repr(weight)
    assert "float32" in repr(weight)


@pytest.mark.parametrize(("form", "part"), [(INT8, 0.26), (WeightFormat("uint4", 128), 0.14)])
def test_takes_a_small_part_of_the_memory(form: WeightFormat, part: float) -> None:
    weight = QuantizedWeight.from_float(torch.randn(512, 512), form)
    assert sum(one.nbytes for one in parts(weight)) < part * 4 * 512 * 512


@pytest.mark.deep
def test_float_weight_is_freed_and_nothing_else_refers_to_it(config: QuantizeConfig) -> None:
    layer = nn.Linear(64, 64)
    original = weakref.ref(layer.weight)
    quantize_(layer, config)
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
    panels, form = weight.panels, weight.format
    expected = QuantizedWeight.from_float(original, form)
    weight.copy_(original)
    assert weight.panels is panels
    assert torch.equal(weight.dequantize(), expected.dequantize())
    weight.copy_(QuantizedWeight.from_float(original * 2, form))
    assert torch.equal(weight.dequantize(), 2 * expected.dequantize())
    weight.copy_(QuantizedWeight.from_float(original, WeightFormat("int4", 8)))
    through = QuantizedWeight.from_float(original, WeightFormat("int4", 8)).dequantize()
    assert torch.equal(weight.dequantize(), QuantizedWeight.from_float(through, form).dequantize())
    plain = torch.zeros(37, 70)
    plain.copy_(weight)
    assert torch.equal(plain, weight.dequantize())
    with pytest.raises(ValueError, match=r"\[37, 69\] into one of \[37, 70\]"):
        weight.copy_(torch.zeros(37, 69))


def test_other_operations_say_what_to_do(weight: QuantizedWeight) -> None:
    before = weight.dequantize()
    for operation in (
        lambda: weight.mul_(2),
        lambda: weight.view(-1),
        lambda: weight[0],
        lambda: weight.__setitem__(0, 1.0),
    ):
        with pytest.raises(NotImplementedError, match="dequantize"):
            operation()
    for operation in (weight.data_ptr, lambda: save_model(nn.ParameterList([weight]), "x")):
        with pytest.raises(NotImplementedError, match=r"call lowbit\.torch\.save"):
            operation()
    assert torch.equal(weight.dequantize(), before)


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
    float_model: nn.Module, model: nn.Module, config: QuantizeConfig, tokens: torch.Tensor
) -> None:
    expected = model(tokens)
    other = quantize_(type(float_model)(), config)
    weight = other.get_parameter("first.weight")
    assert not torch.equal(other(tokens), expected)
    other.load_state_dict(float_model.state_dict())
    assert other.get_parameter("first.weight") is weight
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(other(tokens), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_quantized_state_dict_is_adopted(
    float_model: nn.Module,
    model: nn.Module,
    config: QuantizeConfig,
    tokens: torch.Tensor,
    assign: bool,
) -> None:
    other = quantize_(type(float_model)(), config)
    assert model.state_dict().keys() == float_model.state_dict().keys()
    other.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(other(tokens), model(tokens))


def test_state_dicts_that_do_not_fit(float_model: nn.Module, model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="must be a QuantizedWeight"):
        model.load_state_dict(float_model.state_dict(), assign=True)
    other = quantize_(copy.deepcopy(float_model), Int4DynamicConfig(group_size=8))
    with pytest.raises(RuntimeError, match="got one of uint4, one scale and zero point per 8 of"):
        model.load_state_dict(other.state_dict(), assign=True)
    state = float_model.state_dict()
    state["first.weight"] = torch.full((70, 40), float("inf"))
    with pytest.raises(RuntimeError, match=r"first\.weight.*inf"):
        model.load_state_dict(state)
    state["first.weight"] = torch.zeros(71, 40)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
