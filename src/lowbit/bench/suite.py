"""Running a benchmark: every implementation on every case, checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lowbit import isa
from lowbit.bench import context, probe
from lowbit.bench.peers import Implementation, Prepared, implementations
from lowbit.bench.problem import Problem, shape_of
from lowbit.bench.record import Absent, Record, Row, Spread
from lowbit.bench.timing import Limits, Samples, interleave, paired_ratio, quantiles
from lowbit.spec import Case

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of the whole is done, from 0 to 1."""

# Cold weights: by the time a copy's turn comes again, this many times the cache has been read.
_COLD_FACTOR = 2
_MOST_COLD_BYTES = 2 << 30
_MOST_COPIES = 4096


@dataclass(frozen=True)
class Plan:
    """What to run: cases of the same dtypes, and how.

    peers: whether to run foreign implementations. cold: whether to time with weights from
    memory too. ValueError if there is no case, or threads is below 1.
    """

    cases: Sequence[Case]
    threads: int
    seed: int = 0
    peers: bool = True
    cold: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("there is nothing to run; give at least one shape")
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")


def run(plan: Plan, progress: Progress = lambda what, share: None) -> Record:
    """Run the plan.

    Each implementation's result is compared with the reference before it is timed;
    RuntimeError if lowbit's own is outside the budget of its specification.
    """
    caches = isa.report()["caches"]
    trials = _choose(plan, progress)
    rows: list[Row] = []
    absent: list[Absent] = []
    for index, case in enumerate(plan.cases):
        part = _Part(plan, case, caches, index, progress)
        for one, trial in trials.items():
            if trial.reason is not None:
                absent.append(Absent(shape_of(case), case.dtypes, one.name, trial.reason))
        usable = {one: trial for one, trial in trials.items() if trial.reason is None}
        rows.extend(part.run(usable))
    progress("done", 1.0)
    # Only now are all libraries loaded, and with them the thread runtime that was used.
    where = context.gather(plan.threads, plan.seed, plan.limits)
    return Record(where, tuple(rows), tuple(absent))


def _choose(plan: Plan, progress: Progress) -> dict[Implementation, probe.Trial]:
    """Every implementation with the reason not to run it, tried in its own process if need be."""
    trials: dict[Implementation, probe.Trial] = {}
    to_try: list[Implementation] = []
    for one in implementations():
        if not (one.ours or plan.peers):
            continue
        trials[one] = probe.Trial(one.available(plan.cases[0]))
        if trials[one].reason is None and one.isolated:
            to_try.append(one)
    if to_try:
        progress("trying " + ", ".join(one.name for one in to_try), 0.0)
        with ThreadPoolExecutor(max_workers=2) as pool:
            done = pool.map(lambda one: probe.attempt(one, plan.cases, plan.seed), to_try)
            trials.update(zip(to_try, done, strict=True))
    return trials


@dataclass(frozen=True)
class _Part:
    """One case of a plan."""

    plan: Plan
    case: Case
    caches: Mapping[str, int]
    index: int
    progress: Progress

    def _tell(self, what: str, share: float) -> None:
        self.progress(f"{shape_of(self.case)}: {what}", (self.index + share) / len(self.plan.cases))

    def run(self, trials: Mapping[Implementation, probe.Trial]) -> list[Row]:
        plan = self.plan
        self._tell("computing the reference", 0.0)
        problem = Problem.make(self.case, plan.seed)
        with context.thread_count(plan.threads):
            prepared = {one: one.prepare(problem, plan.threads) for one in trials}
            errors = {one: _error(one, each, problem) for one, each in prepared.items()}
            calls = {one.name: [each.call] for one, each in prepared.items()}
            warm_share = 0.5 if plan.cold else 1.0
            samples = interleave(
                calls,
                plan.limits,
                seed=plan.seed,
                on_round=lambda share: self._tell("timing", share * warm_share),
            )
            rows = self._rows("warm", samples, trials, errors)
            if plan.cold:
                rows += self._rows("cold", self._time_cold(problem, prepared), trials, errors)
        return rows

    def _time_cold(
        self, problem: Problem, prepared: Mapping[Implementation, Prepared]
    ) -> dict[str, Samples]:
        """Samples with weights from memory: each call reads another copy of them."""
        self._tell("copying weights", 0.5)
        copies = _cold_copies(problem.b.nbytes * len(prepared), self.caches)
        calls = {one.name: [each.call] for one, each in prepared.items()}
        for _ in range(copies - 1):
            for one in prepared:
                copy = one.prepare(problem.with_own_weights(), self.plan.threads)
                calls[one.name].append(copy.call)
        return interleave(
            calls,
            self.plan.limits,
            seed=self.plan.seed,
            on_round=lambda share: self._tell("timing with cold weights", 0.5 + share / 2),
        )

    def _rows(
        self,
        weights: str,
        samples: Mapping[str, Samples],
        trials: Mapping[Implementation, probe.Trial],
        errors: Mapping[Implementation, float],
    ) -> list[Row]:
        ours = next((samples[one.name] for one in trials if one.ours), None)
        medians = {one.name: samples[one.name].median for one in trials if not one.ours}
        best = min(medians, key=lambda name: medians[name], default=None)
        rows: list[Row] = []
        for one, trial in trials.items():
            taken = samples[one.name]
            library, version = one.library()
            ratio = None if ours is None or one.ours else Spread(*paired_ratio(taken, ours))
            rows.append(
                Row(
                    operation=self.case.spec.name,
                    shape=shape_of(self.case),
                    dtypes=self.case.dtypes,
                    implementation=one.name,
                    ours=one.ours,
                    weights=weights,
                    library=library,
                    version=version,
                    isa=trial.kernels.get(shape_of(self.case)) or one.isa(self.case),
                    note=one.note,
                    seconds=Spread(*quantiles(taken.seconds)),
                    cpu_seconds=quantiles(taken.cpu_seconds)[1],
                    noise=taken.noise if math.isfinite(taken.noise) else None,
                    rounds=len(taken.seconds),
                    calls=taken.calls,
                    operations=self.case.operations,
                    bytes_moved=self.case.bytes_moved,
                    error=errors[one],
                    lowbit_speedup=ratio,
                    best_peer=one.name == best,
                )
            )
        return rows


def _error(one: Implementation, prepared: Prepared, problem: Problem) -> float:
    """How far the result is from the ideal one; lowbit's own must be within its budget."""
    result = prepared.read(prepared.call())
    if one.ours:
        verdict = problem.reference.expected.check(result)
        if not verdict.ok:
            raise RuntimeError(
                f"{one.name} computes {problem.case} wrongly: {verdict.message}; "
                "this is a bug in lowbit, please report it"
            )
    return problem.reference.error(result)


def _cold_copies(bytes_per_copy: int, caches: Mapping[str, int]) -> int:
    """How many copies of the weights exceed the last cache, all implementations together.

    `bytes_per_copy` counts a byte an element for each implementation, the least that they hold.
    ValueError if that many copies would take too much memory to make.
    """
    cache = max(caches.values())
    copies = max(2, -(-_COLD_FACTOR * cache // bytes_per_copy) + 1)
    if copies > _MOST_COPIES or (copies > 2 and copies * bytes_per_copy > _MOST_COLD_BYTES):
        raise ValueError(
            f"cold weights need {copies} copies of {bytes_per_copy} bytes to exceed a cache of "
            f"{cache} bytes; give a larger shape, or leave --cold out"
        )
    return copies
