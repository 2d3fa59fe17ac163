"""Instruction sets: facts and instructions as data, and which one runs here.

The chain of fall-backs is the `fallback` field of each set, followed by `chain`. `LOWBIT_ISA`
forces a set for the process; the `isa=` argument of the public functions forces it for one call.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from lowbit.isa import host
from lowbit.isa.amx import AMX
from lowbit.isa.avx2 import AVX2
from lowbit.isa.avx2_vnni import AVX2_VNNI
from lowbit.isa.avx512 import AVX512
from lowbit.isa.avx512_vnni import AVX512_VNNI
from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.neon import NEON_DOTPROD, NEON_I8MM

__all__ = ["SETS", "Instruction", "InstructionSet", "active", "available", "chain", "get", "report"]

GENERIC = InstructionSet(
    name="generic",
    features=(),
    fallback=None,
    vector_bytes=16,
    vector_registers=16,
    architecture=None,
)

# Best first; the first that this machine can run is the one that it uses.
SETS = {
    s.name: s for s in (AMX, AVX512_VNNI, AVX2_VNNI, AVX512, AVX2, NEON_I8MM, NEON_DOTPROD, GENERIC)
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


def chain(start: InstructionSet) -> tuple[InstructionSet, ...]:
    """`start` and its fall-backs, best first."""
    sets = [start]
    while sets[-1].fallback is not None:
        sets.append(SETS[sets[-1].fallback])
    return tuple(sets)


def report() -> dict[str, Any]:
    """What `lowbit info` shows, as plain data: CPU, features, sets found and used, caches."""
    used = active().name
    sets = [
        {"name": name, "available": not one.missing(), "used": name == used, "why": one.missing()}
        for name, one in SETS.items()
    ]
    return {
        "cpu": host.cpu_name(),
        "model": host.model_name(),
        "features": sorted(host.features()),
        "instruction_sets": sets,
        "active": used,
        "forced": os.environ.get("LOWBIT_ISA") or None,
        "caches": host.caches(),
        "amx": AMX.missing() or "available: the CPU has it and the system granted the tiles",
    }
