"""Which configuration serves a linear layer on this GPU best: each that fits is compared with
float64, then timed against the rule's, and a table keeps those that are faster."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lowbit.kernels.triton.fast import tables
from lowbit.kernels.triton.fast.few_rows import FewRowsConfig
from lowbit.kernels.triton.fast.launch import Config, Gpu, forget_counters, gpu_of
from lowbit.kernels.triton.fast.many_rows import ManyRowsConfig
from lowbit.kernels.triton.fast.scaled import ScaledConfig
from lowbit.registry.extras import versions
from lowbit_lab.bench.core.case import Case
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cuda import Graph, copies, in_rounds
from lowbit_lab.bench.core.progress import Progress
from lowbit_lab.bench.linear.layers import (
    FORMATS,
    GpuLinearProblem,
    copied,
    multiplied,
    packed,
    parse,
)

Sizes = tuple[int, int, int]
Job = tuple[str, int, int, str, Config]
"""A trial: format, rows of x, K, device and configuration."""

_GAIN = 1.03
"""An entry is at least so many times as fast as the rule; less is the noise of a run."""
_FINAL, _TURNS = 4, 9
_CHECKED = 1024
"""Rows of the weight on which a configuration is first tried, in a process of its own."""
_WORKERS = 12
_MOST_WAVES = 8

_FEW = [(rows, 1, warps, stages)
        for rows, warps in ((64, 2), (64, 4), (128, 4)) for stages in (3, 4)]  # fmt: skip
_MANY = [
    (64, 64, 1, 4, 3), (64, 64, 1, 4, 4), (128, 64, 1, 4, 2), (128, 64, 1, 4, 3),
    (128, 64, 1, 4, 4), (64, 128, 1, 4, 2), (64, 128, 1, 4, 3), (64, 128, 1, 4, 4),
    (128, 128, 1, 4, 2), (128, 128, 1, 4, 3), (128, 128, 1, 8, 3), (64, 256, 1, 4, 2),
    (64, 256, 1, 4, 3), (128, 256, 1, 8, 2), (128, 256, 1, 8, 3),
]  # fmt: skip
_SCALED = [
    (64, 16, 1, 4, 4), (64, 16, 1, 4, 6), (128, 16, 1, 4, 4), (64, 32, 1, 4, 4), (64, 32, 1, 4, 6),
    (128, 32, 1, 4, 4), (64, 64, 1, 4, 4), (64, 64, 1, 4, 6), (128, 64, 1, 4, 4),
    (128, 64, 1, 4, 6), (64, 128, 1, 4, 4), (128, 128, 1, 4, 3), (128, 128, 1, 4, 4),
    (128, 128, 1, 8, 4), (64, 256, 1, 4, 4), (256, 128, 1, 8, 4), (128, 256, 1, 8, 3),
    (128, 256, 1, 8, 4),
]  # fmt: skip
SPACES: dict[type[Config], tuple[list[tuple[int, ...]], tuple[int, ...]]] = {
    FewRowsConfig: (_FEW, (1, 2, 4, 8, 16)),
    ManyRowsConfig: (_MANY, (1, 2, 3, 4, 8)),
    ScaledConfig: (_SCALED, (1, 2, 4, 8)),
}
"""By kind of configuration: those that are tried, and how often K is cut."""


class Point(NamedTuple):
    """One measurement: the key of a table's entry, the fastest configuration, the rule's, and µs a
    call of all."""

    key: tables.Key
    best: Config
    rule: Config
    times: dict[Config, float]

    @property
    def gain(self) -> float:
        return self.times[self.rule] / self.times[self.best]


def candidates(rule: Config, facts: Sequence[Any], sizes: Sizes, processors: int) -> list[Config]:
    """What could serve sizes (M, N, K) on so many multiprocessors, the rule's configuration first.
    Left out: tiles of which most would be empty, programs that would be too many or have too little
    of K, and parts of K that some kernels don't cut evenly."""
    M, N, K = sizes
    found = [rule]
    shapes, cuts = SPACES.get(type(rule), ([], ()))
    for splits in cuts:
        for rows, *rest in shapes:
            make: Any = type(rule)
            config = replace(make(rows, *rest), splits=splits)
            columns = getattr(config, "columns", M)
            programs = config.tiles(M, N) * splits
            wide = columns > max(16, 64 if type(rule) is ManyRowsConfig else 0, 2 * M - 1)
            deep = 4 * splits > K // 128 or (type(rule) is ScaledConfig and K // 128 % splits)
            many = splits > 1 and programs > _MOST_WAVES * processors
            if not (wide or deep or many or config.refusal(*facts) or config == rule):
                found.append(config)
    return found


def fails(format: str, M: int, K: int, device: str, config: Config) -> str | None:
    """Why a configuration cannot be let pass: it does not compile, or is wrong. Twice, for the
    counters of what is cut along K must be 0 again."""
    try:
        (case,) = parse([format], [f"{M}x{K}:{K}x{_CHECKED}"])
        task = GpuLinearProblem.make(case, 0, torch.device(device))
        weight = packed(task)
        with tables.trying(config), torch.inference_mode():
            return next(
                filter(None, (task.wrong(None, multiplied(task, *weight)) for _ in "12")), None
            )
    except Exception as error:
        return " ".join(str(error).split())[:200] or type(error).__name__


