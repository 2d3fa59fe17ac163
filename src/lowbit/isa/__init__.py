"""Instruction sets: facts and instructions as data, and which one runs here.

All are in one table, which the files of this package fill. Its chains of fall-backs are the
`fallback` field of each set, followed by `chain`. `LOWBIT_ISA` forces a set for the process; the
`isa=` argument of the public functions forces it for one call.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from lowbit.isa import host
from lowbit.isa.generic import GENERIC
from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import TABLE, InstructionSet

__all__ = [
    "GENERIC",
    "SETS",
    "TABLE",
    "Instruction",
    "InstructionSet",
    "active",
    "available",
    "chain",
    "get",
    "report",
]


def chain(start: InstructionSet, *, extensions: bool = False) -> tuple[InstructionSet, ...]:
    """`start` and its fall-backs, best first; with the `extensions` of each that run here."""
    sets: list[InstructionSet] = []
    one: InstructionSet | None = start
    while one is not None:
        if extensions:
            sets += (e for e in TABLE if e.extension and e.fallback == one.name and not e.missing())
        sets.append(one)
        one = None if one.fallback is None else TABLE.get(one.fallback)
    return tuple(sets)


# The levels, best first: the first that this machine can run is the one that it uses.
SETS = {
    one.name: one for one in sorted(TABLE, key=lambda one: -len(chain(one))) if not one.extension
}


@cache
def available() -> tuple[str, ...]:
    """Names of the sets that this machine can run, best first."""
    return tuple(name for name, one in SETS.items() if not one.missing())


def named(name: str) -> InstructionSet:
    """The set called `name`, whether or not this machine can run it. ValueError if unknown."""
    if name not in SETS:
        raise ValueError(f"no instruction set is called {name!r}; known: {', '.join(SETS)}")
    return SETS[name]


@cache
def get(name: str) -> InstructionSet:
    """The set called `name`; RuntimeError, naming what there is, if this machine cannot run it."""
    reason = named(name).missing()
    if reason:
        raise RuntimeError(
            f"instruction set {name!r} cannot run here: {reason}; "
            f"this machine has: {', '.join(available())}"
        )
    return SETS[name]


@cache
def active(name: str | None = None) -> InstructionSet:
    """The set to use: `name`, else the one that LOWBIT_ISA forces, else the best that runs.

    The variable is read once. ValueError or RuntimeError, naming what there is, for a set that
    is unknown or cannot run here.
    """
    forced = os.environ.get("LOWBIT_ISA")
    if name or not forced:
        return get(name or available()[0])
    try:
        return get(forced)
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"LOWBIT_ISA={forced}: {error}") from None


def report() -> dict[str, Any]:
    """What `lowbit info` shows, as plain data: CPU, features, sets found and used, caches."""
    used = active().name
    sets = [
        {"name": name, "available": not one.missing(), "used": name == used, "why": one.missing()}
        for name, one in [*SETS.items(), *((e.name, e) for e in TABLE if e.extension)]
    ]
    return {
        "cpu": host.cpu_name(),
        "model": host.model_name(),
        "features": sorted(host.features()),
        "instruction_sets": sets,
        "active": used,
        "forced": os.environ.get("LOWBIT_ISA") or None,
        "caches": host.caches(),
    }
