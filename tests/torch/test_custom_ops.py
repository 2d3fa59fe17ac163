"""The operators inside PyTorch: their contract, tracing, compiling, exporting."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

from lowbit.torch import Int4DynamicConfig, Int8DynamicConfig, QuantizeConfig, QuantizedWeight
from lowbit.torch.functional.linear import dequantize_weight
from lowbit.torch.functional.linear import linear_op as linear

BACKENDS = ["eager", "aot_eager"] + ["inductor"] * (shutil.which("g++") is not None)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(config: QuantizeConfig, bias: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(1)
    weight = QuantizedWeight.from_float(torch.randn(20, 70), config.weight_format)
    return (
        torch.randn(2, 3, 70).to(dtype),
        weight.panels,
        weight.column_sums,
        weight.scale,
        weight.zero_points,
        torch.randn(20) if bias else None,
        70,
        20,
        weight.group_size,
        config.activations,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_passes_opcheck(config: QuantizeConfig, bias: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(linear, arguments(config, bias, dtype))


@pytest.mark.parametrize("kind", [Int8DynamicConfig, Int4DynamicConfig])
def test_linear_of_symmetric_activations_passes_opcheck(kind: Any) -> None:
    torch.library.opcheck(linear, arguments(kind(symmetric=True), False, torch.float32))


def test_dequantize_weight_passes_opcheck(config: QuantizeConfig) -> None:
    _, *weight, _, k, n, group_size, _ = arguments(config, False, torch.float32)
    torch.library.opcheck(dequantize_weight, (*weight, k, n, group_size))


def test_activations_that_there_are_not() -> None:
    given = arguments(Int8DynamicConfig(), False, torch.float32)
    with pytest.raises(ValueError, match="'grouped' or 'float', got 'static'"):
        linear(*given[:-1], "static")
    with pytest.raises(ValueError, match="'float' need a weight with groups"):
        linear(*given[:-1], "float")


def test_panels_at_an_address_that_is_not_aligned(config: QuantizeConfig) -> None:
    given = list(arguments(config, True, torch.float32))
    expected = linear(*given)
    memory = torch.empty(given[1].numel() + 64, dtype=torch.uint8)
    start = 1 if memory.data_ptr() % 64 == 0 else 0
    shifted = memory[start : start + given[1].numel()].view(given[1].shape)
    assert shifted.data_ptr() % 64 != 0
    given[1] = shifted.copy_(given[1])
    assert torch.equal(linear(*given), expected)


@pytest.mark.deep("int8_dynamic-*", "*-inductor-*")
@pytest.mark.pairs
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_whole(model: nn.Module, tokens: torch.Tensor, backend: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        expected = model(tokens)
        out = torch.compile(model, fullgraph=True, backend=backend)(tokens)
    # Inductor fuses and reorders the float operations around the layers.
    tolerance = 1e-4 if backend == "inductor" else 0.0
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.deep
def test_compiled_with_dynamic_shapes(model: nn.Module, tokens: torch.Tensor) -> None:
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for rows in (1, 2, 3):
            assert torch.equal(compiled(tokens[:rows]), model(tokens[:rows]))


def test_gradients_when_compiled(model: nn.Module) -> None:
    layer = model.get_submodule("first")
    x = torch.randn(3, 40, requires_grad=True)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.deep("int4_dynamic-True-True", "int4_weight_only-True-True", "int8_dynamic-True-True")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_exported(model: nn.Module, tokens: torch.Tensor, strict: bool, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        batch = {"tokens": {0: torch.export.Dim("batch", min=1, max=64)}}
        program = torch.export.export(model, (tokens,), dynamic_shapes=batch, strict=strict)
        assert torch.equal(program.module()(tokens[:2]), model(tokens[:2]))
    # With gradients, the strict exporter puts the operator into a graph of its own.
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    called = [str(node.target) for graph in graphs for node in graph.nodes]
    assert called.count("lowbit.linear.default") == 3


def test_fake_says_what_is_wrong_before_anything_runs(model: nn.Module) -> None:
    layer = model.get_submodule("first")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.zeros(2, 40, dtype=torch.bfloat16))
        out = layer(x)
        assert (out.shape, out.dtype) == ((2, 70), torch.bfloat16)
        with pytest.raises(ValueError, match=r"\[\.\.\., 40\], got \[2, 41\]"):
            layer(mode.from_tensor(torch.zeros(2, 41)))
