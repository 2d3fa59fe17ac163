"""The process in which a subject runs, see `bench.core.remote`."""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from lowbit.jit.kernel import Program
from lowbit.registry.extras import explained, versions
from lowbit_lab.bench.core.clock import Limits, interleave, quantiles
from lowbit_lab.trace import cfi
from lowbit_lab.trace.operators import Operator, of_torch
from lowbit_lab.trace.sampler import Mapping, Sample, Sampler, mappings
from lowbit_lab.trace.subject import FILE, Asked, Opened, opened, refusal, understood
from lowbit_lab.trace.unwind import Memory, Unwinder

_TOGETHER_SECONDS = 2e-3
_PATIENCE_SECONDS = 60.0  # where others have the cores
_UNWOUND = 60  # samples whose callers are looked up
_PLACES = 400  # addresses around which code is kept
_BEFORE, _BEHIND = 16 << 10, 48 << 10  # bytes of it, where no function is known to lie
_MOST_BYTES = 256 << 10  # of one function


class Child:
    """Answers questions about one subject."""

    def __init__(self, asked: Asked, subject: Opened, seconds: float, wanted: int) -> None:
        self._asked, self._call, self._subject = asked, subject.call, subject
        self._seconds, self._wanted = seconds, wanted
        self._together = 1  # calls between two looks at the clock

    def first(self) -> Any:
        """Seconds of the first call, which may compile."""
        start = time.perf_counter()
        try:
            self._call()
        except Exception as error:
            if self._asked.engine == FILE:
                raise
            raise Refused(refusal(self._asked, error)) from None
        return time.perf_counter() - start

    def time(self) -> Any:
        """Untraced: 10th, 50th and 90th percentile of the seconds of a call."""
        limits = Limits(noise=0.02, seconds=self._seconds)
        samples = interleave({"subject": [self._call]}, limits)["subject"]
        taken = samples.cpu_seconds
        spread = quantiles(samples.seconds)
        self._together = max(1, int(_TOGETHER_SECONDS / spread[1]))
        least, mean = float(taken.min()), float(taken.mean())
        return {"seconds": spread, "cpu_seconds": least, "mean_cpu_seconds": mean}

    def sample(self) -> Any:
        """Where the time is spent, in some hundred samples, with code and callers."""
        sampler, calls = Sampler(), 0
        with sampler.running():
            start, ran, waited = time.perf_counter(), time.process_time(), _waited()
            # Others may have the cores: it is the time that this process runs that makes samples.
            while sampler.count < self._wanted and (
                time.process_time() - ran < self._seconds
                and time.perf_counter() - start - (_waited() - waited) < 2 * self._seconds
                and time.perf_counter() - start < _PATIENCE_SECONDS
            ):
                for _ in repeat(None, self._together):
                    self._call()
                calls += self._together
            wall = time.perf_counter() - start
            cpu = time.process_time() - ran - sampler.own_seconds
        with closing(Memory()) as memory:
            found = _described(sampler.samples(), memory)
        place = {
            "seconds": wall / calls,
            "cpu_seconds": cpu / calls,
            "python": sampler.python(__file__, self.sample.__name__),
        }
        return {**found, **place, "versions": versions()}

    def operators(self) -> Any:
        """The engine's own table, or a profiler's."""
        if self._subject.operators is not None:
            by, rows = "the engine's own profile", self._subject.operators()
        else:
            by, rows = profiled(self._call)
        return {"by": by, "rows": rows}


