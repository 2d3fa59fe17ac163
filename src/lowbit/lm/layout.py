"""Which tensors of a model are read, and as what: known before any of them is.

A tensor that is missing is an error, and so is one that nothing reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.lm.architectures import Architecture, architecture
from lowbit.lm.description import Description

# Divisors of the frequencies of positions, of which a context takes one.
FREQUENCIES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_NAMED = 6  # tensors that an error names


@dataclass(frozen=True)
class Rules:
    """What a config.json says of tensors. tied: whether the table of embeddings is the head where
    there is none; biased: of each product of a layer, whether it has a bias; sparse_step, dense: of
    a mixture: every so many layers one has experts, but for these."""

    tied: bool
    biased: Mapping[str, bool]
    sparse_step: int
    dense: frozenset[int]

    def is_mixed(self, layer: int) -> bool:
        """Whether a layer of a mixture has experts."""
        return (layer + 1) % self.sparse_step == 0 and layer not in self.dense

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any], outside: Mapping[str, Any]) -> Rules:
        """Of the part of a config.json that is of the text, and of all of it."""
        row = architecture(name)

        def said(key: bool | str) -> bool:
            return key if isinstance(key, bool) else bool(config.get(key, row.defaults.get(key)))

        biases = row.biases
        parts = {
            "attn_q": biases.qkv, "attn_k": biases.qkv, "attn_v": biases.qkv,
            "attn_qkv": biases.qkv, "attn_output": biases.output, "ffn_gate": biases.gated,
            "ffn_up": biases.gated, "ffn_down": biases.gated,
        }  # fmt: skip
        tied = config.get("tie_word_embeddings", outside.get("tie_word_embeddings", row.tied))
        return cls(
            bool(tied),
            {part: said(key) for part, key in parts.items()},
            config.get("decoder_sparse_step", 1),
            frozenset(config.get("mlp_only_layers") or ()),
        )


@dataclass(frozen=True)
class GatedLayout:
    """The products of a gated unit: up: of the gate and of what it is multiplied with, or of both
    in one."""

    up: tuple[str, ...]
    down: str


@dataclass(frozen=True)
class LayerLayout:
    """The tensors of a layer, without ".weight" and ".bias"; of norms, without the layer's name.

    qkv: products of queries, keys and values, or of all in one. router: "" without experts; gated:
    of all of them then. shared: of the expert of all tokens, with shared_gate."""

    name: str
    qkv: tuple[str, ...]
    out: str
    norms: tuple[str, ...]
    gated: GatedLayout
    router: str = ""
    shared: GatedLayout | None = None
    shared_gate: str = ""

    @classmethod
    def of(cls, row: Architecture, name: str, names: Collection[str]) -> LayerLayout:
        """Of the names of tensors."""
        qkv = ("attn_q", "attn_k", "attn_v")
        if f"{name}.attn_qkv.weight" in names:
            qkv = ("attn_qkv",)
        router = f"{name}.ffn_gate_inp"
        mixed = row.mixed and f"{router}.weight" in names
        shared = mixed and row.shared
        return cls(
            name, tuple(f"{name}.{part}" for part in qkv), f"{name}.attn_output", row.norms,
            _gated(name, "_exps" if mixed else "", names), router if mixed else "",
            _gated(name, "_shexp", names) if shared else None,
            f"{name}.ffn_gate_inp_shexp" if shared else "",
        )  # fmt: skip

    @property
    def products(self) -> Iterator[str]:
        """Products that may have biases: all but those of experts."""
        yield from (*self.qkv, self.out)
        for gated in (self.shared if self.router else self.gated,):
            if gated is not None:
                yield from (*gated.up, gated.down)

    @property
    def stems(self) -> Iterator[str]:
        """All tensors that there must be."""
        yield from self.products
        yield from (f"{self.name}.{norm}" for norm in self.norms)
        if self.router:
            yield from (self.router, *self.gated.up, self.gated.down)
        if self.shared_gate:
            yield self.shared_gate


def _gated(name: str, kind: str, names: Collection[str]) -> GatedLayout:
    fused = f"{name}.ffn_gate_up{kind}"
    gate, up = f"{name}.ffn_gate{kind}", f"{name}.ffn_up{kind}"
    parts = (gate, up) if f"{gate}.weight" in names else (up,)
    if f"{fused}.weight" in names:
        parts = (fused,)
    return GatedLayout(parts, f"{name}.ffn_down{kind}")


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model. head: of the product that makes logits."""

    layers: tuple[LayerLayout, ...]
    head: str

    @classmethod
    def of(cls, d: Description, names: Collection[str], rules: Rules | None) -> ModelLayout:
        """Of the names of tensors; rules: None of GGUF, whose tensors say by being there what is
        tied and biased.

        ValueError: tensors are missing."""
        numbers = {match[1] for name in names if (match := re.match(r"blk\.(\d+)\.", name))}
        if len(numbers) != d.layers:
            raise ValueError(f"the model has {len(numbers)} layers; {d.layers} are described")
        row = architecture(d.architecture)
        layers = [LayerLayout.of(row, f"blk.{number}", names) for number in range(d.layers)]
        for layer in layers:
            biased = {stem for stem in layer.products if _has_bias(row, rules, layer, stem)}
            needed = [f"{stem}.weight" for stem in layer.stems]
            _require(layer.name, d.architecture, [*needed, *(f"{s}.bias" for s in biased)], names)
        if d.experts:
            _require_experts(d, layers, rules)
        _require("the model", d.architecture, ["token_embd.weight", "output_norm.weight"], names)
        head = "output" if "output.weight" in names else "token_embd"
        if rules is not None and not rules.tied and head == "token_embd":
            raise ValueError(
                "the model has no output.weight, and its config.json doesn't say that the table of "
                "embeddings is the head (tie_word_embeddings): a file may be missing"
            )
        layout = cls(tuple(layers), head)
        if rules is None:
            layout._require_alike(names)
        return layout

    def _require_alike(self, names: Collection[str]) -> None:
        """ValueError: of layers of one kind, some have biases that others have not."""
        biased: dict[tuple[str, bool], set[bool]] = {}
        for layer in self.layers:
            for stem in layer.products:
                kind = stem.removeprefix(f"{layer.name}."), bool(layer.router)
                has = biased.setdefault(kind, set())
                has.add(f"{stem}.bias" in names)
                if len(has) > 1:
                    raise ValueError(f"{kind[0]}.bias is in some layers and not in {layer.name}")

    def parts(self) -> dict[str, bool]:
        """All tensors that are read, and whether they may have biases."""
        stems: dict[str, bool] = {"token_embd": False, "output_norm": False, self.head: False}
        stems |= dict.fromkeys(FREQUENCIES, False)
        for layer in self.layers:
            stems |= dict.fromkeys(layer.stems, False)
            stems |= dict.fromkeys(layer.products, True)
        return stems

    def unread(self, names: Collection[str]) -> set[str]:
        """Those of some tensors that are not read."""
        parts = self.parts()
        read = {f"{stem}.weight" for stem in parts}
        read |= {f"{stem}.bias" for stem, biased in parts.items() if biased}
        return set(names) - read


