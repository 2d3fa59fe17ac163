"""The CPU, its threads and its clock."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lowbit import isa
from lowbit.jit.threads import runtime
from lowbit.product.dispatch import PRODUCTS, active_kernel
from lowbit.registry.extras import installed
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.case import LIMIT, READY, Implementation, Ready, find
from lowbit_lab.bench.core.clock import settle
from lowbit_lab.bench.core.context import Clock
from lowbit_lab.bench.core.remote import Remote, RemoteError

if TYPE_CHECKING:
    from lowbit_lab.bench.core.suite import Plan


class PlainRead(Implementation):
    """A read of as many bytes as the weights have, which does nothing with them."""

    name = "plain read"
    kind = LIMIT

    def prepare(self, problem: Any, threads: int) -> Ready:
        def reader() -> peak.Reader:
            return peak.Reader(isa.active(), problem.weight_bytes, threads)

        first = reader()
        return Ready(first, nbytes=first.nbytes, again=reader)


class Cpu(Clock):
    """Calls are timed by the time that passes; what is left in caches is theirs to use."""

    isolates = True

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Let NumPy's BLAS and PyTorch use this many threads, and what they had afterwards.

        lowbit's own functions are told in each call.
        """
        with ExitStack() as stack:
            if installed("threadpoolctl"):
                from threadpoolctl import threadpool_limits

                stack.enter_context(threadpool_limits(threads))
            if installed("torch"):
                import torch

                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(threads)
            # Now, before a peer brings another OpenMP runtime into the process.
            runtime()
            yield

    def context(self, plan: Plan) -> dict[str, Any]:
        """With the thread runtime that was used; `cpu` is LLVM's name, caches are in bytes."""
        report = isa.report()
        return {
            **super().context(plan),
            "cpu": report["cpu"],
            "features": list(report["features"]),
            "num_cpus": os.cpu_count() or 1,
            "caches": report["caches"],
            "isa": report["active"],
            "kernels": {name: active_kernel()[0] for name in PRODUCTS},
            "thread_runtime": runtime(),
        }


def answers(suite: str, name: str, work: Any) -> Generator[Any, Any, None]:
    """In a process: what an implementation answers, READY's answer first."""
    logging.disable(logging.WARNING)  # such as of what is not installed and not needed
    functions = find(suite, name).serve(work)
    question, *arguments = [READY]
    while True:
        answer = functions[question](*arguments)
        settle()  # its threads should not take part in the turns of others
        question, *arguments = yield answer


class Processes(Cpu):
    """Calls are timed in processes of their own, one for each implementation of a suite."""

    refusals = (ValueError, RuntimeError, NotImplementedError, OSError)
    own_refusals = refusals
    isolates = False  # each call has a process already

    def __init__(self, suite: str) -> None:
        self.suite = suite
        self.running: dict[str, Remote] = {}
        self.refused: dict[str, str] = {}

    def start(self, names: Iterable[str], work: Any) -> None:
        """A process for each implementation, in place of an earlier one, with `work.threads`."""
        for name in names:
            self.end(name)
            threads = str(work.threads)
            self.running[name] = Remote(answers, self.suite, name, work, OMP_NUM_THREADS=threads)

    def ready(self, name: str, seconds: float) -> Any:
        """READY's answer of a process that has started; None if it ends, `refused` says why."""
        try:
            return self.running[name].answer(seconds)
        except RemoteError as error:
            self.end(name)
            self.refused[name] = str(error)

    def end(self, name: str) -> None:
        """End a process, if there is one of that name, and forget why it was refused."""
        self.refused.pop(name, None)
        if (process := self.running.pop(name, None)) is not None:
            process.close()

    def process(self, name: str) -> Remote:
        """RuntimeError: it has been refused."""
        if name in self.refused:
            raise RuntimeError(self.refused[name])
        return self.running[name]

    @contextmanager
    def using(self, threads: int) -> Iterator[None]:
        """Nothing is computed here, so that there are no threads to set."""
        yield

    def tidy(self) -> None:
        for name in [*self.running, *self.refused]:
            self.end(name)
