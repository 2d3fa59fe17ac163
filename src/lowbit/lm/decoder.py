"""A description and its tensors as a PyTorch module, for GPUs. Rows belong to one sequence or to
several; what differs is where they go in the cache, and how they attend: `Chunk` and `Step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.lm.description import Description
from lowbit.torch.functional import (
    TiledWeight,
    attention,
    attention_decode,
    grouped_matmul,
    rms_norm,
    route,
    routed_sum,
    top_experts,
    weight_only_matmul,
)
from lowbit.torch.functional.decoding import add_rms_norm, gated, rotate
from lowbit.torch.functional.embedding import embedding
from lowbit.torch.weight import QuantizedWeight

# Attention over the cache [2, layers, slots, key heads, capacity, head_dim].


class Form(NamedTuple):
    """Of a layer's attention: the factor of scores; how many tokens each attends to, 0: all; scores
    are cap · tanh(score / cap), 0: as they are."""

    scale: float
    window: int
    cap: float

    @property
    def options(self) -> dict[str, Any]:
        """As functions of lowbit.torch.functional take it."""
        return {"scale": self.scale, "window": self.window or None, "cap": self.cap or None}


@dataclass
class Chunk:
    """Rows of the sequence in a slot, behind `first` others. positions, slots: [rows]."""

    cache: Tensor
    positions: Tensor
    slots: Tensor
    slot: int
    first: int
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, form: Form) -> Tensor:
        """Queries [rows, heads, size] over keys and values that are in the cache already."""
        rows, heads, size = q.shape
        end = self.first + rows
        keys, values = self.cache[:, layer, self.slot, :, :end]
        if keys.itemsize == 2:
            both = keys[None], values[None]
            out = attention(q.transpose(0, 1)[None], *both, causal=True, **form.options)[0]
            return out.transpose(0, 1)
        group = heads // len(keys)
        q = (
            q.reshape(rows, len(keys), group, size)
            .permute(1, 2, 0, 3)
            .reshape(-1, group * rows, size)
        )
        if form.window not in self._masks:
            mask = _mask(self.positions, end, form.window, keys.dtype)
            self._masks[form.window] = mask.repeat(group, 1)
        out = _attention(q[None], keys[None], values[None], self._masks[form.window], form)
        return out.reshape(-1, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)


@dataclass
class Step:
    """Rows of a sequence each. positions, slots: [rows]; the last position is that of rows without
    a sequence. Shapes do not depend on how much the cache holds."""

    cache: Tensor
    positions: Tensor
    slots: Tensor
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spare = self.cache.shape[4] - 1
        self._lengths = (self.positions + 1).where(self.positions != spare, 1)
        self._pages = self.slots.int()[:, None]  # a slot is a page

    def attend(self, layer: int, q: Tensor, form: Form) -> Tensor:
        """Queries [rows, heads, size] over keys and values that are in the cache already."""
        keys, values = self.cache[:, layer]
        if keys.itemsize == 2:
            pages = keys.transpose(1, 2), values.transpose(1, 2)
            out = attention_decode(
                q[:, :, None], *pages, self._lengths, block_table=self._pages, **form.options
            )
            return out[:, :, 0]
        if form.window not in self._masks:
            mask = _mask(self.positions, keys.shape[2], form.window, keys.dtype)
            self._masks[form.window] = mask[:, None, None]
        # The heads that share keys are rows of one product.
        rows = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
        own = keys[self.slots], values[self.slots]
        return _attention(rows, *own, self._masks[form.window], form).reshape(q.shape)


def _mask(positions: Tensor, capacity: int, window: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries at these positions, [rows, capacity]: 0 for keys that
    they see, -inf for others."""
    at, keys = positions[:, None], torch.arange(capacity, device=positions.device)
    unseen = keys > at
    unseen = unseen | (keys <= at - window) if window else unseen
    return torch.zeros(unseen.shape, dtype=dtype, device=at.device).masked_fill(unseen, -torch.inf)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: Form) -> Tensor:
    """Of [batch, key heads, rows, size]; mask: what is added to the scores."""
    if not form.cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=form.scale)
    scores = (q @ k.mT).float() * form.scale
    scores = form.cap * torch.tanh(scores / form.cap) + mask
    return torch.softmax(scores, -1).to(v.dtype) @ v


# Layers.


