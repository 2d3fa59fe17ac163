"""What runs: launches of kernels, and the memory that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lowbit.graph.graph import Tensor
from lowbit.jit.kernel import Program


@dataclass(frozen=True)
class Place:
    """Some bytes behind the beginning of a buffer, whose address is found when a plan is bound."""

    buffer: str
    offset: int = 0

    def __add__(self, distance: int) -> Place:
        return replace(self, offset=self.offset + distance)


Word = Place | int | None


@dataclass(frozen=True)
class Step:
    """One launch of a kernel: its program, and a word for each parameter. node: whom it serves."""

    node: str
    program: Program
    words: Mapping[str, Word]

    def buffers(self) -> Iterator[str]:
        """The buffers that it names."""
        return (word.buffer for word in self.words.values() if isinstance(word, Place))


@dataclass(frozen=True)
class View:
    """Where a value is: `strides` count elements, one for each dimension."""

    tensor: Tensor
    place: Place
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.sizes
