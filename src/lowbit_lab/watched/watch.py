"""Every launch of Triton that a program makes, in the checked interpreter.

A launch runs twice if a masked load gave some of its lanes no value: the second time they hold
poison, and what comes out must be the same.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

from lowbit_lab.backends.host import TORCH, Host, machinery
from lowbit_lab.languages.triton import TritonKernel
from lowbit_lab.prove.launches import available, bounds_of_launch, in_words
from lowbit_lab.prove.ttir import is_gluon
from lowbit_lab.run.findings import Caller, Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import UnsupportedError, crash_of
from lowbit_lab.run.tensor import NOBODY, CheckedTensor
from lowbit_lab.run.trace import Grid, grid_of, programs_of
from lowbit_lab.run.triton import triton_modules
from lowbit_lab.watched.cuda import served_by_cpu
from lowbit_lab.watched.log import Log
from lowbit_lab.watched.sample import MOST_BYTES, Copies, chosen, disagreeing, size_of

# What a program may take, in steps of the interpreter: a loop of this length waits for another.
_MOST_STEPS = 2_000_000
# How many launches of a kernel are sampled on a GPU.
_SAMPLED = 4
# For proofs, in all.
_SECONDS = 30.0
_RUNPY = runpy.run_path.__code__.co_filename


@contextlib.contextmanager
def watch() -> Iterator[Log]:
    """Within it, every launch of Triton runs in the checked interpreter, and is taken down.

    Where there is no GPU, "cuda" is the CPU within it. Yields the Log, which is whole when the
    block is left; where nothing was launched, its `watched` is False. A launch that stops with an
    error raises it, as it would on a GPU, and UnsupportedError if only a GPU can run it.
    ModuleNotFoundError or RuntimeError if Triton is missing or of an unknown version.
    """
    triton_modules()
    log = Log()
    watcher = Watcher(log)
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(served_by_cpu(log.note))
        stack.enter_context(_other_kernels(log))
        stack.enter_context(watcher.running())
        yield log


@contextlib.contextmanager
def _other_kernels(log: Log) -> Iterator[None]:
    """Note the kernels that run within it and that nobody watches: those that torch.compile makes
    in C++, and Numba's."""
    before = _made_by_inductor()
    yield
    made = _made_by_inductor() - before
    if made > 0:
        log.note(f"torch.compile made {made} kernels in C++ for a CPU, which were not watched")
    if not log.watched and "numba" in sys.modules:
        log.note(
            "kernels of Numba are not watched; one in numba.cuda is checked by its specification: "
            "lowbit check FILE.py"
        )


def _made_by_inductor() -> int:
    """How many kernels torch.compile has made by now; without Triton's, which are launched."""
    metrics: Any = sys.modules.get("torch._inductor.metrics")
    return 0 if metrics is None else int(metrics.generated_kernel_count)


