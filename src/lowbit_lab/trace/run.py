"""A trace, from the text that names a subject to what was found: the subject runs in a process of
its own, untraced first; what that tells is understood here."""

from __future__ import annotations

import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from iced_x86 import Instruction

from lowbit.isa import active, host
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.record import Spread
from lowbit_lab.bench.core.remote import Remote, RemoteError
from lowbit_lab.trace import child, loops, parts, replay, roles, verdict
from lowbit_lab.trace.codemap import CodeMap, Function
from lowbit_lab.trace.loops import Code, Cycle, Region
from lowbit_lab.trace.report import LOOP, STRAIGHT, Limit, Line, Loop, Part, Trace
from lowbit_lab.trace.subject import understood

SAMPLES, SECONDS = 300, 2.0
_PATIENCE_SECONDS = 300.0
_HOT = 0.1  # a loop with a smaller share of the samples is not hot
_FEWEST = 20  # samples
_LOOPS = 8  # that are listed
_CHAIN = 0.7  # a kind that takes less of all together is not what limits it
# Two products a cycle, each done after four, are what large cores do.
_ENOUGH_ACCUMULATORS = 8
_MOST_LINES = 400  # of a listing
_PHASES = {
    "open": "was made", "first": "ran for the first time", "time": "was timed",
    "sample": "was sampled", "operators": "was profiled",
}  # fmt: skip
_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA", "NUMEXPR")
_NAMED_CODE = {"ONEDNN_JIT_PROFILE": "2", "DNNL_JIT_PROFILE": "2"}  # oneDNN tells perf its names

OnProgress = Callable[[str], None]


