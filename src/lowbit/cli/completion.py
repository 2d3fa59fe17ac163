"""The names that a shell offers for an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress


def offered(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers for an argument: these names, so far as they begin with what is typed;
    none of them, so files, where an extra that they need is missing."""

    def offer(incomplete: str) -> list[str]:
        with suppress(Exception):  # a shell has no use for an error
            return [name for name in names() if name.startswith(incomplete)]
        return []

    return offer


def exercises() -> Iterable[str]:
    """The operations that the lab has teaching kernels for."""
    from lowbit.lab.exercises.course import course

    return [exercise.name for exercise in course]
