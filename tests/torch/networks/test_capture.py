from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, numbers
from lowbit.graph.session import Session
from lowbit.numerics import QTensor
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizedWeight,
    compile,
    quantize_,
    to_graph,
)

Network = tuple[nn.Module, Callable[[int], Any]]


def exactly(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The leaves of what the model gives, in float64."""
    wide = copy.deepcopy(model).double()
    given = [one.double() if one.is_floating_point() else one for one in inputs]
    with torch.no_grad():
        return pytree.tree_leaves(wide(*given))


def run(graph: Graph, inputs: Any) -> list[np.ndarray]:
    arrays = {name: one.numpy() for name, one in zip(graph.inputs, inputs, strict=True)}
    return list(evaluate(graph, arrays).values())


def close(graph: Graph, model: nn.Module, inputs: Any, tolerance: float = 1e-5) -> None:
    expected = exactly(model, inputs)
    for got, wanted in zip(run(graph, inputs), expected, strict=True):
        assert got.shape == tuple(wanted.shape)
        np.testing.assert_allclose(got, wanted, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.deep("mobile", "residual", "language", "vision", "unet")
def test_a_network_means_what_the_model_does(network: Network) -> None:
    model, inputs = network
    graph = to_graph(model, inputs(1))
    assert all(graph.tensors[name].shape[0] == "batch" for name in graph.inputs)
    for batch in (1, 3):
        close(graph, model, inputs(batch))
    assert not model.training


class Each(nn.Module):
    """All of some functions of x [batch, 4, 6, 6]."""

    def __init__(self, functions: dict[str, Callable[[Tensor], Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in self.functions.items()}


def _gqa(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        x, x[:, :2], x[:, 1:3] * 2, is_causal=True, scale=0.3, enable_gqa=True
    )


def _written(x: Tensor, where: Any, what: Any) -> Tensor:
    changed = x.clone()
    changed[where] = what
    return changed


CHECKERS = torch.arange(36).reshape(6, 6) % 2 == 0
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: ((x + 2) * 3 - x / 7, 1 - x, torch.sub(x, x * x, alpha=2), -x, x**2),
    "of integers": lambda x: (x > 0).long() * 3 // 2 + (x[:, :1] > 1),
    "of negative integers": lambda x: (
        (x * 5).long() // 3, (x * 5).long() % 3, (x * 5).long() % -3, (x * 5).long() / 3,
        torch.fmod((x * 5).long(), 3), torch.div((x * 5).long(), 3, rounding_mode="trunc"),
        torch.div((x * 5).long(), -3, rounding_mode="floor"), (x * 5).long().trunc(),
    ),
    "comparisons": lambda x: [x > 0, x >= x.mean(), x < 1, x <= 0, x == 0, x != 0, ~(x > 0)],
    "logic": lambda x: ((x > 0) & (x < 1)) | torch.logical_xor(x > 2, x < -2),
    "more logic": lambda x: ((x > 0) ^ (x < 1), (x > 1).any(1), (x > 0).all(-1, keepdim=True),
                             (x > 3).any()),
    "functions": lambda x: (x.exp().log1p(), x.abs().sqrt(), x.abs().add(1).rsqrt(), x.sin(),
                            x.cos(), torch.erf(x), x.expm1(), x.reciprocal(), x.square(),
                            x.abs().add(1).log2(), x.abs().add(1).log10(), x.exp2(),
                            x.clamp(-1, 1).tan(), torch.special.erfc(x), torch.hypot(x, x + 1)),
    "rounding": lambda x: (x.floor(), x.ceil(), x.round(), x.sign(),
                           torch.div(x, 0.3, rounding_mode="floor"), x.trunc(), x.frac(),
                           torch.div(x, 0.3, rounding_mode="trunc"), x.round(decimals=1), x % 0.7,
                           torch.fmod(x, 0.7), torch.remainder(x, -0.7)),
    "activations": lambda x: (F.mish(x), F.softplus(x), F.softplus(x, 2), F.hardtanh(x, -0.5, 2),
                              F.prelu(x, SLOPES.to(x.dtype)), F.celu(x).clamp(min=-0.5),
                              F.elu(x, 0.5), F.hardsigmoid(x), F.hardswish(x), F.silu(x),
                              F.gelu(x), F.selu(x), F.softplus(x, 2, 1)),
    "choices": lambda x: (torch.where(x > 0, x, 0.5), x.masked_fill(CHECKERS, -3.0), x.clamp(-1, 1),
                          torch.maximum(x, -x), torch.minimum(x, x * 2)),
    "running sums": lambda x: [x.cumsum(1), (x > 0).cumsum(-1), x.long().cumsum(0)],
    "elements of lines": lambda x: [
        x.gather(1, (x > 0).long()), x[:2].gather(2, torch.arange(5).expand(1, 3, 2, 5)),
    ],
    "reductions": lambda x: (x.mean(), x.sum((1, 3)), x.amax(2, keepdim=True), x.amin((2, 3)),
                             x.max(1)[0], x.max(), x.argmax(1), x.var(2), x.var(3, correction=0),
                             x.norm(dim=1), x.prod(3), x.mean((2, 3), keepdim=True),
                             x.norm(p=3, dim=1), x.norm(p=math.inf, dim=(1, 2)),
                             torch.var_mean(x, 1), torch.var_mean(x, (2, 3), keepdim=True)),
    "shapes": lambda x: (x.view(-1, 36), x.flatten(1), x.unsqueeze(1).squeeze(1),
                         x.permute(0, 2, 3, 1), x.mT, x.reshape(x.shape[0] * 4, 36),
                         x.unflatten(1, (2, 2)), x[..., None]),
    "parts": lambda x: (x[:, 1:3], x[:, :, ::2, -2:], x[:, 0], x.split(3, 2), x.chunk(2, 1),
                        x.unbind(3), x.narrow(3, 1, 2), x[:, [2, 0]], x[:, :, 1, 2],
                        x[[[1], [0]], [3, -2, 0]], x.flip(3), x.flip(1, 2), x.roll(2, 1)),
    "indices of other axes": lambda x: (x[:, :, [0, 1], [2, -3]], x[:, [0, 1], :, [2, 3]],
                                        x[:, [[0], [1]], [2, 3]], x.unfold(2, 3, 2),
                                        F.unfold(x, 3, padding=1)),
    "written": lambda x: (_written(x, (slice(None), 0), 2.0), _written(x, (..., slice(1, 3)), 1.0),
                          _written(x, (..., slice(4, None)), x[..., :2]),
                          _written(x, (slice(None), -1), x[:, 0]), _written(x, x < 0, 3.0),
                          _written(x, (..., slice(3, 1)), 1.0)),
    "joined": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, -x], 1), x.repeat(1, 2, 1, 1),
                         x[:, :1].expand(-1, 3, -1, -1), torch.cat([x, x.new_zeros(x.shape)], 2)),
    "padded": lambda x: (F.pad(x, (1, 2, 0, 1), value=3.0), F.pad(x, (1, 1, 2, 2), mode="reflect"),
                         F.pad(x, (1, 1, 2, 2), mode="replicate")),
    "resized": lambda x: (F.interpolate(x, scale_factor=2.0),
                          F.interpolate(x, (9, 4), mode="bilinear"),
                          F.interpolate(x, (10, 14), mode="bilinear"), F.interpolate(x, (20, 23)),
                          F.interpolate(x, (11, 11), mode="bilinear", align_corners=True),
                          F.interpolate(x, scale_factor=1.7),
                          F.interpolate(x, scale_factor=1.7, mode="bilinear"),
                          F.interpolate(x, scale_factor=(0.4, 2), mode="bilinear"),
                          F.interpolate(x, scale_factor=1.7, recompute_scale_factor=True),
                          F.interpolate(x, (9, 4), mode="bicubic"),
                          F.interpolate(x, (9, 4), mode="nearest-exact"),
                          F.interpolate(x[..., 0], scale_factor=1.3, mode="linear"),
                          F.interpolate(x[..., 0], scale_factor=2.6)),
    "shuffled": lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 3), F.channel_shuffle(x, 2)),
    "pooled": lambda x: (F.max_pool2d(x, 3, 2, 1, ceil_mode=True), F.adaptive_avg_pool2d(x, (3, 2)),
                         F.avg_pool2d(x, 3, 2, 1), F.adaptive_max_pool2d(x, 1),
                         F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    "norms": lambda x: (F.layer_norm(x, (6, 6)), F.instance_norm(x), F.rms_norm(x, (6,)),
                        F.group_norm(x, 2), F.log_softmax(x, 1), F.normalize(x, dim=1)),
    "products": lambda x: (x @ x.mT, torch.einsum("bchw,bcwk->bhk", x, x),
                           F.linear(x, SLOPES[:1].expand(2, 6).to(x.dtype)),
                           torch.bmm(x[:, 0], x[:, 1]),
                           torch.baddbmm(x[:, 2], x[:, 0], x[:, 1], alpha=2)),
    "attention": lambda x: (_gqa(x), F.scaled_dot_product_attention(x, x, x, CHECKERS)),
    "of the batch": lambda x: (torch.arange(x.shape[0]) * 2, x.new_ones(x.shape[0], 3),
                               torch.zeros_like(x), torch.triu(x, 1)),
    "of constants": lambda x: (x[:, SLOPES.sort(descending=True)[1]], x * SLOPES.topk(2)[0].sum()),
}  # fmt: skip


@pytest.mark.deep
def test_each_operator_means_what_pytorch_does() -> None:
    torch.manual_seed(1)
    model, x = Each(FUNCTIONS), torch.randn(3, 4, 6, 6)
    graph = to_graph(model, x)
    assert graph.tensors["x"].shape == ("batch", 4, 6, 6)
    for given in (x, torch.randn(2, 4, 6, 6)):
        with torch.no_grad():
            expected = model(given.double())
        made = evaluate(graph, {"x": given.numpy()})
        got = pytree.tree_unflatten(
            [made[name] for name in graph.outputs], pytree.tree_structure(expected)
        )
        for name in FUNCTIONS:
            leaves = zip(
                pytree.tree_leaves(got[name]), pytree.tree_leaves(expected[name]), strict=True
            )
            for n, (one, wanted) in enumerate(leaves):
                where = f"{name}, number {n}"
                np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5, err_msg=where)


OF_INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-1.5, 2.5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-1.5), torch.tensor(2.5)),
    "clamp by integers": lambda x: x.clamp(-1, 2),
    "round": torch.round, "rsqrt": torch.rsqrt, "log1p": torch.log1p, "expm1": torch.expm1,
    "tan": torch.tan, "erfc": torch.erfc,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_functions_of_integers_have_the_dtype_of_pytorch(name: str) -> None:
    x, function = torch.arange(1, 4), OF_INTEGERS[name]
    got, wanted = compile(Each({"y": function}), x)(x)["y"], function(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [torch.log1p, torch.expm1])
def test_numbers_near_0_and_at_the_ends(function: Callable[[Tensor], Tensor]) -> None:
    near = torch.tensor([1e-3, 1e-5, 1e-7, 3e-8, 1e-12, 0.1, 0.5])
    ends = torch.tensor([0.0, -1.0, math.inf, -math.inf, math.nan, 1.0, 80.0])
    model, x = Each({"y": function}), torch.cat([near, -near, ends])
    torch.testing.assert_close(
        compile(model, x)(x)["y"], function(x.double()).float(), rtol=3e-7, atol=0, equal_nan=True
    )


class Twice(nn.Module):
    """One layer in two places, and a second that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(torch.relu(self.one(x))))


