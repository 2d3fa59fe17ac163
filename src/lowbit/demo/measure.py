"""What the demo measures: latency, run by run in turn, and closeness of embeddings."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

NEIGHBOURS = 10

T = TypeVar("T")


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


def summary(seconds: Sequence[float]) -> Latency:
    """Median and 95th percentile (nearest rank) of some runs."""
    ordered = sorted(seconds)
    rank = -(-95 * len(ordered) // 100)
    return Latency(statistics.median(ordered) * 1e3, ordered[rank - 1] * 1e3, len(ordered))


def interleaved(
    turns: Mapping[str, Callable[[T], float]],
    inputs: Sequence[T],
    *,
    rounds: int,
    fewest: int,
    seconds: float,
    rng: random.Random,
    on_round: Callable[[], object],
) -> dict[str, Latency]:
    """Let everyone take its turn on the same inputs, in a new random order each round.

    A turn takes an input and tells the seconds that it took. Stops after `rounds` rounds, or after
    `seconds` if at least `fewest` are done. Each input is run once before, untimed. `on_round` is
    called between rounds, outside of what is timed.
    """
    for turn in turns.values():
        for one in inputs:
            turn(one)
    taken: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    start = time.perf_counter()
    for done in range(rounds):
        if done >= fewest and time.perf_counter() - start > seconds:
            break
        one = inputs[done % len(inputs)]
        rng.shuffle(order)
        for name in order:
            taken[name].append(turns[name](one))
        on_round()
    return {name: summary(values) for name, values in taken.items()}


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
