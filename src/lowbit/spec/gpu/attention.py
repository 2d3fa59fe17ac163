"""Attention and its gradients: four heads, of which two share a key head. Two batches of them; one
for the gradients without causality.
"""

# Dimensions are text.
# ruff: noqa: F722

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Float

from lowbit.spec.typed import Array, Operation, operation

_DTYPES = ("bfloat16", "float16")
_SIZES = {"Q": 70, "K": 50, "D": 24}
_SHARING = 2
# Of float32, in which sums and logarithms are.
_UNIT = 2.0**-24


def _wide(k: Array) -> Array:
    return np.repeat(k, _SHARING, axis=1)


def _weights(q: Array, k: Array, causal: bool) -> Array:
    """[batch, heads, queries, keys]; 0 in a row that sees no key."""
    scores = q @ _wide(k).swapaxes(2, 3) / np.sqrt(q.shape[3])
    queries, keys = scores.shape[2:]
    seen: Array = np.ones((queries, keys), bool)
    if causal:
        seen = np.tril(seen, keys - queries)
    scores = np.where(seen, scores, -np.inf)
    some = seen.any(axis=1, keepdims=True)
    weights = np.exp(scores - np.where(some, scores.max(axis=3, keepdims=True), 0))
    return weights / np.where(some, weights.sum(axis=3, keepdims=True), 1)


def _gradients(q: Array, k: Array, v: Array, dz: Array, causal: bool) -> tuple[Array, Array, Array]:
    """Of q, k and v."""
    weights = _weights(q, k, causal)
    dweights = dz @ _wide(v).swapaxes(2, 3)
    delta = (weights * dweights).sum(axis=3, keepdims=True)
    dscores = weights * (dweights - delta) / np.sqrt(q.shape[3])

    def shared(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, _SHARING, *x.shape[2:]).sum(axis=2)

    dk, dv = dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dz
    return dscores @ _wide(k), shared(dk), shared(dv)


def _slack(causal: bool, q: Array, k: Array, v: Array, unit: float) -> Array:
    """Weights are rounded to q's dtype."""
    return 2 * unit * (_weights(q, k, causal) @ _wide(np.abs(v)))


def _gradient_slack(
    causal: bool, number: int, q: Array, k: Array, v: Array, dz: Array, unit: float
) -> Array:
    """Weights are made anew from float32 logarithms of their sums, whose error is relative to the
    scores' terms; weights, the gradients of scores, and z in Σ z · dz are rounded to q's dtype."""
    weights, scale = _weights(q, k, causal), 1 / np.sqrt(q.shape[3])
    size_k, size_v, size_dz = _wide(np.abs(k)), _wide(np.abs(v)), np.abs(dz)
    products = np.abs(q) @ size_k.swapaxes(2, 3) * scale
    off = (q.shape[3] + 16) * _UNIT * (products + products.max(axis=3, keepdims=True))
    wrong = weights * (np.expm1(np.minimum(off, 1)) + unit)
    delta = (weights @ size_v * size_dz).sum(axis=3, keepdims=True)
    terms = size_dz @ size_v.swapaxes(2, 3)
    scores = scale * (wrong * (terms + delta) + 4 * unit * weights * (terms + delta))
    if number == 0:
        return scores @ size_k
    made = scores.swapaxes(2, 3) @ np.abs(q) if number == 1 else wrong.swapaxes(2, 3) @ size_dz
    return made.reshape(made.shape[0], -1, _SHARING, *made.shape[2:]).sum(axis=2)


def _stated(causal: bool) -> Operation:
    """Attention; of a query over all keys, or over those up to i + keys - queries."""

    def attention(
        q: Float[np.ndarray, "2 4 Q D"],
        k: Float[np.ndarray, "2 2 K D"],
        v: Float[np.ndarray, "2 2 K D"],
    ) -> Float[np.ndarray, "2 4 Q D"]:
        """z = softmax(q kᵀ / √D) v of each head."""
        return _weights(q, k, causal) @ _wide(v)

    attention.__name__ = "attention_causal" if causal else "attention"
    return operation(
        exercise=_SIZES,
        summed=("K", "D"),
        at_most={"D": 128},
        dtypes=_DTYPES,
        slack=partial(_slack, causal),
    )(attention)


def _gradient(causal: bool, number: int) -> Operation:
    """The gradient of q, k or v, by number."""
    name = f"d{'qkv'[number]}"
    batches = 2 if causal else 1

    def gradient(q: Array, k: Array, v: Array, dz: Array) -> Array:
        return _gradients(q, k, v, dz, causal)[number]

    gradient.__name__ = f"attention_{'causal_' if causal else ''}{name}"
    gradient.__doc__ = f"{name} of the attention of q, k and v, given dz."
    of_queries, of_keys = (f"{batches} {rest}" for rest in ("4 Q D", "2 K D"))
    gradient.__annotations__ = {
        "q": Float[np.ndarray, of_queries],
        "k": Float[np.ndarray, of_keys],
        "v": Float[np.ndarray, of_keys],
        "dz": Float[np.ndarray, of_queries],
        "return": Float[np.ndarray, of_queries if number == 0 else of_keys],
    }
    return operation(
        exercise=_SIZES,
        summed=("Q", "K", "D"),
        at_most={"D": 128},
        dtypes=_DTYPES,
        result=name,
        slack=partial(_gradient_slack, causal, number),
    )(gradient)


attention, attention_causal = _stated(False), _stated(True)
attention_dq, attention_dk, attention_dv = (_gradient(False, number) for number in range(3))
attention_causal_dq, attention_causal_dk, attention_causal_dv = (
    _gradient(True, number) for number in range(3)
)
