"""Running a benchmark of linear layers with 4-bit weights: all checked, then timed together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from lowbit import isa
from lowbit.bench import context, linear_probe, peak
from lowbit.bench.linear_entries import READ, entries
from lowbit.bench.linear_problem import (
    DISTRIBUTION,
    Call,
    Linear,
    LinearPlan,
    LinearShape,
    LinearTask,
    Ready,
)
from lowbit.bench.linear_record import LinearRecord, LinearRow
from lowbit.bench.peak import Ceiling
from lowbit.bench.record import COLD, Absent, Spread
from lowbit.bench.timing import Limits, Samples, interleave, paired_ratio, quantiles

DTYPES = "4-bit weights"
"""What stands where a record of other products has their dtypes."""

Progress = Callable[[str, float], None]
"""Told what is being done, and how much of the whole is done, from 0 to 1."""

_TRIAL_SHARE = 0.05  # of the progress
# Cold weights: by the time a copy's turn comes again, so many bytes of its fellows have been read.
_COLD_CACHES = 2
_COLD_BYTES = 256 << 20
_MOST_COPIES = 4096
_MOST_MEMORY = 0.5  # of the machine's, for all copies together
# They are not timed where reading them from memory would take less than this share of a call.
_COLD_SHARE = 0.02
# A fallback that is so many times slower than lowbit is a plain loop, and measured only once.
_PLAIN_LOOP = 10.0
# The time limit is raised for products that take long, so that none of them has but one turn.
_MOST_SECONDS = 60.0
_MARGIN = 2.0  # it may take longer than the first time


def run(plan: LinearPlan, progress: Progress = lambda what, share: None) -> LinearRecord:
    """Run the plan.

    Each result is compared with float64 before it is timed; RuntimeError if one of lowbit's is
    outside the budget of its specification.
    """
    used = isa.active().name  # at once: one that cannot run here should be told before all else
    state = _Run(plan, progress)
    chosen = state.choose()
    for threads in plan.threads:
        progress(f"measuring the peak, {_threads(threads)}", _TRIAL_SHARE)
        with context.thread_count(threads):
            state.ceilings[threads] = peak.measure(used, threads)
    for index, shape in enumerate(plan.sizes):
        state.at = index / len(plan.sizes)
        state.shape(shape, chosen[shape])
    progress("done", 1.0)
    # Only now are all libraries loaded, and with them the thread runtime that was used.
    where = context.gather(tuple(plan.threads), plan.seed, plan.limits)
    return LinearRecord(
        context=replace(where, distribution=DISTRIBUTION),
        group_size=plan.group_size,
        zero_points=plan.zero_points,
        rows=tuple(state.rows),
        absent=tuple(dict.fromkeys(state.absent)),
        ceilings=tuple(state.ceilings.values()),
    )


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class _Cell:
    """One shape with some threads: who takes part, with packed weights, and their errors."""

    shape: LinearShape
    threads: int
    weights: str
    ready: Mapping[Linear, Ready]
    errors: Mapping[Linear, float]


@dataclass
class _Run:
    """What a run has found so far. `at` is the share of the shapes before the present one; `slow`
    says of the plain loops that were met how slow they are, `fast` holds fallbacks that are none.
    """

    plan: LinearPlan
    progress: Progress
    at: float = 0.0
    rows: list[LinearRow] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    ceilings: dict[int, Ceiling] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)
    fast: set[str] = field(default_factory=set)

    def choose(self) -> dict[LinearShape, list[Linear]]:
        """By shape, who takes part, tried in its own process if need be."""
        plan = self.plan
        usable: list[Linear] = []
        for one in entries(plan):
            reason = one.available()
            if reason is None:
                usable.append(one)
            for shape in plan.sizes if reason is not None else ():
                self._leave_out(shape, one.name, reason or "")
        if not any(one.activations for one in usable):
            raise RuntimeError(f"lowbit itself cannot run: {self.absent[0].reason}")
        to_try = [one for one in usable if one.isolated]
        if to_try:
            self.progress("trying " + ", ".join(one.name for one in to_try), 0.0)
        with ThreadPoolExecutor(max_workers=2) as pool:
            refused = dict(
                zip(
                    to_try,
                    pool.map(lambda one: linear_probe.attempt(one, plan.sizes, plan.seed), to_try),
                    strict=True,
                )
            )
        for one, reasons in refused.items():
            for shape, reason in reasons.items():
                self._leave_out(shape, one.name, reason)
        return {
            shape: [one for one in usable if shape not in refused.get(one, {})]
            for shape in plan.sizes
        }

    def _leave_out(self, shape: LinearShape, name: str, reason: str) -> None:
        self.absent.append(Absent(str(shape), DTYPES, name, reason))

    def _tell(self, what: str, share: float) -> None:
        done = self.at + share / len(self.plan.sizes)
        self.progress(what, _TRIAL_SHARE + (1 - _TRIAL_SHARE) * done)

    def shape(self, shape: LinearShape, chosen: Sequence[Linear]) -> None:
        """The rows of one shape, with each number of threads: warm, then cold."""
        self._tell(f"{shape}: making data", 0.0)
        task = LinearTask.make(shape, self.plan.seed)
        errors: dict[Linear, float] = {}
        for turn, threads in enumerate(self.plan.threads):
            share = turn / len(self.plan.threads)
            with context.thread_count(threads):
                self._tell(f"{shape}, {_threads(threads)}: packing and checking", share)
                ready: dict[Linear, Ready] = {}
                for one in chosen:
                    if one.name in self.slow:
                        self._leave_out(shape, one.name, self.slow[one.name])
                        continue
                    ready[one] = one.prepare(task, threads)
                    if one.name != READ and (one.activations or one not in errors):
                        errors[one] = _error(one, ready[one], task)
                warm = _Cell(shape, threads, "warm", ready, errors)
                self._tell(f"{shape}, {_threads(threads)}: timing", share)
                self._warm(warm)
                if self.plan.cold:
                    self._tell(f"{shape}, {_threads(threads)}: timing with cold weights", share)
                    self._cold(warm)

    def _warm(self, cell: _Cell) -> None:
        """Everybody together; then each fallback, once, with lowbit's rows alone."""
        unknown = [one for one in cell.ready if one.fallback and one.name not in self.fast]
        together = {one: each for one, each in cell.ready.items() if one not in unknown}
        calls = {one.name: [each.call] for one, each in together.items()}
        self._keep(cell, together, self._time(calls, self._limits(together)))
        ours = {one: each for one, each in cell.ready.items() if one.activations}
        for one in unknown:
            pair = {**ours, one: cell.ready[one]}
            calls = {each.name: [ready.call] for each, ready in pair.items()}
            samples = self._time(calls, self.plan.limits)
            self._keep(cell, {one: cell.ready[one]}, samples)
            ratio = samples[one.name].median / min(samples[each.name].median for each in ours)
            if ratio < _PLAIN_LOOP:
                self.fast.add(one.name)
            else:
                self.slow[one.name] = (
                    f"a plain loop here: measured once, at {cell.shape} with "
                    f"{_threads(cell.threads)}, where it took {ratio:.0f} times as long as lowbit"
                )

    def _time(self, calls: Mapping[str, Sequence[Call]], limits: Limits) -> dict[str, Samples]:
        # No pools: PyTorch and lowbit run on the same threads.
        return interleave(calls, limits, seed=self.plan.seed)

    def _limits(self, ready: Mapping[Linear, Ready]) -> Limits:
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
        taking_part = {one: each for one, each in warm.ready.items() if one.name not in self.slow}
        cold = replace(warm, weights="cold", ready=taking_part)
        reason = self._cold_is_pointless(cold) or _too_much(taking_part)
        if reason is not None:
            self._leave_out(cold.shape, COLD, reason)
            return
        calls: dict[str, list[Call]] = {}
        for one, each in taking_part.items():
            calls[one.name] = [each.call, *(each.again() for _ in range(_copies(each.nbytes) - 1))]
            for call in calls[one.name]:
                call()  # what a first call finds out about its weight is not to be timed
        self._keep(cold, taking_part, self._time(calls, self._limits(taking_part)))

    def _cold_is_pointless(self, cell: _Cell) -> str | None:
        """Why cold weights need not be timed: None if reading them takes long enough to be seen."""
        rate = self.ceilings[cell.threads].read_gbs["memory"] * 1e9
        for row in self.rows:
            same = (row.shape, row.threads) == (str(cell.shape), cell.threads)
            if same and row.ours and row.weight_bytes / rate >= _COLD_SHARE * row.seconds.median:
                return None
        return f"reading them from memory would take less than {_COLD_SHARE:.0%} of the time"

    def _keep(
        self, cell: _Cell, ready: Mapping[Linear, Ready], samples: Mapping[str, Samples]
    ) -> None:
        """Make a row of each that is ready."""
        ours = {one.activations: one.name for one in cell.ready if one.activations}
        ceiling = self.ceilings[cell.threads]
        bytes_read = next(each.nbytes for one, each in cell.ready.items() if one.name == READ)
        for one, each in ready.items():
            taken = samples[one.name]
            library, version = one.library()
            error = cell.errors.get(one)
            operations = 0 if error is None else cell.shape.operations
            read_share = None
            if one.name != READ and READ in samples:
                share = paired_ratio(samples[READ], taken)
                read_share = Spread(*(each.nbytes / bytes_read * part for part in share))
            self.rows.append(
                LinearRow(
                    implementation=one.name,
                    activations=one.activations,
                    shape=str(cell.shape),
                    threads=cell.threads,
                    weights=cell.weights,
                    library=library,
                    version=version,
                    note=one.note(),
                    seconds=Spread(*quantiles(taken.seconds)),
                    cpu_seconds=quantiles(taken.cpu_seconds)[1],
                    noise=taken.noise if math.isfinite(taken.noise) else None,
                    rounds=len(taken.seconds),
                    calls=taken.calls,
                    operations=operations,
                    weight_bytes=each.nbytes,
                    error=error,
                    peak_share=ceiling.share(operations / taken.median / 1e9)
                    if operations
                    else None,
                    read_share=read_share,
                    ratios={
                        activations: Spread(*paired_ratio(taken, samples[name]))
                        for activations, name in ours.items()
                        if name != one.name
                    },
                )
            )


