"""What the course says about one operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowbit.spec import Operation


@dataclass(frozen=True)
class Lesson:
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
