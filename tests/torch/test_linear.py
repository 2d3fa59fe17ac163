"""The layer computes what the specification says, to the bit, for whatever is put into it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.isa import InstructionSet, active, available, host
from lowbit.jit.kernel import Program
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.numerics import quantize, quantize_rows
from lowbit.product.prepare import prepare
from lowbit.product.prepared import Prepared
from lowbit.product.product import Product
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    QuantizedLinear,
    quantize_,
)

CONFIGS = [
    Int8DynamicConfig(),
    Int8DynamicConfig(symmetric=True),
    Int4WeightOnlyConfig(group_size=8),
    Int4WeightOnlyConfig(group_size=None, symmetric_weight=True),
    Int4DynamicConfig(group_size=64),
    Int4DynamicConfig(group_size=24, symmetric=True, symmetric_weight=True),
]


def quantized_layer(
    in_features: int, out_features: int, config: QuantizeConfig, *, bias: bool = True
) -> tuple[nn.Linear, nn.Linear]:
    """A float layer and its quantized copy."""
    torch.manual_seed(in_features * 1000 + out_features)
    layer = nn.Linear(in_features, out_features, bias=bias).eval()
    return layer, quantize_(copy.deepcopy(layer), config)


def reference(x: Tensor, layer: nn.Linear, config: QuantizeConfig) -> npt.NDArray[np.float32]:
    """float32 rows [M, N] from float32 rows [M, K], each step rounded by itself."""
    if isinstance(config, Int8DynamicConfig):
        return eight_bits(x, layer, config.symmetric)
    weight, bias = layer.weight.detach().float().numpy(), layer.bias
    added = None if bias is None else bias.detach().float()
    if isinstance(config, Int4WeightOnlyConfig):
        return lowbit.linear_weight_only(x.detach().numpy(), four_bits(weight, config), added)
    assert isinstance(config, Int4DynamicConfig)
    return lowbit.linear_dynamic(
        x.detach().numpy(), four_bits(weight, config), added, symmetric=config.symmetric
    )


def four_bits(
    weight: npt.NDArray[np.float32], config: Int4DynamicConfig | Int4WeightOnlyConfig
) -> lowbit.PackedMatrix:
    """The weight as tests/test_weight_only.py knows it."""
    return lowbit.pack(
        quantize(
            weight.T,
            "int4" if config.symmetric_weight else "uint4",
            axis=1,
            group_size=config.group_size or weight.shape[1],
            group_axis=0,
            symmetric=config.symmetric_weight,
            range=config.weight_range,
        )
    )


def eight_bits(x: Tensor, layer: nn.Linear, symmetric: bool) -> npt.NDArray[np.float32]:
    weight = quantize(layer.weight.detach().float().numpy(), "int8", axis=0)
    q, scale, zero_point = quantize_rows(x.detach().numpy(), symmetric)
    values = weight.values.astype(np.int64)
    product = q.astype(np.int64) @ values.T
    product -= zero_point.astype(np.int64)[:, None] * values.sum(axis=1)
    out = product.astype(np.float32) * scale[:, None] * weight.scale.reshape(-1)
    return out if layer.bias is None else out + layer.bias.detach().float().numpy()


@pytest.mark.pairs
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 1, 1), (2, 3, 15), (3, 17, 16), (5, 63, 17), (7, 64, 33), (4, 65, 127), (33, 130, 48)],
)
def test_equals_the_reference_to_the_bit(
    rows: int, in_features: int, out_features: int, bias: bool, config: QuantizeConfig
) -> None:
    layer, quantized = quantized_layer(in_features, out_features, config, bias=bias)
    x = torch.randn(rows, in_features) * torch.logspace(-3, 3, rows)[:, None] + 0.3
    x[rows // 2] = 0
    with torch.inference_mode():
        out = quantized(x)
    np.testing.assert_array_equal(out.numpy(), reference(x, layer, config), strict=True)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_close_to_the_dequantized_layer(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(130, 33, config)
    x = torch.randn(9, 130)
    exact = nn.functional.linear(x, quantized.weight.dequantize(), quantized.bias)
    # Half a step of 255 over each row's range, if activations are quantized.
    bound = 1e-5 if config.activations == "float" else 0.03
    with torch.inference_mode():
        assert (quantized(x) - exact).abs().max() < bound


def test_extreme_rows(config: QuantizeConfig) -> None:
    layer, quantized = quantized_layer(40, 20, config)
    x = torch.randn(8, 40)
    x[0] = 3e38
    x[1] = -3e38
    x[2, ::2] = 3e38
    x[2, 1::2] = -3e38
    x[3] = 1e-42
    x[4, 7] = float("nan")
    x[5, 9] = float("inf")
    x[6] = 5.0
    with np.errstate(over="ignore", invalid="ignore"), torch.inference_mode():
        out = quantized(x).numpy()
        np.testing.assert_array_equal(out, reference(x, layer, config))
    assert np.isnan(out[4:6]).all()
    assert np.isfinite(np.delete(out, [0, 1, 2, 4, 5], axis=0)).all()


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (2, 1, 3, 1, 40)])
def test_leading_dimensions(shape: tuple[int, ...], config: QuantizeConfig) -> None:
    layer, quantized = quantized_layer(40, 20, config)
    x = torch.randn(shape)
    with torch.inference_mode():
        out = quantized(x)
    assert out.shape == (*shape[:-1], 20)
    np.testing.assert_array_equal(
        out.reshape(-1, 20).numpy(), reference(x.reshape(-1, 40), layer, config)
    )


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40), (0, 3, 40)])
def test_empty_batch(shape: tuple[int, ...], config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(40, 20, config)
    out = quantized(torch.empty(shape))
    assert out.shape == (*shape[:-1], 20)
    assert out.dtype == torch.float32


def test_any_strides(config: QuantizeConfig) -> None:
    layer, quantized = quantized_layer(40, 20, config)
    base = torch.randn(6, 90, 12)
    views = [
        base[:, :40, 3],  # last stride 12
        base[:, ::2, 0][:, :40],
        base.permute(2, 0, 1)[:, :, 5:45],  # strided rows, three dimensions
        base[0].T[:, 7:47],  # transposed
        base.reshape(6, -1)[::2, 3:43],  # row stride 2160, last stride 1
        torch.randn(40).expand(5, 40),  # row stride 0
        torch.randn(1, 40).as_strided((1, 40), (3, 1)),
    ]
    with torch.inference_mode():
        for x in views:
            expected = reference(x.reshape(-1, 40).contiguous(), layer, config)
            np.testing.assert_array_equal(quantized(x).reshape(-1, 20).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(
    dtype: torch.dtype, config: QuantizeConfig
) -> None:
    if dtype == torch.bfloat16 and config.activations == "float":
        pytest.skip("computed as bfloat16: see the next test")
    layer, quantized = quantized_layer(40, 20, config)
    x = torch.randn(2, 5, 40).to(dtype)
    with torch.inference_mode():
        out = quantized(x)
    assert out.dtype == dtype
    expected = torch.from_numpy(reference(x.float().reshape(-1, 40), layer, config)).to(dtype)
    assert torch.equal(out.reshape(-1, 20), expected)


def test_bfloat16_is_what_weight_only_computes_with() -> None:
    config = Int4WeightOnlyConfig(group_size=16)
    layer, quantized = quantized_layer(40, 20, config)
    base = torch.randn(4, 5, 2, 40).bfloat16()
    packed = four_bits(layer.weight.detach().numpy(), config)
    for x in (base, base[:, :, 0], base[0, :, 1, :], base[0, 0].T[:40].T, base[:0]):
        expected = lowbit.linear_weight_only(
            x.reshape(-1, 40), packed, layer.bias, out_dtype="bfloat16"
        )
        with torch.inference_mode():
            assert torch.equal(quantized(x).reshape(-1, 20), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_features", [20, 32])
def test_layer_cast_to_half_precision(
    dtype: torch.dtype, out_features: int, config: QuantizeConfig
) -> None:
    _, quantized = quantized_layer(40, out_features, config)
    expected_weight = quantized.weight.dequantize().to(dtype)
    x = torch.randn(5, 40).to(dtype)
    cast = copy.deepcopy(quantized).to(dtype)
    assert cast.weight.dtype == cast.bias.dtype == dtype
    assert torch.equal(cast.weight.dequantize(), expected_weight)
    with torch.inference_mode():
        quantized.bias.copy_(quantized.bias.to(dtype))  # all that the cast has rounded
        assert torch.equal(cast(x), quantized(x))


def test_layer_that_was_half_precision_before(config: QuantizeConfig) -> None:
    layer = nn.Linear(40, 20).to(torch.bfloat16).eval()
    quantized = quantize_(copy.deepcopy(layer), config)
    assert quantized.weight.dtype == torch.bfloat16
    x = torch.randn(5, 40)
    with torch.inference_mode():
        np.testing.assert_array_equal(quantized(x).numpy(), reference(x, layer, config))


def test_strided_bias(config: QuantizeConfig) -> None:
    layer, quantized = quantized_layer(40, 32, config)
    strided = torch.randn(64)[::2]
    layer.bias = quantized.bias = nn.Parameter(strided)
    x = torch.randn(5, 40)
    with torch.inference_mode():
        np.testing.assert_array_equal(quantized(x).numpy(), reference(x, layer, config))


def test_changes_to_the_bias_are_seen(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(40, 20, config)
    x = torch.randn(5, 40)
    with torch.inference_mode():
        before = quantized(x) - quantized.bias
        quantized.bias.add_(1)
        torch.testing.assert_close(quantized(x) - quantized.bias, before)


def test_wrong_input(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(40, 20, config)
    with pytest.raises(ValueError, match=r"input of shape \[\.\.\., 40\], got \[2, 39\]"):
        quantized(torch.randn(2, 39))
    with pytest.raises(ValueError, match=r"got \[\]"):
        quantized(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        quantized(torch.zeros(2, 40, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        quantized(torch.zeros(2, 40, dtype=torch.float64))


@pytest.mark.parametrize("requires", ["input", "bias", "both"])
def test_gradients_are_those_of_the_dequantized_layer(
    requires: str, config: QuantizeConfig
) -> None:
    _, quantized = quantized_layer(40, 20, config)
    quantized.train()
    x = torch.randn(2, 5, 40, requires_grad=requires != "bias")
    quantized.bias.requires_grad_(requires != "input")
    twin = nn.Linear(40, 20)
    twin.weight = nn.Parameter(quantized.weight.dequantize(), requires_grad=False)
    twin.bias = nn.Parameter(quantized.bias.detach().clone(), quantized.bias.requires_grad)
    x_twin = x.detach().clone().requires_grad_(x.requires_grad)
    direction = torch.randn(2, 5, 20)
    quantized(x).backward(direction)
    twin(x_twin).backward(direction)
    assert quantized.weight.grad is None
    for ours, theirs in ((x, x_twin), (quantized.bias, twin.bias)):
        assert (ours.grad is None) == (not theirs.requires_grad)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_training_mode_and_grad_mode_do_not_change_the_result(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(40, 20, config)
    x = torch.randn(5, 40)
    with torch.inference_mode():
        expected = quantized(x).clone()
    assert torch.equal(quantized.train()(x), expected)
    assert torch.equal(quantized.eval()(x.requires_grad_()), expected)


def test_threads_do_not_change_the_result(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(300, 500, config)
    x = torch.randn(40, 300)
    before = torch.get_num_threads()
    results = []
    with torch.inference_mode():
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                results.append(quantized(x))
        finally:
            torch.set_num_threads(before)
        with ThreadPoolExecutor(4) as pool:
            results += pool.map(quantized, [x] * 8)
    assert all(torch.equal(result, results[0]) for result in results)


def test_is_made_by_quantize_only() -> None:
    with pytest.raises(TypeError, match="quantize_"):
        QuantizedLinear(3, 4)


def test_float_weight_is_refused(config: QuantizeConfig) -> None:
    _, quantized = quantized_layer(40, 20, config)
    with pytest.raises(TypeError, match="must be a QuantizedWeight, got Parameter"):
        quantized.weight = nn.Parameter(torch.zeros(20, 40))


_LAYER = """
import numpy as np, torch
import lowbit, lowbit.torch
from lowbit.product.prepared import Prepared