def _error(one: Linear, ready: Ready, task: LinearTask) -> float:
    """How far the result is from float64; lowbit's own must be within its budget."""
    result = ready.read(ready.call())
    if one.activations:
        expected = task.expected(one.activations)
        verdict = expected.check(result[:, task.columns].astype(expected.dtype.storage))
        if not verdict.ok:
            raise RuntimeError(
                f"{one.name} computes {task.shape} wrongly: {verdict.message}; "
                "this is a bug in lowbit, please report it"
            )
    return task.error(result)


def _copies(nbytes: int) -> int:
    """How many copies of a weight the last cache cannot hold, with a margin."""
    wanted = max(_COLD_BYTES, _COLD_CACHES * max(isa.report()["caches"].values()))
    return max(2, -(-wanted // nbytes))


def _too_much(ready: Mapping[Linear, Ready]) -> str | None:
    """Why that many copies cannot be made, or None."""
    most = max(_copies(each.nbytes) for each in ready.values())
    if most > _MOST_COPIES:
        return f"it would need {most} copies to exceed the caches; a larger shape needs fewer"
    needed = sum(_copies(each.nbytes) * each.nbytes for each in ready.values())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= _MOST_MEMORY * memory:
        return None
    return (
        f"copies that exceed the caches would take {needed / 1e9:.1f} GB, and this machine has "
        f"{memory / 1e9:.1f} GB"
    )
