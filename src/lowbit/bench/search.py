"""Running a benchmark of search: lowbit and its peers on the same vectors, recall beside speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

import lowbit
from lowbit.bench import context
from lowbit.bench.peers.faiss_index import FaissFlat, FaissScalarQuantizer
from lowbit.bench.record import Spread
from lowbit.bench.search_problem import (
    DISTRIBUTION,
    Built,
    Floats,
    Ids,
    Searcher,
    SearchPlan,
    SearchProblem,
)
from lowbit.bench.search_record import SearchRecord, SearchRow
from lowbit.bench.timing import Samples, interleave, paired_ratio, quantiles

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of the whole is done, from 0 to 1."""

_BUILDING_SHARE = 0.4  # of the progress


class Lowbit:
    """`VectorIndex`, and with `candidates` the best of them rescored from the float32 vectors."""

    ours = True
    pool = ""

    def __init__(self, candidates: int = 0) -> None:
        self.candidates = candidates
        self.name = f"lowbit, {candidates} rescored" if candidates else "lowbit"

    def unavailable(self, plan: SearchPlan) -> str | None:
        return None

    def library(self) -> tuple[str, str]:
        return "lowbit", lowbit.__version__

    def build(self, problem: SearchProblem) -> Built:
        plan = problem.plan
        index = lowbit.VectorIndex(plan.dim, plan.bits, metric=plan.metric)
        index.add(problem.vectors)
        extra = {}
        if self.candidates:
            extra = {"rescore": problem.vectors, "candidates": self.candidates}

        def search(queries: Floats) -> Ids:
            return index.search(queries, plan.k, threads=plan.threads, **extra)[1]

        return Built(search, index.nbytes)


class _Ready(NamedTuple):
    searcher: Searcher
    built: Built
    seconds: float
    recall: float


def searchers(plan: SearchPlan) -> tuple[Searcher, ...]:
    """What a plan compares, lowbit without rescoring first."""
    ours = (Lowbit(), Lowbit(plan.candidates)) if plan.candidates else (Lowbit(),)
    return (*ours, FaissScalarQuantizer(plan.bits), FaissFlat()) if plan.peers else ours


def run(plan: SearchPlan, progress: Progress = lambda what, share: None) -> SearchRecord:
    """Run the plan. Whatever takes part takes turns with lowbit without rescoring, two at a time,
    so that a slow one does not use up the time of the others."""
    with context.thread_count(plan.threads):
        progress("making vectors", 0.0)
        problem = SearchProblem.make(plan)
        absent: list[tuple[str, str]] = []
        ready: list[_Ready] = []
        for number, one in enumerate(every := searchers(plan)):
            reason = one.unavailable(plan)
            if reason is not None:
                absent.append((one.name, reason))
                continue
            progress(f"filling {one.name}", _BUILDING_SHARE * (number + 1) / (len(every) + 1))
            start = time.perf_counter()
            built = one.build(problem)
            seconds = time.perf_counter() - start
            recall = problem.recall(built.search(problem.queries))
            ready.append(_Ready(one, built, seconds, recall))
        rows: list[SearchRow] = []
        for number, batch in enumerate(plan.batches):
            at = _BUILDING_SHARE + (1 - _BUILDING_SHARE) * number / len(plan.batches)
            progress(f"searching {batch} together", at)
            rows.extend(_rows(problem, batch, ready))
        progress("done", 1.0)
        where = context.gather((plan.threads,), plan.seed, plan.limits)
    versions = {**where.versions, **dict(one.searcher.library() for one in ready)}
    return SearchRecord(
        context=replace(where, distribution=DISTRIBUTION, versions=versions),
        vectors=plan.vectors,
        dim=plan.dim,
        bits=plan.bits,
        k=plan.k,
        metric=plan.metric,
        rows=tuple(rows),
        absent=tuple(absent),
    )


def _rows(problem: SearchProblem, batch: int, ready: Sequence[_Ready]) -> Iterator[SearchRow]:
    """The rows of one batch, in the order of what is ready."""
    plan, queries = problem.plan, problem.queries[:batch]
    pools = {one.searcher.name: one.searcher.pool for one in ready}

    def times(*several: _Ready) -> dict[str, Samples]:
        calls = {one.searcher.name: [partial(one.built.search, queries)] for one in several}
        return interleave(calls, plan.limits, seed=plan.seed, pools=pools)

    base, *others = ready
    against = {one.searcher.name: times(base, one) for one in others}
    name = base.searcher.name
    alone = [taken[name] for taken in against.values()] or [times(base)[name]]
    for one in ready:
        library, version = one.searcher.library()
        if one is base:
            ratio = None
            seconds = np.concatenate([taken.seconds for taken in alone])
            cpu = np.concatenate([taken.cpu_seconds for taken in alone])
            taken = Samples(name, seconds, cpu, alone[0].calls)
        else:
            pair = against[one.searcher.name]
            taken = pair[one.searcher.name]
            ratio = Spread(*paired_ratio(taken, pair[name]))
        yield SearchRow(
            implementation=one.searcher.name,
            ours=one.searcher.ours,
            library=library,
            version=version,
            batch=batch,
            seconds=Spread(*quantiles(taken.seconds)),
            noise=taken.noise if math.isfinite(taken.noise) else None,
            rounds=len(taken.seconds),
            calls=taken.calls,
            recall=one.recall,
            nbytes=one.built.nbytes,
            build_seconds=one.seconds,
            lowbit_speedup=ratio,
        )
