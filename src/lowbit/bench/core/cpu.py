"""The CPU, its threads and its clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lowbit import isa
from lowbit.bench.core import context, peak
from lowbit.bench.core.case import LIMIT, Call, Implementation, Ready
from lowbit.bench.core.clock import Limits, Samples, interleave
from lowbit.jit.threads import runtime
from lowbit.product.dispatch import active_kernel
from lowbit.registry.extras import installed

if TYPE_CHECKING:
    from lowbit.bench.core.suite import Plan

PRODUCTS = ("matmul", "matmul_scaled", "linear_dynamic")
"""The public functions of which the context tells the kernel."""


class PlainRead(Implementation):
    """A read of as many bytes as the weights have, which does nothing with them."""

    name = "plain read"
    kind = LIMIT

    def library(self) -> tuple[str, str]:
        return "lowbit", context.versions()["lowbit"]

    def prepare(self, problem: Any, threads: int) -> Ready:
        def reader() -> peak.Reader:
            return peak.Reader(isa.active(), problem.weight_bytes, threads)

        first = reader()
        return Ready(first, nbytes=first.nbytes, again=reader)


class Cpu:
    """Calls are timed by the time that passes; what is left in caches is theirs to use."""

    refusals: tuple[type[Exception], ...] = (ValueError, RuntimeError, NotImplementedError)
    own_refusals: tuple[type[Exception], ...] = ()

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

    def time(
        self,
        calls: Mapping[str, Sequence[Call]],
        limits: Limits,
        *,
        seed: int,
        on_round: Callable[[float], None],
        pools: Mapping[str, str] | None,
    ) -> dict[str, Samples]:
        """See `interleave`."""
        return interleave(calls, limits, seed=seed, on_round=on_round, pools=pools)

    def tidy(self) -> None:
        """After a case."""

    def context(self, plan: Plan) -> dict[str, Any]:
        """Of a run that has ended: only now are all libraries loaded, and with them the thread
        runtime that was used. `cpu` is LLVM's name; caches are in bytes."""
        report = isa.report()
        return {
            **context.gather(plan),
            "cpu": report["cpu"],
            "features": list(report["features"]),
            "num_cpus": os.cpu_count() or 1,
            "caches": report["caches"],
            "isa": report["active"],
            "kernels": {name: active_kernel()[0] for name in PRODUCTS},
            "thread_runtime": runtime(),
        }
