"""What is put in order, counted, written by indices or pooled in uneven parts: compiled, it gives
what PyTorch gives, for other batches too."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.graph.files import load, save
from lowbit.graph.session import Session
from lowbit.torch import StaticInt8Config, compile, quantize_, summary

INF = math.inf
FIRST, SECOND = torch.tensor([0, 3, 1]), torch.tensor([1, -1, 2])
CHECKERS = torch.arange(24).reshape(4, 6) % 2 == 0
PLACES = torch.randint(0, 4, (2, 6, 5), generator=torch.Generator().manual_seed(1))


def _written(x: Tensor, where: Any, what: Any) -> Tensor:
    changed = x.clone()
    changed[where] = what
    return changed


def _ties(x: Tensor) -> Tensor:
    """x in steps of a half, with NaN, infinities and both zeros in each row."""
    odd = torch.tensor([math.nan, INF, -INF, -0.0, 0.0])
    return torch.cat([(x * 2).round() / 2, odd.expand(*x.shape[:-1], 5)], -1)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: (x.topk(3), x.topk(2, 1, largest=False), x.abs().topk(1, -2), x.topk(0)),
    "sort": lambda x: (x.sort(), x.sort(1, descending=True), x.argsort(-1), x.msort()[0]),
    "ties": lambda x: (_ties(x).sort(stable=True, dim=-1), (x > 0).sort(stable=True, dim=1),
                       torch.sort(_ties(x), dim=-1, stable=True, descending=True)),
    "sorted integers": lambda x: ((x * 3).long() * (2**40 + 1)).sort(stable=True, dim=1),
    "kthvalue": lambda x: (x.kthvalue(2), x.kthvalue(6, 1, keepdim=True)),
    "counts": lambda x: (torch.histc(x, 7, -2, 2), torch.histc(x.round(), 5, -2, 2)),
    "by an index": lambda x: (_written(x, (slice(None), FIRST), x[:, :3] * 2),
                              _written(x, (..., -1), 5.0), _written(x, (slice(None), 1), x[:, 0])),
    "by two": lambda x: (_written(x, (slice(None), FIRST, SECOND), x[:, :3, 0]),
                         _written(x, (slice(None), FIRST[:, None], SECOND[:2]), 2.0)),
    "far apart": lambda x: _written(x[None].repeat(4, 1, 1, 1), (FIRST, slice(None), SECOND), 1.5),
    "added": lambda x: (x.index_add(1, FIRST, x[:, :3], alpha=2), x.index_copy(1, FIRST, x[:, 1:4]),
                        x.index_put((torch.zeros(3, dtype=torch.int64),), x[0], accumulate=True),
                        x.index_fill(1, FIRST, 3.0)),
    "running sums": lambda x: (x.cumsum(1), ((x * 9).long() * 2**33).cumsum(-1), (x > 0).cumsum(0)),
    "uneven averages": lambda x: (F.adaptive_avg_pool2d(x, (4, 3)), F.adaptive_avg_pool1d(x, 7)),
    "uneven maxima": lambda x: (F.adaptive_max_pool2d(x, (4, 3)), F.adaptive_max_pool1d(x, 2)),
    "grids": lambda x: [
        F.grid_sample(x[:, None], 2 * x.tanh().reshape(-1, 5, 3, 2), mode, padding, aligned)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection") for aligned in (False, True)
    ],
    "angles": lambda x: (torch.atan2(x, x.flip(1)), x.tanh().acos(), x.sinh(), (x * 9).tan()),
    "bits": lambda x: ((x * 2**40).long() & 0xFF00FF, ~(x * 9).int() ^ 5, (x * 9).char() | 64),
    "one hot": lambda x: F.one_hot((x * 2).long().clamp(0, 4), 5),
    "remainders": lambda x: (torch.fmod(x, INF), torch.remainder(x, INF), torch.remainder(x, -INF),
                             torch.fmod(_ties(x), 1.5), torch.remainder(_ties(x), -1.5),
                             torch.fmod(x * INF, 2), torch.fmod(x, 0)),
}  # fmt: skip


class Each(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def same(function: Callable[..., Any], *examples: Any, **how: Any) -> None:
    network = compile(Each(function), examples[0], **how)
    for inputs in examples:
        got, wanted = network(*inputs), function(*inputs)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.deep("grids")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    torch.manual_seed(1)
    examples = [(torch.randn(batch, 6, 5),) for batch in (4, 7)]
    same(FUNCTIONS[name], *examples)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_scattered(dtype: torch.dtype, include_self: bool) -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 6, 5) if dtype.is_floating_point else torch.randint(-9, 9, (4, 6, 5))
    same(lambda x, y: [x.scatter_reduce(0, PLACES, y, reduce, include_self=include_self)
                       for reduce in ("sum", "prod", "mean", "amax", "amin")],
         (x, x.flip(1)))  # fmt: skip


def test_scattered_along_lines() -> None:
    torch.manual_seed(3)
    x, along = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3, 7))
    same(lambda x, i: (x.scatter(2, i[..., :2], 1.0), x.scatter_add(2, i, torch.ones(2, 3, 7)),
                       x.scatter(-1, i[:1, :2, :1], x[1:])), (x, along))  # fmt: skip


@pytest.mark.deep
def test_masks() -> None:
    torch.manual_seed(4)
    x, rows = torch.randn(4, 6, 5), torch.randn(12, 5)
    same(lambda x, rows: (_written(x, CHECKERS, rows), _written(x, CHECKERS, 2.0)), (x, rows))
    masks = [torch.rand(4, 6) > 0.5, torch.zeros(4, 6, dtype=torch.bool)]
    same(lambda x, mask: x.masked_scatter(mask[..., None], x * 2), *((x, one) for one in masks))


@pytest.mark.deep("how0-sum")
@pytest.mark.pairs
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", [{}, {"padding_idx": 3}, {"include_last_offset": True}])
def test_embedding_bags(mode: str, how: dict[str, Any]) -> None:
    torch.manual_seed(5)
    bag = nn.EmbeddingBag(10, 4, mode=mode, **how)
    tokens, offsets = torch.randint(0, 10, (9,)), torch.tensor([0, 3, 3, 9])
    same(bag, (tokens, offsets))
    if not how:
        same(bag, (tokens.reshape(3, 3),), (tokens[:6].reshape(2, 3),))
    if not how and mode == "sum":
        same(bag, (tokens, offsets, torch.rand(9)))


def test_an_index_that_does_not_exist() -> None:
    network = compile(Each(lambda x, i: x.index_add(0, i, x[:2])), (torch.ones(3), FIRST[1:] - 1))
    with pytest.raises(IndexError, match=r"axes of \[3\]"):
        network(torch.ones(3), torch.tensor([0, 3]))


def static(model: nn.Module, batches: list[Tensor], folder: Path) -> Session:
    """In static int8, saved, and read where PyTorch need not be. The summary names what is in
    float, which the experts are."""
    made: Any = quantize_(model, StaticInt8Config(), calibration=batches)
    layers = summary(made).layers
    assert {one.quantized for one in layers if one.layer in ("Conv", "Linear")} == {True}
    grouped = [one for one in layers if one.layer == "GroupedMatMul"]
    assert len(grouped) == sum(one.op == "GroupedMatMul" for one in made.graph.nodes)
    assert all("float32" in one.why and not one.quantized for one in grouped)
    save(made.graph, folder / "net.lowbit")
    return Session(load(folder / "net.lowbit"))


@pytest.mark.deep
def test_a_small_image_network(tmp_path: Path) -> None:
    """VGG's pool of an image that its size does not divide, in 8 bits like what is around it."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d((7, 7)),
                          nn.Flatten(), nn.Linear(8 * 49, 10)).eval()  # fmt: skip
    images = [torch.randn(batch, 3, 10, 9) for batch in (2, 3)]
    wanted = [model(x).detach() for x in images]
    session = static(model, images, tmp_path)
    pools = [one for one in session.graph.nodes if one.op == "AveragePool"]
    assert [session.graph.tensors[one.outputs[0]].scale is not None for one in pools] == [True]
    for x, want in zip(images, wanted, strict=True):
        got = torch.from_numpy(session(x.numpy()))
        assert (got - want).norm() < 0.05 * want.norm()


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 24,
                 "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "num_hidden_layers": 2},  # which differ
}  # fmt: skip


