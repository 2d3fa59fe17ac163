"""What a contender is: a library that runs a language model, in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.lm.model import losses
from lowbit_lab.bench.core.case import LIMIT, OURS, READY, Implementation, Ready
from lowbit_lab.bench.core.clock import RemoteCall, share_processor
from lowbit_lab.bench.core.cpu import Processes
from lowbit_lab.bench.core.remote import Remote

Array = npt.NDArray[Any]
PROMPT, TEXT, PERPLEXITY = "prompt", "text", "perplexity"
"""What a worker is for."""
SECONDS = "seconds"
"""What it is asked for."""
_LOAD_SECONDS = 900.0
_ANSWER_SECONDS = 1800.0
_PART = 128  # tokens whose logits are looked at together


@dataclass(frozen=True)
class ModelWork:
    """What a worker does, an `operation`, with the model of a GGUF file: read `prompts`, token ids
    [sequences][tokens]; or `steps` of the text behind them, greedily, whatever ends a text."""

    operation: str
    path: str
    prompts: Sequence[Sequence[int]]
    steps: int
    threads: int


class Loaded:
    """A model that a library has loaded. A class below it overrides `prompt`, `rewind` and `step`,
    or `seconds` where the library does not give logits.

    nbytes: of the weights, where they are not the file's. detail: a few words on what it runs.
    """

    nbytes: int = 0
    detail: str = ""

    def __init__(self, work: ModelWork) -> None:
        self.work = work
        self._first: Array | None = None  # the tokens that follow the prompts

    def prompt(self) -> Array:
        """Forget everything and read the prompts: the logits of what comes next, [sequences, V]."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Forget what came behind the prompts."""
        raise NotImplementedError

    def step(self, tokens: Array) -> Array:
        """Add a token to each sequence: logits [sequences, V]."""
        raise NotImplementedError

    def logits(self) -> Array | None:
        """Of each token of the first prompt, [tokens, V]; None: it does not give them."""
        raise NotImplementedError

    def seconds(self) -> float:
        """How long the prompts take; or a step of the text, the mean of all steps."""
        if self.work.operation == PROMPT:
            begin = time.perf_counter()
            self.prompt().argmax(-1)
            return time.perf_counter() - begin
        tokens = self.prompt().argmax(-1) if self._first is None else self._first
        self._first = tokens
        self.rewind()
        begin = time.perf_counter()
        for _ in range(self.work.steps):
            tokens = self.step(tokens).argmax(-1)
        return (time.perf_counter() - begin) / self.work.steps

    def perplexity(self) -> float | None:
        """Of the first prompt, by its tokens after the first."""
        logits, tokens = self.logits(), self.work.prompts[0]
        if logits is None:
            return None
        parts = [
            losses(logits[first : first + len(some)], some)
            for first in range(0, len(tokens) - 1, _PART)
            if (some := tokens[first + 1 : first + 1 + _PART])
        ]
        return math.exp(float(np.concatenate(parts).mean()))

    def figures(self) -> Mapping[str, float]:
        """What else is measured, once the worker has been timed for the first time."""
        return {}


class Contender(Implementation):
    """A class below it is registered for the suite `lm`. Importing its file needs nothing that may
    be missing."""

    def __init__(self) -> None:
        self.pool = self.name

    def open(self, work: ModelWork) -> Loaded:
        """Load a model, in the worker. ValueError, RuntimeError and the like: it cannot."""
        raise NotImplementedError

    def serve(self, work: ModelWork) -> Mapping[str, Callable[..., Any]]:
        """READY: figures, or the perplexity alone if that is what the work is. SECONDS: of a
        turn."""
        # What lowbit takes is no other library's.
        before = 0 if self.kind == OURS else memory("VmRSS")
        loaded = self.open(work)
        if work.operation == PERPLEXITY:
            return {READY: lambda: {PERPLEXITY: loaded.perplexity()}}
        loaded.seconds()  # which starts threads, and may compile
        figures = {"peak_bytes": memory("VmHWM") - before, **loaded.figures()}
        if work.threads == 1:
            share_processor()
        first = {"detail": loaded.detail, "nbytes": loaded.nbytes, "figures": figures}
        return {READY: lambda: first, SECONDS: loaded.seconds}

    def prepare(self, problem: Any, threads: int) -> Ready:
        """Start its worker, which loads the model."""
        known = {} if self.kind == LIMIT else {PERPLEXITY: problem.perplexity(self.name)}
        operation = TEXT if TEXT in problem.case.sizes else PROMPT
        work = ModelWork(operation, str(problem.path), problem.prompts, problem.steps, threads)
        worker, answer = start(problem.clock, self.name, work)
        call = RemoteCall(partial(worker.ask, (SECONDS,), _ANSWER_SECONDS), warm=True)
        return Ready(
            call,
            read=lambda _: None,
            nbytes=answer["nbytes"],
            note=answer["detail"],
            extra={name: f for name, f in (known | answer["figures"]).items() if f},
        )


def start(clock: Processes, name: str, work: ModelWork) -> tuple[Remote, Any]:
    """A contender's worker, in place of an earlier one, and its first answer. RuntimeError: it
    cannot.

    They start one after another: the memory that loading takes is not all needed at once."""
    clock.start([name], work)
    answer = clock.ready(name, _LOAD_SECONDS)
    return clock.process(name), answer


def memory(field: str) -> int:
    """Bytes of this process, VmRSS now or VmHWM at most; 0 where the system does not say.

    Not by `getrusage`, which on Linux counts what the parent had too."""
    try:
        with open("/proc/self/status") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith(field)), 0)
    except OSError:
        return 0
