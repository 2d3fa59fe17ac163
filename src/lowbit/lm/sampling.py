"""Which token comes next: the likeliest, or one drawn from those that are likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log

import numpy as np

from lowbit.lm.arguments import whole

_FIRST_PART = 256


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. In this order, which is llama.cpp's:

    repeat_penalty: what logits of the `last` tokens are divided by where they are positive, and
    multiplied with where they are not; 1 changes nothing. top_k: so many of the likeliest stay; 0
    is all. top_p: of these the likeliest that have this probability together. min_p: of these the
    ones that have this share of the likeliest one's probability. temperature: what logits are
    divided by before one is drawn; 0 takes the likeliest. seed: the same gives the same tokens.

    ValueError: a field is out of its range. TypeError: top_k, seed or last is no whole number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None
    last: int = 64

    def __post_init__(self) -> None:
        for name, good, range_ in (
            ("temperature", 0 <= self.temperature < inf, "at least 0, and finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repeat_penalty", 0 < self.repeat_penalty < inf, "above 0, and finite"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {range_}")
        whole("top_k", self.top_k)
        whole("last", self.last)
        if self.seed is not None:
            whole("seed", self.seed)


class Sampler:
    """Chooses tokens one after another, with random numbers of its own."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def pick(self, logits: np.ndarray, ids: Sequence[int]) -> int:
        """The next token. logits: float32 [V], which are left as they are; ids: the tokens up to
        here, the last one last. ValueError: a logit is NaN or infinite where it matters."""
        logits = self._penalized(logits, ids)
        best = int(np.argmax(logits))  # the first NaN, if there is one
        if not isfinite(logits[best]):
            raise ValueError(f"the logit of token {best} is {logits[best]}")
        how = self.sampling
        if how.temperature == 0 or how.top_k == 1:
            return best
        kept = np.arange(len(logits))
        if 0 < how.top_k < len(logits):
            kept = np.argpartition(logits, -how.top_k)[-how.top_k :]
        below = logits[kept] - logits[best]
        if how.top_p < 1:
            chosen = _most_likely(np.exp(below), how.top_p)
            kept, below = kept[chosen], below[chosen]
        if how.min_p > 0:
            chosen = below >= log(how.min_p)
            kept, below = kept[chosen], below[chosen]
        with np.errstate(over="ignore"):
            heights = np.cumsum(np.exp(below.astype(np.float64) / how.temperature))
        drawn = np.searchsorted(heights, self._random.random() * heights[-1], side="right")
        return int(kept[min(int(drawn), len(kept) - 1)])

    def _penalized(self, logits: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        how = self.sampling
        if how.repeat_penalty == 1 or how.last == 0 or not len(ids):
            return logits
        seen = sorted(set(ids[-how.last :]))
        changed, found = logits.copy(), logits[seen]
        changed[seen] = np.where(found > 0, found / how.repeat_penalty, found * how.repeat_penalty)
        return changed


def _most_likely(weights: np.ndarray, share: float) -> np.ndarray:
    """Indices of the fewest largest weights that have this share of all, the largest first. Only
    the largest are sorted: four times as many each time they are not enough."""
    wanted = share * weights.sum(dtype=np.float64)
    count = _FIRST_PART
    while True:
        count = min(count, len(weights))
        largest = np.argpartition(weights, -count)[-count:]
        order = largest[np.argsort(-weights[largest], kind="stable")]
        heights = np.cumsum(weights[order], dtype=np.float64)
        if heights[-1] >= wanted or count == len(weights):
            return order[: int(np.searchsorted(heights, wanted)) + 1]
        count *= 4
