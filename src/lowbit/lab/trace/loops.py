"""Loops in machine code: decoded from where samples were, and found by the branches that go back.

A sampled address is the start of an instruction, so what follows it decodes without symbols and
without the start of a function. Whatever can be reached from there and leads back is a loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from iced_x86 import Decoder, FlowControl, Instruction

_LONGEST = 15
_MOST_REACHED = 12_000  # instructions that are followed from one place
_BRANCHES = (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH)
_ENDS = (
    FlowControl.RETURN, FlowControl.INTERRUPT, FlowControl.EXCEPTION, FlowControl.INDIRECT_BRANCH,
)  # fmt: skip


class Code:
    """Machine code in pieces: (address, bytes)."""

    def __init__(self, pieces: Sequence[tuple[int, bytes]]) -> None:
        self._pieces = sorted(pieces)
        self.at = cache(self._decode)

    def _decode(self, address: int) -> Instruction | None:
        number = bisect_right(self._pieces, address, key=lambda one: one[0]) - 1
        if number < 0:
            return None
        start, data = self._pieces[number]
        part = data[address - start : address - start + _LONGEST]
        one = Decoder(64, part, ip=address).decode() if part else None
        return None if one is None or one.is_invalid else one

    def after(self, address: int) -> tuple[int, ...]:
        """Where it can go on from an instruction; calls come back."""
        one = self.at(address)
        if one is None or one.flow_control in _ENDS:
            return ()
        found = [one.near_branch_target] if one.flow_control in _BRANCHES else []
        if one.flow_control != FlowControl.UNCONDITIONAL_BRANCH:
            found.append(one.next_ip)
        return tuple(found)


@dataclass(frozen=True)
class Cycle:
    """A loop: its first instruction and all of them, in the order of their addresses."""

    head: int
    body: tuple[int, ...]


def hottest(code: Code, samples: Mapping[int, int]) -> list[tuple[Cycle, int]]:
    """Loops with the samples that lie in them and in no loop inside of them, the most first.

    `samples`: how many there are at each address.
    """
    inner: Counter[Cycle] = Counter()
    known: dict[int, Cycle] = {}  # by the places of loops that hold no other
    for address, count in samples.items():
        found = known.get(address) or innermost(code, address)
        if found is not None:
            inner[found] += count
            if _holds_no_other(code, found):
                known.update(dict.fromkeys(found.body, found))
    return inner.most_common()


def innermost(code: Code, address: int) -> Cycle | None:
    """The smallest loop through an address; None if nothing leads back to it."""
    reached = _reached(code, address)
    before: dict[int, list[int]] = {}
    for one in reached:
        for after in code.after(one):
            before.setdefault(after, []).append(one)
    loops = []
    for one in reached:
        for head in code.after(one):
            if head <= one and head in reached:
                body = _body(head, one, before)
                if address in body:
                    loops.append(Cycle(head, tuple(sorted(body))))
    return min(loops, key=lambda loop: len(loop.body), default=None)


def _holds_no_other(code: Code, cycle: Cycle) -> bool:
    body = set(cycle.body)
    back = {
        to for one in cycle.body for to in code.after(one) if to <= one and to in body
    }  # fmt: skip
    return back == {cycle.head}


def _reached(code: Code, start: int) -> set[int]:
    """What can be reached from an address, itself too."""
    seen, waiting = {start}, [start]
    while waiting and len(seen) < _MOST_REACHED:
        for after in code.after(waiting.pop()):
            if after not in seen and code.at(after) is not None:
                seen.add(after)
                waiting.append(after)
    return seen


def _body(head: int, tail: int, before: Mapping[int, Iterable[int]]) -> set[int]:
    """What leads to `tail` without going through `head`: the natural loop of a branch back."""
    seen, waiting = {head, tail}, [tail]
    while waiting:
        one = waiting.pop()
        if one == head:
            continue
        for earlier in before.get(one, ()):
            if earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
    return seen


def instructions(code: Code, cycle: Cycle) -> Iterator[Instruction]:
    """Of a loop."""
    for address in cycle.body:
        one = code.at(address)
        if one is not None:
            yield one
