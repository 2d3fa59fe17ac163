"""Running a suite: every implementation on every case, checked, then timed against the others."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from lowbit import isa
from lowbit.bench.core import peak, probe
from lowbit.bench.core.case import LIMIT, OURS, PEER, Call, Case, Implementation, Problem, Ready
from lowbit.bench.core.clock import Limits, Samples, paired_ratio, quantiles
from lowbit.bench.core.peak import Ceiling
from lowbit.bench.core.record import COLD, Absent, Record, Row, Spread, thread_text
from lowbit.bench.core.suite import Plan, Suite, chosen

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of the whole is done, from 0 to 1."""

_TRIAL_SHARE = 0.05  # of the progress
# Cold weights: by the time a copy's turn comes again, this many times the cache has been read.
_COLD_CACHES = 2
_MOST_COPIES = 4096
_MOST_MEMORY = 0.5  # of the machine's, for all copies together
# They are not timed where reading them from memory would take less than this share of a call.
_COLD_SHARE = 0.02
# A fallback that is so many times slower than lowbit is a plain loop, and measured only once.
_PLAIN_LOOP = 10.0
# A patient suite's limit is raised for what takes long, so that none of them has but one turn.
_MOST_SECONDS = 60.0
_MARGIN = 2.0  # it may take longer than the first time


class Clock(Protocol):
    """What times the calls of a suite: `Cpu` or `Cuda`.

    refusals: exceptions by which a peer says that it does not do a case; own_refusals: the same for
    lowbit's own.
    """

    refusals: tuple[type[Exception], ...]
    own_refusals: tuple[type[Exception], ...]

    def using(self, threads: int) -> AbstractContextManager[None]: ...
    def time(
        self,
        calls: Mapping[str, Sequence[Call]],
        limits: Limits,
        *,
        seed: int,
        on_round: Callable[[float], None],
        pools: Mapping[str, str] | None,
    ) -> dict[str, Samples]: ...
    def tidy(self) -> None: ...
    def context(self, plan: Plan) -> dict[str, Any]: ...


def run(suite: Suite, plan: Plan, progress: Progress = lambda what, share: None) -> Record:
    """Run a suite.

    Each result is compared with the reference before it is timed; RuntimeError if one of lowbit's
    own cannot be let pass, or if none of lowbit's own can run.
    """
    return _Run(suite, plan, progress, suite.clock()).record()


@dataclass(frozen=True)
class _Cell:
    """One case with some threads: who takes part, ready to be called, and how right they are."""

    case: Case
    problem: Problem
    threads: int
    weights: str
    ready: Mapping[Implementation, Ready]
    errors: Mapping[Implementation, float | None]

    def nbytes(self, one: Implementation) -> int:
        """Of the weights that an implementation reads."""
        return self.ready[one].nbytes or self.problem.weight_bytes


