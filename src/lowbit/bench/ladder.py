"""The ladder of exact uint4 products: every entry checked against the same sums, then timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata

from lowbit import isa
from lowbit.bench import context, peak
from lowbit.bench.implementation import Prepared
from lowbit.bench.ladder_entries import Entry, Task, byte_case, libraries, numba_rungs
from lowbit.bench.peak import Ceiling
from lowbit.bench.problem import parse_shape
from lowbit.bench.record import Absent, Context, Record, Row, Spread
from lowbit.bench.timing import Limits, Samples, interleave, paired_ratio, quantiles
from lowbit.registry.extras import explained, installed

DTYPES = "u4:u4:s32"

_BASELINE = "numpy fp32"
_PREPARED_SHARE = 0.3  # of the progress

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class LadderRow(Row):
    """A row of the ladder: what `Row` says, and beside it

    kind: "rung" (to read), "peer" or "ours". idea: what is new on it. blas_ratio: the time of
    NumPy's float32 product over this one's, round by round (above 1: faster than BLAS); None for
    that itself, and where it did not run.
    """

    kind: str = ""
    idea: str = ""
    blas_ratio: Spread | None = None


@dataclass(frozen=True)
class LadderPlan:
    """What to run: the product of a shape `MxK:KxN`, with some threads.

    Entries that know one thread only run on one. peers: whether to run other libraries than
    NumPy. ValueError if the shape is not understood or too large, or threads is below 1.
    """

    shape: str
    threads: int = 1
    peers: bool = True
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        byte_case(self.shape)
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")


def run(plan: LadderPlan, progress: Progress = lambda what, share: None) -> Record:
    """Run the plan; the rows of the record are `LadderRow`s, from the bottom of the ladder.

    RuntimeError if an entry's sums are not exact: none is timed then. What cannot run here, Numba
    included, is left out, with the reason in the record.
    """
    used = isa.active().name  # at once: one that cannot run here should be told before all else
    sizes = parse_shape(plan.shape)
    progress("making data", 0.0)
    task = Task.make(sizes["M"], sizes["N"], sizes["K"], plan.seed)
    usable, absent = _choose(plan, task, progress)
    with context.thread_count(plan.threads):
        progress("measuring the peak", _PREPARED_SHARE / 2)
        ceiling = peak.measure(used, plan.threads, reads=False)
        prepared, errors = _checked(usable, task, plan.threads, progress)
        samples = interleave(
            {name: [one.call] for name, one in prepared.items()},
            plan.limits,
            seed=plan.seed,
            on_round=lambda share: progress(
                "timing", _PREPARED_SHARE + (1 - _PREPARED_SHARE) * share
            ),
            # Every library has threads of its own.
            pools={name: name for name in prepared} if plan.threads > 1 else None,
        )
    progress("done", 1.0)
    rows = _rows(usable, task, samples, errors, ceiling)
    return Record(_context(plan), tuple(rows), tuple(absent), (ceiling,))


def _choose(plan: LadderPlan, task: Task, progress: Progress) -> tuple[list[Entry], list[Absent]]:
    """Who takes part, and who does not and why."""
    usable: list[Entry] = []
    absent: list[Absent] = []
    try:
        wanted = [*numba_rungs()]
    except ImportError as error:
        wanted = []
        reason = explained(error) if isinstance(error, ModuleNotFoundError) else str(error)
        absent.append(Absent(task.shape, DTYPES, "the rungs in Numba", reason))
    for one in libraries():
        if plan.peers or one.kind != "peer" or one.name == _BASELINE:
            wanted.append(one)
    for number, one in enumerate(wanted):
        progress(f"trying {one.name}", _PREPARED_SHARE / 2 * number / len(wanted))
        reason = one.available(task)
        if reason is None:
            usable.append(one)
        else:
            absent.append(Absent(task.shape, DTYPES, one.name, reason))
    return usable, absent


def _checked(
    usable: Sequence[Entry], task: Task, threads: int, progress: Progress
) -> tuple[dict[str, Prepared], dict[str, float]]:
    """By name, every entry with its operands arranged, and its error, which has to be 0."""
    prepared: dict[str, Prepared] = {}
    errors: dict[str, float] = {}
    for number, one in enumerate(usable):
        progress(f"checking {one.name}", _PREPARED_SHARE / 2 * (1 + number / len(usable)))
        each = one.prepare(task, threads)
        error = task.error(each.read(each.call()))
        if error != 0:
            raise RuntimeError(
                f"{one.name} multiplies {task.shape} wrongly: it is off by up to {error:.1e} of "
                "the largest sum, and every entry has to be exact"
            )
        prepared[one.name], errors[one.name] = each, error
    return prepared, errors


def _rows(
    usable: Sequence[Entry],
    task: Task,
    samples: Mapping[str, Samples],
    errors: Mapping[str, float],
    ceiling: Ceiling,
) -> list[LadderRow]:
    ours = next(samples[one.name] for one in usable if one.kind == "ours")
    baseline = samples.get(_BASELINE)
    peers = [one.name for one in usable if one.kind == "peer"]
    best = min(peers, key=lambda name: samples[name].median, default=None)
    rows = []
    for one in usable:
        taken = samples[one.name]
        library, version = one.library()
        own = one.kind == "ours"
        base = None if one.name == _BASELINE else baseline
        rows.append(
            LadderRow(
                operation="matmul",
                work="",
                shape=task.shape,
                dtypes=DTYPES,
                threads=ceiling.threads if one.threaded else 1,
                implementation=one.name,
                ours=own,
                weights="warm",
                library=library,
                version=version,
                isa=one.isa(task),
                note="",
                seconds=Spread(*quantiles(taken.seconds)),
                cpu_seconds=quantiles(taken.cpu_seconds)[1],
                noise=taken.noise if math.isfinite(taken.noise) else None,
                rounds=len(taken.seconds),
                calls=taken.calls,
                operations=task.operations,
                bytes_moved=task.bytes_moved,
                error=errors[one.name],
                lowbit_speedup=None if own else Spread(*paired_ratio(taken, ours)),
                best_peer=one.name == best,
                peak_share=ceiling.share(task.operations / taken.median / 1e9),
                kind=one.kind,
                idea=one.idea,
                blas_ratio=None if base is None else Spread(*paired_ratio(base, taken)),
            )
        )
    return rows


def _context(plan: LadderPlan) -> Context:
    where = context.gather((plan.threads,), plan.seed, plan.limits)
    versions = dict(where.versions)
    if installed("numba"):
        versions["numba"] = metadata.version("numba")
    return replace(where, versions=versions, distribution="uint4 uniform over 0 to 15")
