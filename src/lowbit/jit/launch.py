"""A launch of a kernel, as data: its program, and what each parameter is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.jit.entry import word
from lowbit.jit.kernel import Program


@dataclass(frozen=True)
class Place:
    """Some bytes behind the beginning of a buffer, whose address a call or a plan finds."""

    buffer: str
    offset: int = 0

    def __add__(self, distance: int) -> Place:
        return replace(self, offset=self.offset + distance)


Word = Place | int | None


@dataclass(frozen=True)
class Launch:
    """A program, and a word for each of its parameters: a number, a place, or None, which is 0."""

    program: Program
    words: Mapping[str, Word]

    @property
    def places(self) -> dict[str, Place]:
        """The words that are found later, by parameter."""
        return {name: one for name, one in self.words.items() if isinstance(one, Place)}

    @property
    def numbers(self) -> dict[str, int]:
        """The others."""
        return {name: one or 0 for name, one in self.words.items() if not isinstance(one, Place)}

    def buffers(self) -> Iterator[str]:
        """The buffers that it names."""
        return (place.buffer for place in self.places.values())


def moved(address: Any, distance: int) -> Any:
    """What is so many bytes behind an address, the first element of an array, or a place; nowhere
    stays nowhere."""
    if address is None or not distance:
        return address
    return (word(address) if isinstance(address, np.ndarray) else address) + distance