def _waited() -> float:
    """Seconds for which the main thread wanted a core and had none; 0 where Linux does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _described(samples: Sequence[Sample], memory: Memory) -> dict[str, Any]:
    """Samples with what is needed to understand them elsewhere: who called, code, files."""
    unwinder = Unwinder(memory)
    step = max(1, len(samples) // _UNWOUND)
    chains = [unwinder.frames(one) for one in samples[::step]]
    often = Counter(one.address for one in samples)
    found = list(_extents([place for place, _ in often.most_common(_PLACES)], memory))
    callers = {place - 1 for one in chains for place in one[1:]}
    return {
        "addresses": [one.address for one in samples],
        "chains": chains,
        "functions": [extent for extent, known in chain(found, _extents(callers, memory)) if known],
        "code": list(_code([extent for extent, _ in found], memory)),
        "mappings": [mapping for mapping in mappings() if "x" in mapping.access],
        "names": list(_names()),
    }


def _extents(addresses: Iterable[int], memory: Memory) -> Iterator[tuple[tuple[int, int], bool]]:
    """For each address, where code around it starts and ends, and whether that is a function."""
    known: list[Mapping] = mappings()
    for address in addresses:
        try:
            extent = cfi.extent(address, memory.read)
        except LookupError:
            extent = None
        if extent is not None and address < extent[1] <= extent[0] + _MOST_BYTES:
            yield extent, True
            continue
        place = next((one for one in known if one.start <= address < one.end), None)
        if place is not None:
            start, end = address - _BEFORE, address + _BEHIND
            yield (max(start, place.start), min(end, place.end)), False


def _code(extents: Sequence[tuple[int, int]], memory: Memory) -> Iterator[tuple[int, bytes]]:
    """The bytes of these stretches, those that touch each other as one."""
    joined: list[list[int]] = []
    for start, end in sorted(set(extents)):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    for start, end in joined:
        try:
            yield start, memory.read(start, end - start)
        except LookupError:
            continue


def _names() -> Iterator[tuple[int, int, str]]:
    """Start, size (0: not known) and name of code that was made at run time, as far as its makers
    tell: oneDNN and others in a file for perf, Numba and lowbit by their objects."""
    path = Path(f"/tmp/perf-{os.getpid()}.map")
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            start, size, name = line.split(maxsplit=2)
            yield int(start, 16), int(size, 16), name
        path.unlink()
    numba = sys.modules.get("numba.core.dispatcher")
    for one in gc.get_objects():
        # Some objects make up their class when they are asked for it.
        if issubclass(type(one), Program):
            yield one.address, 0, f"lowbit {one.name} ({one.isa.name})"
        elif numba is not None and issubclass(type(one), numba.Dispatcher):
            yield from _overloads(one)


def _overloads(dispatcher: Any) -> Iterator[tuple[int, int, str]]:
    """The machine code of each signature of a function that Numba compiled."""
    for signature, compiled in dispatcher.overloads.items():
        address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        if address:
            types = ", ".join(map(str, signature))
            yield address, 0, f"{dispatcher.py_func.__qualname__}({types})"


class Refused(ValueError):
    """There is no such subject."""


@contextmanager
def _blamed(subject: Asked, refusing: bool = False) -> Iterator[None]:
    """What the subject raises, whatever it is, becomes a ChildProcessError: with its own line, if
    it is a file's. refusing: what else is raised says that there is no such subject, a ValueError.
    """
    try:
        yield
    except BaseException as error:  # also what ends a process
        frames = traceback.extract_tb(error.__traceback__)
        file = str(Path(subject.name).absolute()) if subject.engine == FILE else None
        own = [(frame.filename, frame.lineno) for frame in frames if frame.filename == file]
        if isinstance(error, SyntaxError) and file and error.filename == file:
            own.append((file, error.lineno))
        if isinstance(error, ModuleNotFoundError):
            raise ValueError(explained(error)) from None
        refused = isinstance(error, Refused) or (
            refusing and not own and isinstance(error, ValueError | FileNotFoundError)
        )
        if refused:
            raise ValueError(str(error)) from None
        if refusing and not own and isinstance(error, Exception):
            raise ValueError(refusal(subject, error)) from None
        said = str(error).splitlines()
        places = own or [(frame.filename, frame.lineno) for frame in frames]
        place = " ({}, line {})".format(*places[-1]) if places else ""
        text = f"{type(error).__name__}{': ' + said[0] if said else ''}{place}"
        raise ChildProcessError(text) from None


def answers(
    text: str, threads: int, seconds: float, samples: int
) -> Generator[dict[str, Any], str, None]:
    """Answer once when the subject is made, then each question, the name of a method of `Child`."""
    asked = understood(text, threads)
    with _blamed(asked, refusing=True):
        subject = opened(asked)
    child = Child(asked, subject, seconds, samples)
    question = yield {
        "title": subject.title,
        "arithmetic": subject.arithmetic,
        "multiply_adds": subject.multiply_adds,
    }
    while True:
        with _blamed(asked):
            answer = getattr(child, question)()
        question = yield answer


# Operator tables of calls whose engine has no table of its own: PyTorch's profiler where torch
# runs, else the functions that Python sees.

_SECONDS, _MOST_CALLS = 0.5, 20
TORCH, PYTHON = "torch.profiler", "cProfile"


def profiled(call: Callable[[], object]) -> tuple[str, list[Operator]]:
    """Which profiler it was, and its table of a few calls."""
    if "torch" in sys.modules:
        found = of_torch(partial(_some, call))
        if found:
            return TORCH, found
    return PYTHON, _python(call)


def _some(call: Callable[[], object]) -> None:
    end = time.perf_counter() + _SECONDS
    for _ in range(_MOST_CALLS):
        call()
        if time.perf_counter() > end:
            return


def _python(call: Callable[[], object]) -> list[Operator]:
    profile = cProfile.Profile()
    profile.enable()
    _some(call)
    profile.disable()
    rows = []
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, total, _) in entries.items():
        if file == __file__:  # what calls the subject: its own time is all that nobody else has
            rows.append(("native code without a name of its own in Python", own, own, calls))
        elif "_lsprof" not in name and "perf_counter" not in name:
            place = "" if file == "~" else f" ({Path(file).name}:{line})"
            rows.append((name + place, own, total, calls))
    return Operator.rows(rows)