def test_what_is_shared_stays_shared() -> None:
    model = Twice()
    graph = to_graph(model, torch.randn(2, 8))
    close(graph, model, (torch.randn(5, 8),))
    assert set(graph.constants) == {"other.weight", "one.bias"}
    assert [node.name for node in graph.nodes] == ["one", "", "one", "other"]
    again = to_graph(copy.deepcopy(model), torch.randn(2, 8))
    assert [node.inputs for node in again.nodes] == [node.inputs for node in graph.nodes]
    assert all(
        np.array_equal(numbers(graph.constants[n]), numbers(one))
        for n, one in again.constants.items()
    )


def test_constants_are_copies_and_the_model_is_as_it_was() -> None:
    layer, dropout = nn.Linear(4, 4), nn.Dropout(0.5)
    model = nn.Sequential(layer, dropout).train()
    graph = to_graph(model, torch.randn(2, 4))
    assert model.training
    assert dropout.training
    before = numbers(graph.constants["0.weight"]).copy()
    with torch.no_grad():
        layer.weight.zero_()
    assert np.array_equal(numbers(graph.constants["0.weight"]), before)


@pytest.mark.deep("config3", "config2", "config1")
@pytest.mark.parametrize(
    "config",
    [
        Int8DynamicConfig(),
        Int8DynamicConfig(symmetric=True),
        Int4WeightOnlyConfig(group_size=16),
        Int4DynamicConfig(group_size=None),
    ],
)
def test_layers_that_are_quantized_stay_so(config: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 6, bias=False)).eval()
    quantize_(model, config)
    x = torch.randn(9, 40)
    graph = to_graph(model, x)
    assert [node.op for node in graph.nodes] == ["Linear", "Relu", "Linear"]
    for node, layer in zip(graph.nodes[::2], list(model)[::2], strict=True):
        weight, given = graph.constants[node.inputs[1]], layer.weight
        assert isinstance(weight, QTensor)
        assert isinstance(given, QuantizedWeight)
        assert np.array_equal(weight.values, given.quantized().values)
    with torch.no_grad():
        expected = model(x)
    np.testing.assert_allclose(run(graph, (x,))[0], expected, atol=1e-5)
    np.testing.assert_allclose(Session(graph)(x.numpy()), expected, atol=1e-5)


