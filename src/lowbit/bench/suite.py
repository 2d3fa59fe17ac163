"""Running a benchmark: every implementation on every case, checked and timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lowbit import isa
from lowbit.bench import context, peak, probe
from lowbit.bench.implementation import Implementation, Prepared, implementations
from lowbit.bench.peak import Ceiling
from lowbit.bench.problem import Problem, shape_of
from lowbit.bench.record import COLD, Absent, Record, Row, Spread
from lowbit.bench.timing import Limits, Samples, interleave, paired_ratio, quantiles
from lowbit.spec import Case

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of the whole is done, from 0 to 1."""

# Cold weights: by the time a copy's turn comes again, this many times the cache has been read.
_COLD_FACTOR = 2
_MOST_COLD_BYTES = 2 << 30
_MOST_COPIES = 4096
# They are not timed where reading them from memory would take less than this share of a call.
_COLD_SHARE = 0.02

_READ = "plain read"
_TRIAL_SHARE = 0.05  # of the progress


@dataclass(frozen=True)
class Plan:
    """What to run: cases, with how many threads, and how.

    works: what the product of a shape is part of, for the record. peers: whether to run foreign
    implementations. cold: whether to time with weights from memory too, where that can make a
    difference. ValueError if there is no case or no number of threads, or one is below 1.
    """

    cases: Sequence[Case]
    threads: Sequence[int]
    works: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    peers: bool = True
    cold: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("there is nothing to run; give at least one shape")
        if not self.threads:
            raise ValueError("no number of threads is given; give at least one")
        for threads in self.threads:
            if threads < 1:
                raise ValueError(f"threads is {threads}; it must be at least 1")


Trials = Mapping[Implementation, probe.Trial]


def run(plan: Plan, progress: Progress = lambda what, share: None) -> Record:
    """Run the plan.

    Each implementation's result is compared with the reference before it is timed;
    RuntimeError if lowbit's own is outside the budget of its specification.
    """
    used = isa.active().name  # at once: one that cannot run here should be told before all else
    trials = _choose(plan, progress)
    ceilings = _measure_ceilings(plan, used, progress)
    rows: list[Row] = []
    absent: list[Absent] = []
    for index, case in enumerate(plan.cases):
        tried = trials[case.dtypes]
        for one, trial in tried.items():
            if trial.reason is not None:
                absent.append(Absent(shape_of(case), case.dtypes, one.name, trial.reason))
        usable = {one: trial for one, trial in tried.items() if trial.reason is None}
        problem: Problem | None = None
        errors: dict[Implementation, float] = {}
        for turn, threads in enumerate(plan.threads):
            at = (index * len(plan.threads) + turn) / (len(plan.cases) * len(plan.threads))
            part = _Part(plan, case, ceilings[threads], at, progress)
            problem = problem or part.make()
            with context.thread_count(threads):
                rows.extend(part.run(problem, usable, errors, absent))
    progress("done", 1.0)
    # Only now are all libraries loaded, and with them the thread runtime that was used.
    where = context.gather(tuple(plan.threads), plan.seed, plan.limits)
    return Record(where, tuple(rows), tuple(dict.fromkeys(absent)), tuple(ceilings.values()))


def _choose(plan: Plan, progress: Progress) -> dict[str, Trials]:
    """By dtypes, every implementation with the reason not to run it, tried in its own process if
    need be."""
    groups: dict[str, list[Case]] = {}
    for case in plan.cases:
        groups.setdefault(case.dtypes, []).append(case)
    trials: dict[str, dict[Implementation, probe.Trial]] = {dtypes: {} for dtypes in groups}
    to_try: list[tuple[str, Implementation]] = []
    for dtypes, cases in groups.items():
        for one in implementations():
            if not (one.ours or plan.peers):
                continue
            trials[dtypes][one] = probe.Trial(one.available(cases[0]))
            if trials[dtypes][one].reason is None and one.isolated:
                to_try.append((dtypes, one))
    if to_try:
        names = dict.fromkeys(one.name for _, one in to_try)
        progress("trying " + ", ".join(names), 0.0)
        with ThreadPoolExecutor(max_workers=2) as pool:
            done = pool.map(lambda each: probe.attempt(each[1], groups[each[0]], plan.seed), to_try)
            for number, ((dtypes, one), trial) in enumerate(zip(to_try, done, strict=True), 1):
                trials[dtypes][one] = trial
                progress(f"tried {one.name} {dtypes}", _TRIAL_SHARE * number / len(to_try))
    return dict(trials)


