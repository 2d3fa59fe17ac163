"""What threads of a warp compute together: shuffles, votes, matches and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WARP = 32

_REDUCE: dict[str, Callable[[Array], Any]] = {
    "add": np.sum,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}
_VOTES: dict[str, Callable[[Array], bool]] = {
    "all": lambda held: bool(held.all()),
    "any": lambda held: bool(held.any()),
    "uni": lambda held: bool(held.all() or not held.any()),
}


def lane_masks(lanes: int) -> dict[str, Array]:
    """The special registers lanemask_eq, _lt and so on of each thread."""
    lane = np.arange(lanes, dtype=np.uint64) % WARP
    own = np.uint64(1) << lane
    below, every = own - np.uint64(1), np.uint64(2**WARP - 1)
    masks = {"eq": own, "lt": below, "le": below | own, "ge": every - below}
    masks["gt"] = masks["ge"] - own
    return {f"lanemask_{name}": held.astype(np.uint32) for name, held in masks.items()}


def shuffle(modes: Sequence[str], values: Array, by: Array, control: Array) -> tuple[Array, Array]:
    """shfl.sync: what another thread of the warp has, its own where that is out of reach; and
    whether it is within."""
    mode = next(m for m in modes if m in ("up", "down", "bfly", "idx"))
    number = np.arange(len(values))
    lane = number % WARP
    by, control = by.astype(np.int64), control.astype(np.int64)
    segment, clamp = (control >> 8) & 31, control & 31
    low, high = lane & segment, (lane & segment) | (clamp & ~segment)
    source = {
        "up": lane - by,
        "down": lane + by,
        "bfly": lane ^ by,
        "idx": low | (by & ~segment),
    }[mode]
    good = source >= high if mode == "up" else source <= high
    whole = number // WARP * WARP + np.where(good, source, lane)
    return values[np.minimum(whole, len(values) - 1)], good


def _warps(active: Array) -> list[Array]:
    """The threads that take part, of each warp."""
    numbers = np.flatnonzero(active)
    return [numbers[numbers // WARP == warp] for warp in np.unique(numbers // WARP)]


def _bits(threads: Array) -> int:
    """A mask of these threads of a warp."""
    return int(np.bitwise_or.reduce(np.uint64(1) << (threads % WARP).astype(np.uint64), initial=0))


def vote(modes: Sequence[str], held: Array, active: Array) -> Array:
    """vote.sync and, of all threads that run, activemask: a mask of those for which a predicate
    holds, or whether it does for all, any, or all alike."""
    mode = next(m for m in modes if m in (*_VOTES, "ballot"))
    found = np.zeros(len(held), np.uint32 if mode == "ballot" else bool)
    for threads in _warps(active):
        inside = held[threads]
        found[threads] = _bits(threads[inside]) if mode == "ballot" else _VOTES[mode](inside)
    return found


def match(values: Array, active: Array, every: bool) -> tuple[Array, Array]:
    """match.sync: a mask of the threads that have the same value, or if `every`, of all threads
    where all have it and else of none; and whether all have it."""
    masks, same = np.zeros(len(values), np.uint32), np.zeros(len(values), bool)
    for threads in _warps(active):
        groups = np.unique(values[threads])
        same[threads] = len(groups) == 1
        for value in groups:
            alike = threads[values[threads] == value]
            masks[alike] = _bits(alike) if not every or len(groups) == 1 else 0
    return masks, same


def reduce(modes: Sequence[str], values: Array, active: Array) -> Array:
    """redux.sync: the sum, least, largest, and so on, of a warp."""
    combine = _REDUCE[next(m for m in modes if m in _REDUCE)]
    found = np.zeros_like(values)
    for threads in _warps(active):
        found[threads] = combine(values[threads]).astype(values.dtype)
    return found


def barrier(mode: str, held: Array, active: Array) -> Array:
    """bar.red: of all threads of a block, how many a predicate holds for (popc), or whether for all
    (and) or any (or)."""
    count = int(held[active].sum())
    if mode == "popc":
        return np.full(len(held), count, np.uint32)
    return np.full(len(held), count == int(active.sum()) if mode == "and" else count > 0)
