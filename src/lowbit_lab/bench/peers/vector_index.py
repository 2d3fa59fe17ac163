"""Indices over vectors: lowbit's, and the exhaustive ones of FAISS, from `faiss-cpu`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from lowbit_lab.bench.core.case import OURS, implementation
from lowbit_lab.bench.suites.search import Data, Filled, Floats, Ids, Index, Mask, Search

_PART = 1 << 16  # vectors that are added together
_BITS = {4: "QT_4bit", 8: "QT_8bit"}


@implementation("search", False, True)
class LowbitIndex(Index):
    """`VectorIndex`; `rescores`: with the best candidates rescored from the float32 vectors."""

    kind = OURS
    pool = ""

    def __init__(self, rescores: bool) -> None:
        self.rescores = rescores
        self.name = "lowbit, rescored" if rescores else "lowbit"

    def fits(self, suite: Search) -> bool:
        return suite.candidates > 0 or not self.rescores

    def fill(self, data: Data, threads: int) -> Filled:
        suite = data.suite
        index = suite.index()
        index.add(data.vectors)
        extra: dict[str, Any] = {}
        if self.rescores:
            extra = {"rescore": data.vectors, "candidates": suite.candidates}

        def search(queries: Floats, mask: Mask | None) -> Ids:
            return index.search(queries, suite.k, filter=mask, threads=threads, **extra)[1]

        return Filled(search, index.add, index.nbytes)

    def available(self, case: Any) -> str | None:
        if self.rescores and case.operation != "search":
            return "it is filled as lowbit is"
        return super().available(case)


class _Faiss(Index):
    """What the indices of FAISS share."""

    pool = "OpenMP of faiss"
    needs = ("faiss",)
    package = "faiss-cpu", "faiss-cpu"

    def fill(self, data: Data, threads: int) -> Filled:
        suite = data.suite
        faiss: Any = importlib.import_module("faiss")
        faiss.omp_set_num_threads(threads)
        measure = faiss.METRIC_L2 if suite.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        index = self._empty(faiss, suite, measure)
        index.train(_prepared(data.vectors[:_PART], suite.metric))
        for first in range(0, suite.vectors, _PART):
            index.add(_prepared(data.vectors[first : first + _PART], suite.metric))

        def search(queries: Floats, mask: Mask | None) -> Ids:
            parameters = None
            if mask is not None:
                chosen = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
                parameters = faiss.SearchParameters(sel=chosen)
            return index.search(_prepared(queries, suite.metric), suite.k, params=parameters)[1]

        def add(vectors: Floats) -> None:
            index.add(_prepared(vectors, suite.metric))

        return Filled(search, add, suite.vectors * index.sa_code_size())

    def _empty(self, faiss: Any, suite: Search, measure: Any) -> Any:
        """An index of this kind without vectors."""
        raise NotImplementedError


@implementation("search", *_BITS)
class FaissScalarQuantizer(_Faiss):
    """`IndexScalarQuantizer` with a scale for each dimension."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"faiss {_BITS[bits]}"

    def fits(self, suite: Search) -> bool:
        return suite.bits == self.bits

    def _empty(self, faiss: Any, suite: Search, measure: Any) -> Any:
        kind = getattr(faiss.ScalarQuantizer, _BITS[self.bits])
        return faiss.IndexScalarQuantizer(suite.dim, kind, measure)


@implementation("search")
class FaissFlat(_Faiss):
    """`IndexFlat`: the vectors themselves, float32."""

    name = "faiss float32"

    def _empty(self, faiss: Any, suite: Search, measure: Any) -> Any:
        return faiss.IndexFlat(suite.dim, measure)


def _prepared(vectors: Floats, metric: str) -> Floats:
    """FAISS has no cosine: vectors and queries are normalized for it."""
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    return np.ascontiguousarray(vectors)