def _measure_ceilings(plan: Plan, used: str, progress: Progress) -> dict[int, Ceiling]:
    """What the machine can do with each number of threads."""
    ceilings = {}
    for threads in plan.threads:
        progress(f"measuring the peak, {_threads(threads)}", _TRIAL_SHARE)
        with context.thread_count(threads):
            ceilings[threads] = peak.measure(used, threads)
    return ceilings


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class _Part:
    """One case of a plan with one number of threads; `at` is the share of the cases before it."""

    plan: Plan
    case: Case
    ceiling: Ceiling
    at: float
    progress: Progress

    def _tell(self, what: str, share: float) -> None:
        parts = len(self.plan.cases) * len(self.plan.threads)
        done = _TRIAL_SHARE + (1 - _TRIAL_SHARE) * (self.at + share / parts)
        name = f"{shape_of(self.case)} {self.case.dtypes}, {_threads(self.ceiling.threads)}"
        self.progress(f"{name}: {what}", done)

    def make(self) -> Problem:
        """The data, for any number of threads."""
        self._tell("making data", 0.0)
        return Problem.make(self.case, self.plan.seed)

    def run(
        self,
        problem: Problem,
        trials: Trials,
        errors: dict[Implementation, float],
        absent: list[Absent],
    ) -> list[Row]:
        """The rows with warm weights, then those with cold ones.

        `errors` holds what is known of other numbers of threads and learns the rest: lowbit is
        checked with each, the peers with the first. `absent` learns of what was left out.
        """
        plan = self.plan
        self._tell("packing and checking", 0.0)
        prepared = {one: one.prepare(problem, self.ceiling.threads) for one in trials}
        for one, each in prepared.items():
            if one.ours or one not in errors:
                errors[one] = _error(one, each, problem)
        calls = {one.name: [each.call] for one, each in prepared.items()}
        warm_share = 0.5 if plan.cold else 1.0
        warm = self._time(calls, "timing", 0.0, warm_share)
        rows = self._rows("warm", warm, trials, errors)
        if plan.cold:
            reason = self._cold_is_pointless(rows, problem) or self._too_many(calls, problem)
            if reason is None:
                cold = self._time_cold(problem, prepared)
                rows += self._rows("cold", cold, trials, errors)
            else:
                absent.append(Absent(shape_of(self.case), self.case.dtypes, COLD, reason))
        return rows

    def _time(
        self, calls: Mapping[str, list[Callable[[], object]]], what: str, start: float, width: float
    ) -> dict[str, Samples]:
        """Samples of all, and of a plain read of the weights' bytes beside them where M is 1."""
        everything = dict(calls)
        if self.case.sizes["M"] == 1:
            one = isa.active()
            size = self.case.sizes["N"] * self.case.sizes["K"]
            copies = max(len(each) for each in calls.values())
            everything[_READ] = [
                peak.Reader(one, size, self.ceiling.threads) for _ in range(copies)
            ]
        pools = {one.name: one.pool for one in implementations()}
        pools[_READ] = next(one.pool for one in implementations() if one.ours)
        return interleave(
            everything,
            self.plan.limits,
            seed=self.plan.seed,
            on_round=lambda share: self._tell(what, start + share * width),
            pools=pools if self.ceiling.threads > 1 else None,
        )

    def _cold_is_pointless(self, rows: Sequence[Row], problem: Problem) -> str | None:
        """Why cold weights need not be timed: None if reading them takes long enough to be seen."""
        reading = problem.b.nbytes / (self.ceiling.read_gbs["memory"] * 1e9)
        fastest = min(row.seconds.median for row in rows)
        if reading >= _COLD_SHARE * fastest:
            return None
        few = f"{_COLD_SHARE:.0%} of the time with {_threads(self.ceiling.threads)}"
        return f"reading them from memory would take less than {few}"

    def _too_many(self, calls: Mapping[str, object], problem: Problem) -> str | None:
        try:
            _cold_copies(problem.b.nbytes * len(calls))
        except ValueError as error:
            return str(error)
        return None

    def _time_cold(
        self, problem: Problem, prepared: Mapping[Implementation, Prepared]
    ) -> dict[str, Samples]:
        """Samples with weights from memory: each call reads another copy of them."""
        self._tell("copying weights", 0.5)
        copies = _cold_copies(problem.b.nbytes * len(prepared))
        calls = {one.name: [each.call] for one, each in prepared.items()}
        for _ in range(copies - 1):
            for one in prepared:
                copy = one.prepare(problem.with_own_weights(), self.ceiling.threads)
                calls[one.name].append(copy.call)
        return self._time(calls, "timing with cold weights", 0.5, 0.5)

    def _rows(
        self,
        weights: str,
        samples: Mapping[str, Samples],
        trials: Trials,
        errors: Mapping[Implementation, float],
    ) -> list[Row]:
        ours = next((samples[one.name] for one in trials if one.ours), None)
        medians = {one.name: samples[one.name].median for one in trials if not one.ours}
        best = min(medians, key=lambda name: medians[name], default=None)
        read = samples.get(_READ)
        shape = shape_of(self.case)
        rows: list[Row] = []
        for one, trial in trials.items():
            taken = samples[one.name]
            library, version = one.library()
            ratio = None if ours is None or one.ours else Spread(*paired_ratio(taken, ours))
            rows.append(
                Row(
                    operation=self.case.spec.name,
                    work=self.plan.works.get(shape, ""),
                    shape=shape,
                    dtypes=self.case.dtypes,
                    threads=self.ceiling.threads,
                    implementation=one.name,
                    ours=one.ours,
                    weights=weights,
                    library=library,
                    version=version,
                    isa=trial.kernels.get(shape) or one.isa(self.case),
                    note=one.note(self.case),
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
                    peak_share=self.ceiling.share(self.case.operations / taken.median / 1e9),
                    read_share=None if read is None else Spread(*paired_ratio(read, taken)),
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


def _cold_copies(bytes_per_copy: int) -> int:
    """How many copies of the weights exceed the last cache, all implementations together.

    `bytes_per_copy` counts a byte an element for each implementation, the least that they hold.
    ValueError if that many copies would take too much memory to make.
    """
    cache = max(isa.report()["caches"].values())
    copies = max(2, -(-_COLD_FACTOR * cache // bytes_per_copy) + 1)
    if copies > _MOST_COPIES or (copies > 2 and copies * bytes_per_copy > _MOST_COLD_BYTES):
        raise ValueError(
            f"it would need {copies} copies of {bytes_per_copy} bytes to exceed a cache of "
            f"{cache} bytes; a larger shape needs fewer"
        )
    return copies
