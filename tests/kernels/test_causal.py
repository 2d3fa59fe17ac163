"""What causal means: every place that computes attention, against the one specification."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper
from tests.helpers.nets import Net, random_inputs
from tests.kernels.test_attention import CASES, Problem, _check, _exact, _plan, _problem, _run
from torch.nn import functional as F

from lowbit.graph import Session
from lowbit.graph.evaluate import evaluate
from lowbit.graph.onnx import from_onnx
from lowbit.kernels.cpu.attention.plan import AttentionForm
from lowbit.kernels.triton.fast.attention import AttentionConfig
from lowbit.kernels.triton.fast.attention import attention as attention_kernels
from lowbit.spec.operations.attention import attention
from lowbit.torch import functional as ours
from lowbit.torch.capture.export import to_graph
from lowbit_lab import interpreter

# Queries and keys: as many, fewer, more, one, and so many more that whole blocks attend to nothing.
SIZES = [(7, 7), (5, 12), (12, 5), (1, 9), (9, 1), (70, 3)]


def _operands(queries: int, keys: int) -> list[np.ndarray]:
    rng = np.random.default_rng(queries * 100 + keys)
    shapes = (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _top_left(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in which query i attends to the keys 0 to i."""
    query, key, value = (torch.from_numpy(array) for array in (q, k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).numpy()


@pytest.mark.parametrize("sizes", SIZES)
def test_the_specification(sizes: tuple[int, int]) -> None:
    """The last query attends to all keys, each before it to one fewer, and to none gives zeros."""
    q, k, v = (array.astype(np.float64) for array in _operands(*sizes))
    z = attention.reference(q, k, v, causal=True)
    for i in range(sizes[0]):
        seen = max(sizes[1] - (sizes[0] - 1 - i), 0)
        row = attention.reference(q[:, :, i : i + 1], k[:, :, :seen], v[:, :, :seen])
        np.testing.assert_allclose(z[:, :, i : i + 1], row, rtol=0, atol=1e-13)
        assert seen or not row.any()


@pytest.mark.parametrize("sizes", SIZES)
def test_networks(sizes: tuple[int, int]) -> None:
    net = Net()
    names = [net.input(*array.shape) for array in _operands(*sizes)]
    graph = net.graph(net("Attention", *names, is_causal=1))
    inputs = random_inputs(graph)
    exact = attention.reference(*(inputs[name].astype(float) for name in names), causal=True)
    for found in (evaluate(graph, inputs), Session(graph).run(**inputs)):
        np.testing.assert_allclose(found[graph.outputs[0]], exact, rtol=0, atol=2e-5)


@pytest.mark.deep("*-sizes0", "*-sizes2")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("inputs", ["f32", "u8"])
def test_the_kernel_on_a_cpu(sizes: tuple[int, int], inputs: str) -> None:
    """Compiled and interpreted, within the kernel's own budget of what the specification says."""
    p = _problem(AttentionForm(inputs, "f32"), *sizes, 16, None, 2, 4, 2, causal=True)
    exact = _specified(p)
    for isa, products in CASES:
        got = _run(p, isa, products)
        _check(p, got, exact, _exact(p, _plan(p, got, isa, products, 1).micro.pair)[1])
        if sizes[0] < 20:
            assert _run(p, isa, products, 1, interpret=True).tobytes() == got.tobytes()


def _specified(p: Problem) -> np.ndarray:
    affine = [(0.02, 117), (0.013, 130), (0.03, 90)] if p.form.inputs == "u8" else [(1.0, 0)] * 3
    real = [
        (array.astype(float) - zero).transpose(0, 2, 1, 3) * scale
        for array, (scale, zero) in zip(p.arrays, affine, strict=True)
    ]
    return attention.reference(*real, causal=True).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("sizes", SIZES)
def test_on_a_gpu(sizes: tuple[int, int]) -> None:
    """The kernel, interpreted, and what serves tensors of a CPU."""
    q, k, v = (torch.from_numpy(array).half() for array in _operands(*sizes))
    exact = attention.reference(*(one.double().numpy() for one in (q, k, v)), causal=True)
    with interpreter():
        kernel = attention_kernels(q, k, v, True, 0.25, config=AttentionConfig(16, 32, 4, 2))[0]
    for found in (kernel, ours.attention(q, k, v, causal=True)):
        np.testing.assert_allclose(found.float(), exact, rtol=0, atol=6e-3)


class _Causal(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.deep("True-sizes5")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("named", [False, True])
def test_what_pytorch_means(sizes: tuple[int, int], named: bool) -> None:
    """Query i attends to the keys 0 to i, however many queries there are."""
    q, k, v = _operands(*sizes)
    example = tuple(torch.from_numpy(array) for array in (q, k, v))
    graph = to_graph(_Causal(), example, dynamic_shapes=True if named else None)
    found = Session(graph).run(q, k, v)
    np.testing.assert_allclose(found[graph.outputs[0]], _top_left(q, k, v), rtol=0, atol=2e-5)


def _onnx(queries: int | str, keys: int | str) -> bytes:
    shapes = {"q": (2, 4, queries, 16), "k": (2, 2, keys, 16), "v": (2, 2, keys, 16)}
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    node = helper.make_node("Attention", list(shapes), ["y"], is_causal=1)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    opsets = [helper.make_opsetid("", 23)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("named", [False, True])
def test_what_onnx_means(sizes: tuple[int, int], named: bool) -> None:
    """The same as PyTorch, also where sizes are known in a run only."""
    q, k, v = _operands(*sizes)
    model = _onnx("queries", "keys") if named else _onnx(*sizes)
    found = Session(from_onnx(model)).run(q, k, v)["y"]
    (runtime,) = onnxruntime.InferenceSession(model).run(None, {"q": q, "k": k, "v": v})
    for exact in (np.asarray(runtime), _top_left(q, k, v)):
        np.testing.assert_allclose(found, exact, rtol=0, atol=2e-5)