@dataclass
class _Run:
    """What a run has found so far. `at` is the share of the cases before the present one; `slow`
    says of the plain loops that were met how slow they are, `fast` holds fallbacks that are none.
    """

    suite: Suite
    plan: Plan
    progress: Progress
    clock: Clock
    at: float = 0.0
    width: float = 1.0
    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    ceilings: dict[int, Ceiling] = field(default_factory=dict)
    trials: dict[Implementation, probe.Trial] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)
    fast: set[str] = field(default_factory=set)

    def record(self) -> Record:
        suite, plan = self.suite, self.plan
        used = isa.active().name  # at once: one that cannot run here should be told before all
        cases = suite.cases()
        entries = self._entries(cases)
        for threads in plan.threads if suite.ceiling else ():
            self.progress(f"measuring the peak, {thread_text(threads)}", _TRIAL_SHARE)
            with self.clock.using(threads):
                self.ceilings[threads] = peak.measure(used, threads, reads=suite.reads)
        self.width = 1 / len(cases)
        for index, case in enumerate(cases):
            self.at = index / len(cases)
            self._case(case, entries)
        self.progress("done", 1.0)
        where = self.clock.context(plan) | {"distribution": suite.distribution}
        rows = tuple(self.rows)
        return Record(
            suite=suite.name,
            context={**where, **suite.settings()},
            rows=rows,
            absent=tuple(dict.fromkeys(self.absent)),
            ceilings=tuple(self.ceilings.values()),
            summary=tuple(suite.summary(rows)),
        )

    def _entries(self, cases: Sequence[Case]) -> list[Implementation]:
        """Who takes part, tried in a process of its own if need be."""
        usable: list[Implementation] = []
        wanted: dict[Implementation, list[Case]] = {}
        for one in chosen(self.suite, self.plan):
            reasons = {case: one.available(case) for case in cases}
            refused = {case: why for case, why in reasons.items() if why is not None}
            self.trials[one] = probe.Trial(refused)
            if len(refused) < len(reasons):
                usable.append(one)
                wanted[one] = [case for case in cases if case not in refused]
            for case, why in refused.items():
                self._leave_out(case, one.name, why)
        if not any(one.kind == OURS for one in usable):
            raise RuntimeError(f"lowbit itself cannot run: {self.absent[0].reason}")
        isolated = [one for one in usable if one.isolated]
        if isolated:
            self.progress("trying " + ", ".join(one.name for one in isolated), 0.0)
        with ThreadPoolExecutor(max_workers=2) as pool:
            trials = pool.map(
                lambda one: probe.attempt(self.suite, one, wanted[one], self.plan.seed), isolated
            )
            for number, (one, trial) in enumerate(zip(isolated, trials, strict=True), 1):
                refused = {**self.trials[one].reasons, **trial.reasons}
                self.trials[one] = probe.Trial(refused, trial.kernels)
                for case, why in trial.reasons.items():
                    self._leave_out(case, one.name, why)
                self.progress(f"tried {one.name}", _TRIAL_SHARE * number / len(isolated))
        return usable

    def _leave_out(self, case: Case, name: str, reason: str) -> None:
        self.absent.append(Absent(case.name, case.dtypes, name, reason))

    def _tell(self, case: Case, what: str, share: float) -> None:
        done = self.at + share * self.width
        self.progress(f"{case}: {what}", _TRIAL_SHARE + (1 - _TRIAL_SHARE) * done)

    def _case(self, case: Case, entries: Sequence[Implementation]) -> None:
        """The rows of one case, with each number of threads: warm, then cold."""
        plan = self.plan
        errors: dict[Implementation, float | None] = {}
        problem: Any = None
        for turn, threads in enumerate(plan.threads):
            with self.clock.using(threads):
                try:
                    if problem is None:
                        self._tell(case, "making data", 0.0)
                        problem = self.suite.make(case, plan.seed)
                except self.clock.own_refusals as error:
                    return self._leave_out(case, "everyone", _first_line(error))
                share, width = turn / len(plan.threads), 1 / len(plan.threads)
                self._tell(case, f"packing and checking, {thread_text(threads)}", share)
                ready = self._ready(case, problem, threads, entries, errors)
                if not any(one.kind != LIMIT for one in ready):
                    continue
                weights = "warm" if self.suite.colds else ""
                warm = _Cell(case, problem, threads, weights, ready, errors)
                self._warm(warm, share, width / 2 if plan.cold else width)
                if plan.cold and self.suite.colds:
                    self._cold(warm, share + width / 2, width / 2)
        return self.clock.tidy()

    def _ready(
        self,
        case: Case,
        problem: Problem,
        threads: int,
        entries: Sequence[Implementation],
        errors: dict[Implementation, float | None],
    ) -> dict[Implementation, Ready]:
        """Who can do the case, ready; lowbit is checked with each number of threads, the others
        with the first."""
        ready: dict[Implementation, Ready] = {}
        for one in self.suite.taking_part(problem, entries):
            if case in self.trials.get(one, probe.Trial()).reasons:
                continue
            if one.name in self.slow:
                self._leave_out(case, one.name, self.slow[one.name])
                continue
            own = one.kind == OURS
            refusals = self.clock.own_refusals if own else self.clock.refusals
            try:
                each = one.prepare(problem, threads)
                if one.kind == LIMIT:
                    errors[one] = None
                elif own or one not in errors:
                    errors[one] = self._error(one, each, problem, case)
            except refusals as error:
                self._leave_out(case, one.name, _first_line(error))
                continue
            ready[one] = each
        return ready

    def _error(
        self, one: Implementation, ready: Ready, problem: Problem, case: Case
    ) -> float | None:
        """How far the result is from the ideal one."""
        result = ready.read(ready.call())
        wrong = problem.wrong(one, result)
        if wrong is not None and one.kind == PEER:
            raise ValueError(wrong)
        if wrong is not None:
            ours = "; this is a bug in lowbit, please report it" if one.kind == OURS else ""
            raise RuntimeError(f"{one.name} computes {case} wrongly: {wrong}{ours}")
        return problem.error(result)

    def _warm(self, cell: _Cell, start: float, width: float) -> None:
        """Everybody together; then whoever is timed with lowbit alone."""
        everyone = list(cell.ready)
        apart = [one for one in everyone if one.fallback and one.name not in self.fast]
        if self.suite.pairs:
            apart = everyone[1:]
        together = [one for one in everyone if one not in apart]
        ours = [one for one in together if one.kind == OURS]
        groups = [[*ours, one] for one in apart]
        if not (self.suite.pairs and apart):
            groups.insert(0, together)
        timed: dict[Implementation, Mapping[str, Samples]] = {}
        for number, group in enumerate(groups):
            ready = {one: cell.ready[one] for one in group}
            at = start + width * number / len(groups)
            taken = self._time(cell, ready, at, width / len(groups))
            timed |= dict.fromkeys(together if group is together else group[-1:], taken)
        for one in apart:
            if one.fallback:
                self._judge(cell, one, timed[one], ours)
        if self.suite.pairs and apart:
            timed[together[0]] = _joined(together[0].name, [timed[one] for one in apart])
        self._keep(cell, timed)

    def _judge(
        self,
        cell: _Cell,
        one: Implementation,
        samples: Mapping[str, Samples],
        ours: Sequence[Implementation],
    ) -> None:
        """Whether a fallback is a plain loop."""
        ratio = samples[one.name].median / min(samples[each.name].median for each in ours)
        if ratio < _PLAIN_LOOP:
            self.fast.add(one.name)
        else:
            self.slow[one.name] = (
                f"a plain loop here: measured once, at {cell.case.name} with "
                f"{thread_text(cell.threads)}, where it took {ratio:.0f} times as long as lowbit"
            )

    def _time(
        self,
        cell: _Cell,
        ready: Mapping[Implementation, Ready],
        start: float,
        width: float,
        calls: Mapping[str, Sequence[Call]] | None = None,
    ) -> dict[str, Samples]:
        threads = thread_text(cell.threads)
        return self.clock.time(
            calls or {one.name: [each.call] for one, each in ready.items()},
            self._limits(ready) if self.suite.patient else self.plan.limits,
            seed=self.plan.seed,
            on_round=lambda share: self._tell(
                cell.case, f"timing {cell.weights}, {threads}", start + share * width
            ),
            pools={one.name: one.pool for one in ready} if cell.threads > 1 else None,
        )

    def _limits(self, ready: Mapping[Implementation, Ready]) -> Limits:
        """Those of the plan, or with more time where a product takes long."""
        limits, slowest = self.plan.limits, 0.0
        for each in ready.values():
            start = time.perf_counter()
            each.call()
            slowest = max(slowest, time.perf_counter() - start)
        wanted = _MARGIN * slowest * len(ready) * limits.least_rounds
        return replace(limits, seconds=max(limits.seconds, min(_MOST_SECONDS, wanted)))

    def _cold(self, warm: _Cell, start: float, width: float) -> None:
        """With weights from memory: each call reads another copy of them."""
        taking_part = {one: each for one, each in warm.ready.items() if one.name not in self.slow}
        cell = replace(warm, weights="cold", ready=taking_part)
        reason = self._cold_is_pointless(cell)
        total = sum(cell.nbytes(one) for one in taking_part)
        count = _copies(total, self.suite.least_cold_bytes)
        reason = reason or _too_much(count, total)
        if reason is not None:
            return self._leave_out(cell.case, COLD, reason)
        self._tell(cell.case, "copying weights", start)
        calls: dict[str, list[Call]] = {}
        for one, each in taking_part.items():
            again = each.again or self._again(one, cell)
            calls[one.name] = [each.call, *(again() for _ in range(count - 1))]
            for call in calls[one.name]:
                call()  # what a first call finds out about its weight is not to be timed
        taken = self._time(cell, taking_part, start, width, calls)
        return self._keep(cell, dict.fromkeys(taking_part, taken))

    def _again(self, one: Implementation, cell: _Cell) -> Callable[[], Call]:
        problem: Any = cell.problem
        return lambda: one.prepare(problem.with_own_weights(), cell.threads).call

    def _cold_is_pointless(self, cell: _Cell) -> str | None:
        """Why cold weights need not be timed: None if reading them takes long enough to be seen."""
        rate = self.ceilings[cell.threads].read_gbs["memory"] * 1e9
        fastest = min(
            row.seconds.median / (row.weight_bytes or math.inf)
            for row in self.rows
            if row.ours and (row.case, row.threads) == (cell.case.name, cell.threads)
        )
        if 1 / rate >= _COLD_SHARE * fastest:
            return None
        few = f"{_COLD_SHARE:.0%} of the time with {thread_text(cell.threads)}"
        return f"reading them from memory would take less than {few}"

    def _keep(self, cell: _Cell, timed: Mapping[Implementation, Mapping[str, Samples]]) -> None:
        """Make a row of each that was timed, in the order in which they take part."""
        medians = {one.name: timed[one][one.name].median for one in cell.ready if one.kind == PEER}
        best = min(medians, key=lambda name: medians[name], default=None)
        references = self.suite.references(list(cell.ready))
        for one in cell.ready:
            samples = timed[one]
            taken = samples[one.name]
            library, version = one.library()
            operations = 0 if one.kind == LIMIT else cell.problem.operations
            self.rows.append(
                Row(
                    operation=cell.case.operation,
                    case=cell.case.name,
                    dtypes=cell.case.dtypes,
                    work=cell.case.work,
                    sizes=dict(cell.case.sizes),
                    threads=cell.threads if self.suite.threaded else None,
                    weights=cell.weights,
                    implementation=one.name,
                    kind=one.kind,
                    library=library,
                    version=version,
                    runs_on=self._runs_on(one, cell.case),
                    note=one.note(cell.case),
                    seconds=Spread(*quantiles(taken.seconds)),
                    cpu_seconds=quantiles(taken.cpu_seconds)[1],
                    noise=taken.noise if math.isfinite(taken.noise) else None,
                    rounds=len(taken.seconds),
                    calls=taken.calls,
                    operations=operations,
                    bytes=cell.problem.bytes,
                    weight_bytes=cell.nbytes(one),
                    error=cell.errors[one],
                    ratios={
                        name: Spread(*paired_ratio(taken, samples[name]))
                        for name in references
                        if name != one.name and name in samples
                    },
                    best_peer=one.name == best,
                    peak_share=self._peak_share(cell, operations, taken),
                    limit_share=_limit_share(cell, one, samples),
                    extra=dict(cell.ready[one].extra),
                )
            )

    def _runs_on(self, one: Implementation, case: Case) -> str | None:
        trial = self.trials.get(one, probe.Trial())
        return trial.kernels.get(case.name) or one.runs_on(case)

    def _peak_share(self, cell: _Cell, operations: int, taken: Samples) -> float | None:
        ceiling = self.ceilings.get(cell.threads)
        if not operations or ceiling is None:
            return None
        return ceiling.share(operations / taken.median / 1e9)


