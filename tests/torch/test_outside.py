"""Weights that a model uses outside of their layers stay in float, and the summary says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit.torch
from lowbit.torch import Int4WeightOnlyConfig, Int8DynamicConfig, QuantizedWeight, quantize_


def with_third_axis(weight: Tensor) -> Tensor:
    return weight.unsqueeze(0)


class Holder(nn.Module):
    """Layers for what follows; `use` and `other` are quantizable, `use` is used in some way."""

    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.use, self.other = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.several = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.other(self.used(x) + self.table.weight.shape[0])
        for one in self.several:
            x = one(x)
        return x

    def used(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Unsqueezed(Holder):
    def used(self, x: Tensor) -> Tensor:
        return F.conv1d(x.mT, self.use.weight.unsqueeze(-1), self.use.bias).mT


class LeftFactor(Holder):
    def used(self, x: Tensor) -> Tensor:
        return (self.use.weight @ x.mT).mT


class Alias(Holder):
    def used(self, x: Tensor) -> Tensor:
        layer = self.use
        weight = layer.weight if x.dim() else None
        assert weight is not None
        return torch.einsum("bsk,nk->bsn", x, weight)


class ByFunction(Holder):
    def used(self, x: Tensor) -> Tensor:
        return x @ with_third_axis(weight=self.use.weight).mT


class ByGetattr(Holder):
    def used(self, x: Tensor) -> Tensor:
        return x * getattr(self, "use").weight.view(-1)[0]  # noqa: B009


class ByProperty(Holder):
    @property
    def row(self) -> Tensor:
        return self.use.weight[0]

    def used(self, x: Tensor) -> Tensor:
        return x * self.row


class Inherited(Unsqueezed):
    def used(self, x: Tensor) -> Tensor:
        return super().used(x).add(1)


class Looped(Holder):
    def used(self, x: Tensor) -> Tensor:
        layers: Any = self.several
        for _, layer in enumerate(layers):
            x = x + layer.weight.unsqueeze(0).sum(1)
        return x


class Listed(Holder):
    def used(self, x: Tensor) -> Tensor:
        layers: Any = (self.use, self.several[0])
        return sum((x @ one.weight.unsqueeze(0) for one in layers), x)


class Child(nn.Module):
    def forward(self, x: Tensor, layer: nn.Linear) -> Tensor:
        return x * layer.weight.view(64)[:8]


class GivenToAChild(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()

    def used(self, x: Tensor) -> Tensor:
        return self.child(x, self.use)


OUTSIDE = Unsqueezed, LeftFactor, Alias, ByFunction, ByGetattr, ByProperty, Inherited, GivenToAChild


class Facts(Holder):
    def used(self, x: Tensor) -> Tensor:
        weight = self.use.weight
        assert isinstance(weight, Tensor)
        assert weight is not None
        return self.use(x.to(weight.dtype)) * weight.size(0)


class Products(Holder):
    def used(self, x: Tensor) -> Tensor:
        rows = F.linear(x, self.use.weight[:8], bias=self.use.bias)
        return rows + x @ self.use.weight.t() + torch.matmul(x, self.use.weight.T)


class NotReached(Holder):
    def used(self, x: Tensor) -> Tensor:
        if self.training or self.flag:
            return x * self.use.weight.view(64)[0]
        return self.use(x)

    def reset(self) -> None:
        self.use.weight.data.view(-1)[0] = 0


def _quantized(model: nn.Module, x: Any, config: Any = None) -> dict[str, str]:
    """Quantize, compare with the float model, and give the reasons of the summary for layers in
    float."""
    model.eval()
    with torch.no_grad():
        want = model(x)
        quantize_(model, config or Int8DynamicConfig())
        got = model(x)
    want, got = (one if isinstance(one, Tensor) else one[0] for one in (want, got))
    assert (got - want).norm() < 0.1 * want.norm()
    layers = lowbit.torch.summary(model).layers
    return {one.name: one.why for one in layers if "uses its weight" in one.why}


@pytest.mark.parametrize("config", [Int8DynamicConfig(), Int4WeightOnlyConfig(group_size=8)])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_weight_that_is_used_outside_stays_in_float(kind: type[Holder], config: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    if config.weight_format.four_bits:
        model.eval()
        quantize_(model, config)
        whole = {n for n, one in model.named_parameters() if isinstance(one, QuantizedWeight)}
        assert whole == {"table.weight", "other.weight", "several.0.weight", "several.1.weight"}
        return
    why = _quantized(model, torch.randn(2, 8, 8))
    assert set(why) == {"use"}
    assert "float" in why["use"]


def test_in_a_loop_over_layers() -> None:
    torch.manual_seed(0)
    assert set(_quantized(Looped(), torch.randn(2, 3, 8))) == {"several.0", "several.1"}


def test_in_a_list_of_layers() -> None:
    torch.manual_seed(0)
    assert set(_quantized(Listed(), torch.randn(2, 3, 8))) == {"use", "several.0", "several.1"}


@pytest.mark.parametrize("kind", [Facts, Products, NotReached])
def test_other_uses_need_no_float_weight(kind: type[Holder]) -> None:
    torch.manual_seed(0)
    model = kind()
    assert not _quantized(model, torch.randn(2, 3, 8))
    assert isinstance(model.use.weight, QuantizedWeight)


def test_what_is_not_seen_beforehand_says_what_to_do() -> None:
    """Whose cure is then one."""

    def make() -> nn.Module:
        model: Any = Unsqueezed()
        function: Any = eval("lambda x: x * model.use.weight.unsqueeze(0).sum()", {"model": model})
        model.used = function
        return model.eval()

    x = torch.randn(2, 3, 8)
    model = quantize_(make(), Int8DynamicConfig(), lambda _, name: name == "use")
    with pytest.raises(NotImplementedError, match=r"'use\.weight'.*filter_fn=.*name != 'use'"):
        model(x)
    quantize_(model := make(), Int8DynamicConfig(), filter_fn=lambda _, name: name != "use")
    model(x)


def _detr(transformers: Any) -> tuple[nn.Module, Tensor]:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1] * 4, layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_queries=5, num_labels=4,
    )  # fmt: skip
    return transformers.DetrForSegmentation(config), torch.randn(1, 3, 64, 64)


def _deberta(transformers: Any) -> tuple[nn.Module, Tensor]:
    config = transformers.DebertaV2Config(
        **BASE, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        max_relative_positions=16, norm_rel_ebd="layer_norm",
    )  # fmt: skip
    return transformers.DebertaV2Model(config), TOKENS


def _first_deberta(transformers: Any) -> tuple[nn.Module, Tensor]:
    config = transformers.DebertaConfig(
        **BASE, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16
    )
    return transformers.DebertaModel(config), TOKENS


def _mamba(transformers: Any) -> tuple[nn.Module, Tensor]:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=1, use_cache=False
    )
    return transformers.MambaModel(config), TOKENS


def _bert(transformers: Any) -> tuple[nn.Module, Tensor]:
    return transformers.BertForMaskedLM(transformers.BertConfig(**BASE)), TOKENS


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip
TOKENS = torch.arange(18).reshape(2, 9)
MODELS: dict[str, tuple[Callable[[Any], tuple[nn.Module, Tensor]], set[str]]] = {
    "detr": (_detr, {"detr.model.query_position_embeddings", "bbox_attention.k_proj"}),
    "deberta": (
        _first_deberta,
        {"encoder.rel_embeddings", "encoder.layer.0.attention.self.in_proj"},
    ),
    "deberta-v2": (_deberta, {"encoder.rel_embeddings"}),
    "mamba": (_mamba, {"layers.0.mixer.dt_proj"}),
    "bert": (_bert, set()),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    make, stay = MODELS[name]
    model, x = make(transformers)
    assert set(_quantized(model, x)) == stay


@pytest.mark.parametrize("encoder", [True, False])
def test_attention_of_pytorch_is_quantized_whole(encoder: bool) -> None:
    torch.manual_seed(0)
    layer: Any = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = layer if encoder else layer.self_attn
    model.eval()
    quantize_(model, Int8DynamicConfig())
    matrices = [one for name, one in model.named_parameters() if one.dim() == 2]
    assert matrices
    assert all(isinstance(one, QuantizedWeight) for one in matrices)
