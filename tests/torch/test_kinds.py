"""The kinds of layers that are quantized: what they compute, what they share, what is told."""

from __future__ import annotations

import copy
import logging
import sys
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    QuantizedWeight,
    load,
    quantize_,
    save,
    summary,
    to_graph,
)

CONFIGS = [
    Int8DynamicConfig(),
    Int8DynamicConfig(embeddings=4),
    Int4WeightOnlyConfig(16, embeddings=4),
    Int4DynamicConfig(None, symmetric_weight=True),
    Int4WeightOnlyConfig(16, method="hqq"),
]


def reference(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """A linear layer of the same weight, which QuantizedLinear computes to the bit."""
    layer = nn.Linear(weight.in_features, weight.out_features, bias is not None)
    record = weight.record()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(record.dequantize()))
    layer = quantize_(layer, weight.config)
    copied = weight.facts._replace(transposed=False, packing="panels")
    layer.weight = nn.Parameter(
        QuantizedWeight.of(record, copied, torch.device("cpu")), requires_grad=False
    )
    layer.bias = bias  # type: ignore[assignment]
    return layer(x)


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


@pytest.fixture
def conv1d(monkeypatch: pytest.MonkeyPatch) -> type[Conv1D]:
    module = ModuleType("transformers.pytorch_utils")
    module.Conv1D = Conv1D  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Conv1D, "__module__", module.__name__)
    return Conv1D


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_conv1d(config: QuantizeConfig, conv1d: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    layer = conv1d(48, 48)  # square, so that nothing but its kind says which way it lies
    plain, x = copy.deepcopy(layer), torch.randn(2, 5, 48)
    expected = layer(x)
    quantize_(layer, config)
    out = layer(x)
    assert F.cosine_similarity(out, expected, dim=-1).min() > 0.98
    assert torch.equal(out, reference(x, layer.weight, layer.bias))
    assert layer.weight.shape == plain.weight.shape
    assert (layer.weight.dequantize() - plain.weight).abs().max() < 0.2
    # PyTorch's own forward computes the same with such a weight.
    plain.weight = layer.weight
    assert torch.equal(plain(x), out)
    save(layer, tmp_path / "file")
    assert torch.equal(load(conv1d(48, 48), tmp_path / "file")(x), out)
    with pytest.raises(ValueError, match=r"is \[in, out\] in the file and"):
        load(nn.Linear(48, 48), tmp_path / "file")
    if config.method == "nearest":  # type: ignore[attr-defined]
        again = quantize_(conv1d(48, 48), config)
        again.load_state_dict({"weight": layer.weight.dequantize(), "bias": layer.bias})
        assert (again.weight.dequantize() - layer.weight.dequantize()).abs().max() < 0.2


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("width", [32, 40])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(config: QuantizeConfig, width: int, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(width, 4, batch_first=batch_first).eval()
    layer = quantize_(copy.deepcopy(layer), config)
    float_ = copy.deepcopy(nn.MultiheadAttention(width, 4, batch_first=batch_first).eval())
    with torch.no_grad():
        for name, one in float_.named_parameters():
            one.copy_(layer.get_parameter(name))
    q, k, v = torch.randn(3, 3, 5, width)
    for inputs in ((q, q, q), (q, k, k), (q, k, v)):
        expected = float_(*inputs)[0]
        with torch.inference_mode():
            out = layer(*inputs)[0]
        assert torch.equal(layer(*inputs)[0], out)
        assert F.cosine_similarity(out, expected, dim=-1).min() > 0.999
    assert isinstance(layer.in_proj_weight, QuantizedWeight)
    assert isinstance(layer.out_proj.weight, QuantizedWeight)


def test_attention_with_separate_projections_and_gradients() -> None:
    layer = nn.MultiheadAttention(32, 4, kdim=24, vdim=16, batch_first=True)
    quantize_(layer, Int8DynamicConfig())
    q = torch.randn(2, 5, 32, requires_grad=True)
    layer(q, torch.randn(2, 5, 24), torch.randn(2, 5, 16))[0].sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert layer.in_proj_bias.grad is not None
    names = {n for n, p in layer.named_parameters() if isinstance(p, QuantizedWeight)}
    assert names == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [8, 37, 128])
def test_embedding(config: QuantizeConfig, tied: bool, width: int, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(70, width, padding_idx=3), nn.Linear(width, 70)])
    if tied:
        model[1].weight = model[0].weight
    indices = torch.tensor([[0, 69, 3], [16, 15, 69]])
    before = model[0](indices)
    quantize_(model, config)
    weight: Any = model[0].weight
    assert (weight is model[1].weight) == tied
    assert weight.packing == ("panels" if tied else "rows")
    out = model[0](indices)
    assert torch.equal(out, weight.dequantize()[indices])
    assert torch.equal(F.embedding(indices.int(), weight), out)
    assert not out[0, 2].any()  # of the padding
    assert F.cosine_similarity(out, before, dim=-1)[1].min() > 0.97
    for wrong in (70, -1):
        with pytest.raises(IndexError, match=f"index {wrong} is not within the 70 rows"):
            model[0](torch.tensor([wrong]))
    with pytest.raises(TypeError, match=r"got torch\.float32"):
        model[0](torch.zeros(2))
    assert model[0].to(torch.bfloat16)(indices).dtype == torch.bfloat16
    save(model.float(), tmp_path / "file")
    with torch.device("meta"):
        empty = nn.ModuleList([nn.Embedding(70, width), nn.Linear(width, 70)])
    load(empty, tmp_path / "file")
    assert torch.equal(empty[0](indices), out)
    assert (empty[0].weight is empty[1].weight) == tied