def _limit_share(cell: _Cell, one: Implementation, samples: Mapping[str, Samples]) -> Spread | None:
    """How fast the bytes are moved, compared with a limit that was timed in the same rounds."""
    limit = next((each for each in cell.ready if each.kind == LIMIT), None)
    if limit is None or one is limit or limit.name not in samples:
        return None
    part = cell.nbytes(one) / cell.nbytes(limit) if cell.problem.weight_bytes else 1.0
    share = paired_ratio(samples[limit.name], samples[one.name])
    return Spread(*(part * each for each in share))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _joined(name: str, several: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    """All samples of one that was timed beside each of several."""
    own = [samples[name] for samples in several]
    seconds = np.concatenate([one.seconds for one in own])
    cpu = np.concatenate([one.cpu_seconds for one in own])
    return {name: Samples(name, seconds, cpu, own[0].calls)}


def _copies(nbytes: int, least: int) -> int:
    """How many copies of the weights, all implementations together `nbytes` each time, there must
    be for the last cache to have been filled anew before one is read again."""
    wanted = max(least, _COLD_CACHES * max(isa.report()["caches"].values()))
    return max(2, -(-wanted // nbytes) + 1)


def _too_much(count: int, nbytes: int) -> str | None:
    """Why that many copies cannot be made, or None."""
    if count > _MOST_COPIES:
        return f"it would need {count} copies to exceed the caches; a larger shape needs fewer"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if count * nbytes <= _MOST_MEMORY * memory:
        return None
    return (
        f"copies that exceed the caches would take {count * nbytes / 1e9:.1f} GB, and this machine "
        f"has {memory / 1e9:.1f} GB"
    )
