"""Why a variant is as fast as it is: types, registers, the inner loop, accesses, and faults."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import Language, language_of
from lowbit_lab.compare import faults
from lowbit_lab.compare.built import Built, Typed
from lowbit_lab.compare.code import KINDS, Code, Mix, bytes_loaded, mix
from lowbit_lab.compare.faults import Fault, Occupancy, occupancy
from lowbit_lab.compare.problem import Checked, Problem, bare_lines
from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.execute import AccessCost, Trace, costs, moved, repeats
from lowbit_lab.compare.ptx.memory import OutsideError
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.compare.toolchain import Machine, MissingToolError, assemble

_MOST_STEPS = 20_000
"""Instructions of a block that are followed at the sizes that are timed."""


@dataclass(frozen=True)
class Loop:
    """The inner loop in one language. language: "PTX", "SASS" or "assembly". instructions: of its
    body; unrolled: iterations of the source that a pass makes, 1 where that is not known; mix: of
    each kind, per iteration; uniform: of them those that a warp executes once for all its threads;
    lines: of the text, first and last; opcodes: how many of each in a
    pass, the most frequent first."""

    language: str
    instructions: int
    unrolled: float
    mix: Mix
    uniform: float
    lines: tuple[int, int] | None
    opcodes: dict[str, int]
    text: tuple[str, ...]

    @property
    def per_iteration(self) -> float:
        """Instructions of one iteration of the source."""
        return self.instructions / self.unrolled

    @property
    def per_arithmetic(self) -> float | None:
        """Instructions for each that computes the result; None if none does."""
        return self.per_iteration / self.mix["arithmetic"] if self.mix["arithmetic"] else None


@dataclass
class Timed:
    """What takes part in the timing: a variant, or a peer that the file names.

    idea: a line about it. error: of the result at the sizes that are timed, as a share of its
    largest element; None where nothing says what that is. seconds: of one call: 10th percentile,
    median, 90th, None where it was not timed. ratios: times as fast as those that the file sets
    it against, likewise. peak_share: of what the machine can multiply at most.
    """

    name: str
    idea: str = field(default="", kw_only=True)
    error: float | None = field(default=None, kw_only=True)
    seconds: tuple[float, float, float] | None = field(default=None, kw_only=True)
    rounds: int = field(default=0, kw_only=True)
    ratios: dict[str, tuple[float, float, float]] = field(
        default_factory=dict[str, tuple[float, float, float]], kw_only=True
    )
    peak_share: float | None = field(default=None, kw_only=True)


@dataclass
class Explained(Timed):
    """All that is known of a variant.

    moved: bytes that a warp moves from and to global memory in an iteration of the inner loop, in
    whole sectors.
    """

    kind: str
    built: Built
    checked: Checked
    loops: list[Loop] = field(default_factory=list[Loop])
    machine: Machine | None = None
    occupancy: Occupancy | None = None
    accesses: tuple[AccessCost, ...] = ()
    moved: float | None = None
    faults: list[Fault] = field(default_factory=list[Fault])
    notes: list[str] = field(default_factory=list[str])

    @property
    def types(self) -> tuple[Typed, ...]:
        """Of its variables."""
        return self.built.types

    @property
    def loop(self) -> Loop | None:
        """The inner loop as it runs, or as near to that as is known."""
        return self.loops[-1] if self.loops else None

    def text_of(self, line: int | None) -> str:
        """A line of its text."""
        at = -1 if line is None else line - self.built.first_line
        return self.built.lines[at].strip() if 0 <= at < len(self.built.lines) else ""


def explain(
    variant: Variant, built: Built, checked: Checked, problem: Problem, sm: int
) -> Explained:
    """Everything that can be said without running it on a GPU. problem: at the sizes that are
    timed."""
    language = language_of(variant.kernel, "compile")
    notes, idea = list(built.missing), language.idea(variant.kernel)
    found = Explained(variant.name, language.title, built, checked, notes=notes, idea=idea)
    if built.ptx is not None:
        _explain_ptx(language, variant, built, problem, sm, found)
    elif built.code is not None:
        body = built.code.main_loop()
        if body is not None:
            found.loops.append(_loop("assembly", built.code, body, 1))
    found.faults = faults.ordered([*found.faults, *faults.of_types(built, problem)])
    return found


def _explain_ptx(
    language: type[Language],
    variant: Variant,
    built: Built,
    problem: Problem,
    sm: int,
    found: Explained,
) -> None:
    assert built.ptx is not None
    ptx = parse(built.ptx, built.file, built.entry)
    trace = _followed(language, variant, built, problem, found)
    body = ptx.code.main_loop(trace.counts)
    unrolled = 1
    if body is not None:
        unrolled = repeats(ptx.code, body, trace)
        found.loops.append(_loop("PTX", ptx.code, body, unrolled))
        passed = moved(ptx.code, body, trace)
        found.moved = None if passed is None else passed / unrolled
    found.accesses = costs(ptx.code, trace)
    found.faults += faults.of_ptx(ptx.code, body, problem)
    found.faults += faults.of_threads(built, trace)
    found.faults += faults.of_accesses(found.accesses)
    try:
        machine = assemble(built.ptx, sm, built.file, built.most_registers)
    except (MissingToolError, RuntimeError) as error:
        found.notes.append(str(error))
        return
    found.machine = machine
    if machine.missing:
        found.notes.append(machine.missing)
    shared = machine.shared + built.shared
    found.occupancy = occupancy(sm, built.threads, machine.registers, shared)
    found.faults += faults.of_machine(machine, found.occupancy)
    inner = machine.sass.main_loop() if machine.sass is not None else None
    if inner is not None and machine.sass is not None:
        times = float(unrolled)
        ours = bytes_loaded(machine.sass.body(inner))
        theirs = bytes_loaded(ptx.code.body(body)) if body is not None else 0
        if theirs and ours:
            times = unrolled * ours / theirs
        found.loops.append(_loop("SASS", machine.sass, inner, times))


def _followed(
    language: type[Language], variant: Variant, built: Built, problem: Problem, found: Explained
) -> Trace:
    """One block, followed for a while at the sizes that are timed."""
    trace = Trace()
    try:
        launch = language.launch(variant, built, problem, problem.arrays(variant))
        if launch is not None and not launch.run([(0, 0, 0)], trace, _MOST_STEPS):
            found.notes.append(
                f"accesses are those of the first {_MOST_STEPS:,} instructions of the first block"
            )
    except (NotInterpretedError, OutsideError, ValueError) as error:
        found.notes.append(f"accesses were not followed to the end: {error}")
    return trace


def _loop(language: str, code: Code, at: range, unrolled: float) -> Loop:
    body = code.body(at)
    counts: dict[str, int] = {}
    for one in body:
        counts[one.opcode] = counts.get(one.opcode, 0) + 1
    lines = [one.line for one in body if one.line is not None]
    made = mix(body)
    return Loop(
        language=language,
        instructions=len(body),
        unrolled=unrolled,
        mix={kind: made[kind] / unrolled for kind in KINDS},
        uniform=sum(one.uniform for one in body) / unrolled,
        lines=(min(lines), max(lines)) if lines else None,
        opcodes=dict(sorted(counts.items(), key=lambda item: -item[1])),
        text=tuple(map(str, body)),
    )


# A variant set against the one before it: what changed in the text, in types, in the loop, in
# time.

_MOST_LINES = 24


@dataclass(frozen=True)
class Change:
    """What is different in `after`.

    text: lines removed ("-") and added ("+"), docstrings aside. types: of
    variables of one name. loop: instructions per iteration, by kind, before and after, where they
    differ. registers, faults: those that went ("-") and came ("+"). time: after by before.
    """

    before: str
    after: str
    text: tuple[str, ...]
    types: tuple[str, ...]
    loop: dict[str, tuple[float, float]]
    registers: tuple[int, int] | None
    faults: tuple[str, ...]
    time: float | None


def change(before: Explained, after: Explained) -> Change:
    """What changed from one to the next."""
    return Change(
        before=before.name,
        after=after.name,
        text=_text(before, after),
        types=_types(before, after),
        loop=_loop_of(before, after),
        registers=_registers(before, after),
        faults=_faults(before, after),
        time=after.seconds[1] / before.seconds[1] if before.seconds and after.seconds else None,
    )


def _body(variant: Explained) -> list[str]:
    """The text without the kernel's name where it is defined, and without its docstring, which
    differ always."""
    return [line.rstrip() for line in bare_lines(variant.built.lines) if line.strip()]


def _text(before: Explained, after: Explained) -> tuple[str, ...]:
    rows = [row for row in difflib.ndiff(_body(before), _body(after)) if row.startswith(("-", "+"))]
    if before.kind != after.kind or len(rows) > _MOST_LINES:
        return (f"another text, {after.kind}: {len(after.built.lines)} lines",)
    return tuple(rows)


def _types(before: Explained, after: Explained) -> tuple[str, ...]:
    was, now = ({one.name: one.type for one in each.types} for each in (before, after))
    if not was or not now:
        return ()
    changed = [f"{n}: {was[n]} → {t}" for n, t in now.items() if n in was and was[n] != t]
    return tuple(changed + [f"{n}: {t}, new" for n, t in now.items() if n not in was])


def _loop_of(before: Explained, after: Explained) -> dict[str, tuple[float, float]]:
    was, now = before.loop, after.loop
    if was is None or now is None or was.language != now.language:
        return {}
    pairs = {kind: (was.mix[kind], now.mix[kind]) for kind in KINDS}
    pairs["uniform"] = was.uniform, now.uniform
    pairs["all"] = was.per_iteration, now.per_iteration
    return {kind: pair for kind, pair in pairs.items() if abs(pair[0] - pair[1]) > 0.005}


def _registers(before: Explained, after: Explained) -> tuple[int, int] | None:
    if before.machine is None or after.machine is None:
        return None
    pair = before.machine.registers, after.machine.registers
    return None if pair[0] == pair[1] else pair


def _faults(before: Explained, after: Explained) -> tuple[str, ...]:
    was, now = ({one.title for one in each.faults} for each in (before, after))
    return tuple(
        [f"- {one}" for one in sorted(was - now)] + [f"+ {one}" for one in sorted(now - was)]
    )