def _has_bias(row: Architecture, rules: Rules | None, layer: LayerLayout, stem: str) -> bool:
    """Whether a product must have a bias."""
    part = stem.removeprefix(f"{layer.name}.")
    if rules is not None:
        return rules.biased.get(part, False)
    return row.always_biased and part in ("attn_q", "attn_k", "attn_v")


def _require_experts(d: Description, layers: Iterable[LayerLayout], rules: Rules | None) -> None:
    """ValueError: there are none, or they are in other layers than config.json says."""
    mixed = [bool(layer.router) for layer in layers]
    if not any(mixed):
        raise ValueError(f"{d.experts} experts are described, and no layer has them")
    for number, has_experts in enumerate(mixed):
        if rules is not None and rules.is_mixed(number) != has_experts:
            said = "experts" if rules.is_mixed(number) else "no experts"
            raise ValueError(f"config.json says that blk.{number} has {said}; its tensors say not")


def _require(owner: str, name: str, needed: Iterable[str], names: Collection[str]) -> None:
    """ValueError: tensors are missing."""
    if missing := sorted(each for each in needed if each not in names):
        short = [each.removeprefix(f"{owner}.") for each in missing]
        raise ValueError(f"{owner} of {name} has no {', '.join(short)}")


def refuse_unread(names: Collection[str]) -> None:
    """NotImplementedError: there are tensors that nothing reads."""
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise NotImplementedError(
            "there are tensors that no part of lowbit reads, and that may change the result: "
            f"{', '.join(sorted(names)[:_NAMED])}{more}"
        )
