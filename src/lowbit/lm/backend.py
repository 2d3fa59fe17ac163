"""What computes a language model's rows: on the CPU, sessions over its graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from mmap import mmap
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lowbit.graph.session import Session
from lowbit.lm.checkpoint import Checkpoint
from lowbit.lm.network import Networks
from lowbit.numerics.formats import dtype_of

Rows = npt.NDArray[np.float32]
# Rows of a prompt that run together. What is left is filled up to one of these.
ROWS = (8, 32, 128, 512)


class Backend(Protocol):
    """A model on a device, and the keys and values of several sequences, each in a slot.

    slots: how many. cut: how many rows the chunks of so many tokens have; the last one's may be
    more than there are tokens. chunk: adds tokens to the sequence of a slot, behind `first` others,
    in one of those numbers of rows: what the head reads, of each token or, with `last`, of the last
    one, float32 [tokens, width]. step: adds a token to each of several sequences: logits
    [tokens, vocabulary]. head: logits of what a chunk gave, without `logit_cap`. copy: keys and
    values of some tokens of a slot to the same places of another.
    """

    @property
    def slots(self) -> int: ...
    def cut(self, count: int) -> tuple[int, ...]: ...
    def chunk(
        self, ids: Sequence[int], first: int, slot: int, rows: int, *, last: bool
    ) -> Rows: ...
    def step(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Rows: ...
    def head(self, hidden: Rows) -> Rows: ...
    def copy(self, source: int, target: int, tokens: slice) -> None: ...


class CpuBackend:
    """Sessions over a model's graphs."""

    def __init__(
        self, checkpoint: Checkpoint, networks: Networks, threads: int | None, isa: str | None
    ) -> None:
        self._checkpoint = checkpoint
        self._chunk, self._step, self._head = (
            Session(one, threads=threads, isa=isa)
            for one in (networks.chunk, networks.step, networks.head)
        )
        tensor = networks.step.tensors["cache"]
        # Pages that no token has touched take no memory; NumPy's own would be large ones.
        dtype = dtype_of(tensor.dtype)
        memory = mmap(-1, math.prod(tensor.sizes) * dtype.itemsize)
        self._cache = np.frombuffer(memory, dtype).reshape(tensor.sizes)
        self.slots = len(self._cache)
        self._idle: dict[tuple[int, int], list[_Step]] = {}  # by rows and threads

    def cut(self, count: int) -> tuple[int, ...]:
        """As `Backend` says."""
        return _chunks(count)

    def chunk(self, ids: Sequence[int], first: int, slot: int, rows: int, *, last: bool) -> Rows:
        """As `Backend` says."""
        positions = np.arange(first, first + rows)
        x = filled(self._embedded(ids), rows)
        y = self._chunk(x, positions, self._cache[slot : slot + 1])[: len(ids)]
        return y[-1:] if last else y

    def step(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Rows:
        """As `Backend` says."""
        rows = len(ids)
        rows += -rows % 4 if rows > 8 else 0  # each number takes a plan, longer than some steps
        idle = self._idle.setdefault((rows, self._step.threads), [])
        step = idle.pop() if idle else _Step(self._step, self._cache, rows)
        # Behind them the last one again, which writes the same to the same place.
        for held, given in zip(step.held, (self._embedded(ids), positions, slots), strict=True):
            held[: len(ids)] = given
            held[len(ids) :] = given[-1]
        (logits,) = step.run()
        idle.append(step)
        return logits[: len(ids)]

    def head(self, hidden: Rows) -> Rows:
        """As `Backend` says."""
        return self._head(hidden)

    def copy(self, source: int, target: int, tokens: slice) -> None:
        """As `Backend` says."""
        self._cache[target, ..., tokens, :] = self._cache[source, ..., tokens, :]

    def _embedded(self, ids: Sequence[int]) -> Rows:
        rows = self._checkpoint.rows("token_embd.weight", ids)
        scale = self._checkpoint.description.embedding_scale
        return rows if scale == 1 else rows * np.float32(scale)


class _Step:
    """A step of so many sequences, ready to run: held: x, positions and slots, which it reads."""

    def __init__(self, session: Session, cache: npt.NDArray[Any], rows: int) -> None:
        _, width = session.graph.tensors["x"].shape
        x = np.empty((rows, int(width)), np.float32)
        at, slots = np.zeros((2, rows), np.int64)
        self.held = x, at, slots
        self.run = session.bind(x, at, cache, slots)


def filled(x: Rows, rows: int) -> Rows:
    """So many rows, with zeros behind what there is: each number of rows would take a plan."""
    if len(x) == rows:
        return x
    return np.concatenate([x, np.zeros((rows - len(x), x.shape[1]), np.float32)])


@cache
def _chunks(count: int) -> tuple[int, ...]:
    """The rows of the chunks of so many tokens: the fewest, where a chunk's weights, which are read
    once, count as much as 12 rows; that is what they take on the machines that were measured."""
    if count <= 0:
        return ()
    rows = [ROWS[-1]] if count > ROWS[-1] else reversed(ROWS)
    cuts = [(size, *_chunks(count - size)) for size in rows]
    return min(cuts, key=lambda cut: sum(cut) + 12 * len(cut))