used = []
run = Prepared.run
def remembered(self, *operands, **named):
    used.append(self.plan.micro.name)
    run(self, *operands, **named)
Prepared.run = remembered
layer = torch.nn.Linear(64, 32, bias=False)
x = torch.randn(5, 64)
with torch.no_grad():
    layer.weight.uniform_(0.2, 0.5)
    layer.weight[:, 0] = 1.0  # the scale's: pairs sum to less than 128
    layer.weight[:, 1] = 0.0
    lowbit.torch.quantize_(layer, lowbit.torch.Int8DynamicConfig())
    layer(x)
    layer.weight.copy_(torch.full((32, 64), 0.7))  # now they sum to 254
    saturating = layer(x)
assert torch.allclose(saturating, x @ torch.full((64, 32), 0.7), atol=0.5)
print(*used)
"""


@pytest.mark.deep
def test_weights_that_cannot_saturate_get_the_narrow_kernel() -> None:
    """And lose it when they change."""
    if "avx2" not in available():
        pytest.skip("the machine has no AVX2")
    done = subprocess.run(
        [sys.executable, "-c", _LAYER], capture_output=True, text=True, check=False,
        env={**os.environ, "LOWBIT_ISA": "avx2"},
    )  # fmt: skip
    assert done.stdout.split() == ["narrow", "widening"], done.stderr


@pytest.mark.deep
def test_many_rows_are_served_by_split_weights() -> None:
    """With the bits of any other kernel, and anew when the weight changes."""
    if "avx2" not in available():
        pytest.skip("the machine has no AVX2")
    script = """
