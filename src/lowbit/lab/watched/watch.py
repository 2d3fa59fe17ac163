"""Every launch of Triton that a program makes, in the checked interpreter.

A launch runs twice if a masked load gave some of its lanes no value: the second time they hold
poison, and what comes out must be the same.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.lab.backends.host import TORCH, Host, launches, machinery
from lowbit.lab.backends.kinds.triton import TritonKernel
from lowbit.lab.report import Caller, Finding
from lowbit.lab.run.memory import Memory
from lowbit.lab.run.outcome import UnsupportedError, crash_of
from lowbit.lab.run.tensor import NOBODY, CheckedTensor
from lowbit.lab.run.trace import Grid, grid_of
from lowbit.lab.watched.cuda import served_by_cpu
from lowbit.lab.watched.log import Log

# What a program may take, in steps of the interpreter: a loop of this length waits for another.
_MOST_STEPS = 2_000_000
_RUNPY = runpy.run_path.__code__.co_filename


@contextlib.contextmanager
def watch() -> Iterator[Log]:
    """Within it, every launch of Triton runs in the checked interpreter, and is taken down.

    Where there is no GPU, "cuda" is the CPU within it. Yields the Log, which is whole when the
    block is left. A launch that stops with an error raises it, as it would on a GPU, and
    UnsupportedError if only a GPU can run it. ModuleNotFoundError or RuntimeError if Triton is
    missing or of an unknown version.
    """
    log = Log()
    watcher = Watcher(log)
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(served_by_cpu(log.note))
        stack.enter_context(watcher.running())
        yield log


class Watcher(Host):
    """Watches launches on CPU tensors, and what torch does between them, for a log."""

    def __init__(self, log: Log) -> None:
        self._log, self._machinery = log, machinery()
        super().__init__(self._memory(), None)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            yield

    def _memory(self, poisoned: bool = False) -> Memory:
        return Memory(
            [], machinery=self._machinery, poisoned=poisoned, most_steps=_MOST_STEPS
        )  # fmt: skip

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
        # A mode of torch's functions that says "cuda" does not say it in here.
        with torch._C.DisableTorchFunction():
            self.forget_freed()
            launched = TritonKernel.of(kernel)
            self._log.launches[launched.name] += 1
            self._watch(launched, *self.taken(arguments), grid_of(grid))

    def _watch(
        self, kernel: TritonKernel, values: dict[str, Any], tensors: list[CheckedTensor], grid: Grid
    ) -> None:
        before = _State(tensors)
        try:
            self.run(kernel, values, tensors, grid)
        except Exception as error:
            self._stopped(error)
            raise
        finally:
            undefined, more = self.memory.undefined, list[Finding]()
            if undefined and not sys.exc_info()[0]:
                more = self._again(before, kernel, values, tensors, grid)
            self._take_down(*more)
            for tensor in tensors:
                tensor.writer[tensor.writer >= 0] = TORCH
                tensor.reader[:] = NOBODY

    def _stopped(self, error: Exception) -> None:
        """Log that a launch stops with an error, unless the interpreter is at fault."""
        try:
            self._log.add(replace(crash_of(error, self.memory), stack=callers(self.memory.machinery)))
        except UnsupportedError as refused:
            self._log.note(str(refused))
            raise

    def _again(
        self, before: _State, kernel: TritonKernel, values: dict[str, Any],
        tensors: list[CheckedTensor], grid: Grid,
    ) -> list[Finding]:  # fmt: skip
        """Once more, with poison in undefined lanes; the memory is then as it was."""
        first, after = self.memory, _State(tensors)
        before.restore()
        self.memory = self._memory(poisoned=True)
        try:
            self.run(kernel, values, tensors, grid)
        except Exception as error:  # an address of poison, say
            return [crash_of(error, self.memory)]
        finally:
            differing = after.differing()
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
        self._tensors = {tensor.key: tensor for tensor in tensors}
        self._kept = {
            key: [one.copy() for one in _arrays(tensor)] for key, tensor in self._tensors.items()
        }

    def writer_of(self, tensor: CheckedTensor) -> NDArray[np.int64]:
        return self._kept[tensor.key][1]

    def restore(self) -> None:
        for key, tensor in self._tensors.items():
            for array, kept in zip(_arrays(tensor), self._kept[key], strict=True):
                array[:] = kept

    def differing(self) -> tuple[CheckedTensor, int] | None:
        """The first element that holds something else now; None if there is none."""
        for key, tensor in self._tensors.items():
            bytes_ = np.flatnonzero(self._kept[key][0] != tensor.storage)
            if bytes_.size:
                return tensor, int(tensor.elements.owner[bytes_[0]])
        return None


def _arrays(tensor: CheckedTensor) -> tuple[NDArray[Any], ...]:
    return tensor.storage, tensor.writer, tensor.reader, tensor.place


def callers(machinery: Sequence[str]) -> tuple[Caller, ...]:
    """Who calls now, the innermost first, up to a script: none of these files and folders."""
    frame, found = sys._getframe(1), list[Caller]()
    while frame is not None and frame.f_code.co_filename != _RUNPY:
        code = frame.f_code
        if not code.co_filename.startswith((*machinery, contextlib.__file__)):
            found.append(Caller(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)
