"""Running a suite: every implementation on every case, checked, then timed against the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit import isa
from lowbit_lab.bench.core.case import LIMIT, OURS, PEER, Call, Case, Implementation, Problem, Ready
from lowbit_lab.bench.core.clock import Limits, Samples, paired_ratio, quantiles
from lowbit_lab.bench.core.context import Clock, physical_memory
from lowbit_lab.bench.core.isolated import Workers, attempt, first_line
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.record import COLD, Absent, Record, Row, Spread, thread_text
from lowbit_lab.bench.core.suite import Plan, Suite, chosen

if TYPE_CHECKING:
    from lowbit_lab.bench.core.progress import Progress

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


def run(
    suite: Suite,
    plan: Plan,
    progress: Progress = lambda what, share: None,
    keep: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Run a suite. keep: is given what there is after each case, should the run be cut short.

    Each result is compared with the reference before it is timed; RuntimeError if one of lowbit's
    own cannot be let pass, or if none of lowbit's own can run.
    """
    with closing(Workers(suite, plan.seed)) as workers:
        return _Run(suite, plan, progress, suite.clock(), workers).run(keep)


@dataclass(frozen=True)
class _Cell:
    """One case with some threads: who takes part, ready to be called, and how right they are."""

    case: Case
    problem: Problem
    threads: int
    weights: str
    ready: Mapping[Implementation, Ready]
    errors: Mapping[Implementation, float | None]

    def nbytes(self, implementation: Implementation) -> int:
        """Of the weights that an implementation reads."""
        return self.ready[implementation].nbytes or self.problem.weight_bytes

    def note(self, implementation: Implementation) -> str:
        """What is to be said of what an implementation ran."""
        note = self.ready[implementation].note
        return implementation.note(self.case) if note is None else note