import torch, lowbit.torch
from lowbit.product.prepared import Prepared

used = []
run = Prepared.run
def remembered(self, *operands, **named):
    used.append(self.plan.micro.name)
    run(self, *operands, **named)
Prepared.run = remembered
torch.manual_seed(0)
layer, x = torch.nn.Linear(530, 40), torch.randn(64, 530)
with torch.no_grad():
    lowbit.torch.quantize_(layer, lowbit.torch.Int8DynamicConfig())
    for _ in range(2):
        together = layer(x)
        assert torch.equal(together, torch.cat([layer(row) for row in x.split(1)]))
        layer.weight.copy_(torch.randn(40, 530))
print(*sorted(set(used)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False,
        env={**os.environ, "LOWBIT_ISA": "avx2"},
    )  # fmt: skip
    assert done.stdout.split() == ["split", "widening"], done.stderr


@pytest.mark.deep("int4_dynamic-large", "int8_dynamic-large")
@pytest.mark.parametrize(
    ("rows", "columns", "streams"),
    [(2, 32, [False]), (None, 32, [False, True]), (None, 33, [False])],
    ids=["small", "large", "rows that begin within a line"],
)
def test_outputs_too_large_for_the_caches_are_stored_past_them(
    config: QuantizeConfig,
    rows: int | None,
    columns: int,
    streams: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # More than the fourfold of the second-level cache, which any kernel writes past the caches.
    rows = rows or host.caches()["L2"] // columns + 1
    torch.manual_seed(3)
    layer = quantize_(nn.Sequential(nn.Linear(160, columns)), config)
    x = torch.randn(rows, 160)
    ran: list[Product] = []
    run = Prepared.run

    def watched(self: Prepared, *given: Any, **named: Any) -> None:
        ran.append(self.request)
        run(self, *given, **named)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Prepared, "run", watched)
        y = layer(x)
    assert [product.streams for product in ran] == streams  # the one product, and its other form
    # The code of what ran last has such stores if it says so.
    program = product_kernel.program
    compiled: list[str] = []

    def emitted(isa: InstructionSet, **static: Any) -> Program:
        compiled.append(product_kernel.ir(isa, **static))
        return program(isa, **static)

    monkeypatch.setattr(product_kernel, "program", emitted)
    prepare.__wrapped__(ran[-1])
    # Only whole lines of 64 bytes are stored so.
    lines = active().vector_bytes == 64
    assert ("nontemporal" in compiled[0]) is (streams[-1] and lines)
    few = max(1, rows // 8)
    with torch.no_grad():
        assert torch.equal(y[:few], layer(x[:few]))
