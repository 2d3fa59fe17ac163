"""Models that move to a GPU and back, and what their layers compute there.

Without a GPU, weights are packed for one here, on the CPU, where the operators run in plain PyTorch
and in Triton's interpreter.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

import lowbit_lab
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizedWeight,
    load,
    quantize_,
    save,
)
from lowbit.torch.weight import PACKING_OF

GPU = torch.cuda.is_available()
CONFIGS = [Int4WeightOnlyConfig(128), Int4WeightOnlyConfig(32, True), Int4WeightOnlyConfig(None)]
DYNAMIC = [Int4DynamicConfig(128, symmetric=True), Int4DynamicConfig(None, True, True)]


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """From here on, weights that are moved are packed as for a GPU, and stay where they are."""
    monkeypatch.setitem(PACKING_OF, "cpu", "tiles")
    return monkeypatch


def _layer(config: Any, in_features: int = 296, out_features: int = 70) -> Any:
    torch.manual_seed(0)
    return quantize_(nn.Linear(in_features, out_features).eval(), config)


def _moved(layer: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A copy of a layer, cast, so that its weight is packed anew."""
    return copy.deepcopy(layer).to(dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_weights_there_and_back_are_the_same(config: Any, as_gpu: pytest.MonkeyPatch) -> None:
    as_gpu.undo()
    layer = _layer(config)
    as_gpu.setitem(PACKING_OF, "cpu", "tiles")
    there = _moved(layer)
    assert (layer.weight.packing, there.weight.packing) == ("panels", "tiles")
    as_gpu.undo()
    back = _moved(there, torch.float32)
    assert back.weight.packing == "panels"
    assert back.weight.parts.keys() == layer.weight.parts.keys()
    for name, part in layer.weight.parts.items():
        assert torch.equal(back.weight.parts[name], part)
    for one in (there, back):
        np.testing.assert_array_equal(one.weight.int_values(), layer.weight.int_values())
    assert torch.equal(there.weight.dequantize(), layer.weight.dequantize().bfloat16())


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("shape", [(1, 296), (3, 296), (2, 2, 296), (130, 296), (0, 296)], ids=str)
@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_compute_the_same_there(
    config: Any,
    shape: tuple[int, ...],
    interpreted: bool,
    dtype: torch.dtype,
    as_gpu: pytest.MonkeyPatch,
) -> None:
    layer = _layer(config)
    x = torch.randn(shape).to(dtype)
    there = _moved(layer).to(dtype)
    exact = x.double() @ layer.weight.dequantize().double().T + there.bias.double()
    with torch.inference_mode():
        if interpreted:
            with lowbit_lab.interpreter():
                out = there(x)
        else:
            out = there(x)
    assert out.dtype == dtype
    # Roundings of the weight, the sum and the sum with the bias to the dtype; float32 of 296 terms.
    unit = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1.5)
    mass = x.double().abs() @ layer.weight.dequantize().double().abs().T + exact.abs()
    assert ((out.double() - exact).abs() <= unit * mass).all()


def test_inputs_of_any_width_are_served(as_gpu: pytest.MonkeyPatch) -> None:
    for width in (1, 5, 70, 130):
        there = _moved(_layer(Int4WeightOnlyConfig(32), width, 5))
        weight = there.weight.dequantize().double()
        for rows in (1, 3, 130):
            x = torch.randn(rows, width).bfloat16()
            with torch.inference_mode(), lowbit_lab.interpreter():
                out = there(x)
            exact = x.double() @ weight.T + there.bias.double()
            assert ((out.double() - exact).abs() <= 2.0**-7 * (exact.abs() + 1)).all()


def test_gradients_there(as_gpu: pytest.MonkeyPatch) -> None:
    there = _moved(_layer(Int4WeightOnlyConfig(32)))
    x = torch.randn(3, 296).bfloat16().requires_grad_()
    there.bias.requires_grad_()
    direction = torch.randn(3, 70).bfloat16()
    there(x).backward(direction)
    expected = direction @ there.weight.dequantize()
    torch.testing.assert_close(x.grad, expected, rtol=2.0**-6, atol=2.0**-6)
    torch.testing.assert_close(there.bias.grad, direction.sum(0), rtol=2.0**-6, atol=2.0**-6)


