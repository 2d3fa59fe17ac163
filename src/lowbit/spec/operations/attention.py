"""Attention, its gradients, and attention over a cache: four heads, of which two share a key head.
Two batches of them; one for the gradients without causality.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float32, Int8, Int32

from lowbit.spec.attention import attention_weights, causal_diagonal
from lowbit.spec.case import Case
from lowbit.spec.data import Draw, draw_scales
from lowbit.spec.dtypes import DTYPES, FLOAT32_UNIT, Array
from lowbit.spec.operation import Operation
from lowbit.spec.operations import Halves, specified

_SIZES = {"Q": 70, "K": 50, "D": 24}
_SHARING = 2


def _wide(k: Array) -> Array:
    return np.repeat(k, _SHARING, axis=1)


def _weights(q: Array, k: Array, causal: bool) -> Array:
    """[batch, heads, queries, keys]."""
    diagonal = causal_diagonal(q.shape[2], k.shape[2]) if causal else None
    return attention_weights(q @ _wide(k).swapaxes(2, 3) / np.sqrt(q.shape[3]), diagonal)


def _slack(case: Case, q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Weights are rounded to q's dtype."""
    return 2 * case.dtype("q").unit * (_weights(q, k, causal) @ _wide(np.abs(v)))


# Half of the pairs, as if keys and queries were as many.
@specified(
    exercise=_SIZES,
    summed=("K", "D"),
    at_most={"D": 256},
    operations="2*4*4*Q*K*D//(1+causal)",
    slack=_slack,
)
def attention(
    q: Halves[np.ndarray, "2 4 Q D"],
    k: Halves[np.ndarray, "2 2 K D"],
    v: Halves[np.ndarray, "2 2 K D"],
    *,
    causal: bool = False,
) -> Halves[np.ndarray, "2 4 Q D"]:
    """z = softmax(q kᵀ / √D) v of each head; causal: see `causal_diagonal`."""
    return _weights(q, k, causal) @ _wide(v)


def _decoded(
    q: Array, k: Array, v: Array, lengths: Array, window: int | None, cap: float | None
) -> Array:
    z = np.zeros(q.shape)
    for b, length in enumerate(np.clip(lengths, 0, k.shape[2])):
        keys, diagonal = _wide(k[b : b + 1, :, :length]), causal_diagonal(q.shape[2], length)
        scores = q[b] @ keys[0].swapaxes(1, 2) / np.sqrt(q.shape[3])
        z[b] = attention_weights(scores, diagonal, window, cap) @ _wide(v[b : b + 1, :, :length])[0]
    return z


def _decode_slack(
    case: Case, q: Array, k: Array, v: Array, lengths: Array,
    k_scale: Array | None = None, v_scale: Array | None = None,
    *, window: int | None, cap: float | None,
) -> Array:  # fmt: skip
    """Weights are rounded to q's dtype, with scales to bfloat16. Scales come after the products,
    which may be too large for float32 then."""
    if k_scale is None or v_scale is None:
        return 2 * case.dtype("q").unit * _decoded(q, k, np.abs(v), lengths, window, cap)
    products = (np.abs(q) @ _wide(np.abs(k)).swapaxes(2, 3)).max(axis=3, keepdims=True)
    over = np.where(products > DTYPES["float32"].largest, np.inf, 0)
    k, v = k * k_scale[..., None], np.abs(v * v_scale[..., None])
    return over + 2 * DTYPES["bfloat16"].unit * _decoded(q, k, v, lengths, window, cap)


def _draw_lengths(draw: Draw) -> Array:
    """Around the exercise's, so that some are above and some are below the capacity."""
    return draw.rng.integers(0, 64, draw.shape).astype(np.int32)


_decode_facts: dict[str, Any] = {
    "exercise": {"Q": 3, "K": 50, "D": 24},
    "summed": ("K", "D"),
    "at_most": {"Q": 8, "D": 256},
    "operations": "2*2*2*4*Q*K*D",
    "slack": _decode_slack,
    "tried": {"window": (None, 7), "cap": (None, 2.0)},
}