def test_results_that_are_inputs_twice_or_numbers() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor, factor: float = 1.0) -> Any:
            made = x * factor
            return made, x, made, None, {"y": y, "three": 3}

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = to_graph(Odd(), {"y": y, "x": x, "factor": 2.0})
    assert graph.inputs == ("x", "y")
    for got, wanted in zip(run(graph, (x, y)), (2 * x, x, 2 * x, y), strict=True):
        np.testing.assert_array_equal(got, wanted)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        calls = self.get_buffer("calls")
        calls += 1
        return x * calls


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x) + torch.fft.rfft(x).abs().sum() + torch.rand_like(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Chooses(), r"chooses by the values of its data .* torch\.where"),
        (Counts(), "changes calls when it is called"),
        (Unknown(), r"known of aten::_fft_r2c, aten::rand_like, aten::special_bessel_j0"),
        (nn.Linear(3, 3).half(), r"torch\.float16 has no kernels here: .* by \.float\(\)"),
    ],
)
def test_what_a_graph_cannot_hold_is_said(model: nn.Module, message: str) -> None:
    dtype = torch.float16 if isinstance(model, nn.Linear) else torch.float32
    with pytest.raises(NotImplementedError, match=message):
        to_graph(model, torch.randn(2, 3, 3, 3, dtype=dtype))


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got builtin"):
        to_graph(torch.relu, torch.randn(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match=r"cannot export this model: .*reduction dim"):
        to_graph(nn.Linear(3, 3), torch.randn(2, 4))


class KeyCache:
    pass


def test_a_model_that_gives_back_a_cache_is_told_how_not_to() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, KeyCache()

    with pytest.raises(NotImplementedError, match=r"set model\.config\.use_cache = False"):
        to_graph(Model(), torch.randn(2))


class Attends(nn.Module):
    """nn.MultiheadAttention in all the ways that differ in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.alike = nn.MultiheadAttention(12, 3, batch_first=True)
        self.other = nn.MultiheadAttention(12, 2, batch_first=True, kdim=7, vdim=5, bias=False)
        self.first = nn.MultiheadAttention(12, 3, add_bias_kv=True)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> Any:
        blind = torch.ones(x.shape[1], x.shape[1]).triu(1)
        quiet = {"need_weights": False}
        return (
            self.alike(x, x, x, **quiet)[0],
            self.alike(x, x, x, padding, **quiet)[0],
            self.alike(x, x, x, attn_mask=blind.bool(), **quiet)[0],
            self.alike(x, x, x, attn_mask=-blind, is_causal=False, **quiet)[0],
            self.alike(x, y[..., :1] + x, x, attn_mask=None)[0],
            self.alike(x, x + 1, x, **quiet)[0],
            self.other(x, y[..., :7], y[..., :5], **quiet)[0],
            self.first(x, x, x, **quiet)[0],
        )


@pytest.mark.deep
def test_multihead_attention() -> None:
    torch.manual_seed(2)
    model = Attends().eval()
    nn.init.normal_(model.alike.in_proj_bias)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    inputs = torch.randn(3, 6, 12), torch.randn(3, 6, 9), padding
    graph = to_graph(model, inputs)
    assert "forward" not in vars(model.alike)
    close(graph, model, inputs)
    moves = to_graph(nn.Sequential(nn.TransformerEncoderLayer(12, 3, batch_first=True)), inputs[0])
    assert [node.op for node in moves.nodes[:2]] == ["Linear", "Split"]
    assert sum(node.op == "Transpose" for node in moves.nodes) == 4


@pytest.mark.deep
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_quantized_attention_of_several_inputs(need_weights: bool, batch_first: bool) -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(40, 4, batch_first=batch_first)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.attention(x, y, y, need_weights=need_weights)[: 1 + need_weights]

    torch.manual_seed(3)
    model = quantize_(Across().eval(), Int8DynamicConfig())
    others = (3, 5, 40) if batch_first else (5, 7, 40)
    inputs = torch.randn(3, 7, 40), torch.randn(others)
    names = dict(model.named_parameters()).keys()
    graph = to_graph(model, inputs)
    assert dict(model.named_parameters()).keys() == names
    assert all(isinstance(graph.constants[node.inputs[1]], QTensor)
               for node in graph.nodes if node.op == "Linear")  # fmt: skip
    for got, wanted in zip(run(graph, inputs), model(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted.detach(), atol=1e-5)


@pytest.mark.deep
def test_a_quantized_table_is_the_weight_of_what_comes_out() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(50, 32), nn.Linear(32, 32)

        def forward(self, words: Tensor) -> Tensor:
            return F.linear(self.layer(self.table(words)), self.table.weight)

    model = quantize_(Tied().eval(), Int8DynamicConfig(), progress=False)
    words = torch.randint(50, (2, 4))
    torch.export.export(model, (words,))
    torch.testing.assert_close(compile(model, words)(words), model(words), rtol=1e-4, atol=1e-4)


def test_what_an_example_must_be_is_said() -> None:
    x = torch.randn(2, 3)
    for example, message in (((x, x), "without labels"), (x.numpy(), "torch.from_numpy")):
        with pytest.raises(TypeError, match=message):
            compile(nn.ReLU(), example)
    traced: Any = torch.jit.trace(nn.ReLU(), x)
    with pytest.raises(TypeError, match="TorchScript"):
        compile(traced, x)
