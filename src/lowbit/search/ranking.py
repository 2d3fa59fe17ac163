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
from lowbit.registry.locks import cached_property
from lowbit.search.codec import Codec, check_rows, floats
from lowbit.search.content import Content
from lowbit.search.groups import (
    Chunk,
    Floats,
    Ids,
    Queries,
    best_groups,
    group_maxima,
    groups_for,
    masked,
    scores_of_groups,
)
from lowbit.search.projection import Projection, distances, inner_products

_RESCORED = 1 << 22  # numbers of originals that are looked at together
_DENSE = 1 / 8  # the share of vectors from which on all are scored, and the others left out
_SLACK = 1e-5  # of numbers of float32: more than their sums are rounded by

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
        scores = np.empty((len(queries), count), np.float32)
        positions = np.empty((len(queries), count), np.int64)
        for projection in self._projections(queries, first):
            chunks = self._chunks(projection)
            values = Queries(projection.values, *self.how)
            groups = best_groups(values, chunks, groups_for(count), self.scope.mask)
            products, places = scores_of_groups(values, chunks, groups)
            self._check_products(products, projection, first)
            places = self.scope.positions(places)
            # Columns without a vector, or with one that may not be found, come last.
            order = np.lexsort((places, -products, places < 0), axis=1)[:, :count]
            products = np.take_along_axis(products, order, axis=1)
            scores[projection.rows] = self._scores(projection, products)
            positions[projection.rows] = np.take_along_axis(places, order, axis=1)
        return scores, positions

    def within(self, query: Floats, number: int, radius: float) -> Found:
        """(scores, positions) of all that score better than `radius` with a query [1, dim]."""
        if self.content.frame is None:  # there was no vector yet
            return np.empty(0, np.float32), np.empty(0, np.int64)
        (projection,) = self._projections(query, number)
        chunks = self._chunks(projection)
        values = Queries(projection.values, *self.how)
        least = projection.products(radius)
        # Maxima are of the query in 8 bits. What it lost, times the length of a vector, is what
        # they may be too low by; and what float32 rounds.
        length = float(np.linalg.norm(projection.values.astype(np.float64)))
        lost = float(values.lost[0]) + _SLACK * length
        maxima = [group_maxima(values, chunk, mask)[0, : chunk.groups]
                  for chunk, mask in masked(chunks, self.scope.mask)]  # fmt: skip
        lowest = least - _SLACK * abs(least) - lost * self._longest
        groups = np.flatnonzero(np.concatenate(maxima) >= lowest) if maxima else np.empty(0, int)
        products, places = scores_of_groups(values, chunks, groups[None])
        self._check_products(products, projection, number)
        places = self.scope.positions(places[0])
        products, places = products[0, places >= 0], places[places >= 0]
        order = np.lexsort((places, -products))
        scores = self._scores(projection, products[None, order])[0]
        exact = np.float64(radius)  # NumPy would round a number of Python to float32
        inside = scores < exact if self.codec.metric == "l2" else scores > exact
        return scores[inside], places[order][inside]

    @cached_property
    def _longest(self) -> npt.NDArray[np.float64]:
        """No vector of a group is longer, as its integers times its scale, [groups]."""
        scales = [chunk.scales_of_groups for chunk in self.scope.chunks]
        whole = np.concatenate([np.empty(0, np.float32), *scales]).astype(np.float64)
        return whole * self.codec.code_length

    def _projections(self, queries: Floats, first: int) -> list[Projection]:
        """Queries in the frame of the index. ValueError: beyond float32 there."""
        frame = self.content.frame
        if frame is None:
            return []
        project = distances if self.codec.metric == "l2" else inner_products
        projections = project(queries, frame)
        for projection in projections:
            beyond = ~np.isfinite(projection.values).all(axis=1)
            if beyond.any():
                number = first + int(projection.rows[beyond.argmax()])
                raise ValueError(
                    f"queries[{number}] beside the mean of the vectors, times the scales of the "
                    "dimensions, is beyond float32; scale vectors and queries down"
                )
        return projections

    def _chunks(self, projection: Projection) -> tuple[Chunk, ...]:
        if projection.biased:
            return self.scope.chunks
        return tuple(chunk._replace(bias=None) for chunk in self.scope.chunks)

    def _check_products(self, products: Floats, projection: Projection, first: int) -> None:
        """ValueError: infinite products, if scores cannot be made of them."""
        lost = np.isnan(products)
        if projection.biased:
            lost |= np.isposinf(products)
        if lost.any():
            number = first + int(projection.rows[lost.any(axis=1).argmax()])
            raise ValueError(
                f"queries[{number}] times a vector is beyond float32; scale vectors and queries "
                "down"
            )

    def _scores(self, projection: Projection, products: Floats) -> Floats:
        """What products [n, count] say of distances, cosines or inner products."""
        scores = projection.scores(products)
        if self.codec.metric == "l2":
            scores = np.maximum(scores, 0)
        elif self.codec.metric == "cosine":
            scores = np.clip(scores, -1, 1)
        with np.errstate(over="ignore"):
            return scores.astype(np.float32)

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
