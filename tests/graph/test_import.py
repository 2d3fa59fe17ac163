"""Networks that PyTorch exports mean here what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.graph.evaluate import evaluate
from lowbit.graph.onnx import from_onnx, imported
from lowbit.graph.passes import simplified
from lowbit.graph.passes.infer import inferred

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SHAPES = {"Shape", "Gather", "Unsqueeze", "Concat", "Slice", "Split", "Squeeze", "Reshape"}
NETWORKS = {
    "resnet": {"Conv", "MaxPool", "GlobalAveragePool", "Flatten", "Reshape", "Linear"},
    "mobilenet": {"Conv", "GlobalAveragePool", "HardSigmoid", "Mul"},
    "transformer": {
        "Linear", "Transpose", "MatMul", "Div", "Softmax", "LayerNormalization", *SHAPES
    },
    "unet": {"Conv", "LeakyRelu", "ConvTranspose", "Concat", "Resize"},
}  # fmt: skip
"""Networks, and what is left of them: normalizations and activations are part of products."""
EXPORTS = [(name, False, opset) for name in NETWORKS for opset in (13, 17)]
EXPORTS += [(name, True, opset) for name in NETWORKS for opset in (18, 20)]


@pytest.mark.deep("*-True-*")
@pytest.mark.parametrize(("name", "dynamo", "opset"), EXPORTS)
def test_an_exported_network_is_what_onnx_runtime_computes(
    exported: Callable[..., Any], name: str, dynamo: bool, opset: int
) -> None:
    model, x = exported(name, dynamo, opset)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (expected,) = session.run(None, {"x": x})
    whole, graph = imported(model), from_onnx(model)
    for one in (whole, graph, simplified(graph.bound({"batch": len(x)}))):
        (found,) = evaluate(one, {"x": x}).values()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    assert {node.op for node in graph.nodes} <= NETWORKS[name]
    tensors = inferred(graph.bound({"batch": len(x)})).tensors
    assert tensors[graph.outputs[0]].sizes == expected.shape


def test_additions_and_activations_are_part_of_products(exported: Callable[..., Any]) -> None:
    def steps(name: str) -> list[tuple[str, ...]]:
        nodes = from_onnx(exported(name)[0]).nodes
        products = (node for node in nodes if node.op in ("Conv", "ConvTranspose", "Linear"))
        return [tuple(step[0] for step in node.get("post_ops", ())) for node in products]

    both = ("residual", "relu")
    assert sorted(steps("resnet")) == sorted([(), (), *[("relu",)] * 3, both, both])
    assert sorted(steps("mobilenet")) == sorted(
        [(), ("hardswish",), ("hardswish",), ("relu",), ("residual",)]
    )
    assert sorted(steps("transformer")) == sorted(
        [(), ("residual",), ("residual",), ("gelu",), ("silu",)]
    )
    assert sorted(steps("unet")) == sorted([(), (), ("clamp",), ("relu",), ("silu",)])
