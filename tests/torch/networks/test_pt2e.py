"""Models that PyTorch's own flow has quantized: its operators become formats and QTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph
from lowbit.graph.passes import simplified
from lowbit.numerics import QTensor
from lowbit.torch import CompiledModule, compile, to_graph

Build = Callable[[str], tuple[nn.Module, Callable[[int], Any]]]


def test_operators_of_the_flow() -> None:
    pytest.importorskip("torch.ao.quantization.fx._decomposed")  # which registers them
    ops = torch.ops.quantized_decomposed

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.randint(-127, 128, (4, 3, 3, 3), dtype=torch.int8)
            self.register_buffer("weight", weight)
            self.register_buffer("scales", torch.rand(4) * 0.01 + 0.001)
            self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))
            self.register_buffer("own", torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = rounded(x, 0.02, 120, 0, 255, torch.uint8)
            weight = ops.dequantize_per_channel(
                self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8
            )
            x = rounded(F.relu(F.conv2d(x, weight)), 0.03, -128, -128, 127, torch.int8)
            x = rounded(x.mean((2, 3)), 0.01, 3, 0, 127, torch.uint8)  # 7 bits
            own = rounded(self.get_buffer("own"), 0.01, 0, -127, 127, torch.int8)
            return F.linear(x, own)

    def rounded(x: Tensor, *how: Any) -> Tensor:
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how)

    torch.manual_seed(0)
    model, x = Quantized(), torch.randn(2, 3, 8, 8) * 3
    graph = simplified(to_graph(model, x))
    assert [node.op for node in graph.nodes if node.op.endswith("Linear")] == ["Linear"]
    conv = next(node for node in graph.nodes if node.op == "Conv")
    weight = graph.constants[conv.inputs[1]]
    assert isinstance(weight, QTensor)
    assert np.array_equal(weight.values, model.get_buffer("weight").numpy())
    formats = {(one.dtype, one.zero_point) for one in graph.tensors.values() if one.scale}
    assert formats == {("uint8", 120), ("int8", -128), ("uint8", 3)}
    same(graph, model, x)


def same(graph: Graph, model: nn.Module, x: Tensor) -> None:
    (got,) = evaluate(graph, {graph.inputs[0]: x.numpy()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(got, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["residual", "mobile"])
def test_a_converted_model(build: Build, name: str) -> None:
    flow = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    model, inputs = build(name)
    (x,) = inputs(2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = flow.prepare_pt2e(program.module(), quantizer)
    prepared(*inputs(4))
    converted = flow.convert_pt2e(prepared)
    made = compile(converted, x)
    assert isinstance(made, CompiledModule)
    assert not any("Quantize" in node.op for node in made.graph.nodes)
    same(made.graph, converted, *inputs(3))