class Watcher(Host):
    """Watches launches on CPU tensors, and what torch does between them, for a log."""

    def __init__(self, log: Log) -> None:
        self._log, self._machinery = log, machinery()
        self._proved, self._left = set[tuple[str, str]](), _SECONDS
        self._launched: _State | None = None
        super().__init__(self._memory(), None)

    def _memory(self, poisoned: bool = False) -> Memory:
        return Memory([], machinery=self._machinery, poisoned=poisoned, most_steps=_MOST_STEPS)

    def found(self, kind: str, held: Any, element: Any, what: str) -> None:
        super().found(kind, held, element, what)
        self._take_down()

    def _take_down(self, *more: Finding) -> None:
        """Log what is found by now, with those who called."""
        stack = callers(self.memory.machinery)
        for finding in (*self.memory.findings, *more):
            self._log.add(replace(finding, stack=stack))
        self.memory = self._memory()

    def launch(self, kernel: Any, grid: Sequence[int], arguments: Mapping[str, Any]) -> None:
        with torch._C.DisableTorchFunction():  # a mode that says "cuda" does not say it in here
            self.forget_freed()
            launched = TritonKernel.of(kernel)
            self._log.launches[launched.name] += 1
            values, tensors = self.taken(arguments)
            gluon = is_gluon(launched.jitted)
            self._prove(launched, values, tensors, grid_of(grid), alone=gluon)
            if gluon:
                self._log.note(f"{launched.name} is in Gluon, which no interpreter runs")
                raise UnsupportedError(f"{launched.name} is in Gluon, which needs a GPU to run")
            self._watch(launched, values, tensors, grid_of(grid))

    def on_gpu(
        self, start: Callable[[], Any], kernel: Any, grid: Sequence[int],
        arguments: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """The launch as it is; of its first ones of a kind a sample of programs besides."""
        launched, dims = TritonKernel.of(kernel), grid_of(grid)
        self._log.launches[launched.name] += 1
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if captured or 0 in dims or self._log.launches[launched.name] > _SAMPLED:
            return start()
        if size_of(arguments) > MOST_BYTES:
            self._log.note(f"launches with more than {MOST_BYTES >> 20} MiB were not sampled")
            return start()
        with _plain_torch():
            before = Copies(arguments)
        result = start()
        with _plain_torch():
            after = Copies(arguments)
            self._sample(launched, dims, before.arguments, after.arguments)
        return result

    def _sample(
        self, kernel: TritonKernel, grid: Grid, before: dict[str, Any], after: dict[str, Any]
    ) -> None:
        """Interpret a sample on the tensors before a launch, and compare with those after it."""
        values, tensors = self.taken(before)
        self._prove(kernel, values, tensors, grid, alone=True)
        try:
            with self.living.elsewhere():
                self.run(kernel, values, tensors, grid, chosen(grid))
        except Exception as error:  # it may wait for programs that are not in the sample
            self._log.note(f"a sample of {kernel.name} stopped: {error}")
        differing = disagreeing(self.memory, tensors, self.taken(after)[1])
        self._take_down(*(replace(one, kernel=kernel.name) for one in differing))
        self.forget_freed()

    def _prove(
        self, kernel: TritonKernel, values: dict[str, Any], tensors: list[CheckedTensor],
        grid: Grid, *, alone: bool = False,
    ) -> None:  # fmt: skip
        """Log whether all programs stay in bounds, once for all launches of this kind; of several
        kinds of launch, what was not proved counts. alone: nobody else looks at all programs, so
        that an access that leaves its tensor is a finding."""
        lie = [(one.name, one.type.dtype, one.shape, one.strides) for one in tensors]
        key = kernel.name, repr((values, lie, grid))
        if key in self._proved or not available():
            return
        self._proved.add(key)
        if self._left < 0:
            self._log.note(f"bounds of later launches were not proved: {_SECONDS:.0f} s were spent")
            return
        known, begun = self._log.bounds.setdefault(kernel.name, {}), time.monotonic()
        for name, verdict in bounds_of_launch(kernel, values, tensors, grid).items():
            if name not in known or not verdict.proved:
                known[name] = in_words(verdict, "programs")
            if alone and verdict.wrong:
                self._take_down(
                    Finding(
                        f"out-of-bounds-{verdict.kind}", f"{name}: {verdict.why}", tensor=name,
                        program=verdict.program, place=verdict.place, device="Z3",
                        kernel=kernel.name,
                    )
                )  # fmt: skip
        self._left -= time.monotonic() - begun

    def _watch(
        self, kernel: TritonKernel, values: dict[str, Any], tensors: list[CheckedTensor], grid: Grid
    ) -> None:
        self._launched = before = _State(tensors)
        try:
            self.run(kernel, values, tensors, grid)
        except Exception as error:
            self._stopped(error)
            raise
        finally:
            tensors = before.tensors
            more = list[Finding]()
            if self.memory.undefined_in and not sys.exc_info()[0]:
                more = self._again(before, kernel, values, tensors, grid)
            self._take_down(*more)
            for tensor in tensors:
                tensor.writer[tensor.writer >= 0] = TORCH
                tensor.reader[:] = NOBODY

    def reached(self, tensor: CheckedTensor) -> None:
        if self._launched is not None:
            self._launched.keep(tensor)

    def _stopped(self, error: Exception) -> None:
        """Log that a launch stops with an error, unless the interpreter is at fault."""
        try:
            self._log.add(
                replace(crash_of(error, self.memory), stack=callers(self.memory.machinery))
            )
        except UnsupportedError as refused:
            self._log.note(str(refused))
            raise

    def _again(
        self, before: _State, kernel: TritonKernel, values: dict[str, Any],
        tensors: list[CheckedTensor], grid: Grid,
    ) -> list[Finding]:  # fmt: skip
        """Those programs once more that have undefined lanes, with poison in them, and all if what
        they read may come from others; the memory is then as it was."""
        first = self.memory
        self._launched = after = _State(tensors)
        again, writers = programs_of(grid), None
        if not first.atomics:
            again = sorted(first.undefined_in)
            writers = [n for n, one in enumerate(first.begun) if one.program in first.undefined_in]
        before.restore()
        self.memory = self._memory(poisoned=True)
        try:
            self.run(kernel, values, tensors, grid, again)
        except Exception as error:  # an address of poison, say
            return [crash_of(error, self.memory)]
        finally:
            differing = after.differing(writers)
            after.restore()
            poisoned, self.memory = self.memory, first
        found = list[Finding]()
        if differing is not None:
            tensor, element = differing
            writer = int(after.writer_of(tensor)[element])
            place = first.place_of(tensor, element)
            found.append(
                Finding(
                    "undefined-lanes",
                    f"{tensor.name}{list(tensor.index(element))} depends on what a masked load "
                    "without other= gives its masked lanes; pass other=",
                    tensor=tensor.name,
                    index=tensor.index(element),
                    program=first.begun[writer].program if writer >= 0 else None,
                    place=place,
                    kernel=kernel.name,
                )
            )
        known = {(one.kind, one.place) for one in first.findings}
        return found + [one for one in poisoned.findings if (one.kind, one.place) not in known]


class _State:
    """What tensors hold, and who has touched them."""

    def __init__(self, tensors: Sequence[CheckedTensor]) -> None:
        self.tensors = list[CheckedTensor]()
        self._tensors = dict[int, CheckedTensor]()
        self._kept = dict[int, list[NDArray[Any]]]()
        for tensor in tensors:
            self.keep(tensor)

    def keep(self, tensor: CheckedTensor) -> None:
        """Take in another tensor, as it is now."""
        self.tensors.append(tensor)
        if tensor.key not in self._tensors:
            self._tensors[tensor.key] = tensor
            self._kept[tensor.key] = [one.copy() for one in _arrays(tensor)]

    def writer_of(self, tensor: CheckedTensor) -> NDArray[np.int64]:
        return self._kept[tensor.key][1]

    def restore(self) -> None:
        for key, tensor in self._tensors.items():
            for array, kept in zip(_arrays(tensor), self._kept[key], strict=True):
                array[:] = kept

    def differing(self, writers: Sequence[int] | None) -> tuple[CheckedTensor, int] | None:
        """The first element, of those that were written by these if any are given, that holds
        something else now; None if there is none."""
        for key, tensor in self._tensors.items():
            bytes_ = np.flatnonzero(self._kept[key][0] != tensor.storage)
            elements = tensor.elements.owner[bytes_]
            if writers is not None:
                elements = elements[np.isin(self._kept[key][1][elements], writers)]
            if elements.size:
                return tensor, int(elements[0])
        return None


def _arrays(tensor: CheckedTensor) -> tuple[NDArray[Any], ...]:
    return tensor.storage, tensor.writer, tensor.reader, tensor.place


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Within it, nobody watches what torch does."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def callers(machinery: Sequence[str]) -> tuple[Caller, ...]:
    """Who calls now, the innermost first, up to a script: none of these files and folders."""
    frame, found = sys._getframe(1), list[Caller]()
    while frame is not None and frame.f_code.co_filename != _RUNPY:
        code = frame.f_code
        if not code.co_filename.startswith((*machinery, contextlib.__file__)):
            found.append(Caller(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)