def _checked(jobs: Iterable[Job], on_progress: Progress) -> dict[Job, str | None]:
    """What fails, by job, in processes of their own: one that crashes takes nothing with it."""
    every = list(dict.fromkeys(jobs))
    workers = max(1, min(_WORKERS, len(os.sched_getaffinity(0)) - 2))
    found = dict[Job, str | None]()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {job: pool.submit(fails, *job) for job in every}
        for job, future in waiting.items():
            on_progress(f"compiling and checking {job[0]}, {len(found)} of {len(every)}", 0.0)
            try:
                found[job] = future.result()
            except Exception as error:  # its process has died
                found[job] = f"it ended its process: {error}"
    return found


def _turns(calls: dict[Config, Sequence[Callable[[], Any]]], rounds: int) -> dict[Config, float]:
    """µs of a call of each, the median of turns in random order."""
    graphs = dict[Config, Graph]()
    for config, several in calls.items():
        with tables.trying(config):
            graphs[config] = Graph(several)
    starts = {config: (graph.start, graph.count) for config, graph in graphs.items()}
    taken = in_rounds(starts, Limits(least_rounds=rounds, most_rounds=rounds))
    forget_counters()
    return {config: 1e6 * samples.median for config, samples in taken.items()}


def measure(
    task: GpuLinearProblem,
    weights: Sequence[tuple[Any, ...]],
    one: Wanted,
    several: Sequence[Config],
) -> Point:
    """Each of several that is right for this very task is timed over copies of its weight; the
    fastest ones and the rule's again, in turns."""
    calls = [partial(multiplied, task, *one) for one in weights]
    times = dict[Config, float]()
    for config in several:
        with tables.trying(config):
            if task.wrong(None, calls[0]()):
                continue
        times |= _turns({config: calls}, 3)
    rule = one.configs[0]
    best = sorted(times, key=lambda one: times[one])[:_FINAL]
    times |= _turns(dict.fromkeys(dict.fromkeys((rule, *best)), calls), _TURNS)
    return Point(one.key, min((rule, *best), key=lambda one: times[one]), rule, times)


class Wanted(NamedTuple):
    """A layer that is to be tuned; depth: the K at which its configurations are tried."""

    case: Case
    key: tables.Key
    configs: list[Config]
    depth: int

    def jobs(self, device: torch.device) -> Iterator[Job]:
        """The trials of its configurations: with as many rows of x as they are compiled for, or
        with two tiles of columns."""
        for config in self.configs:
            columns = getattr(config, "columns", 0)
            M = 2 * columns - 3 if columns else max(self.case.sizes["M"], 8)
            yield self.case.dtypes, M, self.depth, str(device), config


def wanted(cases: Iterable[Case], gpu: Gpu) -> Iterator[Wanted]:
    """Those whose kernel has configurations."""
    depths = dict[str, int]()  # a kernel may be compiled for a kind of operands
    for case in cases:
        M, N, K = (case.sizes[name] for name in "MNK")
        with tables.trying(None) as trial:
            FORMATS[case.dtypes].choice(gpu, M, N, K)
        for key, (rule, facts) in trial.asked.items():
            configs = candidates(rule, facts, (M, N, K), gpu.multiprocessors)
            yield Wanted(case, key, configs, depths.setdefault(key.kind, K))


def tune(
    cases: Iterable[Case],
    device: torch.device,
    seconds: float,
    on_progress: Progress,
    on_point: Callable[[Point], None],
    again: bool = False,
) -> int:
    """Fill the user's table for these layers, as far as it has nothing of them, until the seconds
    are over; how many were measured. The table is written after each, and other processes that tune
    wait."""
    gpu, count = gpu_of(device), 0
    path = tables.path_of(gpu)
    number = -1 if device.type == "cpu" else device  # -1: leave the current one
    with tables.locked(path), torch.inference_mode(), torch.cuda.device(number):
        begin = time.monotonic()
        about, entries = tables.read(path)
        about |= {"gpu": gpu.name, "capability": gpu.capability}
        about |= {"multiprocessors": gpu.multiprocessors, "versions": versions()}
        todo = [one for one in wanted(cases, gpu) if again or one.key not in entries]
        failed = _checked((job for one in todo for job in one.jobs(device)), on_progress)
        for one in todo:
            if time.monotonic() - begin > seconds:
                break
            on_progress(str(one.case), count / len(todo))
            right = [job[-1] for job in one.jobs(device) if not failed[job]]
            task = GpuLinearProblem.make(one.case, 0, device)
            first = packed(task)
            others = (copied(first) for _ in range(copies(task.weight_bytes, device) - 1))
            point = measure(task, [first, *others], one, right)
            better = asdict(point.best) if point.gain >= _GAIN else None
            entries[one.key] = {"config": better, "gain": round(point.gain, 3) if better else 1.0}
            tables.write(path, about, entries)
            on_point(point)
            count += 1
    return count
