"""What makes a kernel slow, named with its line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowbit_lab.compare.built import Built
from lowbit_lab.compare.code import Code, Instruction
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.ptx.execute import AccessCost, Trace
from lowbit_lab.compare.ptx.operations import WARP
from lowbit_lab.compare.toolchain import Machine

# How many warps a multiprocessor of a GPU holds at a time, by what a block takes of it.

_WARP = 32
_REGISTERS = 65536
_REGISTER_UNIT = 256  # registers are given to warps in these
_WARP_UNIT = 4  # and warps to the four parts of a multiprocessor
_SHARED_UNIT = 128


@dataclass(frozen=True)
class _Limits:
    """Of a multiprocessor: warps, blocks, and bytes of shared memory of which each block takes
    1024 more than it asks for."""

    warps: int
    blocks: int
    shared: int
    reserved: int = 1024


# From the table of compute capabilities in NVIDIA's CUDA programming guide.
_LIMITS = {
    70: _Limits(64, 32, 96 << 10, 0),
    75: _Limits(32, 16, 64 << 10, 0),
    80: _Limits(64, 32, 164 << 10),
    86: _Limits(48, 16, 100 << 10),
    87: _Limits(48, 16, 164 << 10),
    89: _Limits(48, 24, 100 << 10),
    90: _Limits(64, 32, 228 << 10),
    100: _Limits(64, 32, 228 << 10),
    120: _Limits(48, 24, 100 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """Warps that a multiprocessor holds of as many as it could, and what sets the limit."""

    warps: int
    most: int
    limit: str

    @property
    def share(self) -> float:
        """Of the most."""
        return self.warps / self.most


def occupancy(sm: int, threads: int, registers: int, shared: int) -> Occupancy | None:
    """Of blocks of so many threads, with registers of a thread and bytes of shared memory of a
    block; None for a compute capability that is not known."""
    limits = _LIMITS.get(sm)
    if limits is None or threads < 1:
        return None
    warps = -(-threads // _WARP)
    of_warp = -(-max(registers, 1) * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    held = _REGISTERS // of_warp // _WARP_UNIT * _WARP_UNIT
    taken = -(-(shared + limits.reserved) // _SHARED_UNIT) * _SHARED_UNIT
    blocks = {
        "threads": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": held // warps,
        "shared memory": limits.shared // taken if taken else limits.blocks,
    }
    limit = min(blocks, key=lambda name: blocks[name])
    return Occupancy(blocks[limit] * warps, limits.warps, limit)


Severity = Literal["fault", "note"]

TITLES: Mapping[str, str] = {
    "float64": "arithmetic in float64",
    "float64-variable": "a variable is float64",
    "int64-division": "64-bit division",
    "int32-division": "32-bit division",
    "uncoalesced": "uncoalesced access",
    "bank-conflict": "bank conflict",
    "spill": "spilled registers",
    "local-memory": "an array in local memory",
    "negative-index": "negative indices are looked for",
    "int64-index": "64-bit indices",
    "conversion": "conversions",
    "idle-threads": "threads with nothing of their own to do",
    "occupancy": "low occupancy",
}
"""What each kind is called."""

_WASTE = 2.0  # sectors moved by those needed
_CONFLICT = 1.5
_LOW_OCCUPANCY = 0.5
_F64 = re.compile(r"\.f64\b")
# Additions make pointers, which have 64 bits in any case.
_INT64 = re.compile(r"^(mul|mad|shl|shr|and|or|xor|min|max|selp)\b.*\.[bsu]64\b")


@dataclass(frozen=True)
class Fault:
    """One of TITLES. severity: whether it costs much by itself. line: of the text. in_loop:
    whether the inner loop, or any other, repeats it. count: how many instructions."""

    kind: str
    message: str
    line: int | None = None
    severity: Severity = "fault"
    in_loop: bool = False
    count: int = 1

    @property
    def title(self) -> str:
        """In words."""
        return TITLES[self.kind]


def ordered(faults: Iterable[Fault]) -> list[Fault]:
    """Each kind of each line once, in loops first, faults before notes."""
    first: dict[tuple[str, int | None], Fault] = {}
    for one in sorted(faults, key=lambda f: not f.in_loop):
        first.setdefault((one.kind, one.line), one)
    return sorted(first.values(), key=lambda f: (f.severity != "fault", not f.in_loop))


def _wanted_wide(problem: Problem) -> bool:
    """Whether the data are float64 themselves."""
    return "float64" in problem.dtypes


def of_types(built: Built, problem: Problem) -> list[Fault]:
    """Variables that are wider than the data."""
    if _wanted_wide(problem):
        return []
    return [
        Fault(
            "float64-variable",
            f"{one.name} is {one.type}{f': {one.why}' if one.why else ''}; write float32(...)",
            one.where or one.line,
        )
        for one in built.types
        if re.search(r"\bfloat64\b|\bfp64\b|\bf64\b", one.type)
    ]


def of_ptx(code: Code, loop: range | None, problem: Problem) -> list[Fault]:
    """What instructions say that are slow, or that are there for nothing."""
    wide = _wanted_wide(problem)
    found: list[Fault] = []
    inner = frozenset(loop or ())
    by_line: dict[tuple[str, int | None], list[int]] = {}
    for index, one in enumerate(code.instructions):
        for kind in _kinds(one, wide):
            by_line.setdefault((kind, one.line), []).append(index)
    for (kind, line), at in by_line.items():
        inside = [i for i in at if i in code.in_loops]
        if kind in ("int64-index", "conversion") and not inner & set(at):
            continue
        examples = ", ".join(dict.fromkeys(code.instructions[i].opcode for i in (inside or at)))
        where = (
            "in the inner loop"
            if inner & set(at)
            else "in a loop"
            if inside
            else "outside of loops"
        )
        count = len([i for i in at if i in inner]) or len(inside) or len(at)
        # Without a loop, each thread does everything once.
        repeated = bool(inside) or not code.loops
        severity: Severity = "fault" if repeated and kind in _COSTLY else "note"
        message = f"{count} {where} ({examples}){_ADVICE.get(kind, '')}"
        found.append(Fault(kind, message, line, severity, bool(inside), count))
    found += _negative_indices(code, inner)
    return found


_COSTLY = ("float64", "int64-division")

_ADVICE = {
    "float64": "; a GPU has few units for it",
    "int64-division": "; no instruction does it: each becomes a subroutine of about a hundred",
    "int32-division": "; each becomes some twenty instructions",
}


def _kinds(instruction: Instruction, wide: bool) -> list[str]:
    base, *rest = instruction.opcode.split(".")
    kinds = list[str]()
    if _F64.search(instruction.opcode) and not wide and base not in ("ld", "st", "mov", "selp"):
        kinds.append("float64")
    if base in ("div", "rem") and rest[-1] in ("s64", "u64"):
        kinds.append("int64-division")
    elif base in ("div", "rem") and rest[-1] in ("s32", "u32"):
        kinds.append("int32-division")
    elif _INT64.search(instruction.opcode):
        kinds.append("int64-index")
    if base == "cvt" and not ("f64" in rest and wide):
        kinds.append("conversion")
    return kinds


def _negative_indices(code: Code, inner: frozenset[int]) -> list[Fault]:
    """The sign of an index, spread over it, with the size that is added if it is negative: what
    Python's rule for a[-1] takes."""
    signs = {
        name
        for one in code.instructions
        if one.opcode in ("shr.s64", "shr.s32") and one.operands[-1] in ("63", "31")
        for name in one.writes
    }
    lines: dict[int | None, int] = {}
    for index, one in enumerate(code.instructions):
        if one.opcode in ("and.b64", "and.b32") and one.reads & signs and index in inner:
            lines[one.line] = lines.get(one.line, 0) + 1
    return [
        Fault(
            "negative-index",
            f"{count} fix-ups of an index that might be negative in the inner loop; "
            "unsigned indices need none",
            line,
            "note",
            True,
            count,
        )
        for line, count in lines.items()
    ]


