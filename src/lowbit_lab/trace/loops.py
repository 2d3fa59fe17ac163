"""Regions of machine code that hold samples: loops, and straight-line code outside of them.

Code is decoded from where samples were; loops are found by the branches that go back.

A sampled address is the start of an instruction, so what follows it decodes without symbols and
without the start of a function. Whatever can be reached from there and leads back is a loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from iced_x86 import Decoder, FlowControl, Instruction

_LONGEST = 15
_MOST_REACHED = 24_000  # instructions that are followed from one place
_FEWEST = 8  # instructions of straight-line code that is a region
_DENSE = 0.1  # of a function's samples for each instruction: blocks with fewer are apart
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
class Region:
    """Code that runs from one end to the other: its first instruction and all of them, in the
    order of their addresses."""

    head: int
    body: tuple[int, ...]


class Cycle(Region):
    """A loop, with those inside of it."""


class Straight(Region):
    """Code of one function outside of loops: its blocks that hold samples."""


def hottest(
    code: Code,
    samples: Mapping[int, int],
    entry: Callable[[int], int | None] = lambda address: None,
) -> list[tuple[Region, int]]:
    """Regions with the samples that lie in them and in no loop inside of them, the most first.

    `samples`: how many there are at each address. `entry`: the first address of the function at
    an address, None where that is not known.
    """
    found: Counter[Region] = Counter()
    known: dict[int, Cycle | None] = {}  # by place, where no other loop can be nearer
    straight: dict[int, dict[int, int]] = {}  # samples by place, by the function's first address
    roots: dict[int, int] = {}  # a place that leads to this one, by place
    for address, count in sorted(samples.items()):
        if address not in known:
            cycle = known[address] = innermost(code, address)
            if cycle is None:
                reached = _outside_loops(code, address)
                root = entry(address) or min(
                    (roots[x] for x in reached if x in roots), default=address
                )
                known.update(dict.fromkeys(reached))
                roots.update(dict.fromkeys(reached, root))
            elif _holds_no_other(code, cycle):
                known.update(dict.fromkeys(cycle.body, cycle))
        cycle = known[address]
        if cycle is not None:
            found[cycle] += count
        elif code.at(address) is not None:
            root = entry(address) or roots[address]
            straight.setdefault(root, {})[address] = count
    for root, places in straight.items():
        found.update(dict(_straight(code, root, places)))
    return found.most_common()


def _outside_loops(code: Code, start: int) -> set[int]:
    """What can be reached from an address that is in no loop, and is in none itself."""
    reached = _reached(code, start)
    if len(reached) >= _MOST_REACHED:
        return {start}
    before = _before(code, reached)
    # A loop is left over when all that nothing leads to is taken away, and again.
    left = {address: len(before.get(address, ())) for address in reached}
    waiting, taken = [start], set[int]()
    while waiting:
        address = waiting.pop()
        taken.add(address)
        for after in code.after(address):
            if after in left:
                left[after] -= 1
                if not left[after]:
                    waiting.append(after)
    return taken


def _straight(code: Code, root: int, places: Mapping[int, int]) -> Iterator[tuple[Straight, int]]:
    """The blocks with samples of one function, those with many apart from those with few."""
    reached: set[int] = set()
    for start in (root, *sorted(places)):
        if start not in reached:
            reached |= _reached(code, start)
    before = _before(code, reached)
    blocks: dict[tuple[int, ...], int] = {}
    own: dict[int, tuple[int, ...]] = {}
    for address in places:
        if address not in own:
            own.update(dict.fromkeys(block := _block(code, address, before), block))
        blocks[own[address]] = blocks.get(own[address], 0) + places[address]
    while blocks:
        mean = sum(blocks.values()) / sum(map(len, blocks))
        dense = {b: count for b, count in blocks.items() if count >= _DENSE * mean * len(b)}
        body = tuple(sorted(address for block in dense for address in block))
        if len(body) >= _FEWEST:
            yield Straight(body[0], body), sum(dense.values())
        blocks = {block: count for block, count in blocks.items() if block not in dense}


def _block(code: Code, address: int, before: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The instructions around an address that always run together."""
    first = address
    while len(earlier := before.get(first, ())) == 1 and len(code.after(earlier[0])) == 1:
        first = earlier[0]
    block = [first]
    while len(after := code.after(block[-1])) == 1 and len(before.get(after[0], ())) == 1:
        block.append(after[0])
    return tuple(block)


def innermost(code: Code, address: int) -> Cycle | None:
    """The smallest loop through an address; None if nothing leads back to it."""
    loops = (loop for loop in _loops(code, _reached(code, address)) if address in loop[1])
    head, body = min(loops, key=lambda loop: len(loop[1]), default=(0, set[int]()))
    return Cycle(head, tuple(sorted(body))) if body else None


def own(code: Code, region: Region) -> tuple[int, ...]:
    """The instructions of a region that are in no loop inside of it."""
    if isinstance(region, Straight):
        return region.body
    body = set(region.body)
    return tuple(
        sorted(body.difference(*(inner for _, inner in _loops(code, body) if inner < body)))
    )


def _loops(code: Code, within: set[int]) -> Iterator[tuple[int, set[int]]]:
    """First instruction and all of them, of each branch back among these instructions."""
    before = _before(code, within)
    for address in within:
        for head in code.after(address):
            if head <= address and head in within:
                yield head, _body(head, address, before)


def _before(code: Code, within: Iterable[int]) -> dict[int, list[int]]:
    """Which of these instructions lead to each."""
    before: dict[int, list[int]] = {}
    for address in within:
        for after in code.after(address):
            before.setdefault(after, []).append(address)
    return before


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


def instructions(code: Code, region: Region) -> Iterator[Instruction]:
    """Of a region, without those of loops inside of it."""
    for address in own(code, region):
        one = code.at(address)
        if one is not None:
            yield one
