"""An exercise of the course: what it says about one operation."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.registry import Registry
from lowbit.spec import Operation


@dataclass(frozen=True)
class Exercise:
    """An exercise of the course. number: from 1, its place in `lowbit.spec.exercises`. hints: from
    the idea to nearly the code; the last one may have several lines."""

    number: int
    operation: Operation
    formula: str
    idea: str
    hints: tuple[str, str, str]

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.operation.name

    @property
    def stem(self) -> str:
        """The name of its file, without the ending."""
        return f"{self.number:02d}_{self.name}"


course: Registry[Exercise] = Registry("exercise", "lowbit.lab.exercises.course")
"""By the name of the operation, in the order of their numbers."""


def find(what: str) -> Exercise:
    """The exercise of a number or of an operation's name. ValueError for one that there is not."""
    for exercise in course:
        if what in (exercise.name, str(exercise.number), f"{exercise.number:02d}"):
            return exercise
    names = ", ".join(f"{one.number} {one.name}" for one in course)
    raise ValueError(f"there is no exercise {what!r}; there are {names}")
