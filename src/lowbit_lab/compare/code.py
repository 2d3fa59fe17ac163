"""Instructions of whatever language, their loops, and what the instructions of a loop are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowbit.registry.locks import cached_property

Kind = Literal["arithmetic", "integer", "conversion", "memory", "control", "other"]

KINDS = ("arithmetic", "address", "conversion", "memory", "control", "other")
"""What instructions of a loop are for: the result, addresses, another type of the same value, loads
and stores, the loop itself, and the rest (moves, predicates)."""

Mix = Mapping[str, float]


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    text, opcode: without its predicate, the opcode with its suffixes. line: of the kernel's own
    text. guard: the predicate, with "!" if negated. target: the label that a jump leads to.
    address: the registers of the address. space: "global", "shared", "local", "param", "constant"
    or "". nbytes: that a thread loads or stores. uniform: whether a warp executes it once. kind:
    what it is by itself; "integer" may turn out to be an address.
    """

    text: str
    opcode: str
    line: int | None = None
    operands: tuple[str, ...] = ()
    guard: str = ""
    target: str | None = None
    writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    address: frozenset[str] = frozenset()
    kind: Kind = "other"
    space: str = ""
    nbytes: int = 0
    stores: bool = False
    uniform: bool = False

    def __str__(self) -> str:
        return f"@{self.guard} {self.text}" if self.guard else self.text

    @property
    def loads(self) -> bool:
        """Whether it reads memory that other threads may write."""
        return self.kind == "memory" and self.reads_memory

    @property
    def reads_memory(self) -> bool:
        """The same, whatever else it does: a processor widens or multiplies what it loads."""
        return bool(self.nbytes) and not self.stores and self.space in ("global", "shared", "")


@dataclass(frozen=True)
class Code:
    """The instructions of one function in their order, and where labels are."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def loops(self) -> tuple[range, ...]:
        """The instructions of each loop, innermost loops only: a jump back makes one. One that
        only waits, as at the end of machine code, is none."""
        found = set[tuple[int, int]]()
        for last, one in enumerate(self.instructions):
            first = self.labels.get(one.target or "", last + 1)
            if first < last:
                found.add((first, last))
        inner = [
            (first, last)
            for first, last in found
            if not any((f, e) != (first, last) and first <= f and e <= last for f, e in found)
        ]
        return tuple(range(first, last + 1) for first, last in sorted(inner))

    @cached_property
    def in_loops(self) -> frozenset[int]:
        """The instructions that are in a loop, inner or outer."""
        inside = set[int]()
        for last, one in enumerate(self.instructions):
            first = self.labels.get(one.target or "", last + 1)
            inside.update(range(first, last + 1))
        return frozenset(inside)

    def main_loop(self, counts: Mapping[int, int] | None = None) -> range | None:
        """The innermost loop that was run most, by how often instructions were; else the one that
        loads most. None without a loop."""

        def weight(loop: range) -> tuple[float, float, int]:
            body = [self.instructions[i] for i in loop]
            run = sum((counts or {}).get(i, 0) for i in loop)
            return run, sum(one.nbytes for one in body if one.reads_memory), len(body)

        return max(self.loops, key=weight, default=None)

    def body(self, loop: Iterable[int]) -> list[Instruction]:
        """The instructions of a loop."""
        return [self.instructions[i] for i in loop]


def mix(body: Sequence[Instruction]) -> dict[str, int]:
    """How many instructions of a loop's body are of each of KINDS."""
    roles = roles_of(body)
    return {kind: roles.count(kind) for kind in KINDS}


def roles_of(body: Sequence[Instruction]) -> list[str]:
    """The kind of each instruction of a loop's body. Integers from which an address is made are
    "address", those that decide whether the loop goes on "control"."""
    roles: list[str] = [one.kind for one in body]
    for role, starts in (
        ("address", lambda one: one.address),
        ("control", lambda one: one.reads if one.kind == "control" else frozenset[str]()),
    ):
        for i in _feeding(body, [starts(one) for one in body]):
            if roles[i] in ("integer", "other"):
                roles[i] = role
    return ["arithmetic" if role == "integer" else role for role in roles]


def _feeding(body: Sequence[Instruction], starts: Sequence[frozenset[str]]) -> set[int]:
    """Which instructions compute what others start from, also from one trip to the next. Neither
    loads nor floats are followed."""
    found, wanted = set[int](), set[str]()
    for _ in range(2):
        for i in reversed(range(len(body))):
            one = body[i]
            if one.writes & wanted and one.kind in ("integer", "other", "conversion"):
                found.add(i)
                if not one.guard:
                    wanted -= one.writes
                wanted |= one.reads
            elif one.writes & wanted and not one.guard:
                wanted -= one.writes
            wanted |= starts[i]
    return found


def bytes_loaded(body: Iterable[Instruction]) -> int:
    """What a thread loads in one pass."""
    return sum(one.nbytes for one in body if one.loads)
