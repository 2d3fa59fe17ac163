"""What a decoder does between products and attention, on rows: one launch each on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.torch.registration import register, specified


def rotate(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, positions: Tensor, slots: Tensor,
    keys: Tensor, values: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    epsilon: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Heads of queries and keys, normalized and turned by their position; keys and values are
    written to a cache. The queries, [rows, heads, size] of the cache's dtype.

    q [rows, heads · size], k and v [rows, key heads · size]: floats. angles: float32 [places, 2,
    pairs], cosines and sines by position; elements i and i + pairs of a head are turned together;
    None: nothing is. positions, slots: int64 [rows]. keys, values: [slots, key heads, places,
    size], alike, of any strides but for the last. q_norm, k_norm: weights of RMS norms of each
    head, [size], both or none.
    """
    return _rotate_op(q, k, v, angles, positions, slots, keys, values, q_norm, k_norm, epsilon)


def gated(x: Tensor, function: str) -> Tensor:
    """f(a) · b of rows x = [a, b]: [rows, 2 n] to [rows, n]. function: "silu" or "gelu_tanh"."""
    return _gated_op(x, function)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm with a weight, of rows [rows, length] of one dtype."""
    return _add_norm_op(x, y, weight, epsilon)


def _rotate_reference(
    q: Tensor, k: Tensor, v: Tensor, angles: Tensor | None, positions: Tensor, slots: Tensor,
    keys: Tensor, values: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, epsilon: float,
) -> Tensor:  # fmt: skip
    size = keys.shape[3]
    q, k, v = (one.unflatten(1, (-1, size)) for one in (q, k, v))
    if q_norm is not None and k_norm is not None:
        q, k = _normed(q.double(), q_norm, epsilon), _normed(k.double(), k_norm, epsilon)
    if angles is not None:
        q, k = (_turned(one.double(), angles[positions]) for one in (q, k))
    keys[slots, :, positions] = k.to(keys.dtype)
    values[slots, :, positions] = v.to(values.dtype)
    return q.to(keys.dtype).contiguous()


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    half = angles.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = angles[:, None].unbind(2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _gated_reference(x: Tensor, function: str) -> Tensor:
    a, b = x.double().chunk(2, -1)
    a = F.silu(a) if function == "silu" else F.gelu(a, approximate="tanh")
    return (a * b).to(x.dtype)


def _add_norm_reference(
    x: Tensor, y: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = (x + y).contiguous()
    return total, _normed(total.double(), weight, epsilon).to(x.dtype)


def _rotate_fake(q: Tensor, *rest: Any) -> Tensor:
    keys = rest[5]
    return keys.new_empty(len(q), q.shape[1] // keys.shape[3], keys.shape[3])


_rotate_op = register(
    "rotate(Tensor q, Tensor k, Tensor v, Tensor? angles, Tensor positions, Tensor slots, "
    "Tensor(a!) keys, Tensor(b!) values, Tensor? q_norm, Tensor? k_norm, float epsilon) -> Tensor",
    kernel="decoding.rotate",
    cpu=_rotate_reference,
    fake=_rotate_fake,
)
_gated_op = register(
    "gated(Tensor x, str function) -> Tensor",
    kernel="decoding.gated",
    cpu=_gated_reference,
    fake=lambda x, function: x.new_empty(len(x), x.shape[1] // 2),
)
_add_norm_op = register(
    "add_rms_norm(Tensor x, Tensor y, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    kernel="decoding.add_rms_norm",
    cpu=_add_norm_reference,
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
)


@specified("gated_silu")
def _gated_parts(a: Tensor, b: Tensor) -> Tensor:
    return gated(torch.cat([a, b], 1), "silu")


@specified("add_rms_norm")
def _normed_sum(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return add_rms_norm(x, y, weight, 1e-6)[1]
