"""Search over compressed vectors: in clusters, with the right answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit import VectorIndex
from lowbit.registry.locks import cached_property
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import Case, Implementation, Problem, Ready
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.suite import Suite, numbers, option, suite
from lowbit_lab.bench.core.table import Column

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_PER_CENTRE = 1000
_SPREAD = np.float32(0.5)
_RECALL_QUERIES = 256
_PART = 1 << 16  # vectors that are made, or compared with queries, together


@suite
@dataclass(frozen=True)
class Search(Suite):
    """Time search over compressed vectors, and tell how many of the nearest it finds.

    Vectors are synthetic, in clusters. Recall is against exact float32 scores. Implementations
    take turns in random order, each with lowbit.
    """

    vectors: int = option(100_000, "How many vectors are searched.")
    dim: int = option(384, "How many numbers each has.")
    bits: int = option(4, "Of each number, as it is stored: 8 or 4.")
    k: int = option(10, "How many are to be found.")
    batch: str = option("1,256", "Queries together, or several numbers.")
    candidates: int = option(40, "How many are rescored from the float32 vectors; 0: no rescoring.")
    metric: str = option("dot", "dot, cosine or l2.")
    also: str = option(
        "", "Cases more: fill, one (vector added to a full index), or shares that a filter admits."
    )

    name: ClassVar[str] = "search"
    example: ClassVar[str] = "--vectors 100000 --dim 384 --bits 4 --also fill,one,0.01,0.5"
    distribution: ClassVar[str] = (
        "normal centres, one for about 1,000 vectors; vectors and queries are normal around them "
        "with half of the centres' deviation"
    )
    ceiling: ClassVar[str] = ""
    pairs: ClassVar[bool] = True
    by_time: ClassVar[bool] = False

    def index(self) -> VectorIndex:
        """An empty one."""
        bits: Any = self.bits
        metric: Any = self.metric
        return VectorIndex(max(1, self.dim), bits, metric=metric)

    def __post_init__(self) -> None:
        self.index()  # which refuses what it must
        for name in ("vectors", "dim", "k"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for one in self.more:
            if one not in ("fill", "one"):
                self._admitted(one)
        _ = self.batches
        if self.candidates != 0 and self.candidates < self.k:
            raise ValueError(
                f"candidates is {self.candidates}; it must be 0, or at least k = {self.k}"
            )
        if max(self.k, self.candidates) > self.vectors:
            raise ValueError(
                f"k = {self.k} and candidates = {self.candidates} must not exceed "
                f"the {self.vectors} vectors"
            )

    @property
    def more(self) -> tuple[str, ...]:
        """The cases of `also`, each once."""
        return tuple(dict.fromkeys(filter(None, self.also.split(","))))

    def _admitted(self, share: str) -> int:
        """How many vectors this share is."""
        try:
            count = round(float(share) * self.vectors)
        except ValueError:
            count = 0
        if not 0 < count <= self.vectors:
            raise ValueError(
                f"also {share!r} is not understood; write fill, one, or a share such as 0.01"
            )
        return count

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of queries together, each once. ValueError: they are none."""
        return numbers("batch", self.batch)

    def settings(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in ("vectors", "dim", "bits", "k", "metric")}

    def cases(self, seed: int = 0) -> Sequence[Case]:
        cases = [Case("search", f"batch {b}", sizes={"batch": b}) for b in self.batches]
        filled = {
            "fill": Case("fill", "an empty index", sizes={"batch": self.vectors}),
            "one": Case("add", "one vector", sizes={"batch": 1}),
        }
        for one in self.more:
            if one in filled:
                cases.append(filled[one])
                continue
            for b in self.batches:
                name = f"batch {b}, filter admits {one}"
                cases.append(
                    Case("search", name, sizes={"batch": b, "admitted": self._admitted(one)})
                )
        return cases

    def implementations(self) -> Sequence[Implementation]:
        several = (one for one in super().implementations() if isinstance(one, Index))
        return [one for one in several if one.fits(self)]

    def make(self, case: Case, seed: int) -> Queries:
        data, sizes = _data(self, seed), case.sizes
        mask = None
        if "admitted" in sizes:
            mask = np.zeros(self.vectors, np.bool_)
            chosen = np.random.default_rng(seed).permutation(self.vectors)
            mask[chosen[: sizes["admitted"]]] = True
        return Queries(data, sizes["batch"], case.operation, mask)

    def title(self, record: Record) -> str:
        where = record.context
        described = ("{k} nearest ({metric}) of {vectors:,} x {dim}, {bits} bits").format(**where)
        return f"{described}; vectors: {where['distribution']}; seed {where['seed']}"

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        def per_second(row: Row) -> str:
            return table.three_digits(row.sizes["batch"] / row.seconds.median)

        def unfiltered(row: Row) -> str:
            whole = [one for one in rows if one.operation == "search"
                     and (one.implementation, one.threads) == (row.implementation, row.threads)
                     and one.sizes == {"batch": row.sizes["batch"]}]  # fmt: skip
            if not whole or "admitted" not in row.sizes:
                return ""
            return table.three_digits(row.seconds.median / whole[0].seconds.median)

        return (
            *(table.IMPLEMENTATION, table.TIME, table.SPREAD),
            Column("rounds", lambda row: str(row.rounds)),
            Column("per second", per_second),
            Column(f"recall@{self.k}", lambda row: f"{row.extra['recall']:.4f}"),
            Column("size, MB", lambda row: table.three_digits(row.weight_bytes / 1e6)),
            Column("filled in", lambda row: table.format_seconds(row.extra["build_seconds"])),
            Column(
                "time / unfiltered",
                unfiltered,
                when=lambda shown: any("admitted" in row.sizes for row in shown),
            ),
            *table.ratio_columns(rows),
        )