def mixture(name: str, **how: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**BASE | MIXTURES[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0, 0.1)
    if how:
        model.set_experts_implementation(how["experts"])
    return model


@pytest.mark.deep
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(name: str) -> None:
    """For other batches and lengths; some experts get no token of one short text."""
    model = mixture(name)
    texts = [torch.randint(0, 64, size) for size in ((2, 7), (1, 2), (4, 11))]
    with torch.no_grad():
        wanted = [model(x)[0] for x in texts]
    network = compile(model, texts[0], dynamic_shapes=True)
    for x, want in zip(texts, wanted, strict=True):
        torch.testing.assert_close(network(x)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["Qwen2Moe", "GptOss"])
def test_mixtures_in_8_bits(name: str, tmp_path: Path) -> None:
    """With an expert for all tokens, and with biases: of the layers, experts stay in float."""
    model = mixture(name)
    texts = [torch.randint(0, 64, size) for size in ((2, 7), (3, 7))]
    with torch.no_grad():
        wanted = [model(x)[0] for x in texts]
    session = static(model, [*texts, texts[0]], tmp_path)
    for x, want in zip(texts, wanted, strict=True):
        got = torch.from_numpy(session.run(input_ids=x.numpy())[session.graph.outputs[0]])
        assert (got - want).norm() < 0.2 * want.norm()


@pytest.mark.deep
def test_experts_in_batches() -> None:
    """The other way that transformers has for them."""
    model, text = mixture("Mixtral", experts="batched_mm"), torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        want = model(text)[0]
    torch.testing.assert_close(compile(model, text)(text)[0], want, rtol=1e-4, atol=1e-4)
