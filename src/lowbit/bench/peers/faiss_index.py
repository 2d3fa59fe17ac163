"""The exhaustive indices of FAISS, from the package `faiss-cpu`."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from importlib import metadata
from typing import Any

import numpy as np

from lowbit.bench.search_problem import Built, Floats, Ids, SearchPlan, SearchProblem
from lowbit.registry.extras import absent

_PART = 1 << 16  # vectors that are added together
_BITS = {4: "QT_4bit", 8: "QT_8bit"}


class _Faiss(ABC):
    """What the indices share."""

    name: str
    ours = False
    pool = "OpenMP of faiss"

    def unavailable(self, plan: SearchPlan) -> str | None:
        return absent("faiss")

    def library(self) -> tuple[str, str]:
        return "faiss-cpu", metadata.version("faiss-cpu")

    def build(self, problem: SearchProblem) -> Built:
        plan = problem.plan
        faiss: Any = importlib.import_module("faiss")
        faiss.omp_set_num_threads(plan.threads)
        measure = faiss.METRIC_L2 if plan.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        index = self._empty(faiss, plan, measure)
        index.train(_prepared(problem.vectors[:_PART], plan.metric))
        for first in range(0, plan.vectors, _PART):
            index.add(_prepared(problem.vectors[first : first + _PART], plan.metric))

        def search(queries: Floats) -> Ids:
            return index.search(_prepared(queries, plan.metric), plan.k)[1]

        return Built(search, plan.vectors * index.sa_code_size())

    @abstractmethod
    def _empty(self, faiss: Any, plan: SearchPlan, measure: Any) -> Any:
        """An index of this kind without vectors."""


class FaissScalarQuantizer(_Faiss):
    """`IndexScalarQuantizer` with as many bits as the plan has, a scale for each dimension."""

    def __init__(self, bits: int) -> None:
        self.name = f"faiss {_BITS[bits]}"

    def _empty(self, faiss: Any, plan: SearchPlan, measure: Any) -> Any:
        kind = getattr(faiss.ScalarQuantizer, _BITS[plan.bits])
        return faiss.IndexScalarQuantizer(plan.dim, kind, measure)


class FaissFlat(_Faiss):
    """`IndexFlat`: the vectors themselves, float32."""

    name = "faiss float32"

    def _empty(self, faiss: Any, plan: SearchPlan, measure: Any) -> Any:
        return faiss.IndexFlat(plan.dim, measure)


def _prepared(vectors: Floats, metric: str) -> Floats:
    """FAISS has no cosine: vectors and queries are normalized for it."""
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    return np.ascontiguousarray(vectors)