class Linear(nn.Module):
    """x[..., order] · weightᵀ + bias. weight: [N, K], floats or integers. order: which inputs the
    columns of the weight stand for, [K]; None: each for its own."""

    def __init__(
        self, weight: Tensor | TiledWeight, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.order = weight, bias, order

    def forward(self, x: Tensor, activation: str = "") -> Tensor:
        """activation: of weights that are integers."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        return weight_only_matmul(x, self.weight, self.bias, activation=activation)


GATES = {"silu": "swiglu", "gelu_tanh": "geglu_tanh"}
"""The activations that stand for a gated unit with these functions."""


def is_fused(weight: Tensor | TiledWeight) -> bool:
    """Whether one product with the weights of a gate, and of what it is multiplied with, computes
    both and the gate."""
    return isinstance(weight, TiledWeight) and weight.N % 16 == 0


class Gated(nn.Module):
    """f(gate) · up, projected down; up: both in one, `interleaved` if it `is_fused`, or one after
    the other."""

    def __init__(self, up: Sequence[Linear], down: Linear, function: str) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.ModuleList(up), down, function
        self._fused = len(up) == 1 and is_fused(up[0].weight)

    def forward(self, y: Tensor) -> Tensor:
        if self._fused:
            return self.down(self.up[0](y, GATES[self.function]))
        parts = [one(y) for one in self.up]
        both = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self.down(gated(both, self.function))


class Mixture(nn.Module):
    """Gated units, of which each row takes `used`, by the router [experts, width], and one for all.

    up, down: as `Gated` has them, of all experts, [experts, N, K]. Rows are sorted by their experts
    on the device: nothing waits for the router on the host."""

    def __init__(
        self, d: Description, router: Tensor, up: Sequence[Tensor | TiledWeight],
        down: Tensor | TiledWeight, shared: tuple[Tensor, Gated] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router, self.up, self.down, self.function = router, list(up), down, d.function
        self._fused = len(self.up) == 1 and is_fused(self.up[0])
        self.shared_gate, self.shared = (None, None) if shared is None else shared
        self._used, self._normalized = d.experts_used, d.experts_normalized

    def forward(self, y: Tensor) -> Tensor:
        scores = F.linear(y.float(), self.router)
        shares, chosen = top_experts(scores, self._used, normalized=self._normalized)
        rows, places, ends = route(chosen, len(self.router))
        if self._fused:
            made = grouped_matmul(y, self.up[0], ends, rows, activation=GATES[self.function])
        else:
            parts = [grouped_matmul(y, weight, ends, rows) for weight in self.up]
            made = gated(torch.cat(parts, -1), self.function)
        shared = None
        if self.shared is not None and self.shared_gate is not None:
            shared = torch.sigmoid(F.linear(y, self.shared_gate)) * self.shared(y)
        return routed_sum(grouped_matmul(made, self.down, ends), places, shares, shared)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then the same of a gated unit or a mixture. norms: by GGUF's names,
    those that there are. What is to be added last is left to the norm that follows it.

    rotation: the name of its table in the Decoder; "": positions turn nothing."""

    def __init__(
        self, d: Description, number: int, qkv: Sequence[Linear], out: Linear,
        gated: Gated | Mixture, norms: dict[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv, self.out, self.gated, self.norms = nn.ModuleList(qkv), out, gated, norms
        self._number, self._sizes = number, [n * d.head_dim for n in (d.heads, *[d.key_heads] * 2)]
        self._epsilon, window = d.epsilon, d.window(number)
        scale = d.attention_scale or d.head_dim**-0.5
        self._form = Form(scale, window, d.attention_cap)
        straight = d.straight and not (number + 1) % d.straight
        self.rotation = "local rotation" if window and d.local_base else "rotation" * (not straight)

    def forward(
        self, x: Tensor, more: Tensor | None, rows: Chunk | Step, rotations: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x + more, through the layer: again a sum in two parts."""
        x, y = added(x, more, self.norms.get("attn_norm"), self._epsilon)
        more = self._normed("post_attention_norm", self.out(self._attended(y, rows, rotations)))
        x, y = added(x, more, self.norms.get("ffn_norm"), self._epsilon)
        return x, self._normed("post_ffw_norm", self.gated(y))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight = self.norms.get(name)
        return x if weight is None else rms_norm(x, weight, self._epsilon)

    def _attended(self, y: Tensor, rows: Chunk | Step, rotations: dict[str, Tensor]) -> Tensor:
        parts = [one(y) for one in self.qkv]
        q, k, v = parts if len(parts) > 1 else parts[0].split(self._sizes, -1)
        keys, values = rows.cache[:, self._number]
        q_norm, k_norm = (self.norms.get(f"attn_{part}_norm") for part in "qk")
        if q_norm is not None and len(q_norm) != keys.shape[-1]:  # of all heads together
            q, k = self._normed("attn_q_norm", q), self._normed("attn_k_norm", k)
            q_norm = k_norm = None
        angles = rotations[self.rotation] if self.rotation else None
        places = rows.positions, rows.slots, keys, values
        q = rotate(q, k, v, angles, *places, q_norm, k_norm, self._epsilon)
        return rows.attend(self._number, q, self._form).flatten(1).to(y.dtype)


def added(
    x: Tensor, more: Tensor | None, norm: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """x + more, and that with a norm; where there is none, as it is."""
    if more is None or norm is None:
        x = x if more is None else x + more
        return x, x if norm is None else rms_norm(x, norm, epsilon)
    return add_rms_norm(x, more, norm, epsilon)


class Decoder(nn.Module):
    """A decoder. rotations: tables of cosines and sines by position, [capacity, 2, pairs]."""

    def __init__(
        self, d: Description, table: Tensor, layers: Sequence[DecoderLayer], norm: Tensor,
        head: Linear, rotations: dict[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.description, self.table, self.norm, self.head = d, table, norm, head
        self.layers, self.rotations = nn.ModuleList(layers), rotations

    def forward(self, ids: Tensor, rows: Chunk | Step) -> Tensor:
        """What the head reads, [rows, width], of tokens [rows]."""
        table = self.table
        quantized = isinstance(table, QuantizedWeight)
        x = embedding(ids, table) if quantized else F.embedding(ids, table)
        if self.description.embedding_scale != 1:
            x = x * self.description.embedding_scale
        more = None
        for layer in self.layers:
            x, more = layer(x, more, rows, self.rotations)
        return added(x, more, self.norm, self.description.epsilon)[1]

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocabulary], without `logit_cap`, of what the head reads."""
        y = self.head(x).float()
        scale = self.description.logit_scale
        return y if scale == 1 else y * scale
