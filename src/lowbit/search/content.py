"""What an index holds at one moment, and how the next moment is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowbit.registry.locks import cached_property
from lowbit.search.frame import Frame
from lowbit.search.groups import Chunk, Floats, Ids
from lowbit.search.storage import Coded, Part, taken

LARGEST_ID = (1 << 63) - 2  # after which there is one more, for `next_id`
MOST = 1 << 16  # vectors in a part
_PIECE = 1 << 12  # that are packed together: what that takes stays in the caches


@dataclass(frozen=True)
class Content:
    """Vectors of `dim` numbers of a format, with a bias each or without, in parts, which are full
    but for the last one and those that vectors were removed from.

    `frame`: what they are kept in; None before there was any vector. `early`: while there are few
    vectors, and nobody trained, the vectors themselves, since the frame changes with them.
    `named`: vectors have ids of their own; else an id is a position, which counts from 0.
    `next_id`: what a vector is called that is added without an id.
    """

    dim: int
    dtype: str
    biased: bool
    parts: tuple[Part, ...] = ()
    frame: Frame | None = None
    early: Floats | None = None
    named: bool = False
    next_id: int = 0

    def _part(self, capacity: int, named: bool) -> Part:
        return Part.empty(self.dim, self.dtype, capacity, self.biased, named)

    @cached_property
    def count(self) -> int:
        """How many vectors there are."""
        return sum(part.count for part in self.parts)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(part.chunk for part in self.parts)

    @cached_property
    def starts(self) -> Ids:
        """The position that each part begins with, and their end."""
        return np.cumsum([0, *(part.count for part in self.parts)])

    @cached_property
    def ids(self) -> Ids:
        """All ids, in the order of positions."""
        if not self.named:
            return np.arange(self.count)
        own = [part.ids for part in self.parts if part.ids is not None]
        return np.concatenate([np.empty(0, np.int64), *own])

    @cached_property
    def _ascending(self) -> tuple[Ids, Ids | None]:
        """Ids in ascending order, and their positions, or None if they are in that order."""
        ids = self.ids
        if (ids[1:] > ids[:-1]).all():
            return ids, None
        order = np.argsort(ids)
        return ids[order], order

    def ids_at(self, positions: Ids) -> Ids:
        """The ids of vectors at these positions."""
        if not self.named:
            return positions
        found = np.empty_like(positions)
        which = np.searchsorted(self.starts, positions, side="right") - 1
        for number in np.flatnonzero(np.bincount(which.ravel())):
            own, here = self.parts[number].memory.ids, which == number
            assert own is not None
            found[here] = own[positions[here] - self.starts[number]]
        return found

    def positions(self, ids: Ids) -> Ids:
        """Where vectors of these ids are; −1: nowhere."""
        if not self.named:
            if not ids.size or (ids.min() >= 0 and ids.max() < self.count):
                return ids
            return np.where((ids >= 0) & (ids < self.count), ids, -1)
        ascending, order = self._ascending
        if not len(ascending):
            return np.full(ids.shape, -1)
        places = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
        found = places if order is None else order[places]
        return np.where(ascending[places] == ids, found, -1)

    def taken(self, positions: Ids) -> Part:
        """The vectors at these positions, ascending, at least one, in a part of their own."""
        return taken(self.parts, positions, named=False)

    def recoded(self, coded: Sequence[Coded], frame: Frame) -> Content:
        """With the same vectors as they are stored in another frame."""
        ids = self.ids if self.named else None
        content = replace(self, parts=(), frame=frame).extended(coded, ids)
        return replace(content, next_id=self.next_id)

    def extended(self, made: Sequence[Coded], ids: Ids | None) -> Content:
        """With more vectors, in the order in which they come. Only who holds the index's lock may
        ask for it, and only of what the index holds."""
        left = sum(len(one.codes) for one in made)
        if ids is None and self.named:
            if self.next_id + left > LARGEST_ID:
                raise ValueError(f"no ids are left after {self.next_id - 1}; give ids")
            ids = np.arange(self.next_id, self.next_id + left)
        content = self if ids is None else self.with_names()
        parts, done = list(content.parts), 0
        for one in made:
            first = 0
            while first < len(one.codes):
                if not parts or parts[-1].count >= MOST:
                    parts.append(self._part(min(left, MOST), content.named))
                room = MOST - parts[-1].count
                some = one.cut(first, first + min(room, _PIECE))
                count = len(some.codes)
                if ids is not None:
                    some = some._replace(ids=ids[done : done + count])
                parts[-1] = parts[-1].with_room(min(left, room), MOST).appended(some)
                first, done, left = first + count, done + count, left - count
        greatest = int(ids.max()) + 1 if ids is not None and len(ids) else 0
        following = max(self.next_id + done * (ids is None), greatest)
        return replace(content, parts=tuple(parts), next_id=following)

    def with_names(self) -> Content:
        """With ids that are kept, whatever they are."""
        if self.named:
            return self
        ends = zip(self.parts, self.starts, self.starts[1:], strict=False)
        parts = tuple(part.named(np.arange(first, last)) for part, first, last in ends)
        return replace(self, parts=parts, named=True)

    def without(self, positions: Ids) -> Content:
        """Without the vectors at these positions, ascending."""
        content, parts = self.with_names(), list[Part]()
        for part, start in zip(content.parts, self.starts, strict=False):
            stays = np.ones(part.count, np.bool_)
            gone = positions[(positions >= start) & (positions < start + part.count)]
            stays[gone - start] = False
            if not len(gone):
                parts.append(part)
            elif stays.any():
                parts.append(taken([part], np.flatnonzero(stays), named=True))
        early = None if self.early is None else np.delete(self.early, positions, axis=0)
        return replace(content, parts=tuple(parts), early=early)

    def sealed(self) -> Content:
        """For another index, which may write to no memory of this one."""
        return replace(self, parts=tuple(replace(part, grows=False) for part in self.parts))
