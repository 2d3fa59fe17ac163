"""The lessons of the course, one for each operation of `lowbit.spec.exercises`."""

from __future__ import annotations

from lowbit.lab.lessons.blocks import BLOCKS
from lowbit.lab.lessons.lesson import Lesson
from lowbit.lab.lessons.loops import LOOPS

__all__ = ["LESSONS", "Lesson", "find"]

LESSONS: tuple[Lesson, ...] = (*BLOCKS, *LOOPS)
"""In the order of the course."""


def find(what: str) -> Lesson:
    """The lesson of a number or of an operation's name. ValueError for one that there is not."""
    for lesson in LESSONS:
        if what in (lesson.name, str(lesson.number), f"{lesson.number:02d}"):
            return lesson
    names = ", ".join(f"{lesson.number} {lesson.name}" for lesson in LESSONS)
    raise ValueError(f"there is no exercise {what!r}; there are {names}")
