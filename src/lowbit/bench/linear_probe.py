"""Trying a foreign linear layer in a process of its own before it may run in ours.

Run as `python -m lowbit.bench.linear_probe NAME SEED SHAPES`, where SHAPES is JSON, a list of the
fields of `LinearShape`. It prints a line for each shape that it comes through: as JSON, the reason
not to use it there, or null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from lowbit.bench.apart import run_apart
from lowbit.bench.linear_entries import find
from lowbit.bench.linear_problem import Linear, LinearShape, LinearTask

_MOST_ROWS = 16  # as good as more, and some take a second for each


def attempt(one: Linear, shapes: Sequence[LinearShape], seed: int) -> dict[LinearShape, str]:
    """The shapes that it cannot be used for, and why: it says so, or does not live through it."""
    tried = list(dict.fromkeys(_few_rows(shape) for shape in shapes))
    reasons: dict[LinearShape, str] = {}
    while tried:
        lines, end = _run(one, tried, seed)
        for shape, reason in zip(tried, lines, strict=False):
            if reason is not None:
                reasons[shape] = reason
        if len(lines) < len(tried):  # the one after the last line ended it; the others are left
            reasons[tried[len(lines)]] = end
        tried = tried[len(lines) + 1 :]
    return {shape: reasons[_few_rows(shape)] for shape in shapes if _few_rows(shape) in reasons}


def _few_rows(shape: LinearShape) -> LinearShape:
    return replace(shape, m=min(shape.m, _MOST_ROWS))


def _run(one: Linear, shapes: Sequence[LinearShape], seed: int) -> tuple[list[str | None], str]:
    """What a process said of the first of the shapes, and how it ended."""
    text = json.dumps([asdict(shape) for shape in shapes])
    ended = run_apart("lowbit.bench.linear_probe", [one.name, str(seed), text])
    return _reasons(ended.said), ended.how


def _reasons(text: str) -> list[str | None]:
    """What the process wrote; a library may have written as well."""
    found = []
    for line in text.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and "refused" in one:
            found.append(one["refused"])
    return found


def main(arguments: Sequence[str]) -> None:
    """Prepare and call the entry once for each shape."""
    name, seed, text = arguments
    one = find(name)
    for fields in json.loads(text):
        reason = None
        try:
            ready = one.prepare(LinearTask.make(LinearShape(**fields), int(seed)), threads=1)
            ready.read(ready.call())
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = "refused: " + str(error).splitlines()[0]
        print(json.dumps({"refused": reason}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
