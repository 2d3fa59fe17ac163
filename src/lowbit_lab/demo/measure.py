"""What the demo measures: latency, and closeness of embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_lab.bench.core.clock import Samples

NEIGHBOURS = 10


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call, over `runs` calls."""

    median_ms: float
    p95_ms: float
    runs: int


@dataclass(frozen=True)
class Quality:
    """Embeddings compared with the float model's, sentence by sentence.

    - mean_cosine, min_cosine: cosine to the float embedding.
    - neighbours: of each sentence's ten nearest others, the part that is the same; the mean.
    """

    mean_cosine: float
    min_cosine: float
    neighbours: float


def latency(samples: Samples) -> Latency:
    """Median and 95th percentile (nearest rank) of some runs."""
    ordered = sorted(float(one) * 1e3 for one in samples.seconds)
    rank = -(-95 * len(ordered) // 100)
    return Latency(samples.median * 1e3, ordered[rank - 1], len(ordered))


def quality(embeddings: Tensor, exact: Tensor) -> Quality:
    """Compare unit vectors [sentences, width] with those of the float model."""
    cosine = torch.nn.functional.cosine_similarity(embeddings.double(), exact.double(), dim=1)
    shared = (_nearest(embeddings).unsqueeze(2) == _nearest(exact).unsqueeze(1)).sum((1, 2))
    return Quality(
        mean_cosine=float(cosine.mean()),
        min_cosine=float(cosine.min()),
        neighbours=float(shared.double().mean() / NEIGHBOURS),
    )


def _nearest(embeddings: Tensor) -> Tensor:
    """Indices [sentences, 10] of the most similar other sentences."""
    if len(embeddings) <= NEIGHBOURS:
        raise ValueError(
            f"{NEIGHBOURS} nearest neighbours need more than {NEIGHBOURS} sentences, "
            f"got {len(embeddings)}"
        )
    similarity = embeddings.double() @ embeddings.double().T
    similarity.fill_diagonal_(-torch.inf)
    return similarity.topk(NEIGHBOURS, dim=1).indices
