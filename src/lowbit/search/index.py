"""Exact search over compressed vectors: the nearest of m vectors of 8 or 4 bits.

Vectors are the columns of packed right operands, some thousands in a part. A search finds the best
by what the compressed vectors score with queries of 8 bits (groups.py), and may then rank
some candidates by the originals.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from lowbit.numerics import longest_sum
from lowbit.product.arguments import array
from lowbit.registry.locks import Lock
from lowbit.search import files, growth
from lowbit.search.codec import FORMATS, Bits, Codec, Metric, Scale, floats
from lowbit.search.content import LARGEST_ID, Content
from lowbit.search.groups import Floats, Ids, groups_for
from lowbit.search.ranking import How, Ranking, as_ids, scope

_QUERIES = 256  # that are served together at most
_PLACES = 1 << 18  # of groups that they keep together at most; scores and ids of one are 96 bytes


class VectorIndex:
    """Vectors of `dim` numbers, kept at `bits` 8 or 4 each, to be searched exhaustively.

    - scale "vector": symmetric about the vectors' mean, a scale for each vector. "dimension": a
      weight for each dimension too, by how much it varies.
    - metric "dot": inner product; "cosine": of vectors that are normalized when they are added,
      and queries when they are searched; "l2": squared distance.

    Mean and weights are found in the vectors of `train`, or else in those that are added: anew
    whenever there are twice as many, until there are 1,024, up to which the index keeps the vectors
    themselves too.

    Vectors and queries are float32, float64, float16 or bfloat16, in arrays, CPU tensors or lists;
    one vector may be given as [dim]. They are taken as float32.

    A vector's id is given with it, or else the number of vectors that were added before it. All
    methods may be called from several threads at once. What one call of `add` brings gets
    neighbouring positions, and a search or a file holds all of it or none. ValueError: another
    parameter than these, or a dim of so many products that int32 could overflow (65,793 at 8 bits).
    """

    def __init__(
        self, dim: int, bits: Bits = 8, *, scale: Scale = "dimension", metric: Metric = "dot"
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 1:
            raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")
        for name, given, known in (
            ("bits", bits, tuple(FORMATS)),
            ("scale", scale, get_args(Scale)),
            ("metric", metric, get_args(Metric)),
        ):
            if given not in known:
                raise ValueError(f"{name} must be one of {known}, got {given!r}")
        most = longest_sum("uint8", FORMATS[bits], shifted=(True, False))
        if dim > most:
            raise ValueError(
                f"dim = {dim} products of queries and vectors of {bits} bits could overflow "
                f"int32; at most {most} cannot: search parts of the vectors and add the scores"
            )
        self.dim, self.bits, self.scale, self.metric = int(dim), int(bits), scale, metric
        self._codec = Codec(self.dim, self.bits, scale, metric)
        self._content = Content(self.dim, FORMATS[self.bits], biased=True)
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()  # of who puts another content in place
        # All ids, where somebody had to know; None while they change.
        self._known: set[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["_lock"], state["_known"]
        return {**state, "_content": self._content.sealed()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __len__(self) -> int:
        """How many vectors there are."""
        return self._content.count

    @property
    def ids(self) -> Ids:
        """The ids of all vectors, int64 [len()], in the order in which they are kept: that in which
        they were added. A mask for `filter` and the originals for `rescore` have this order."""
        return self._content.ids.copy()

    @property
    def nbytes(self) -> int:
        """Bytes held, padding, room for more and early vectors included."""
        content = self._content
        early = 0 if content.early is None else content.early.nbytes
        return early + sum(part.nbytes for part in content.parts)

    def __repr__(self) -> str:
        return (
            f"VectorIndex({len(self):,} vectors of {self.dim} x {self.bits} bits, "
            f"scale={self.scale!r}, metric={self.metric!r}, {self.nbytes:,} bytes)"
        )

    def train(self, vectors: Any) -> None:
        """Find mean and weights in `vectors`, floats [n, dim], some hundreds at least.

        ValueError: of another width, not finite, none, or the index holds vectors already.
        """
        given = self._codec.checked(vectors, "vectors")
        frame = self._codec.trained([given]) if len(given) else None
        with self._lock:
            count = self._content.count
            if count or frame is None:
                raise ValueError(
                    f"train an empty index, with at least one vector; it holds {count}, "
                    f"and {len(given)} are given"
                )
            self._content = replace(self._content, frame=frame, early=None)

    def add(
        self, vectors: Any, progress: Callable[[int, int], None] | None = None, *, ids: Any = None
    ) -> None:
        """Add vectors, floats [n, dim], or one [dim].

        ids: integers [n] from 0 on, or one, that no other vector of the index has; without, the
        numbers that follow the greatest id. `progress` is called with (vectors done, n), after
        every 65,536 vectors and at the end.

        TypeError: no floats; ids that are no integers. ValueError: of another width; NaN or
        infinity, naming the first; beyond float32, or so large that it cannot hold a squared
        length; ids of another number, below 0, or that are there already. Nothing is added then.
        UserWarning: more than a hundredth of the vectors lie outside of what was trained.
        """
        source = self._codec.shaped(vectors, "vectors")
        names = None if ids is None else self._names(ids, len(source))
        added = not len(source)
        while not added:
            before = self._content
            settled = growth.is_settled(before)
            base = before if settled else growth.regrown(self._codec, before, source)
            assert base.frame is not None
            coded = growth.coded(self._codec, source, base.frame, progress)
            with self._lock:
                content = self._content
                added = content is before or (settled and content.frame is before.frame)
                if added:  # or all is coded once more
                    known = self._with_new(names)
                    self._content = (content if settled else base).extended(coded, names)
                    self._known = known
            if added and settled:
                growth.warn_outside(coded, base.frame, stacklevel=2)

    @staticmethod
    def _names(ids: Any, count: int) -> Ids:
        """The ids of so many vectors, checked but for those that the index has."""
        given = np.asarray(ids)
        names = as_ids(given[None] if given.ndim == 0 else given, "ids")
        if len(names) != count:
            raise ValueError(f"{count} vectors have {len(names)} ids; give one for each")
        if count and (names.min() < 0 or names.max() > LARGEST_ID):
            bad = names.min() if names.min() < 0 else names.max()
            raise ValueError(f"ids are from 0 on, below 2^63 - 1, got {bad}")
        ordered = np.sort(names)
        twice = ordered[:-1][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise ValueError(f"id {twice[0]} is given twice")
        return names

    def _with_new(self, names: Ids | None) -> set[int] | None:
        """All ids and these, if somebody had to know; from now on nobody knows. The caller holds
        the lock. ValueError: the index holds a vector of such an id."""
        content, known = self._content, self._known
        if names is not None and int(names.min()) < content.next_id:
            known = self._known = set(content.ids.tolist()) if known is None else known
            there = next((name for name in names.tolist() if name in known), None)
            if there is not None:
                raise ValueError(f"id {there} is there already; remove([{there}]) first")
        self._known = None
        if names is None or known is None:
            return None
        known.update(names.tolist())
        return known

    def remove(self, ids: Any) -> int:
        """Remove the vectors of these ids, integers [n] or one; return how many there were.

        Ids that the index does not have are passed over. Other vectors keep theirs, and no id is
        given out again. TypeError: no integers.
        """
        given = np.asarray(ids)
        wanted = as_ids(given[None] if given.ndim == 0 else given, "ids")
        with self._lock:
            found = self._content.positions(wanted)
            found, _ = np.unique(found[found >= 0], return_inverse=True)
            if len(found):
                self._known = None
                self._content = self._content.without(found)
        return len(found)

    def reconstruct(self, ids: Any) -> Floats:
        """The vectors of these ids as they are kept, float32 [n, dim]; of one id, [dim].

        With metric "cosine" they are those of length 1. KeyError: an id that is not there.
        TypeError: no integers.
        """
        content, given = self._content, np.asarray(ids)
        wanted = as_ids(given[None] if given.ndim == 0 else given, "ids")
        found = content.positions(wanted)
        if (found < 0).any():
            raise KeyError(f"there is no vector of id {wanted[int((found < 0).argmax())]}")
        vectors = np.empty((len(found), self.dim), np.float32)
        if len(found):
            distinct, where = np.unique(found, return_inverse=True)
            vectors = self._codec.decoded(content.taken(distinct), content.frame)[where]
        return vectors[0] if given.ndim == 0 else vectors

    def search(
        self,
        queries: Any,
        k: int,
        *,
        filter: Any = None,
        metric: Metric | None = None,
        rescore: Any = None,
        candidates: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best vectors of each query, best first: scores float32, ids int64, both [Q, k].

        queries: floats [Q, dim], or one, [dim], for which the results are [k]. Scores are inner
        products or cosines, descending, or squared distances, ascending. What k exceeds the
        vectors by has id −1 and score −inf (l2: +inf). filter: which vectors may be found: a mask,
        bool [len()], in the order of `ids`, or a sequence of ids, in any order, of which those that
        the index does not have are passed over. metric: the index's own, since that decides what
        was stored of the vectors; None means it too.

        Of equal scores the vector that was added first comes first; scores are compared before
        distances are rounded to float32 and, if below 0, become 0. `rescore`: the vectors as they
        were added, floats [len(), dim], in the order of `ids`, maybe a memmap; the best
        `candidates` (4·k) are then ranked by them, in float64, those added first before their
        equals. threads: for the products, as many as there are and the work is worth by default;
        results do not depend on them, nor on `isa`.

        TypeError: no floats, or k or candidates no integer, or a filter of neither kind.
        ValueError: another width, k < 1, candidates < k or without rescore, rescore or a mask of
        another shape, NaN or infinity in queries or candidates, naming the first, queries so large
        that float32 cannot hold what a distance is made of, threads < 1, or another metric.
        """
        self._check_metric(metric)
        content = self._content  # whatever is added meanwhile
        source = self._codec.checked(queries, "queries")
        wanted = self._wanted(k, rescore, candidates)
        originals = None if rescore is None else self._originals(rescore, content.count)
        ranking = Ranking(self._codec, content, scope(content, filter), How(threads, isa))
        bad = -np.inf if self.metric != "l2" else np.inf
        scores = np.full((len(source), k), bad, np.float32)
        ids = np.full((len(source), k), -1, np.int64)
        count = min(wanted, ranking.scope.count)
        together = min(_QUERIES, max(1, _PLACES // groups_for(count)))
        for first in range(0, len(source) if count else 0, together):
            part = self._codec.normalized(source[first : first + together])
            found = ranking.nearest(part, first, count)
            if originals is not None:
                found = ranking.rescored(part, found[1], originals)
            kept = min(k, count)
            scores[first : first + len(part), :kept] = found[0][:, :kept]
            ids[first : first + len(part), :kept] = content.ids_at(found[1][:, :kept])
        return (scores[0], ids[0]) if np.ndim(queries) == 1 else (scores, ids)

    def range_search(
        self,
        queries: Any,
        radius: float,
        *,
        filter: Any = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All vectors that score better than `radius`: limits int64 [Q + 1], scores, ids.

        Query q has found ids[limits[q] : limits[q + 1]], best first, with scores above `radius`, or
        squared distances below it. Queries, filter, threads and isa are as in `search`, scores
        those of the vectors as they are kept.

        TypeError: no floats, or radius no number. ValueError: as `search`, or radius is NaN.
        """
        if isinstance(radius, bool) or not isinstance(radius, float | int | np.number):
            raise TypeError(f"radius must be a number, got {radius!r}")
        if math.isnan(radius):
            raise ValueError("radius is NaN; give a score, or a squared distance")
        content = self._content
        source = self._codec.checked(queries, "queries")
        ranking = Ranking(self._codec, content, scope(content, filter), How(threads, isa))
        vectors = self._codec.normalized(source)
        found = [ranking.within(vectors[q : q + 1], q, float(radius)) for q in range(len(vectors))]
        limits = np.cumsum([0, *(len(positions) for _, positions in found)])
        scores = np.concatenate([np.empty(0, np.float32), *(part for part, _ in found)])
        positions = np.concatenate([np.empty(0, np.int64), *(part for _, part in found)])
        return limits, scores, content.ids_at(positions)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to the safetensors file `path`, whole or not at all.

        OSError if that cannot be done; a file that was there before is then as it was.
        """
        files.save(path, self._codec, self._content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = False) -> VectorIndex:
        """The index in a file, memory-mapped: pages are read when a search first needs them.
        Adding to it leaves the file as it is.

        The header is checked in any case. With `verify` the whole file is read and compared with
        its digest; without, numbers that were damaged on the disk are not noticed.

        ValueError, naming the file, if it is of another kind or version, truncated, damaged, or
        does not hold together. FileNotFoundError if there is none.
        """
        made: list[VectorIndex] = []

        def empty(parameters: dict[str, Any]) -> Content:
            made.append(cls(**parameters))
            return made[0]._content

        content = files.load(path, verify, empty)
        made[0]._content = content
        return made[0]

    def _check_metric(self, metric: Metric | None) -> None:
        if metric is not None and metric != self.metric:
            raise ValueError(
                f"this index was made for {self.metric!r} and cannot be searched by {metric!r}: "
                f"VectorIndex({self.dim}, {self.bits}, metric={metric!r})"
            )

    def _wanted(self, k: int, rescore: Any, candidates: int | None) -> int:
        """How many vectors the quantized scores have to find."""
        for name, given in (("k", k), ("candidates", k if candidates is None else candidates)):
            if isinstance(given, bool) or not isinstance(given, int | np.integer):
                raise TypeError(f"{name} must be an integer, got {given!r}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if rescore is None:
            if candidates is not None:
                raise ValueError("candidates are ranked by the originals: give rescore too")
            return int(k)
        if candidates is not None and candidates < k:
            raise ValueError(f"candidates must be at least k = {k}, got {candidates}")
        return int(4 * k if candidates is None else candidates)

    def _originals(self, rescore: Any, count: int) -> Any:
        given = (
            floats(rescore, "rescore") if isinstance(rescore, list) else array(rescore, "rescore")
        )
        if given.shape != (count, self.dim):
            raise ValueError(
                f"rescore has shape {given.shape}; expected the vectors that are kept, "
                f"({count}, {self.dim}), in the order of ids"
            )
        floats(given[:0], "rescore")
        return given
