"""Attention as one operator, so that its scores need never be kept whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real


class Attention(Operator):
    """softmax(q @ kᵀ · scale + mask) @ v, in float64, rounded once: an operator of lowbit's own.

    q [..., H, L, D], k [..., G, S, D] and v [..., G, S, E], where each of the G heads serves H / G
    neighbours of q; the result is [..., H, L, E]. mask, which broadcasts to [..., H, L, S]: what is
    added to the scores, or booleans that are true where a key takes part. Attributes: scale, which
    is 1/√D if left out; is_causal: as `causal_diagonal` says, which is what ONNX and PyTorch say
    where L = S (importers make a mask of theirs elsewhere). A row that attends to no key is all
    zeros. (Vaswani et al. 2017, arXiv:1706.03762.)
    """

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        from lowbit.spec.attention import attention_weights  # not for networks that only run

        q, k, v = given(inputs, 3)
        (mask,) = (*inputs, None)[3:4]
        _check(q.shape, k.shape, v.shape)
        k, v = (_for_heads(one.astype(np.float64), q) for one in (k, v))
        scores = np.matmul(q.astype(np.float64), k.swapaxes(-1, -2))
        scores *= float(node.get("scale", q.shape[-1] ** -0.5))
        if mask is not None:
            scores = scores + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask)
        weights = attention_weights(scores, bool(node.get("is_causal", 0)))
        return (np.matmul(weights, v).astype(q.dtype),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        q, k, v = given(tensors, 3)
        _check(q.sizes, k.sizes, v.sizes)
        return (Tensor(real(q).name, (*q.sizes[:-1], v.sizes[-1])),)


def _check(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """ValueError unless the shapes fit together."""
    fits = len(q) == len(k) == len(v) >= 2 and q[-1] == k[-1] and k[:-1] == v[:-1]
    heads = (q[-3], k[-3]) if fits and len(q) > 2 else (1, 1)
    if not fits or q[:-3] != k[:-3] or not heads[1] or heads[0] % heads[1]:
        raise ValueError(f"attention of q {q}, k {k} and v {v}, which do not fit together")


def _for_heads(one: Array, q: Array) -> Array:
    """k or v with as many heads as q has."""
    if one.ndim < 3 or one.shape[-3] == q.shape[-3]:
        return one
    return np.repeat(one, q.shape[-3] // one.shape[-3], axis=-3)


operators.add("Attention", Attention())
