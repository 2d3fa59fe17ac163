"""What attention's weights are: shared by the operation, networks, and whatever computes them."""

from __future__ import annotations

import numpy as np

from lowbit.spec.dtypes import Array


def causal_diagonal(queries: int, keys: int) -> int:
    """Causal attention: query i attends to the keys 0 to i + this, so the last query to all keys,
    as a cache needs. If there are more queries than keys, the first ones attend to none."""
    return keys - queries


def attention_weights(
    scores: Array, diagonal: int | None, window: int | None = None, cap: float | None = None
) -> Array:
    """The softmax of scores [..., queries, keys], float64, over the keys 0 to i + diagonal, or all;
    0 in a row that attends to no key. window: over the last so many of these keys. cap: of
    cap · tanh(score / cap)."""
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    if diagonal is not None:
        seen = np.tri(*scores.shape[-2:], k=diagonal, dtype=bool)
        if window is not None:
            seen &= ~np.tri(*scores.shape[-2:], k=diagonal - window, dtype=bool)
        scores = np.where(seen, scores, -np.inf)
    greatest = scores.max(-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isneginf(greatest), 0, greatest))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)