def test_files_do_not_tell_where_a_model_was(as_gpu: pytest.MonkeyPatch, tmp_path: Any) -> None:
    layer = _layer(Int4WeightOnlyConfig(32))
    assert layer.weight.packing == "tiles"  # quantized where it will run
    save(layer, tmp_path / "there")
    there: Any = load(nn.Linear(296, 70), tmp_path / "there")
    as_gpu.undo()
    here: Any = load(nn.Linear(296, 70), tmp_path / "there")
    assert (there.weight.packing, here.weight.packing) == ("tiles", "panels")
    assert torch.equal(there.weight.dequantize(), here.weight.dequantize())
    save(here, tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    here.weight.data.copy_(torch.zeros(70, 296))
    here.load_state_dict(layer.state_dict())  # from tiles into panels
    assert torch.equal(here.weight.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Int4WeightOnlyConfig(24), "group_size must be a multiple of 32 there, got 24"),
    ],
    ids=repr,
)
def test_what_no_kernel_takes_is_refused(
    config: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _layer(config)
    expected = layer.weight.dequantize()
    monkeypatch.setitem(PACKING_OF, "cpu", "tiles")
    with pytest.raises(NotImplementedError, match=message):
        layer.to(torch.bfloat16)
    assert torch.equal(layer.weight.dequantize(), expected)
    with pytest.raises(ValueError, match=f"layer 'the model itself'|{message}"):
        _layer(config)


def test_inputs_are_divided_there_too(as_gpu: pytest.MonkeyPatch, tmp_path: Any) -> None:
    as_gpu.undo()
    torch.manual_seed(0)
    layer = nn.Linear(296, 70).eval()
    data = torch.randn(50, 296) * torch.linspace(0.1, 3, 296)
    quantize_(layer, Int4WeightOnlyConfig(32, method="awq"), calibration=[data])
    want, whole = layer(data), layer.weight.dequantize()
    as_gpu.setitem(PACKING_OF, "cpu", "tiles")
    there: Any = copy.deepcopy(layer).to(torch.float16).to(torch.float32)
    assert there.weight.packing == "tiles"
    assert there.weight.input_scale is not None
    assert torch.equal(there.weight.dequantize(), whole)
    assert (there(data) - want).norm() < 1e-3 * want.norm()
    save(there, tmp_path / "layer")
    as_gpu.undo()
    again = load(nn.Linear(296, 70).eval(), tmp_path / "layer")
    assert torch.equal(again(data), layer.to(torch.float16).to(torch.float32)(data))


@pytest.mark.parametrize("symmetric", [False, True])
def test_layers_of_8_bits_there(symmetric: bool, as_gpu: pytest.MonkeyPatch) -> None:
    """Their activations are quantized as here, so results differ by roundings alone."""
    as_gpu.undo()
    layer = _layer(Int8DynamicConfig(symmetric=symmetric))
    as_gpu.setitem(PACKING_OF, "cpu", "tiles")
    there = _moved(layer)
    assert there.weight.packing == "bytes"
    assert torch.equal(there.weight.dequantize(), layer.weight.dequantize().bfloat16())
    assert torch.equal(there.weight.int_values(), layer.weight.int_values())
    x = torch.randn(2, 3, 296).bfloat16()
    with torch.inference_mode():
        here, z = layer(x.float()), there(x)
        assert there(x[:0]).shape == (0, 3, 70)
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z.float(), here, rtol=2**-7, atol=2**-8)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(there(x).sum(), x)
    sums = there.weight.dequantize().float().sum(0)
    torch.testing.assert_close(dx[0, 0].float(), sums, rtol=2**-6, atol=2**-6)
    as_gpu.undo()
    back = _moved(there, torch.float32)
    assert torch.equal(back.weight.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize("symmetric", [False, True])
def test_layers_of_4_bits_and_8_bit_activations_there(
    symmetric: bool, as_gpu: pytest.MonkeyPatch
) -> None:
    """Activations have no zero points there, so those of a symmetric layer are as here."""
    as_gpu.undo()
    layer = _layer(Int4DynamicConfig(32, symmetric=symmetric))
    as_gpu.setitem(PACKING_OF, "cpu", "tiles")
    there = _moved(layer)
    assert there.weight.packing == "tiles"
    assert torch.equal(there.weight.int_values(), layer.weight.int_values())
    x = torch.randn(2, 3, 296).bfloat16()
    with torch.inference_mode():
        here, z = layer(x.float()), there(x)
        assert there(x[:0]).shape == (0, 3, 70)
    assert z.dtype == torch.bfloat16
    error = (z.float() - here).norm() / here.norm()
    assert error < (2**-8 if symmetric else 2**-6)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(there(x).sum(), x)
    sums = there.weight.dequantize().float().sum(0)
    torch.testing.assert_close(dx[0, 0].float(), sums, rtol=2**-6, atol=2**-6)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("config", [*CONFIGS, *DYNAMIC], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(config: Any, dtype: torch.dtype) -> None:
    layer = _layer(config, 512, 256).to(dtype)
    model = nn.Sequential(nn.LayerNorm(512).to(dtype), layer)
    x = torch.randn(50, 512).to(dtype)
    with torch.inference_mode():
        here = model(x)
        weight = copy.deepcopy(layer.weight)
        there = model.to("cuda")(x.cuda())
        assert isinstance(layer.weight, QuantizedWeight)
        assert layer.weight.is_cuda
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here, rtol=2.0**-5, atol=2.0**-5)
        assert torch.equal(model.cpu()(x), here)
    for name, part in layer.weight.parts.items():
        assert torch.equal(part, weight.parts[name])
    on_gpu = quantize_(nn.Linear(512, 256, device="cuda", dtype=dtype), config)
    assert on_gpu(x.cuda()).shape == (50, 256)


def test_what_a_gpu_would_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers can be on a GPU that is not there."""
    layer = _layer(Int4WeightOnlyConfig(32)).requires_grad_(False)
    record = layer.weight.record()
    monkeypatch.setattr(QuantizedWeight, "record", lambda _: record)
    copied = torch.ops.aten._to_copy.default
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        layer.bias = None
        layer._apply(lambda one: copied(one.detach(), device=torch.device("cuda:0")))
        weight = layer.weight
        assert isinstance(weight, QuantizedWeight)
        assert (weight.device.type, weight.packing) == ("cuda", "tiles")
        assert {part.device.type for part in weight.parts.values()} == {"cuda"}
        out = layer(torch.empty(3, 296, device="cuda:0", dtype=torch.bfloat16))
        assert (out.device.type, out.dtype, out.shape) == ("cuda", torch.bfloat16, (3, 70))
        back = copied(weight.detach(), device=torch.device("cpu"))
        assert (back.device.type, back.packing) == ("cpu", "panels")
