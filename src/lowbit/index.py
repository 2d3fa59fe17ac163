"""Exact search over compressed vectors: the nearest of m vectors of 8 or 4 bits.

Vectors are the columns of packed right operands, some thousands in a chunk. A search multiplies the
queries, quantized row by row to 8 bits, by one chunk after another. Of each product only the
greatest score of every 8 neighbours is stored; what these 8 scored is computed again for the few
groups that matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import dispatch, index_file
from lowbit import isa as instruction_sets
from lowbit.arguments import float_matrix, padded
from lowbit.kernels.cpu.activation import Source
from lowbit.kernels.cpu.epilogue import MAX_GROUP, Epilogue
from lowbit.kernels.cpu.layout import GROUP, LINE, NIBBLE_FLIP, PANEL, blocks
from lowbit.numerics import QTensor, check_finite, int_format, quantize, quantize_rows
from lowbit.packed import NIBBLE_MASK, PackedMatrix
from lowbit.packing import pack

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_CHUNK = 1 << 16  # vectors that are packed together at most
_QUERIES = 256  # that are served together
_GROUP_BITS = 32  # of a key, for the number of a group
_LAST_GROUP = (1 << _GROUP_BITS) - 1
_FORMATS = {8: "int8", 4: "int4"}
_HALVES = PANEL // MAX_GROUP
_METRICS = ("dot", "cosine", "l2")
_SCALES = ("vector", "dimension")


class _Chunk(NamedTuple):
    """Vectors as columns; `bias` is −|v|²/2 of each as it is stored, for l2 only."""

    matrix: PackedMatrix
    bias: Floats | None

    @property
    def groups(self) -> int:
        return blocks(self.matrix.N, MAX_GROUP)


class VectorIndex:
    """Vectors of `dim` float32 numbers, kept at `bits` 8 or 4 each, to be searched exhaustively.

    - scale "vector": symmetric, one scale for each vector. "dimension": one for each dimension,
      found in the vectors of `train`, or else in those that are added first; later values beyond
      its range are clamped.
    - metric "dot": inner product; "cosine": of vectors that are normalized when they are added,
      and queries when they are searched, where a vector of zeros scores 0; "l2": squared
      distance.

    ids count the vectors from 0 in the order in which they were added. ValueError: another
    parameter than these.
    """

    def __init__(
        self, dim: int, bits: int = 8, *, scale: str = "vector", metric: str = "dot"
    ) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 1:
            raise ValueError(f"dim must be an integer of at least 1, got {dim!r}")
        for name, given, known in (
            ("bits", bits, tuple(_FORMATS)),
            ("scale", scale, _SCALES),
            ("metric", metric, _METRICS),
        ):
            if given not in known:
                raise ValueError(f"{name} must be one of {known}, got {given!r}")
        self.dim, self.bits, self.scale, self.metric = int(dim), int(bits), scale, metric
        self._dimension_scale: Floats | None = None
        self._chunks: list[_Chunk] = []

    def __len__(self) -> int:
        """How many vectors there are."""
        return sum(chunk.matrix.N for chunk in self._chunks)

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        biases = (0 if chunk.bias is None else chunk.bias.nbytes for chunk in self._chunks)
        return sum(chunk.matrix.nbytes for chunk in self._chunks) + sum(biases)

    def __repr__(self) -> str:
        return (
            f"VectorIndex({len(self):,} vectors of {self.dim} x {self.bits} bits, "
            f"scale={self.scale!r}, metric={self.metric!r}, {self.nbytes:,} bytes)"
        )

    def train(self, vectors: Any) -> None:
        """Find the scales of dimensions in `vectors`, float32 [n, dim]; others need no training.

        ValueError: of another width, not finite, none, or the index holds vectors already.
        """
        given = self._prepared(vectors, "vectors")
        if self.scale != "dimension":
            return
        if self._chunks or not len(given):
            raise ValueError(
                f"train an empty index, with at least one vector; it holds {len(self)}, "
                f"and {len(given)} are given"
            )
        self._dimension_scale = quantize(given, _FORMATS[self.bits], axis=1).scale

    def add(self, vectors: Any, progress: Callable[[int, int], None] | None = None) -> None:
        """Add vectors, float32 [n, dim]. `progress` is called with (vectors done, n).

        TypeError: not float32. ValueError: of another width, NaN or infinity, naming the first,
        or so large that float32 cannot hold a squared length; nothing is added then.
        """
        source = self._checked(vectors, "vectors")
        if len(source) and self.scale == "dimension" and self._dimension_scale is None:
            self.train(source)
        made: list[_Chunk] = []
        for first in range(0, len(source), _CHUNK):
            part = self._prepared(source[first : first + _CHUNK], "vectors", checked=True)
            made.append(self._chunk(*self._codes(part)))
            if progress is not None:
                progress(first + len(part), len(source))
        chunks = [*self._chunks]
        for chunk in made:
            chunks.append(chunk)
            # Merging only what is not smaller keeps the work on single vectors logarithmic.
            while len(chunks) > 1 and chunks[-2].matrix.N <= chunks[-1].matrix.N:
                if chunks[-2].matrix.N + chunks[-1].matrix.N > _CHUNK:
                    break
                chunks[-2:] = [self._merged(*chunks[-2:])]
        self._chunks = chunks

    def search(
        self,
        queries: Any,
        k: int,
        *,
        rescore: Any = None,
        candidates: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best vectors of each query, best first: scores float32, ids int64, both [Q, k].

        queries: float32 [Q, dim]. Scores are inner products or cosines, descending, or squared
        distances, ascending; equals come by ascending id. What k exceeds len() by has id −1 and
        score −inf (l2: +inf). `rescore`: the vectors as they were added, float32 [len(), dim],
        maybe a memmap; the best `candidates` (4·k) are then ranked by them, in float64.

        TypeError: not float32, or k no integer. ValueError: another width, k < 1, candidates < k
        or without rescore, NaN or infinity, naming the first.
        """
        source = self._checked(queries, "queries")
        wanted = self._wanted(k, rescore, candidates)
        originals = None if rescore is None else self._originals(rescore)
        bad = -np.inf if self.metric != "l2" else np.inf
        scores = np.full((len(source), k), bad, np.float32)
        ids = np.full((len(source), k), -1, np.int64)
        count = min(wanted, len(self))
        for first in range(0, len(source) if count else 0, _QUERIES):
            part = self._prepared(source[first : first + _QUERIES], "queries", checked=True)
            found = self._nearest(part, count, threads, isa)
            if originals is not None:
                found = self._rescored(part, found[1], originals)
            kept = min(k, count)
            scores[first : first + len(part), :kept] = found[0][:, :kept]
            ids[first : first + len(part), :kept] = found[1][:, :kept]
        return scores, ids

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to `path`, whole or not at all. OSError if that cannot be done."""
        fields = {"dim": self.dim, "bits": self.bits, "scale": self.scale, "metric": self.metric}
        arrays: dict[str, npt.NDArray[Any]] = {}
        if self._dimension_scale is not None:
            arrays["dimension_scale"] = self._dimension_scale
        for number, (matrix, bias) in enumerate(self._chunks):
            assert matrix.scale is not None
            arrays[f"{number}.panels"] = matrix.panels
            arrays[f"{number}.column_sums"] = matrix.column_sums
            arrays[f"{number}.scale"] = matrix.scale
            if bias is not None:
                arrays[f"{number}.bias"] = bias
        counts = [chunk.matrix.N for chunk in self._chunks]
        index_file.write(path, {**fields, "counts": counts}, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> VectorIndex:
        """The index in a file, memory-mapped; adding to it leaves the file as it is.

        ValueError, naming the file, if it is of another kind or version, truncated or damaged.
        """
        fields, arrays = index_file.read(path)
        try:
            counts = fields.pop("counts")
            index = cls(**fields)
            index._dimension_scale = arrays.get("dimension_scale")
            for number, count in enumerate(counts):
                matrix = PackedMatrix(
                    panels=arrays[f"{number}.panels"],
                    column_sums=arrays[f"{number}.column_sums"],
                    K=index.dim,
                    N=count,
                    dtype=_FORMATS[index.bits],
                    scale=arrays[f"{number}.scale"],
                )
                index._chunks.append(_Chunk(matrix, arrays.get(f"{number}.bias")))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None
        return index

    def _checked(self, given: Any, name: str) -> Floats:
        """A float32 view [n, dim] of finite numbers."""
        source = float_matrix(given, name)
        if source.shape[1] != self.dim:
            raise ValueError(
                f"{name} have shape {source.shape}, and the index holds vectors of {self.dim}: "
                f"expected [n, {self.dim}]"
            )
        for first in range(0, len(source), _CHUNK):
            bad = ~np.isfinite(source[first : first + _CHUNK])
            if bad.any():
                row, column = (int(i) for i in np.argwhere(bad)[0])
                raise ValueError(
                    f"{name}[{first + row}, {column}] is {source[first + row, column]}; "
                    "remove or replace NaN and infinity"
                )
        return source

    def _prepared(self, given: Any, name: str, checked: bool = False) -> Floats:
        """As `_checked`, normalized for cosines."""
        source = given if checked else self._checked(given, name)
        if self.metric != "cosine":
            return source
        wide = source.astype(np.float64)
        length = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        return (wide / np.where(length > 0, length, 1)[:, None]).astype(np.float32)

    def _codes(self, vectors: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
        """The integers [n, dim] and the scale of each vector."""
        name = _FORMATS[self.bits]
        if self._dimension_scale is None:
            coded = quantize(vectors, name, axis=0)
            return coded.values, coded.scale
        most = 2 ** (self.bits - 1) - 1
        steps = np.rint(vectors / self._dimension_scale)
        return np.clip(steps, -most, most).astype(np.int8), np.ones(len(vectors), np.float32)

    def _chunk(self, codes: npt.NDArray[np.int8], scale: Floats) -> _Chunk:
        fmt = int_format(_FORMATS[self.bits])
        zero = np.zeros(len(codes), np.int32)
        matrix = pack(QTensor(codes.T, scale, zero, fmt, axis=1))
        if self.metric != "l2":
            return _Chunk(matrix, None)
        wide = codes.astype(np.float64)
        if self._dimension_scale is not None:
            wide *= self._dimension_scale
        half = np.einsum("nd,nd->n", wide, wide) * scale.astype(np.float64) ** 2 / 2
        largest = float(half.max(initial=0))
        if largest > np.finfo(np.float32).max:
            raise ValueError(f"a squared length of {2 * largest} is beyond float32; scale vectors")
        return _Chunk(matrix, padded((-half).astype(np.float32)))

    def _merged(self, *parts: _Chunk) -> _Chunk:
        codes = np.concatenate([part.matrix.unpack().T for part in parts])
        scales = [
            part.matrix.scale[: part.matrix.N] for part in parts if part.matrix.scale is not None
        ]
        return self._chunk(codes, np.concatenate(scales))

    def _wanted(self, k: int, rescore: Any, candidates: int | None) -> int:
        """How many vectors the quantized scores have to find."""
        for name, given in (("k", k), ("candidates", candidates)):
            if given is not None and (
                isinstance(given, bool) or not isinstance(given, int | np.integer)
            ):
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

    def _originals(self, rescore: Any) -> Floats:
        given = float_matrix(rescore, "rescore")
        if given.shape != (len(self), self.dim):
            raise ValueError(
                f"rescore has shape {given.shape}; expected the vectors that were added, "
                f"({len(self)}, {self.dim})"
            )
        return given

    def _nearest(
        self, queries: Floats, count: int, threads: int | None, isa: str | None
    ) -> tuple[Floats, Ids]:
        """(scores, ids), [Q, count], by quantized scores; count is at most len()."""
        folded = queries
        if self._dimension_scale is not None:
            folded = queries * self._dimension_scale
            check_finite(folded)
        folded = np.ascontiguousarray(folded)
        groups = self._best_groups(folded, count, threads, isa)
        scores, ids = self._group_scores(folded, groups)
        # The last groups of chunks have columns without a vector, of id −1; they come last.
        order = np.lexsort((ids, -scores, ids < 0), axis=1)[:, :count]
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        if self.metric == "l2":
            wide = queries.astype(np.float64)
            lengths = np.einsum("qd,qd->q", wide, wide)
            squares = np.maximum(lengths[:, None] - 2 * scores.astype(np.float64), 0)
            scores = squares.astype(np.float32)
        return scores, ids

    def _best_groups(
        self, queries: Floats, count: int, threads: int | None, isa: str | None
    ) -> Ids:
        """The `count` groups of each query, or all, with the greatest maxima, lower ones first.

        They hold the `count` best vectors. Were one of these in a group G outside, then `count`
        groups would come before G: by a greater maximum, or by the same one and a lower number.
        In each of them the vector with the maximum comes before all of G, by score or by id. So
        `count` vectors come before the one in G, which is not among the best.
        """
        best = np.empty((len(queries), 0), np.int64)
        base = 0
        for chunk in self._chunks:
            maxima = group_maxima(queries, chunk.matrix, chunk.bias, threads, isa)
            keys = _keys(maxima[:, : chunk.groups], base)
            best = np.concatenate([best, _largest(keys, count)], axis=1)
            best = _largest(best, count)
            base += chunk.groups
        return _LAST_GROUP - (best & _LAST_GROUP)

    def _group_scores(self, queries: Floats, groups: Ids) -> tuple[Floats, Ids]:
        """(scores, ids) [Q, groups · 8] of all that the groups hold, exactly as products give them.

        Where a group has a column without a vector, the id is −1.
        """
        codes, scale, zero = quantize_rows(queries, False)
        width = blocks(self.dim, LINE) * LINE
        # Whatever int32 holds is exact in float64, whose products NumPy has fast.
        left = np.zeros((len(queries), width))
        left[:, : self.dim] = codes.astype(np.float64) - zero[:, None]
        scores = np.empty((*groups.shape, MAX_GROUP), np.float32)
        ids = np.full((*groups.shape, MAX_GROUP), -1, np.int64)
        base = first = 0
        for chunk in self._chunks:
            rows, places = np.nonzero((groups >= base) & (groups < base + chunk.groups))
            local = groups[rows, places] - base
            columns = local[:, None] * MAX_GROUP + np.arange(MAX_GROUP)
            sums = np.empty(columns.shape, np.float32)
            for row in np.unique(rows):
                mine = rows == row
                sums[mine] = _group_codes(chunk.matrix, local[mine]) @ left[row]
            assert chunk.matrix.scale is not None
            made = sums * scale[rows][:, None] * chunk.matrix.scale[columns]
            scores[rows, places] = made if chunk.bias is None else made + chunk.bias[columns]
            ids[rows, places] = np.where(columns < chunk.matrix.N, first + columns, -1)
            base, first = base + chunk.groups, first + chunk.matrix.N
        return scores.reshape(len(queries), -1), ids.reshape(len(queries), -1)

    def _rescored(self, queries: Floats, ids: Ids, originals: Floats) -> tuple[Floats, Ids]:
        """(scores, ids) of the candidates, ranked by what the originals score."""
        scores = np.empty(ids.shape, np.float64)
        for row, query in enumerate(queries.astype(np.float64)):
            taken = self._prepared(originals[ids[row]], f"rescored candidates of query {row}")
            wide = taken.astype(np.float64)
            if self.metric == "l2":
                scores[row] = -(np.square(wide - query).sum(axis=1))
            else:
                scores[row] = wide @ query
        order = np.lexsort((ids, -scores), axis=1)
        scores = np.take_along_axis(scores, order, axis=1).astype(np.float32)
        return np.abs(scores) if self.metric == "l2" else scores, np.take_along_axis(ids, order, 1)


def group_maxima(
    queries: Floats,
    matrix: PackedMatrix,
    bias: Floats | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Floats:
    """The maxima of `linear_dynamic(queries, matrix, bias)` over each 8 columns, which is not made.

    queries: finite float32 [Q, K], C-contiguous, Q and K at least 1; bias: padded to panels.
    Returns float32 [Q, 2 · ceil(N / 16)]; columns from N on count as −inf.
    """
    used = instruction_sets.active(isa).name
    proven = matrix.largest_pair if dispatch.wants_proof(used) else dispatch.UNPROVEN
    (rows, depth), columns = queries.shape, matrix.N
    plan = dispatch.plan(
        dispatch.Request(
            isa=used,
            m=rows,
            n=columns,
            k=depth,
            source=Source("f32"),
            epilogue=Epilogue(a_zero=True, steps=() if bias is None else ("bias",), out="max8"),
            threads=dispatch.thread_count(rows, columns, depth, threads),
            largest_pair=proven,
            weight=matrix.weight,
        )
    )
    out = np.empty((rows, blocks(columns, PANEL) * _HALVES), np.float32)
    plan.run(queries, (depth, 1), matrix.addresses, out, out.shape[1], bias=bias)
    return out


def _keys(maxima: Floats, base: int) -> Ids:
    """Integers that order as (maximum, lower group first) do; `base` is the first group's."""
    # Adding zero makes −0 into 0. Negative floats order against their other bits.
    bits = (maxima + np.float32(0)).view(np.int32)
    ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    groups = base + np.arange(maxima.shape[1], dtype=np.int64)
    return (ordered << _GROUP_BITS) | (_LAST_GROUP - groups)


def _largest(keys: Ids, count: int) -> Ids:
    """The `count` largest of each row, or all, in no order."""
    if keys.shape[1] <= count:
        return keys
    return np.partition(keys, keys.shape[1] - count, axis=1)[:, keys.shape[1] - count :]


def _group_codes(matrix: PackedMatrix, groups: Ids) -> npt.NDArray[np.float64]:
    """The integers of some groups of 8 columns: float64 [groups, 8, K padded to a line]."""
    panels = matrix.panels.reshape(len(matrix.panels), -1, _HALVES, MAX_GROUP * GROUP)
    taken = panels[groups // _HALVES, :, groups % _HALVES]
    if matrix.weight != "s8":
        low_high = np.stack([taken & np.uint8(NIBBLE_MASK), taken >> 4], axis=2)
        low_high -= np.uint8(NIBBLE_FLIP)
        taken = low_high.reshape(len(groups), -1, MAX_GROUP * GROUP)
    quads = taken.view(np.int8).reshape(len(groups), -1, MAX_GROUP, GROUP)
    return quads.transpose(0, 2, 1, 3).reshape(len(groups), MAX_GROUP, -1).astype(np.float64)
