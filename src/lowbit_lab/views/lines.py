"""What each line of a kernel asks of a GPU's memory: lanes that a mask leaves idle, and sectors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.run.trace import Access, Event, Place, Program

# Memory is moved in sectors of 32 bytes (CUDA C++ Programming Guide, "Device Memory Accesses"): a
# warp asks at once for all that its 32 lanes touch.
WARP, SECTOR = 32, 32
_THREADED = 6  # numbers of a program that is a thread: its block's and its own


@dataclass
class LineTraffic:
    """All accesses of a line to the tensors of an operation. lanes, idle: how many, and how many of
    them a mask leaves out. asked: the sectors that warps ask for; needed: the fewest that hold the
    bytes which they touch. Lanes lie in warps in their C order, 32 after another; tensors begin
    at a sector."""

    lanes: int = 0
    idle: int = 0
    asked: int = 0
    needed: int = 0


def line_traffic(
    events: Iterable[Event], tensors: Sequence[str], block: Sequence[int]
) -> dict[Place, LineTraffic]:
    """What each line did to these tensors. block: its threads, where programs are threads."""
    found = defaultdict[Place, LineTraffic](LineTraffic)
    warps = defaultdict[tuple[object, ...], list[Access]](list)
    times = Counter[tuple[object, ...]]()
    for event in events:
        if not isinstance(event, Access) or event.place is None or event.tensor not in tensors:
            continue
        line = found[event.place]
        line.lanes += event.elements.size
        line.idle += int((~event.active).sum())
        if len(event.program) < _THREADED:
            _count(line, event.offsets, event.active, event.itemsize)
        else:  # lanes of a warp that are at the same line for the same time go together
            key = event.program, event.place, event.tensor
            warps[_warp(event.program, block), event.place, event.tensor, times[key]].append(event)
            times[key] += 1
    for (_, place, *_), lanes in warps.items():
        offsets, active = (
            np.concatenate([getattr(one, name).reshape(-1) for one in lanes])
            for name in ("offsets", "active")
        )
        assert isinstance(place, Place)
        _count(found[place], offsets, active, lanes[0].itemsize)
    return dict(found)


def _warp(program: Program, block: Sequence[int]) -> tuple[Program, int]:
    x, y, z = program[3:]
    return program[:3], (x + block[0] * (y + block[1] * z)) // WARP


def _count(
    line: LineTraffic, offsets: NDArray[np.int64], active: NDArray[np.bool_], size: int
) -> None:
    flat, on = offsets.reshape(-1), active.reshape(-1)
    for first in range(0, flat.size, WARP):
        lanes = flat[first : first + WARP][on[first : first + WARP]] * size
        if lanes.size:
            touched = np.unique(lanes[:, None] + np.arange(size))
            line.asked += np.unique(touched // SECTOR).size
            line.needed += -(-touched.size // SECTOR)


def threads_of(programs: Iterable[Program]) -> list[int]:
    """The threads of a block on each axis, as far as they did something."""
    own = [program[3:] for program in programs if len(program) == _THREADED]
    return [1 + max(axis) for axis in zip(*own, strict=True)] if own else []


def as_data(
    found: Mapping[Place, LineTraffic], lines: Mapping[Place, list[int] | None]
) -> list[dict[str, object]]:
    """As JSON has it, for lines that are listed."""
    return [
        {"line": lines[place], **vars(one)}
        for place, one in found.items()
        if lines[place] is not None
    ]
