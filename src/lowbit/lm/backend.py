"""What computes a language model's rows: on the CPU, sessions over its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lowbit.graph.lower import dtype_of
from lowbit.graph.session import Session
from lowbit.lm.checkpoint import Checkpoint
from lowbit.lm.network import Networks

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
        # Pages that no token has touched take no memory.
        self._cache = np.empty(tensor.sizes, dtype_of(tensor.dtype))
        self.slots = len(self._cache)

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
        # The last one again, which writes the same to the same place: each number of rows takes a
        # plan, which takes longer to make than some steps.
        extra = -len(ids) % 4 if len(ids) > 8 else 0
        ids, *places = ([*part, *[*part[-1:]] * extra] for part in (ids, positions, slots))
        rows = (np.array(part, np.int64) for part in places)
        at, where = rows
        return self._step(self._embedded(ids), at, self._cache, where)[: len(ids) - extra]

    def head(self, hidden: Rows) -> Rows:
        """As `Backend` says."""
        return self._head(hidden)

    def copy(self, source: int, target: int, tokens: slice) -> None:
        """As `Backend` says."""
        self._cache[target, ..., tokens, :] = self._cache[source, ..., tokens, :]

    def _embedded(self, ids: Sequence[int]) -> Rows:
        rows = self._checkpoint.rows("token_embd.weight", ids)
        return rows * np.float32(self._checkpoint.description.embedding_scale)


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
