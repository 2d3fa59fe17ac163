"""A description and its tensors as a PyTorch module, for GPUs. Rows belong to one sequence or to
several; what differs is where they go in the cache, and how they attend: `Chunk` and `Step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.lm.description import Description
from lowbit.torch.functional import Int4Weight, attention, int4_matmul, rms_norm
from lowbit.torch.functional.embedding import embedding
from lowbit.torch.weight import QuantizedWeight

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_LARGEST_HEAD = 128  # that `attention` serves


# Attention over the cache [2, layers, slots, key heads, capacity, head_dim].


class Form(NamedTuple):
    """Of a layer's attention: the factor of scores; how many tokens each attends to, 0: all; scores
    are cap · tanh(score / cap), 0: as they are."""

    scale: float
    window: int
    cap: float


@dataclass
class Chunk:
    """Rows of the sequence in a slot, behind `first` others. positions: [rows]."""

    cache: Tensor
    slot: int
    first: int
    positions: Tensor
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        """Keep keys and values [rows, key heads, size]; queries [rows, heads, size] attend."""
        rows, heads, size = q.shape
        end = self.first + rows
        keys, values = self.cache[:, layer, self.slot, :, :end]
        keys[:, self.first :].copy_(k.transpose(0, 1))
        values[:, self.first :].copy_(v.transpose(0, 1))
        q = q.to(keys.dtype)
        if not form.window and not form.cap and size <= _LARGEST_HEAD and keys.itemsize == 2:
            out = attention(q.transpose(0, 1)[None], keys[None], values[None], causal=True,
                            scale=form.scale)[0]  # fmt: skip
            return out.transpose(0, 1)
        group = heads // len(keys)
        q = q.view(rows, len(keys), group, size).permute(1, 2, 0, 3).reshape(-1, group * rows, size)
        out = _attention(q[None], keys[None], values[None], self._mask(form, end, group), form)
        return out.view(len(keys), group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)

    def _mask(self, form: Form, end: int, group: int) -> Tensor:
        if form.window not in self._masks:
            mask = _seen(self.positions, end, form.window)
            self._masks[form.window] = mask.repeat(group, 1)
        return self._masks[form.window]


@dataclass
class Step:
    """Rows of a sequence each. positions: [rows]. slots: [rows], or None: the first ones, in order.
    Shapes do not depend on how much the cache holds."""

    cache: Tensor
    positions: Tensor
    slots: Tensor | None
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        """Keep keys and values [rows, key heads, size]; queries [rows, heads, size] attend."""
        keys, values = self.cache[:, layer]
        if self.slots is None:
            keys, values = keys[: len(q)], values[: len(q)]
            slots = torch.arange(len(q), device=q.device)
        else:
            slots = self.slots
        keys[slots, :, self.positions] = k.to(keys.dtype)
        values[slots, :, self.positions] = v.to(keys.dtype)
        if form.window not in self._masks:
            mask = _seen(self.positions, keys.shape[2], form.window)
            self._masks[form.window] = mask[:, None, None]
        return step_attention(
            q.to(keys.dtype), keys, values, self.slots, self._masks[form.window], form
        )


def step_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor | None, mask: Tensor, form: Form
) -> Tensor:
    """A query [rows, heads, size] of each sequence over its slot of [slots, key heads, capacity,
    size]; slots: which, None: the first ones. mask: [rows, 1, 1, capacity], what is seen."""
    if slots is not None:
        keys, values = keys[slots], values[slots]
    # The heads that share keys are rows of one product.
    rows = q.view(len(q), keys.shape[1], -1, q.shape[-1])
    return _attention(rows, keys, values, mask, form).view(q.shape)


def _seen(positions: Tensor, capacity: int, window: int) -> Tensor:
    """Which keys a query at a position sees, [rows, capacity]."""
    at, keys = positions[:, None], torch.arange(capacity, device=positions.device)
    seen = keys <= at
    return seen & (keys > at - window) if window else seen


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: Form) -> Tensor:
    """Of [batch, key heads, rows, size]; mask: what is seen, as wide as the scores."""
    if not form.cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=form.scale)
    scores = (q @ k.mT).float() * form.scale
    scores = (form.cap * torch.tanh(scores / form.cap)).masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v


# Layers.


class Linear(nn.Module):
    """x[..., order] · weightᵀ + bias, and what is added to it. weight: [N, K], floats or 4 bits.
    order: which inputs the columns of the weight stand for, [K]; None: each for its own."""

    def __init__(
        self, weight: Tensor | Int4Weight, bias: Tensor | None = None, order: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.order = weight, bias, order

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        weight = self.weight
        if isinstance(weight, Tensor):
            if residual is not None and self.bias is None:
                return torch.addmm(residual, x, weight.T)
            y = F.linear(x, weight, self.bias)
        else:
            y = int4_matmul(x, weight)
            y = y if self.bias is None else y + self.bias
        return y if residual is None else residual + y


class Gated(nn.Module):
    """f(gate) · up, projected down; up: both in one, or one after the other."""

    def __init__(self, up: Sequence[Linear], down: Linear, function: str) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.ModuleList(up), down, _FUNCTIONS[function]

    def forward(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        parts = [one(y) for one in self.up]
        gate, up = parts if len(parts) > 1 else parts[0].chunk(2, -1)
        return self.down(self.function(gate) * up, residual)


class Mixture(nn.Module):
    """Gated units, of which each row takes `used`, by the router [experts, width], and one for all.

    All are computed for all rows, so that nothing has to wait for the router on the host."""

    def __init__(
        self, d: Description, router: Tensor, experts: Sequence[Gated],
        shared: tuple[Tensor, Gated] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)
        self.shared_gate, self.shared = (None, None) if shared is None else shared
        self._used, self._normalized = d.experts_used, d.experts_normalized

    def forward(self, y: Tensor, residual: Tensor) -> Tensor:
        scores = F.linear(y.float(), self.router)
        if self._normalized:
            shares, chosen = scores.topk(self._used)
            shares = shares.softmax(-1)
        else:
            shares, chosen = scores.softmax(-1).topk(self._used)
        shares = torch.zeros_like(scores).scatter(1, chosen, shares).to(y.dtype)
        for index, expert in enumerate(self.experts):
            residual = residual + shares[:, index, None] * expert(y)
        if self.shared is None or self.shared_gate is None:
            return residual
        return residual + torch.sigmoid(F.linear(y, self.shared_gate)) * self.shared(y)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then the same of a gated unit or a mixture. norms: by GGUF's names,
    those that there are. rotation: the name of its table in the Decoder; "": positions turn
    nothing."""

    def __init__(
        self, d: Description, number: int, qkv: Sequence[Linear], out: Linear,
        gated: Gated | Mixture, norms: dict[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv, self.out, self.gated, self.norms = nn.ModuleList(qkv), out, gated, norms
        self._number, self._heads, self._size = number, (d.heads, d.key_heads), d.head_dim
        self._epsilon, window = d.epsilon, d.window(number)
        scale = d.attention_scale or d.head_dim**-0.5
        self._form = Form(scale, window, d.attention_cap)
        straight = d.straight and not (number + 1) % d.straight
        self.rotation = "local rotation" if window and d.local_base else "rotation" * (not straight)

    def forward(self, x: Tensor, rows: Chunk | Step, angles: dict[str, Tensor]) -> Tensor:
        y = self._attended(self._normed("attn_norm", x), rows, angles)
        x = self._joined("post_attention_norm", x, y, self.out)
        return self._joined("post_ffw_norm", x, self._normed("ffn_norm", x), self.gated)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight = self.norms.get(name)
        return x if weight is None else rms_norm(x, weight, self._epsilon)

    def _joined(self, norm: str, x: Tensor, y: Tensor, module: nn.Module) -> Tensor:
        """x and what a module makes of y, with a norm of that, if there is one."""
        return x + self._normed(norm, module(y)) if norm in self.norms else module(y, x)

    def _attended(self, y: Tensor, rows: Chunk | Step, angles: dict[str, Tensor]) -> Tensor:
        heads, key_heads = self._heads
        size = self._size
        parts = [one(y) for one in self.qkv]
        if len(parts) == 1:
            parts = parts[0].split([n * size for n in (heads, key_heads, key_heads)], -1)
        q, k, v = parts
        q, k = self._by_heads("attn_q_norm", q, heads), self._by_heads("attn_k_norm", k, key_heads)
        if self.rotation:
            q, k = (_turned(one, angles[self.rotation]) for one in (q, k))
        out = rows.attend(self._number, q, k, v.unflatten(-1, (key_heads, size)), self._form)
        return out.flatten(1).to(y.dtype)

    def _by_heads(self, norm: str, x: Tensor, count: int) -> Tensor:
        """[rows, count, size], with a norm of all of a row or of each head."""
        weight = self.norms.get(norm)
        if weight is not None and len(weight) != self._size:
            return self._normed(norm, x).unflatten(-1, (count, self._size))
        x = x.unflatten(-1, (count, self._size))
        return x if weight is None else self._normed(norm, x)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rows [rows, heads, size], of which the first elements, in halves, are turned by cosines and
    sines [rows, 2, pairs]."""
    half = angles.shape[-1]
    a, b, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = angles[:, None].unbind(2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


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
        angles = {name: table[rows.positions] for name, table in self.rotations.items()}
        for layer in self.layers:
            x = layer(x, rows, angles)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocabulary], without `logit_cap`."""
        y = self.head(rms_norm(x, self.norm, self.description.epsilon)).float()
        scale = self.description.logit_scale
        return y if scale == 1 else y * scale
