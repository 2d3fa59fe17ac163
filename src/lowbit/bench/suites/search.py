"""What a benchmark of search searches: vectors in clusters, queries, and the right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lowbit import VectorIndex
from lowbit.bench.timing import Limits

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

DISTRIBUTION = (
    "normal centres, one for about 1,000 vectors; vectors and queries are normal around them with "
    "half of the centres' deviation"
)
_PER_CENTRE = 1000
_SPREAD = np.float32(0.5)
_RECALL_QUERIES = 256
_PART = 1 << 16  # vectors that are made, or compared with queries, together


@dataclass(frozen=True)
class SearchPlan:
    """What to run: one set of vectors, searched for the k nearest of batches of queries.

    candidates: how many of the best are rescored, 0 for no rescoring. ValueError if a number is
    below 1, k or candidates exceed the vectors, candidates are fewer than k, or no `VectorIndex`
    can be of that dim, bits and metric.
    """

    vectors: int
    dim: int
    bits: int = 4
    k: int = 10
    batches: Sequence[int] = (1, 256)
    candidates: int = 40
    metric: str = "dot"
    threads: int = 1
    seed: int = 0
    peers: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        VectorIndex(max(1, self.dim), self.bits, metric=self.metric)  # which refuses what it must
        for name in ("vectors", "dim", "k", "threads"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not self.batches:
            raise ValueError("no batch is given; give at least one number of queries")
        if min(self.batches) < 1:
            raise ValueError(f"a batch is {min(self.batches)}; it must be at least 1")
        if self.candidates != 0 and self.candidates < self.k:
            raise ValueError(
                f"candidates is {self.candidates}; it must be 0, or at least k = {self.k}"
            )
        if max(self.k, self.candidates) > self.vectors:
            raise ValueError(
                f"k = {self.k} and candidates = {self.candidates} must not exceed "
                f"the {self.vectors} vectors"
            )


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Vectors float32 [m, dim], queries float32 [Q, dim], and the ids of the k nearest, [Q, k].

    There are as many queries as the largest batch has, and no fewer than recall is taken over.
    """

    plan: SearchPlan
    vectors: Floats
    queries: Floats
    exact: Ids

    @classmethod
    def make(cls, plan: SearchPlan) -> SearchProblem:
        """The same for every run of one plan."""
        rng = np.random.default_rng(plan.seed)
        count = max(1, plan.vectors // _PER_CENTRE)
        centres = rng.standard_normal((count, plan.dim), dtype=np.float32)

        def around(rows: int) -> Floats:
            noise = rng.standard_normal((rows, plan.dim), dtype=np.float32)
            noise *= _SPREAD
            noise += centres[rng.integers(0, count, rows)]
            return noise

        vectors = np.empty((plan.vectors, plan.dim), np.float32)
        for first in range(0, plan.vectors, _PART):
            part = vectors[first : first + _PART]
            part[...] = around(len(part))
        queries = around(max(*plan.batches, _RECALL_QUERIES))
        return cls(plan, vectors, queries, nearest(vectors, queries, plan.k, plan.metric))

    def recall(self, ids: Ids) -> float:
        """The share of the right ids [Q, k] that are among those found."""
        pairs = zip(ids.tolist(), self.exact.tolist(), strict=True)
        return sum(len(set(a) & set(b)) for a, b in pairs) / ids.size


def nearest(vectors: Floats, queries: Floats, k: int, metric: str) -> Ids:
    """The ids [Q, k] of the k vectors that score best in float32, in no order."""
    best = np.empty((len(queries), 0), np.float32)
    ids = np.empty((len(queries), 0), np.int64)
    for first in range(0, len(vectors), _PART):
        part = vectors[first : first + _PART]
        squares = np.einsum("nd,nd->n", part, part)
        if metric == "cosine":  # a query's own length does not change its order
            part = part / np.sqrt(np.where(squares > 0, squares, 1))[:, None]
        scores = queries @ part.T
        if metric == "l2":
            scores -= squares / 2
        places = np.broadcast_to(np.arange(first, first + len(part)), scores.shape)
        best, ids = np.concatenate([best, scores], 1), np.concatenate([ids, places], 1)
        kept = np.argpartition(-best, min(k, best.shape[1]) - 1, axis=1)[:, :k]
        best, ids = np.take_along_axis(best, kept, 1), np.take_along_axis(ids, kept, 1)
    return ids


Search = Callable[[Floats], Ids]
"""Queries to the ids of their k nearest; what is timed."""


@dataclass(frozen=True)
class Built:
    """An index that is filled: how it is searched, and the bytes that it holds."""

    search: Search
    nbytes: int


class Searcher(Protocol):
    """Something that can be filled with vectors and searched.

    name: unique, for the table. ours: whether it is lowbit's own. pool: the threads that it runs
    on, by the name of what keeps them.
    """

    name: str
    ours: bool
    pool: str

    def unavailable(self, plan: SearchPlan) -> str | None:
        """None if it can run this plan here, else the reason."""
        ...

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version."""
        ...

    def build(self, problem: SearchProblem) -> Built:
        """Fill an index; the time that this takes is told beside the searches'."""
        ...
