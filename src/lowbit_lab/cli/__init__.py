"""The lab's commands, which join the command `lowbit`: a file a command."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lowbit.registry import Registry


def load() -> None:
    """Import them all; each makes itself known."""
    files: Registry[Callable[..., None]] = Registry("command", "lowbit_lab.cli")
    files.load()


def exercises() -> Iterable[str]:
    """The operations that the lab has teaching kernels for."""
    from lowbit_lab.exercises.course import course

    return [exercise.name for exercise in course]