def trace(
    subject: str,
    threads: int = 1,
    seconds: float = SECONDS,
    on_progress: OnProgress = lambda phase: None,
) -> Trace:
    """What runs when a subject is called, such as "torch:linear 1024x2048" or FILE.py.

    threads: for libraries that ask the environment. seconds: of the processor, for each phase.
    on_progress: called with what begins. ValueError or FileNotFoundError for a subject that cannot
    be made, ChildProcessError if it raises or ends its process, RuntimeError on a machine whose
    code this cannot read.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        where = f"{platform.system()} on {platform.machine()}"
        raise RuntimeError(f"lowbit explain call reads code of x86-64 on Linux; this is {where}")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    understood(subject)
    start = time.perf_counter()
    answers = _answers(subject, threads, seconds, on_progress)
    on_progress("understood")
    found = _Analysis(answers, threads).trace(subject)
    return found(time.perf_counter() - start)


def _answers(subject: str, threads: int, seconds: float, on_progress: OnProgress) -> dict[str, Any]:
    """The answers of the process in which the subject runs, by question."""
    environment = {f"{name}_NUM_THREADS": str(threads) for name in _THREADS} | _NAMED_CODE
    found: dict[str, Any] = {}
    with closing(
        Remote(child.answers, subject, threads, seconds, SAMPLES, **environment)
    ) as process:
        for phase, done in _PHASES.items():
            on_progress(done)
            try:
                if phase == "open":
                    found[phase] = process.answer(_PATIENCE_SECONDS)
                else:
                    found[phase] = process.ask(phase, _PATIENCE_SECONDS)
            except RemoteError as error:
                if isinstance(error.raised, ValueError):
                    raise error.raised from None
                own = str(Path(subject.split()[0]).absolute())
                ended = f"{subject} ended its process while it {done}: {error}"
                text = ended + _crashed_in(error.stderr, own)
                if error.raised is not None:
                    text = f"{subject} raised while it {done}: {error.raised}"
                raise ChildProcessError(text) from None
    return found


def _crashed_in(stderr: str, own: str) -> str:
    """Where in Python a process was when it crashed, from what faulthandler wrote: the innermost
    function of the file `own`, of the thread that crashed if it has some, else of any."""
    written = stderr.rpartition("Fatal Python error")[2]
    _, current, crashed = written.partition("Current thread")
    threads = [*re.split(r"\n\n", crashed)[:1], written] if current else []
    places = re.findall(r'  File "([^"]*)", line (\d+) in (.*)', "\n".join(threads))
    places = [place for place in places if place[0] == own] or places
    return ", in {2} ({0}, line {1})".format(*places[0]) if places else ""


class _Analysis:
    """Understands the answers."""

    def __init__(self, answers: dict[str, Any], threads: int) -> None:
        self._answers, self._threads = answers, threads
        sample = answers["sample"]
        self._map = CodeMap(sample["mappings"], sample["names"], sample["functions"])
        self._code = Code(sample["code"])
        self._at: Counter[int] = Counter(sample["addresses"])
        self._count = len(sample["addresses"])
        self._notes: list[str] = []

    def trace(self, subject: str) -> Callable[[float], Trace]:
        answers = self._answers
        regions = loops.hottest(self._code, self._at, self._map.entry)
        every = parts.of_products([self._loop(region, count) for region, count in regions])
        by_loop = {id(loop): region for loop, (region, _) in zip(every, regions, strict=True)}
        split = self._parts(by_loop, every)
        hot, why = self._hot(every, split, by_loop)
        region = by_loop[id(hot)] if hot is not None else None
        every = [hot, *(loop for loop in every if loop is not hot)] if hot is not None else []
        if region is not None:
            every[0] = self._listed(every[0], region)
        limit = self._limit(every, region)
        expected = answers["open"]["arithmetic"]
        try:
            judged = verdict.judged(hot and _multiplying(hot, every), expected, why)
        except RuntimeError as error:
            judged = verdict.Verdict(
                None, f"no verdict: the machine's best was not measured: {error}"
            )
        callers = self._chain(region)
        frames = parts.frames(callers, answers["sample"]["python"])
        if hot and not any(parts.is_interpreter(one.library) for one in callers):
            self._notes.append("no Python was found above the hot loop: it runs on another thread")
        return lambda took: Trace(
            subject=answers["open"]["title"],
            cpu=f"{host.model_name()} ({host.cpu_name()}, {active().name})",
            threads=self._threads,
            versions=answers["sample"]["versions"],
            seconds=Spread(*answers["time"]["seconds"]),
            cpu_seconds=answers["time"]["cpu_seconds"],
            mean_cpu_seconds=answers["time"]["mean_cpu_seconds"],
            sampled_cpu_seconds=answers["sample"]["cpu_seconds"],
            multiply_adds=answers["open"]["multiply_adds"],
            samples=self._count,
            operators=tuple(answers["operators"]["rows"]),
            operators_by=answers["operators"]["by"],
            chain=tuple(frames),
            loops=tuple(every[:_LOOPS]),
            why=why,
            parts=tuple(split),
            limit=limit,
            verdict=judged,
            notes=tuple(self._notes),
            took_seconds=took,
        )

    def _loop(self, region: Region, count: int) -> Loop:
        body = list(loops.instructions(self._code, region))
        place = self._map.function(region.head)
        function, structure = place.short, roles.structure(body)
        amount, arithmetic, products = roles.multiply_adds(body)
        wide = _width(body)
        return Loop(
            function=function,
            library=place.library,
            kind=place.kind,
            part=parts.part_of(function, place.library, structure, wide),
            samples=count,
            share=count / self._count,
            start=region.head,
            instructions=len(body),
            structure=structure,
            mix=roles.mix(body),
            instruction_sets=roles.sets_of(body),
            vector_bits=wide,
            products=products,
            arithmetic=arithmetic,
            multiply_adds=amount,
            accumulators=roles.accumulators(body),
            loads=structure.get(roles.LOAD, 0) + structure.get(roles.BROADCAST, 0),
            stores=structure.get(roles.WRITE_BACK, 0),
            form=LOOP if isinstance(region, Cycle) else STRAIGHT,
        )

    def _hot(
        self, every: Sequence[Loop], split: Sequence[Part], regions: dict[int, Region]
    ) -> tuple[Loop | None, str]:
        """The hot loop; or None, and why there is none. Of nested loops it is the inner one that
        multiplies."""
        if self._count < _FEWEST:
            return None, (
                f"only {self._count} samples: it hardly uses the processor, so it waits, or it "
                "ended"
            )
        calling = next((one.share for one in split if one.name == parts.CALLING), 0.0)
        found = [
            one for one in every
            if one.share >= _HOT and one.part not in (parts.WAITING, parts.CALLING)
        ]  # fmt: skip
        if found:
            hot = max(found, key=lambda one: one.samples)
            around = set(regions[id(hot)].body)
            inner = (
                loop for loop in found
                if loop.part == parts.KERNEL and around > set(regions[id(loop)].body)
            )  # fmt: skip
            return max(inner, key=lambda loop: loop.samples, default=hot), ""
        if calling > 0.5:
            return None, f"no hot loop: {calling:.0%} of the time is Python's own"
        most, count = Counter(
            self._map.function(place).short for place in self._at.elements()
        ).most_common(1)[0]
        share = count / self._count
        return None, f"no hot loop: the time is spread, {share:.0%} at most in one function, {most}"

    def _parts(self, regions: dict[int, Region], every: Sequence[Loop]) -> list[Part]:
        """The samples, by the part of a product in which they were."""
        in_loop = {
            place: loop for loop in reversed(every)
            for place in loops.own(self._code, regions[id(loop)])
        }  # fmt: skip
        kernels = {loop.function for loop in every if loop.part == parts.KERNEL}
        shares: Counter[str] = Counter()
        functions: dict[str, Counter[str]] = {}
        for place, count in self._at.items():
            loop = in_loop.get(place)
            if loop is None:
                at = self._map.function(place)
                name = at.short
                named = parts.part_of(name, at.library, {})
                part = parts.KERNEL if name in kernels and named == parts.OTHER else named
                part = parts.OTHER if part == parts.KERNEL and not kernels else part
            else:
                name, part = loop.function, loop.part
            shares[part] += count
            functions.setdefault(part, Counter())[name] += count
        return [
            Part(one, shares[one] / self._count, tuple(n for n, _ in functions[one].most_common(3)))
            for one in parts.PARTS
            if shares[one]
        ]

    def _listed(self, loop: Loop, region: Region) -> Loop:
        lines = [
            Line(one.ip, roles.text(one), roles.roles(one), self._at[one.ip])
            for one in loops.instructions(self._code, region)
        ]
        if len(lines) > _MOST_LINES:
            self._notes.append(
                f"the {loop.form} has {len(lines)} instructions, {_MOST_LINES} are listed"
            )
        return replace(loop, listing=tuple(lines[:_MOST_LINES]))

    def _limit(self, every: Sequence[Loop], region: Region | None) -> Limit | None:
        """Of the hot loop's structure; None, with a note, where it cannot be measured."""
        if region is None:
            return None
        hot = every[0]
        body = list(loops.instructions(self._code, region))
        try:
            by = _tiles(hot) if not hot.vector_bits and hot.multiply_adds else _replayed(body)
        except (ValueError, RuntimeError) as error:
            self._notes.append(f"the {hot.form}'s limit was not measured: {error}")
            return None
        # All multiply-adds of a call are made in loops like this one.
        alike = [one for one in every if one.multiply_adds and one.arithmetic == hot.arithmetic]
        share = sum(one.share for one in alike) if hot.multiply_adds else hot.share
        taken = share * self._answers["time"]["cpu_seconds"]
        work = self._answers["open"]["multiply_adds"]
        least = by[replay.TOGETHER]
        allowed = work / hot.multiply_adds * least if work and hot.multiply_adds else None
        return Limit(
            by=by,
            limited_by=_limited_by(by, hot),
            rate=hot.multiply_adds / least if hot.multiply_adds else None,
            seconds=allowed,
            loop_seconds=taken,
            reached=peak.share(allowed / taken) if allowed and taken else None,
        )

    def _chain(self, region: Region | None) -> list[Function]:
        """The callers that most samples in a loop have, or most of all, the innermost first."""
        every = self._answers["sample"]["chains"]
        inside = set(region.body) if region else set()
        several = [one for one in every if one[0] in inside] or every
        # What is behind a call may belong to the next function.
        named = [
            tuple(self._map.function(at - (number > 0)) for number, at in enumerate(one))
            for one in several
        ]
        seen = Counter(tuple(function.text for function in one) for one in named)
        most = seen.most_common(1)[0][0] if seen else ()
        return list(next((x for x in named if tuple(f.text for f in x) == most), ()))