class Index(Implementation):
    """Something that is filled with vectors and searched."""

    def fits(self, suite: Search) -> bool:
        """Whether it is meant for these options."""
        return True

    def fill(self, data: Data, threads: int) -> Filled:
        """An index that holds the vectors."""
        raise NotImplementedError

    def prepare(self, problem: Queries, threads: int) -> Ready:
        """It is filled once for all batches; the time that this takes is told."""
        data, key = problem.data, (self.name, threads)
        if key not in data.filled:
            start = time.perf_counter()
            filled = self.fill(data, threads)
            seconds = time.perf_counter() - start
            recall = data.recall(filled.search(data.queries, None))
            data.filled[key] = replace(filled, seconds=seconds, recall=recall)
        filled = data.filled[key]
        queries, mask = data.queries[: problem.batch], problem.mask
        extra = {"recall": filled.recall, "build_seconds": filled.seconds}

        if problem.operation == "fill":
            return Ready(lambda: self.fill(data, threads).nbytes, nbytes=filled.nbytes, extra=extra)
        if problem.operation == "add":
            growing, one = self.fill(data, threads), data.vectors[:1]
            return Ready(lambda: growing.add(one), nbytes=filled.nbytes, extra=extra)
        return Ready(lambda: filled.search(queries, mask), nbytes=filled.nbytes, extra=extra)


@dataclass(frozen=True, eq=False)
class Data:
    """Vectors float32 [m, dim], queries float32 [Q, dim], and the ids of the k nearest, [Q, k].

    There are as many queries as the largest batch has, and no fewer than recall is taken over.
    filled: indices that hold the vectors, by what made them.
    """

    suite: Search
    vectors: Floats
    queries: Floats
    exact: Ids
    filled: dict[tuple[str, int], Filled] = field(default_factory=dict)

    def recall(self, ids: Ids) -> float:
        """The share of the right ids [Q, k] that are among those found."""
        pairs = zip(ids.tolist(), self.exact.tolist(), strict=True)
        return sum(len(set(a) & set(b)) for a, b in pairs) / ids.size


@dataclass(frozen=True)
class Filled:
    """An index that holds the vectors: how it is searched, queries, and a mask of the vectors that
    a filter admits, to the ids of their k nearest; how it is added to; its bytes; how long it took
    to fill, and what it finds."""

    search: Callable[[Floats, Mask | None], Ids]
    add: Callable[[Floats], None]
    nbytes: int
    seconds: float = 0.0
    recall: float = 0.0


@dataclass(frozen=True, eq=False)
class Queries(Problem):
    """So many queries together, of vectors that a mask admits, or of all; or, by the operation, all
    vectors ("fill") or one ("add") that are added."""

    data: Data
    batch: int
    operation: str = "search"
    mask: Mask | None = None

    @cached_property
    def operations(self) -> int:
        return 2 * self.batch * self.data.vectors.size

    @cached_property
    def bytes(self) -> int:
        return self.data.vectors.size * self.data.suite.bits // 8

    @cached_property
    def weight_bytes(self) -> int:
        return self.bytes

    def error(self, result: Ids) -> None:
        """There is a recall instead."""

    def wrong(self, implementation: Implementation, result: Ids) -> None:
        """Whatever it finds: that is what is told."""


@lru_cache(maxsize=1)
def _data(suite: Search, seed: int) -> Data:
    """The same for every run of one suite."""
    rng = np.random.default_rng(seed)
    count = max(1, suite.vectors // _PER_CENTRE)
    centres = rng.standard_normal((count, suite.dim), dtype=np.float32)

    def around(rows: int) -> Floats:
        noise = rng.standard_normal((rows, suite.dim), dtype=np.float32)
        noise *= _SPREAD
        noise += centres[rng.integers(0, count, rows)]
        return noise

    vectors = np.empty((suite.vectors, suite.dim), np.float32)
    for first in range(0, suite.vectors, _PART):
        part = vectors[first : first + _PART]
        part[...] = around(len(part))
    queries = around(max(*suite.batches, _RECALL_QUERIES))
    return Data(suite, vectors, queries, nearest(vectors, queries, suite.k, suite.metric))


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