@pytest.mark.deep
def test_traced_alike() -> None:
    """By torch.compile, torch.export and as a graph."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.head = nn.Linear(32, 50)
            self.head.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    model = quantize_(Model().eval(), Int8DynamicConfig())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected = model(tokens)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(tokens), expected)
        exported = torch.export.export(model, (tokens,))
        assert torch.equal(exported.module()(tokens), expected)
    assert {"Gather", "Linear", "Attention"} <= {node.op for node in to_graph(model, tokens).nodes}


def test_what_a_weight_computes_by_itself() -> None:
    layer = quantize_(nn.Linear(64, 32), Int8DynamicConfig())
    x, weight = torch.randn(2, 3, 64), cast(Any, layer.weight)
    assert torch.equal(F.linear(x, weight, layer.bias), layer(x))
    strided = x.transpose(0, 1)
    assert torch.equal(strided @ weight.T, F.linear(strided, weight))
    with torch.inference_mode():
        assert torch.equal(F.linear(x, weight, layer.bias), layer(x))
        assert torch.equal(x @ weight.T, F.linear(x, weight))
    for span in (slice(0, 16), slice(16, None), slice(3, 5)):
        part: Any = weight[span]
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantize(), weight.dequantize()[span])
        assert torch.equal(F.linear(x, part), F.linear(x, weight)[..., span])
    assert torch.equal(weight + 1, weight.dequantize() + 1)
    assert weight.nbytes == sum(one.nbytes for one in weight.parts.values()) < 32 * 64 * 4 / 3
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    torch.testing.assert_close(gradient[0, 0], weight.dequantize().sum(0))


@pytest.mark.deep
def test_autocast_vmap_and_trace() -> None:
    for config in (Int8DynamicConfig(), Int4WeightOnlyConfig(32)):
        layer = quantize_(nn.Linear(64, 32), config)
        x = torch.randn(3, 4, 64)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == F.linear(x, layer.weight).dtype == torch.bfloat16
        assert torch.equal(torch.func.vmap(layer, in_dims=1, out_dims=1)(x), layer(x))
        over_biases = torch.func.vmap(F.linear, in_dims=(None, None, 0))
        with pytest.raises(NotImplementedError, match="map over inputs only"):
            over_biases(x, layer.weight, torch.zeros(2, 32))
        assert torch.equal(torch.jit.trace(layer, x)(x), layer(x))  # type: ignore[operator]


def test_assigned_into_a_model_without_memory(tmp_path: Any) -> None:
    model = quantize_(nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 8)), Int8DynamicConfig())
    with torch.device("meta"):
        empty = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 8))
    empty.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.arange(9)
    assert torch.equal(empty(tokens), model(tokens))
    assert all(one.quantized for one in summary(empty).layers)
    save(empty, tmp_path / "file")
    again = load(nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 8)), tmp_path / "file")
    assert torch.equal(again(tokens), model(tokens))
    with pytest.raises(NotImplementedError, match=r"call lowbit\.torch\.save"):
        save_model(model, str(tmp_path / "other"))


def test_summary_and_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowbit")
    model = nn.ModuleDict({
        "table": nn.Embedding(10, 8), "head": nn.Linear(8, 10), "other": nn.Linear(8, 8),
        "conv": nn.Conv1d(8, 8, 3), "norm": nn.LayerNorm(8), "bag": nn.EmbeddingBag(4, 8),
        "limited": nn.Embedding(4, 8, max_norm=1.0), "twice": nn.Bilinear(4, 4, 4),
    })  # fmt: skip
    model["head"].weight = model["table"].weight
    floats = sum(one.nbytes for one in model.parameters())
    quantize_(model, Int8DynamicConfig(), lambda _, name: name not in ("table", "other"))
    told = {one.name: one for one in summary(model).layers}
    assert [name for name, one in told.items() if one.quantized] == ["head"]
    assert told["other"].why == told["table"].why == "filter_fn left it out"
    assert told["limited"].why == "max_norm changes the table in every call"
    assert told["conv"].why == "convolution: StaticInt8Config quantizes it"
    assert told["bag"].why == told["twice"].why == "of no kind that is quantized"
    assert summary(model).bytes_after == sum(one.nbytes for one in model.parameters())
    assert summary(model).bytes_before == floats + 10 * 8 * 4  # the tie is broken
    assert "table.weight keeps the float weight that it shared with head.weight" in caplog.text
    assert str(summary(model)) in caplog.text
    caplog.clear()
    quantize_(model, Int4WeightOnlyConfig(8), lambda _, name: name in ("head", "other"))
    assert "1 layers are quantized already, with Int8DynamicConfig" in caplog.text
    assert "stay as they are: head" in caplog.text


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[str, int, int]] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    quantize_(copy.deepcopy(model), Int8DynamicConfig(), progress=lambda *step: steps.append(step))
    assert steps == [("Quantizing weights", done, 2) for done in range(3)]
    quantize_(copy.deepcopy(model), Int8DynamicConfig())
    assert capsys.readouterr().err == ""  # no terminal
    quantize_(model, Int8DynamicConfig(), progress=True)
    assert "Quantizing weights: 2 of 2" in capsys.readouterr().err
    with pytest.raises(TypeError, match="progress must be"):
        quantize_(model, Int8DynamicConfig(), progress="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
@pytest.mark.parametrize("kind", [Int8DynamicConfig, Int4WeightOnlyConfig])
def test_methods_that_need_data(method: str, kind: Any, tmp_path: Any) -> None:
    torch.manual_seed(0)
    groups: dict[str, Any] = {} if kind is Int8DynamicConfig else {"group_size": 16}
    config: Any = kind(method=method, **groups)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    mixed = torch.randn(8, 32)
    data = [torch.randn(4, 6, 8) @ mixed for _ in range(4)]
    seen = copy.deepcopy(data)
    quantized = quantize_(copy.deepcopy(model), config, calibration=data)
    nearest: Any = config.__class__(**{**vars(config), "method": "nearest"})
    plain = quantize_(copy.deepcopy(model), nearest)
    assert all(torch.equal(a, b) for a, b in zip(data, seen, strict=True))
    with torch.inference_mode():
        exact = torch.cat([model(one) for one in data])
        errors = [(torch.cat([one(x) for x in data]) - exact).norm() for one in (quantized, plain)]
    assert errors[0] < errors[1] * (1.0 if method == "gptq" else 1.2)
    save(quantized, tmp_path / "file")
    again = load(copy.deepcopy(model), tmp_path / "file")
    with torch.inference_mode():
        assert torch.equal(again(data[0]), quantized(data[0]))
    for wrong, message in (
        ({}, "needs data"),
        ({"calibration": []}, "give at least one batch"),
        ({"calibration": [data[0] * float("nan")]}, "the input of layer"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_(copy.deepcopy(model), config, **cast(Any, wrong))
    both = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    both.forward = both[0].forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the calibration data never reach '1'"):
        quantize_(both, config, calibration=[torch.randn(2, 8)])


def test_wrong_configurations() -> None:
    with pytest.raises(ValueError, match="unknown method 'best'; pass 'nearest'"):
        Int8DynamicConfig(method="best")
    for wrong in (Int8DynamicConfig, lambda method: Int4WeightOnlyConfig(32, True, method=method)):
        with pytest.raises(ValueError, match="finds zero points, which only 4-bit"):
            wrong(method="hqq")
    with pytest.raises(ValueError, match="embeddings must be 8, 4 or None, got 2"):
        Int8DynamicConfig(embeddings=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs none"):
        quantize_(nn.Linear(2, 2), Int8DynamicConfig(), calibration=[torch.zeros(1, 2)])
