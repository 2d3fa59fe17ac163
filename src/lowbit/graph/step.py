"""What runs: launches of kernels, and the memory that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowbit.graph.graph import Tensor
from lowbit.isa import host
from lowbit.jit.launch import Launch, Place, Word
from lowbit.kernels.cpu.shared.layout import PANEL, blocks


@dataclass(frozen=True)
class Step(Launch):
    """One launch of a kernel. node: whom it serves."""

    node: str = ""


def reading_ahead(steps: Sequence[Step], threads: int) -> list[Step]:
    """The same steps, where each product fetches the weights of the next one in passing, as far as
    they fit into the second-level cache beside its own. Of several threads nobody knows which will
    need what."""
    made: list[Step] = []
    panels: Word = 0
    size = 0
    for step in reversed(steps):
        words = step.words
        if "next_panels" in words:
            own, count = _number(words, "next_bytes"), blocks(_number(words, "n"), PANEL)
            item = own * min(_number(words, "item_panels"), count) // count
            room = max(0, host.caches()["L2"] * 3 // 4 - item) if threads == 1 else 0
            ahead = {"next_panels": panels, "next_bytes": min(size, room)}
            panels, size = words["next_panels"], own
            step = replace(step, words={**words, **ahead})
        made.append(step)
    return made[::-1]


def _number(words: Mapping[str, Word], name: str) -> int:
    word = words[name]
    assert isinstance(word, int)
    return word


@dataclass(frozen=True)
class View:
    """Where a value is: `strides` count elements, one for each dimension."""

    tensor: Tensor
    place: Place
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.sizes

    def part(self, shape: Sequence[int], strides: Sequence[int], first: int = 0) -> View:
        """Elements of it from number `first` in memory on, with other sizes and strides."""
        place = self.place + first * self.tensor.itemsize
        return View(replace(self.tensor, shape=tuple(shape)), place, tuple(strides))

    def along(self, axis: int, first: int, count: int, step: int = 1) -> View:
        """`count` elements of an axis, each a step behind the one before."""
        shape, strides = list(self.shape), list(self.strides)
        first *= strides[axis]
        shape[axis] = count
        strides[axis] *= step
        return self.part(shape, strides, first)