def _width(body: Sequence[Instruction]) -> int:
    """Bits of the vectors that most of the work is done on: the products, if there are some."""
    products = [one for one in body if roles.PRODUCTS in roles.roles(one)]
    seen = Counter(roles.vector_bits(one) for one in products or body if roles.is_vector(one))
    return seen.most_common(1)[0][0] if seen else 0


def _multiplying(hot: Loop, every: Sequence[Loop]) -> Loop:
    """What is judged: the hot loop, or where that multiplies nothing, the hottest that does."""
    kernels = [loop for loop in every if loop.part == parts.KERNEL and loop.share >= _HOT]
    if hot.part == parts.KERNEL or not kernels:
        return hot
    return max(kernels, key=lambda loop: loop.samples)


def _replayed(body: Sequence[Instruction]) -> dict[str, float]:
    found = replay.programs(body)
    if replay.TOGETHER not in found:
        raise ValueError("nothing of it can be run by itself")
    return replay.measured(found)


def _limited_by(by: dict[str, float], hot: Loop) -> str:
    """What keeps a round from being shorter."""
    alone = {name: seconds for name, seconds in by.items() if name != replay.TOGETHER}
    slowest = max(alone, key=lambda name: alone[name], default=replay.PRODUCTS)
    if alone and alone[slowest] < _CHAIN * by[replay.TOGETHER]:
        return "none of these alone, so by instructions that wait for the results of others"
    if slowest == replay.PRODUCTS and 0 < hot.accumulators < _ENOUGH_ACCUMULATORS:
        count = "1 register" if hot.accumulators == 1 else f"{hot.accumulators} registers"
        return f"products, which wait for each other: they are added to {count}"
    return slowest


def _tiles(loop: Loop) -> dict[str, float]:
    """Of a round of products of tiles, from the rate that lowbit's own probe reaches."""
    ceiling = peak.measure(active().name, 1, reads=False)
    rate = ceiling.ways.get(next((name for name in loop.products if name in ceiling.ways), ""))
    if rate is None:
        raise ValueError(f"{loop.products[0]} cannot be run by itself")
    return {replay.TOGETHER: 2 * loop.multiply_adds / (rate * 1e9)}