@dataclass
class _Run:
    """What a run has found so far. part: how many of `parts` are done, one for each case, number of
    threads and state of the weights. refused, kernels: what trials told. loops: by the name of a
    fallback that was met, how slow a plain loop it is, "" if it is none.
    """

    suite: Suite
    plan: Plan
    progress: Progress
    clock: Clock
    workers: Workers
    part: int = 0
    parts: int = 1
    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    ceilings: dict[int, Ceiling] = field(default_factory=dict)
    refused: set[tuple[Implementation, Case]] = field(default_factory=set)
    kernels: dict[tuple[Implementation, str], str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)

    def run(self, keep: Callable[[Record], None]) -> Record:
        suite, plan = self.suite, self.plan
        used = isa.active().name  # at once: one that cannot run here should be told before all
        cases = suite.cases(plan.seed)
        entries = self._entries(cases)
        for threads in plan.threads if suite.ceiling else ():
            self.progress(f"measuring the peak, {thread_text(threads)}", _TRIAL_SHARE)
            with self.clock.using(threads):
                self.ceilings[threads] = self.clock.ceiling(used, threads, suite.ceiling)
        each = len(plan.threads) * (2 if self._colds else 1)
        self.parts = each * len(cases)
        for index, case in enumerate(cases):
            self.part = each * index
            self._case(case, entries)
            if index + 1 < len(cases):
                keep(self._record())
        self.progress("done", 1.0)
        return self._record()

    def _record(self) -> Record:
        suite = self.suite
        where = self.clock.context(self.plan) | {"distribution": suite.distribution}
        rows = tuple(self.rows)
        return Record(
            suite=suite.name,
            context={**where, **suite.settings()},
            rows=rows,
            absent=tuple(dict.fromkeys(self.absent)),
            ceilings=tuple(self.ceilings.values()),
            summary=tuple(suite.summary(rows)),
        )

    @property
    def _colds(self) -> bool:
        return self.plan.cold and self.suite.colds

    def _entries(self, cases: Sequence[Case]) -> list[Implementation]:
        """Who takes part, tried in a process of its own if need be."""
        wanted: dict[Implementation, list[Case]] = {}
        for one in chosen(self.suite, self.plan):
            reasons = {case: one.available(case) for case in cases}
            self._refuse(one, {case: why for case, why in reasons.items() if why is not None})
            if left := [case for case, why in reasons.items() if why is None]:
                wanted[one] = left
        if not any(one.kind == OURS for one in wanted):
            raise RuntimeError(f"lowbit itself cannot run: {self.absent[0].reason}")
        isolated = [one for one in wanted if one.isolated]
        if isolated:
            self.progress("trying " + ", ".join(one.name for one in isolated), 0.0)
        with ThreadPoolExecutor(max_workers=2) as pool:
            trials = pool.map(
                lambda one: attempt(self.suite, one, wanted[one], self.plan.seed), isolated
            )
            for number, (one, (refused, kernels)) in enumerate(zip(isolated, trials, strict=True)):
                self._refuse(one, refused)
                self.kernels |= {(one, name): kernel for name, kernel in kernels.items()}
                share = (number + 1) / len(isolated)
                self.progress(f"tried {one.name}", _TRIAL_SHARE * share)
        return list(wanted)

    def _refuse(self, implementation: Implementation, reasons: Mapping[Case, str]) -> None:
        for case, why in reasons.items():
            self.refused.add((implementation, case))
            self._leave_out(case, implementation.name, why)

    def _leave_out(self, case: Case, name: str, reason: str) -> None:
        self.absent.append(Absent(case.name, case.dtypes, name, reason))

    def _report(self, case: Case, what: str, share: float = 0.0) -> None:
        """share: how much of the present part is done."""
        done = (self.part + share) / self.parts
        self.progress(f"{case}: {what}", _TRIAL_SHARE + (1 - _TRIAL_SHARE) * done)

    def _case(self, case: Case, entries: Sequence[Implementation]) -> None:
        """The rows of one case, with each number of threads: warm, then cold."""
        errors: dict[Implementation, float | None] = {}
        problem: Any = None
        for threads in self.plan.threads:
            with self.clock.using(threads):
                try:
                    if problem is None:
                        self._report(case, "making data")
                        problem = self.suite.make(case, self.plan.seed)
                except self.clock.own_refusals as error:
                    return self._leave_out(case, "everyone", first_line(error))
                self._report(case, f"packing and checking, {thread_text(threads)}")
                ready = self._ready(case, problem, threads, entries, errors)
                weights = "warm" if self.suite.colds else ""
                cell = _Cell(case, problem, threads, weights, ready, errors)
                if timed := any(one.kind != LIMIT for one in ready):
                    self._warm(cell)
                self.part += 1
                if self._colds:
                    if timed:
                        self._cold(cell)
                    self.part += 1
        return self.clock.tidy()

    def _ready(
        self, case: Case, problem: Problem, threads: int, entries: Sequence[Implementation],
        errors: dict[Implementation, float | None],
    ) -> dict[Implementation, Ready]:  # fmt: skip
        """Who can do the case, ready; lowbit is checked with each number of threads, the others
        with the first."""
        ready: dict[Implementation, Ready] = {}
        for one in self.suite.taking_part(problem, entries):
            if (one, case) in self.refused:
                continue
            if loop := self.loops.get(one.name):
                self._leave_out(case, one.name, loop)
                continue
            own = one.kind == OURS
            refusals = self.clock.own_refusals if own else self.clock.refusals
            try:
                each = one.prepare(problem, threads)
                if one.kind == LIMIT:
                    errors[one] = None
                elif own or one not in errors:
                    errors[one] = _error(one, each, problem, case)
            except refusals as error:
                self._leave_out(case, one.name, first_line(error))
                continue
            ready[one] = each
        return ready

    def _warm(self, cell: _Cell) -> None:
        """Everybody together; then whoever is timed with lowbit alone."""
        everyone = list(cell.ready)
        separate = [one for one in everyone if one.fallback and one.name not in self.loops]
        if self.suite.pairs:
            separate = everyone[1:]
        together = [one for one in everyone if one not in separate]
        ours = [one for one in together if one.kind == OURS]
        groups = [[*ours, one] for one in separate]
        if not (self.suite.pairs and separate):
            groups.insert(0, together)
        timed: dict[Implementation, Mapping[str, Samples]] = {}
        for number, group in enumerate(groups):
            ready = {one: cell.ready[one] for one in group}
            taken = self._time(cell, ready, number, len(groups))
            timed |= dict.fromkeys(together if group is together else group[-1:], taken)
        for one in separate:
            if one.fallback:
                self.loops[one.name] = _plain_loop(cell, one, timed[one], ours)
        if self.suite.pairs and separate:
            timed[together[0]] = _joined(together[0].name, [timed[one] for one in separate])
        self._keep(cell, timed)

    def _time(
        self, cell: _Cell, ready: Mapping[Implementation, Ready], number: int = 0, of: int = 1,
        calls: Mapping[str, Sequence[Call]] | None = None,
    ) -> dict[str, Samples]:  # fmt: skip
        """One of several groups of a part."""
        what = f"timing {cell.weights}, {thread_text(cell.threads)}"
        pools = {one.name: one.pool for one in ready} if cell.threads > 1 else None
        if calls is None and cell.threads > 1 and self.clock.isolates:
            calls, pools = self.workers.calls(cell.case, cell.threads, ready), None
        return self.clock.time(
            calls or {one.name: [each.call] for one, each in ready.items()},
            self._limits(ready) if self.suite.patient else self.plan.limits,
            seed=self.plan.seed,
            on_round=lambda share: self._report(cell.case, what, (number + share) / of),
            pools=pools,
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

    def _cold(self, warm: _Cell) -> None:
        """With weights from memory: each call reads another copy of them."""
        taking_part = {one: r for one, r in warm.ready.items() if not self.loops.get(one.name)}
        cell = replace(warm, weights="cold", ready=taking_part)
        sizes = [cell.nbytes(one) for one in taking_part]
        counts = self.clock.copies(sizes)
        if counts is None:
            count = _copies(sum(sizes), self.suite.least_cold_bytes)
            reason = self._cold_is_pointless(cell) or _too_much(count, sum(sizes))
            if reason is not None:
                return self._leave_out(cell.case, COLD, reason)
            counts = [count] * len(sizes)
        self._report(cell.case, "copying weights")
        calls: dict[str, list[Call]] = {}
        for (one, each), count in zip(taking_part.items(), counts, strict=True):
            again = each.again or partial(_prepared, one, cell)
            calls[one.name] = [each.call, *(again() for _ in range(count - 1))]
            for call in calls[one.name]:
                call()  # what a first call finds out about its weight is not to be timed
        taken = self._time(cell, taking_part, calls=calls)
        return self._keep(cell, dict.fromkeys(taking_part, taken))

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
                    runs_on=self.kernels.get((one, cell.case.name)) or one.runs_on(cell.case),
                    note=cell.note(one),
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

    def _peak_share(self, cell: _Cell, operations: int, samples: Samples) -> float | None:
        ceiling = self.ceilings.get(cell.threads)
        if not operations or ceiling is None:
            return None
        return ceiling.share(operations / samples.median / 1e9, cell.problem.way)


def _limit_share(cell: _Cell, one: Implementation, samples: Mapping[str, Samples]) -> Spread | None:
    """How fast the bytes are moved, compared with a limit that was timed in the same rounds."""
    limit = next((each for each in cell.ready if each.kind == LIMIT), None)
    if limit is None or one is limit or limit.name not in samples:
        return None
    part = cell.nbytes(one) / cell.nbytes(limit) if cell.problem.weight_bytes else 1.0
    share = paired_ratio(samples[limit.name], samples[one.name])
    return Spread(*(part * each for each in share))


def _error(one: Implementation, ready: Ready, problem: Problem, case: Case) -> float | None:
    """How far the result is from the ideal one."""
    result = ready.read(ready.call())
    wrong = problem.wrong(one, result)
    error = problem.error(result) if wrong is None else None
    if one.kind == PEER and error is not None and error > problem.most_error:
        wrong = f"wrong on this CPU, by {error:.0%} of the largest value"
    if wrong is not None and one.kind == PEER:
        raise ValueError(wrong)
    if wrong is not None:
        ours = "; this is a bug in lowbit, please report it" if one.kind == OURS else ""
        raise RuntimeError(f"{one.name} computes {case} wrongly: {wrong}{ours}")
    return error


def _prepared(implementation: Implementation, cell: _Cell) -> Call:
    return implementation.prepare(cell.problem, cell.threads).call


def _plain_loop(
    cell: _Cell, implementation: Implementation, samples: Mapping[str, Samples],
    ours: Sequence[Implementation],
) -> str:  # fmt: skip
    """How slow a plain loop a fallback is, "" if it is none."""
    ratio = samples[implementation.name].median / min(samples[each.name].median for each in ours)
    if ratio < _PLAIN_LOOP:
        return ""
    return (
        f"a plain loop here: measured once, at {cell.case.name} with "
        f"{thread_text(cell.threads)}, where it took {ratio:.0f} times as long as lowbit"
    )


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
    memory = physical_memory()
    if count * nbytes <= _MOST_MEMORY * memory:
        return None
    return (
        f"copies that exceed the caches would take {count * nbytes / 1e9:.1f} GB, and this machine "
        f"has {memory / 1e9:.1f} GB"
    )
