"""Attention over [batch, heads, length, head size], forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.triton.fast import LARGEST_HEAD
from lowbit.spec.attention import causal_diagonal
from lowbit.torch.arguments import check_alike, check_tensor
from lowbit.torch.registration import register, specified, specified_gradients

DTYPES = (torch.bfloat16, torch.float16)


@specified("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v of each head, no scores in memory (Dao, FlashAttention-2, 2023).

    q: bfloat16 or float16 [batch, heads, queries, size], size at most 256; k, v: [batch, key heads,
    keys, size] of the same dtype, any strides. Several heads share a key head where there are fewer
    of those: head h uses key head h // (heads // key heads). causal: the last query sees all
    keys (`causal_diagonal`). A query that sees none gives zeros. scale: 1/√size if not given.
    window: a query sees the last so many of these keys; it needs `causal`. cap: scores become
    cap · tanh(score / cap).

    The result is like q, contiguous. Sums are float32; weights are rounded to q's dtype before they
    multiply v. Differentiable, once, without window and cap. On Hopper the copy engine wants rows
    at multiples of 16 bytes: tensors for which that does not hold are copied.

    TypeError for another dtype; ValueError for shapes that do not match, a size above 256, a
    scale, window or cap that is not positive, or a window without `causal`.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        check_tensor("attention", name, value, DTYPES)
        if value.dim() != 4:
            raise ValueError(
                f"attention: {name} has the shape {list(value.shape)}; it must be "
                "[batch, heads, length, head size]"
            )
    check_alike("attention", q=q, k=k, v=v)
    _check_shapes(q, k, v)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"attention: scale is {scale}; it must be positive (negate q if need be)")
    for name, value in (("window", window), ("cap", cap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"attention: {name} is {value}; it must be positive")
    if window is not None and not causal:
        raise ValueError(
            "attention: a window is one of keys up to the query's own: give causal=True"
        )
    return _attention_op(q, k, v, causal, scale, window or 0, cap or 0.0)[0]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    (batch, heads, _, size), (_, key_heads, keys, _) = q.shape, k.shape
    if not 1 <= size <= LARGEST_HEAD:
        raise ValueError(
            f"attention: heads have {size} elements; from 1 to {LARGEST_HEAD} is possible"
        )
    for name, value in (("k", k), ("v", v)):
        if list(value.shape) != [batch, key_heads, keys, size]:
            raise ValueError(
                f"attention: q has the shape {list(q.shape)}, k {list(k.shape)}, and {name} "
                f"{list(value.shape)}; k and v must be alike, [{batch}, key heads, keys, {size}]"
            )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"attention: {heads} heads of q cannot share {key_heads} key heads evenly; the former "
            "must be a multiple of the latter"
        )


def _scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, window: int = 0, cap: float = 0.0
) -> Tensor:
    """In float64, -inf where a key is not seen."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if causal:
        diagonal = causal_diagonal(*scores.shape[-2:])
        unseen = torch.ones_like(scores).triu(diagonal + 1)
        if window:
            unseen += torch.ones_like(scores).tril(diagonal - window)
        scores = scores.masked_fill(unseen.bool(), -math.inf)
    return scores


def _reference(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, cap: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale, window, cap)
    lse = torch.logsumexp(scores, -1)
    blind = lse == -math.inf
    weights = torch.exp(scores - lse.masked_fill(blind, 0)[..., None])
    z = weights @ v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = (lse / math.log(2)).masked_fill(blind, math.inf)
    return z.to(q.dtype).contiguous(), lse.float()


def _backward_reference(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, lse: Tensor, dz: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*k.shape[:2], q.shape[1] // k.shape[1])
    wide_k, wide_v = (x.double().repeat_interleave(shape[2], 1) for x in (k, v))
    weights = torch.exp2(_scores(q, k, causal, scale) / math.log(2) - lse.double()[..., None])
    dz = dz.double()
    dv = (weights.mT @ dz).unflatten(1, shape[1:]).sum(2)
    delta = (z.double() * dz).sum(-1, keepdim=True)
    ds = weights * (dz @ wide_v.mT - delta) * scale
    dk = (ds.mT @ q.double()).unflatten(1, shape[1:]).sum(2)
    gradients = (ds @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return gradients[0].contiguous(), gradients[1].contiguous(), gradients[2].contiguous()


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.causal, ctx.scale, *ctx.reduced = inputs
    z, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, z, lse)


def _gradient(ctx: Any, dz: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    if any(ctx.reduced):
        raise NotImplementedError("attention has no derivative with a window or a cap")
    gradients = _attention_backward_op(*ctx.saved_tensors, dz, ctx.causal, ctx.scale)
    return (*gradients, None, None, None, None)


_attention_backward_op = register(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor z, Tensor lse, Tensor dz, "
    "bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    kernel="attention_backward.attention_backward",
    cpu=_backward_reference,
)
_attention_op = register(
    "attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, int window, float cap) "
    "-> (Tensor, Tensor)",
    kernel="attention.attention",
    cpu=_reference,
    backward=_gradient,
    keep=_keep,
)


specified_gradients("attention", attention, "q", "k", "v")
