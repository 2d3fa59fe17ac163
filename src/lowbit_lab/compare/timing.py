"""Timing the variants of a file and the peers that it names, all in turn: on one thread of the CPU,
or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowbit import isa
from lowbit.spec import Array
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import language_of
from lowbit_lab.backends.source import Comparison, Peer, read
from lowbit_lab.bench.core.clock import Limits, Samples, paired_ratio, quantiles
from lowbit_lab.bench.core.context import Clock
from lowbit_lab.bench.core.cpu import Cpu
from lowbit_lab.bench.core.isolated import first_line, trials
from lowbit_lab.bench.core.peak import Ceiling, measure
from lowbit_lab.bench.core.remote import Remote
from lowbit_lab.compare.explain import Explained, Timed
from lowbit_lab.compare.problem import Baseline, Problem, idea_of

_REFUSALS = (ImportError, ValueError, RuntimeError, NotImplementedError)
"""By which a peer says that it does not do it, or not here."""


@dataclass
class Turns:
    """What is timed on one device, and notes on what was left out.

    calls: by name. ceiling: what the machine can multiply at most, where products are timed on the
    CPU.
    """

    problem: Problem
    gpu: bool
    calls: dict[str, Callable[[], object]] = field(default_factory=dict[str, Callable[[], object]])
    notes: list[str] = field(default_factory=list[str])
    ceiling: Ceiling | None = None
    _first: Baseline | None = None

    def add_variant(self, variant: Variant, one: Explained) -> None:
        """With arrays of its own, after its result was checked at these sizes too."""
        language = language_of(variant.kernel, "compile")
        try:
            arrays: dict[str, Any] = self.problem.arrays(variant)
            arrays = _on_gpu(arrays) if self.gpu else arrays
            call = language.call(variant, one.built, self.problem, arrays)
            call()
            result = _array(arrays[self.problem.result])
        except Exception as error:  # what compilers and drivers raise has no common kind
            self._leave_out(one.name, first_line(error))
            return
        judged = self.problem.judge(result, self._first, "the GPU" if self.gpu else "a call")
        self._first = self._first or Baseline(one.name, result)
        if judged.ok is False:
            one.checked = judged
            self._leave_out(one.name, f"it is wrong at the sizes that are timed: {judged.message}")
            return
        one.error = self.problem.error(result)
        self.calls[one.name] = call

    def add_peer(self, one: Timed, peer: Peer, reason: str | None) -> None:
        """Whose error is shown, whatever that is; unless there is a reason to leave it out."""
        inputs: dict[str, Any] = {n: array.copy() for n, array in self.problem.inputs.items()}
        try:
            if reason is not None:
                raise RuntimeError(reason)
            call, read_result = _prepared(peer, _on_gpu(inputs) if self.gpu else inputs)
            one.error = self.problem.error(read_result(call()))
        except Exception as error:  # on a GPU nobody has tried it before
            self._leave_out(one.name, first_line(error))
            return
        self.calls[one.name] = call

    def _leave_out(self, name: str, reason: str) -> None:
        self.notes.append(f"{name} was not timed: {reason}")

    def take(
        self, clock: Clock, limits: Limits, bases: Iterable[str], every: Sequence[Timed]
    ) -> None:
        """Time them, and write down what came out."""
        if not self.calls:
            return
        samples = clock.time({name: [call] for name, call in self.calls.items()}, limits)
        dtype = None if self.gpu else self.problem.multiplied
        if dtype is not None:
            self.ceiling = measure(isa.active().name, 1, reads=False, dtype=dtype)
        bases = [name for name in bases if name in samples] or [next(iter(samples))]
        for one in every:
            if one.name in samples:
                self._write(one, samples, bases)

    def _write(self, one: Timed, samples: Mapping[str, Samples], bases: Iterable[str]) -> None:
        taken = samples[one.name]
        one.seconds, one.rounds = quantiles(taken.seconds), len(taken.seconds)
        one.ratios = {n: paired_ratio(samples[n], taken) for n in bases if n != one.name}
        if self.ceiling is not None and self.problem.operations:
            one.peak_share = self.ceiling.share(self.problem.operations / taken.median / 1e9)


def timed(
    comparison: Comparison, explained: Sequence[Explained], gpu: bool, limits: Limits, peers: bool
) -> tuple[list[Timed], list[Turns]]:
    """Time the variants that can run here and are not wrong: those for a GPU in turn on it, the
    others in turn on the CPU; and the peers, if they are wanted, where the first variant runs."""
    where = {one.name: language_of(one.kernel, "compile").for_gpu for one in comparison.variants}
    named = comparison.peers if peers else {}
    others = [Timed(name, idea=idea_of(one)) for name, one in named.items()]
    found: list[Turns] = []
    for on_gpu in sorted(set(where.values()), reverse=True):
        turns = Turns(comparison.large, on_gpu)
        found.append(turns)
        if on_gpu and not gpu:
            turns.notes.append("what runs on a GPU was not timed: PyTorch can use none")
            continue
        clock = _clock(on_gpu)
        with clock.using(1):
            for variant, one in zip(comparison.variants, explained, strict=True):
                if where[one.name] == on_gpu and one.built.made_by and one.checked.ok is not False:
                    turns.add_variant(variant, one)
            if on_gpu == next(iter(where.values())):
                refused = {} if on_gpu else _refused(comparison, [one.name for one in others])
                for one in others:
                    turns.add_peer(one, named[one.name], refused.get(one.name))
            turns.take(clock, limits, comparison.base, [*explained, *others])
    return others, found


def _clock(on_gpu: bool) -> Clock:
    if not on_gpu:
        return Cpu()
    from lowbit_lab.bench.core.cuda import Cuda

    return Cuda("cuda")


def _on_gpu(arrays: Mapping[str, Array]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(one).cuda() for name, one in arrays.items()}


def _array(result: Any) -> Array:
    """A result as an array, also of a tensor on a GPU, which is waited for."""
    return np.asarray(result.cpu() if hasattr(result, "cpu") else result)


def _prepared(peer: Peer, inputs: Mapping[str, Any]) -> tuple[Callable[[], object], Any]:
    """What is timed of a peer, and what makes an array of its result."""
    made = peer(**inputs)
    return made if isinstance(made, tuple) else (made, _array)


def _refused(comparison: Comparison, names: Sequence[str]) -> dict[str, str]:
    """Call peers once in a process of its own, which may crash: why not to use them, by name."""
    start = partial(Remote, _reasons, comparison.path, comparison.large.sizes)
    return {name: why for refused, _ in trials(start, names) for name, why in refused.items()}


def _reasons(path: Path, sizes: Mapping[str, int]) -> Generator[str | None, str, None]:
    """In the process: of each peer whose name comes, why not to use it."""
    comparison = read(path, sizes)
    reason = None
    with Cpu().using(1):
        while True:
            name = yield reason
            reason = None
            try:
                inputs = {n: array.copy() for n, array in comparison.large.inputs.items()}
                call, read_result = _prepared(comparison.peers[name], inputs)
                read_result(call())
            except _REFUSALS as error:
                reason = first_line(error)
