"""What a search is made of: which vectors may be found, the best by quantized scores, by originals.

Vectors are named by their positions here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.kernels.cpu.rows.select import mark, marked
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.search.codec import Codec, check_rows, floats
from lowbit.search.content import Content
from lowbit.search.groups import (
    Chunk,
    Floats,
    Ids,
    Queries,
    best_groups,
    group_maxima,
    masked,
    scores_of_groups,
)

_RESCORED = 1 << 22  # numbers of originals that are looked at together
_DENSE = 1 / 8  # the share of vectors from which on all are scored, and the others left out
_SLACK = 1e-5  # of a threshold: what is near it is looked at closely

Found = tuple[Floats, Ids]
Mask = npt.NDArray[np.bool_]


class How(NamedTuple):
    """Of the products: how many threads, and which instruction set is forced."""

    threads: int | None
    isa: str | None


@dataclass(frozen=True)
class Scope:
    """The vectors that may be found, `count` of those in `chunks`: all, or those whose mask is
    True. places: their positions in the index, where they were taken from it; None: the same.
    """

    chunks: tuple[Chunk, ...]
    count: int
    mask: Mask | None = None
    places: Ids | None = None

    def positions(self, found: Ids) -> Ids:
        """In the index, of vectors found here; −1 for those that may not be."""
        if self.mask is not None:
            found = np.where(self.mask[found], found, -1)  # of −1 the last one, which is False
        if self.places is None:
            return found
        return np.where(found >= 0, self.places[found], -1)


def scope(content: Content, admitted: Any) -> Scope:
    """All vectors, or those of a list of ids, or of a mask with a bool for each.

    Few are taken out of the panels, and searched as an index of their own; many are left there.
    """
    if admitted is None:
        return Scope(content.chunks, content.count)
    given = np.asarray(admitted)
    marks = np.zeros(blocks(content.count + PANEL, LINE) * LINE, np.uint8)
    if given.dtype == np.bool_:
        if given.shape != (content.count,):
            raise ValueError(
                f"a mask has a bool for each of the {content.count} vectors, in the order of "
                f"`ids`; filter has shape {given.shape}"
            )
        np.not_equal(given.view(np.uint8), 0, out=marks[: content.count].view(np.bool_))
    else:
        ids = as_ids(given, "filter")
        places = content.positions(ids) if content.named else np.ascontiguousarray(ids)
        program = mark.program(instruction_sets.active(None))
        program(1, places, len(places), marks, content.count)
        marks[content.count :] = 0  # where ids that are not there went
    mask = marks.view(np.bool_)
    count = int(np.count_nonzero(mask))
    if not count:
        return Scope((), 0)
    if count >= _DENSE * content.count:
        return Scope(content.chunks, count, mask)
    few = np.empty(count + 1, np.int64)
    marked.program(instruction_sets.active(None))(1, marks, len(marks), few, count)
    return Scope((content.taken(few[:-1]).chunk,), count, places=few[:-1])


def as_ids(given: Any, name: str) -> Ids:
    """A vector of ids. TypeError: no integers."""
    ids = np.asarray(given)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {ids.shape}")
    if not ids.size:
        return np.empty(0, np.int64)
    return ids.astype(np.int64, copy=False)


@dataclass(frozen=True)
class Ranking:
    """A search of one content, as it was when the search began."""

    codec: Codec
    content: Content
    scope: Scope
    how: How

    def nearest(self, queries: Floats, first: int, count: int) -> Found:
        """(scores, positions), [Q, count], best first; count is at most that of the scope.
        `first` is the number of the first query, for errors."""
        made = self._queries(queries, first)
        groups = best_groups(made, self.scope.chunks, count, self.scope.mask)
        scores, found = scores_of_groups(made, self.scope.chunks, groups)
        found = self.scope.positions(found)
        # Columns without a vector, or with one that may not be found, come last.
        order = np.lexsort((found, -scores, found < 0), axis=1)[:, :count]
        scores = np.take_along_axis(scores, order, axis=1)
        found = np.take_along_axis(found, order, axis=1)
        return self._distances(queries, scores, first), found

    def within(self, query: Floats, number: int, radius: float) -> Found:
        """(scores, positions) of all that score better than `radius` with a query [1, dim]."""
        made = self._queries(query, number)
        least = radius
        if self.codec.metric == "l2":
            least = (float(np.square(query.astype(np.float64)).sum()) - radius) / 2
        least -= _SLACK * abs(least) + float(np.finfo(np.float32).tiny)
        maxima = [group_maxima(made, chunk, mask)[0, : chunk.groups]
                  for chunk, mask in masked(self.scope.chunks, self.scope.mask)]  # fmt: skip
        # NumPy would round numbers of Python to float32 before it compares.
        exact, least = np.float64(radius), np.float64(least)
        groups = np.flatnonzero(np.concatenate(maxima) >= least) if maxima else np.empty(0, int)
        scores, found = scores_of_groups(made, self.scope.chunks, groups[None])
        found = self.scope.positions(found[0])
        scores, found = scores[0, found >= 0], found[found >= 0]
        order = np.lexsort((found, -scores))
        scores = self._distances(query, scores[None, order], number)[0]
        inside = scores < exact if self.codec.metric == "l2" else scores > exact
        return scores[inside], found[order][inside]

    def _queries(self, queries: Floats, first: int) -> Queries:
        """Queries as the kernels take them, with the scales of dimensions in them."""
        folded = queries
        if self.content.dimension_scale is not None:
            with np.errstate(over="ignore"):
                folded = queries * self.content.dimension_scale
            beyond = ~np.isfinite(folded).all(axis=1)
            if beyond.any():
                raise ValueError(
                    f"queries[{first + int(beyond.argmax())}] times the scales of the dimensions "
                    "is beyond float32; scale vectors and queries down"
                )
        return Queries(np.ascontiguousarray(folded), *self.how)

    def _distances(self, queries: Floats, scores: Floats, first: int) -> Floats:
        """What products say of distances, for l2; for others the products."""
        if self.codec.metric != "l2":
            return scores
        lost = np.isposinf(scores).any(axis=1)
        if lost.any():
            raise ValueError(
                f"queries[{first + int(lost.argmax())}] times a vector is beyond float32; "
                "scale vectors and queries down"
            )
        wide = queries.astype(np.float64)
        lengths = np.einsum("qd,qd->q", wide, wide)
        squares = np.maximum(lengths[:, None] - 2 * scores.astype(np.float64), 0)
        with np.errstate(over="ignore"):
            return squares.astype(np.float32)

    def rescored(self, queries: Floats, found: Ids, originals: Floats) -> Found:
        """(scores, positions) of the candidates [Q, count], ranked by what the originals score."""
        exact = np.empty(found.shape, np.float64)
        step = max(1, _RESCORED // (found.shape[1] * self.codec.dim))
        for first in range(0, len(queries), step):
            part = found[first : first + step]
            wide = self._candidates(part, originals).astype(np.float64)
            query = queries[first : first + step].astype(np.float64)
            if self.codec.metric == "l2":
                difference = wide - query[:, None]
                exact[first : first + step] = -np.einsum("qcd,qcd->qc", difference, difference)
            else:
                exact[first : first + step] = np.einsum("qcd,qd->qc", wide, query)
        order = np.lexsort((found, -exact), axis=1)
        with np.errstate(over="ignore"):
            scores = np.take_along_axis(exact, order, axis=1).astype(np.float32)
        scores = np.abs(scores) if self.codec.metric == "l2" else scores
        return scores, np.take_along_axis(found, order, 1)

    def _candidates(self, positions: Ids, originals: Floats) -> Floats:
        """The originals of vectors at these positions, [*positions.shape, dim]."""
        taken = floats(originals[positions.ravel()], "rescore")
        check_rows(taken, positions.ravel(), "rescore", "give the vectors as they were added")
        return self.codec.normalized(taken).reshape(*positions.shape, self.codec.dim)
