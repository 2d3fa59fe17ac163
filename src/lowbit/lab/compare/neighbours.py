"""A variant set against the one before it: what changed in the text, in types, in the loop, in
time."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lowbit.lab.compare.code import KINDS
from lowbit.lab.compare.explain import Explained
from lowbit.lab.compare.variant import without_name

_MOST_LINES = 24


@dataclass(frozen=True)
class Change:
    """What is different in `after`.

    text: lines removed ("-") and added ("+"), comments and decorators of types aside. types: of
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
        loop=_loop(before, after),
        registers=_registers(before, after),
        faults=_faults(before, after),
        time=after.seconds[1] / before.seconds[1] if before.seconds and after.seconds else None,
    )


def _body(one: Explained) -> list[str]:
    """The text without the kernel's name where it is defined, which differs always."""
    return [line.rstrip() for line in without_name(one.built.lines) if line.strip()]


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


def _loop(before: Explained, after: Explained) -> dict[str, tuple[float, float]]:
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