@specified(**_decode_facts, draws={"lengths": _draw_lengths})
def attention_decode(
    q: Halves[np.ndarray, "2 4 Q D"],
    k: Halves[np.ndarray, "2 2 K D"],
    v: Halves[np.ndarray, "2 2 K D"],
    lengths: Int32[np.ndarray, "2"],
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Halves[np.ndarray, "2 4 Q D"]:
    """z = softmax(q kᵀ / √D) v over the first lengths[b] keys of sequence b, all if it is more;
    causal. window and cap: see `attention_weights`."""
    return _decoded(q, k, v, lengths, window, cap)


@specified(
    **_decode_facts,
    draws={
        "lengths": _draw_lengths,
        **dict.fromkeys(("k_scale", "v_scale"), draw_scales),
    },
)
def attention_decode_int8(
    q: Halves[np.ndarray, "2 4 Q D"],
    k: Int8[np.ndarray, "2 2 K D"],
    v: Int8[np.ndarray, "2 2 K D"],
    lengths: Int32[np.ndarray, "2"],
    k_scale: Float32[np.ndarray, "2 2 K"],
    v_scale: Float32[np.ndarray, "2 2 K"],
    *,
    window: int | None = None,
    cap: float | None = None,
) -> Halves[np.ndarray, "2 4 Q D"]:
    """`attention_decode` over a cache of 8 bits with a scale for each token and head."""
    k, v = k * k_scale[..., None], v * v_scale[..., None]
    return _decoded(q, k, v, lengths, window, cap)


def _gradients(q: Array, k: Array, v: Array, dz: Array, causal: bool) -> tuple[Array, Array, Array]:
    """Of q, k and v."""
    weights = _weights(q, k, causal)
    dweights = dz @ _wide(v).swapaxes(2, 3)
    delta = (weights * dweights).sum(axis=3, keepdims=True)
    dscores = weights * (dweights - delta) / np.sqrt(q.shape[3])
    dk, dv = dscores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ dz
    return dscores @ _wide(k), _shared(dk), _shared(dv)


def _shared(x: Array) -> Array:
    """The sums over heads that share a key head."""
    return x.reshape(x.shape[0], -1, _SHARING, *x.shape[2:]).sum(axis=2)


def _gradient_slack(
    case: Case, q: Array, k: Array, v: Array, dz: Array, *, causal: bool, number: int
) -> Array:
    """Weights are made anew from float32 logarithms of their sums, whose error is relative to the
    scores' terms; weights, the gradients of scores, and z in Σ z · dz are rounded to q's dtype."""
    unit, weights, scale = case.dtype("q").unit, _weights(q, k, causal), 1 / np.sqrt(q.shape[3])
    size_k, size_v, size_dz = _wide(np.abs(k)), _wide(np.abs(v)), np.abs(dz)
    products = np.abs(q) @ size_k.swapaxes(2, 3) * scale
    off = (q.shape[3] + 16) * FLOAT32_UNIT * (products + products.max(axis=3, keepdims=True))
    wrong = weights * (np.expm1(np.minimum(off, 1)) + unit)
    delta = (weights @ size_v * size_dz).sum(axis=3, keepdims=True)
    terms = size_dz @ size_v.swapaxes(2, 3)
    scores = scale * (wrong * (terms + delta) + 4 * unit * weights * (terms + delta))
    if number == 0:
        return scores @ size_k
    return _shared(
        scores.swapaxes(2, 3) @ np.abs(q) if number == 1 else wrong.swapaxes(2, 3) @ size_dz
    )


def _gradient(number: int, shape: str) -> Operation:
    """The gradient of q, k or v, by number."""

    def gradient(
        q: Halves[np.ndarray, "1+causal 4 Q D"],
        k: Halves[np.ndarray, "1+causal 2 K D"],
        v: Halves[np.ndarray, "1+causal 2 K D"],
        dz: Halves[np.ndarray, "1+causal 4 Q D"],
        *,
        causal: bool = False,
    ) -> Array:
        return _gradients(q, k, v, dz, causal)[number]

    name = f"d{'qkv'[number]}"
    gradient.__name__ = f"attention_{name}"
    gradient.__doc__ = f"{name} of the attention of q, k and v, given dz."
    gradient.__annotations__["return"] = Halves[np.ndarray, shape]
    return specified(
        exercise=_SIZES,
        summed=("Q", "K", "D"),
        at_most={"D": 256},
        operations="5*2*(1+causal)*4*Q*K*D//(1+causal)",
        result=name,
        slack=partial(_gradient_slack, number=number),
    )(gradient)


attention_dq = _gradient(0, "1+causal 4 Q D")
attention_dk, attention_dv = (_gradient(number, "1+causal 2 K D") for number in (1, 2))