def of_threads(built: Built, trace: Trace) -> list[Fault]:
    """Threads of a block that have no element of any tensor, or access no memory."""
    if built.widest is not None:
        idle = built.threads - built.widest
        warps, enough = built.threads // WARP, -(-built.widest // WARP)
        message = (
            f"{warps} warps, {built.threads} threads, for tensors of {built.widest} elements at "
            f"most: {idle} threads repeat what others do; num_warps={enough} is enough"
        )
        return [Fault("idle-threads", message)] if idle > 0 and warps > 1 else []
    masks = [each.active for seen in trace.accesses.values() for each in seen]
    idle = int((~np.logical_or.reduce(masks)).sum()) if masks and trace.ended else 0
    message = f"{idle} of the {built.threads} threads of the first block access no memory"
    return [Fault("idle-threads", message)] if idle else []


def of_accesses(costs: Sequence[AccessCost]) -> list[Fault]:
    """Accesses that move more than they use, and banks that are asked several times."""
    found: list[Fault] = []
    for one in costs:
        what = "atomic" if one.atomic else "store" if one.stores else "load"
        stride = f", {one.stride} bytes from thread to thread" if one.stride is not None else ""
        if one.space == "global" and one.waste >= _WASTE:
            message = (
                f"a {what} moves {one.sectors:.3g} sectors of 32 bytes a warp, {one.least:.3g} "
                f"would do{stride}"
            )
            found.append(Fault("uncoalesced", message, one.line, in_loop=one.in_loop))
        if one.space == "shared" and one.conflict >= _CONFLICT:
            message = f"a {what} asks the busiest bank {one.conflict:.3g} times{stride}"
            found.append(Fault("bank-conflict", message, one.line, in_loop=one.in_loop))
    return found


def of_machine(machine: Machine, held: Occupancy | None) -> list[Fault]:
    """What did not fit into registers, and how full a multiprocessor is."""
    found: list[Fault] = []
    lines: dict[int | None, list[int]] = {}
    sass = machine.sass
    for index, one in enumerate(sass.instructions if sass is not None else ()):
        if one.space == "local":
            lines.setdefault(one.line, []).append(index)
    spilled = machine.spill_stores + machine.spill_loads
    kind = "spill" if spilled else "local-memory"
    if spilled:
        how = (
            f"{machine.spill_stores} bytes stored, {machine.spill_loads} loaded, "
            f"with {machine.registers} registers a thread"
        )
    else:
        how = f"{machine.stack} bytes a thread"
    for line, at in lines.items():
        inside = sass is not None and any(i in sass.in_loops for i in at)
        message = f"{len(at)} accesses to local memory here; {how} in all"
        found.append(
            Fault(kind, message, line, "fault" if spilled or inside else "note", inside, len(at))
        )
    if spilled and not lines:
        found.append(Fault("spill", how))
    if held is not None and held.share < _LOW_OCCUPANCY:
        message = f"{held.warps} of {held.most} warps a multiprocessor, limited by {held.limit}"
        found.append(Fault("occupancy", message, severity="note"))
    return found
