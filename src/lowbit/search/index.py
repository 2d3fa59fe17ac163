"""Exact search over compressed vectors: the nearest of m vectors of 8 or 4 bits.

Vectors are the columns of packed right operands, some thousands in a chunk. A search finds the best
by what the compressed vectors score with queries of 8 bits (groups.py), and may then rank
some candidates by the originals.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics import QTensor, Range, int_format, longest_sum, quantize
from lowbit.numerics.formats import first_index
from lowbit.product.arguments import float_matrix
from lowbit.search.groups import Chunk, Floats, Ids, Queries, best_groups, scores_of_groups
from lowbit.weights.panels import PackedMatrix, pack, padded
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

_CHUNK = 1 << 16  # vectors that are packed together at most
_QUERIES = 256  # that are served together at most
_PLACES = 1 << 18  # of groups that they keep together at most; scores and ids of one are 96 bytes
_RESCORED = 1 << 22  # numbers of originals that are looked at together
_FORMATS = {8: "int8", 4: "int4"}
# Of sixteen steps each counts; 8 bits would gain nothing for the time.
_RANGES: Mapping[int, Range] = {8: "minmax", 4: "mse"}
_METRICS = ("dot", "cosine", "l2")
_SCALES = ("vector", "dimension")
_FILE = TensorFile("lowbit.vector_index", "vector index", "2")
_PARTS = ("panels", "column_sums", "scale")  # of a chunk's matrix, in a file
_FIELDS = ("dim", "bits", "scale", "metric", "counts")


@dataclass(frozen=True)
class _Content:
    """What an index holds at one moment; what changes it puts another in its place."""

    chunks: tuple[Chunk, ...] = ()
    dimension_scale: Floats | None = None

    @property
    def count(self) -> int:
        """How many vectors there are."""
        return sum(chunk.matrix.N for chunk in self.chunks)


class VectorIndex:
    """Vectors of `dim` float32 numbers, kept at `bits` 8 or 4 each, to be searched exhaustively.

    - scale "vector": symmetric, one scale for each vector. "dimension": one for each dimension,
      found in the vectors of `train`, or else in those that are added first; later values beyond
      its range are clamped.
    - metric "dot": inner product; "cosine": of vectors that are normalized when they are added,
      and queries when they are searched, where a vector of zeros scores 0; "l2": squared
      distance.

    ids count the vectors from 0 in the order in which they were added. All methods may be called
    from several threads at once. What one call of `add` brings gets neighbouring ids, and a search
    or a file holds all of it or none. ValueError: another parameter than these, or a dim of so many
    products that int32 could overflow (65,793 at 8 bits).
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
        most = longest_sum("uint8", _FORMATS[bits], shifted=(True, False))
        if dim > most:
            raise ValueError(
                f"dim = {dim} products of queries and vectors of {bits} bits could overflow "
                f"int32; at most {most} cannot: search parts of the vectors and add the scores"
            )
        self.dim, self.bits, self.scale, self.metric = int(dim), int(bits), scale, metric
        self._content = _Content()
        self._new_lock()

    def _new_lock(self) -> None:
        self._lock = threading.Lock()  # of who puts another content in place
        _indices.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._new_lock()

    def __len__(self) -> int:
        """How many vectors there are."""
        return self._content.count

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        chunks = self._content.chunks
        biases = (0 if chunk.bias is None else chunk.bias.nbytes for chunk in chunks)
        return sum(chunk.matrix.nbytes for chunk in chunks) + sum(biases)

    def __repr__(self) -> str:
        return (
            f"VectorIndex({len(self):,} vectors of {self.dim} x {self.bits} bits, "
            f"scale={self.scale!r}, metric={self.metric!r}, {self.nbytes:,} bytes)"
        )

    def train(self, vectors: Any) -> None:
        """Find the scales of dimensions in `vectors`, float32 [n, dim]; others need no training.

        ValueError: of another width, not finite, none, or the index holds vectors already.
        """
        given = self._normalized(self._checked(vectors, "vectors"))
        if self.scale != "dimension":
            return
        found = self._scale_of(given) if len(given) else None
        with self._lock:
            count = self._content.count
            if count or found is None:
                raise ValueError(
                    f"train an empty index, with at least one vector; it holds {count}, "
                    f"and {len(given)} are given"
                )
            self._content = _Content(dimension_scale=found)

    def _scale_of(self, given: Floats) -> Floats:
        """The scales of dimensions that suit these vectors."""
        return quantize(given, _FORMATS[self.bits], axis=1, range=_RANGES[self.bits]).scale

    def add(self, vectors: Any, progress: Callable[[int, int], None] | None = None) -> None:
        """Add vectors, float32 [n, dim]. `progress` is called with (vectors done, n), after every
        65,536 vectors and at the end.

        TypeError: not float32. ValueError: of another width, NaN or infinity, naming the first,
        or so large that float32 cannot hold a squared length; nothing is added then.
        """
        source = self._checked(vectors, "vectors")
        added = not len(source)
        while not added:
            before = scale = self._content.dimension_scale
            if scale is None and self.scale == "dimension":
                scale = self._scale_of(self._normalized(source))
            made: list[Chunk] = []
            for first in range(0, len(source), _CHUNK):
                part = self._normalized(source[first : first + _CHUNK])
                made.append(self._chunk(*self._codes(part, scale), scale))
                if progress is not None:
                    progress(first + len(part), len(source))
            with self._lock:
                added = self._content.dimension_scale is before  # or all is coded once more
                if added:
                    self._content = _Content(self._joined(made, scale), scale)

    def _joined(self, made: list[Chunk], scale: Floats | None) -> tuple[Chunk, ...]:
        """The chunks that there are and those that were made, small ones in one."""
        chunks = [*self._content.chunks]
        for chunk in made:
            chunks.append(chunk)
            # Merging only what is not smaller keeps the work on single vectors logarithmic.
            while len(chunks) > 1 and chunks[-2].matrix.N <= chunks[-1].matrix.N:
                if chunks[-2].matrix.N + chunks[-1].matrix.N > _CHUNK:
                    break
                chunks[-2:] = [self._merged(chunks[-2], chunks[-1], scale)]
        return tuple(chunks)

    def search(
        self,
        queries: Any,
        k: int,
        *,
        metric: str | None = None,
        rescore: Any = None,
        candidates: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> tuple[Floats, Ids]:
        """The k best vectors of each query, best first: scores float32, ids int64, both [Q, k].

        queries: float32 [Q, dim]. Scores are inner products or cosines, descending, or squared
        distances, ascending. What k exceeds len() by has id −1 and score −inf (l2: +inf). metric:
        the index's own, since that decides what was stored of the vectors; None means it too.

        Of equal scores the lower id comes first; scores are compared before distances are rounded
        to float32 and, if below 0, become 0. `rescore`: the vectors as they were added, float32
        [len(), dim], maybe a memmap; the best `candidates` (4·k) are then ranked by them, in
        float64, lower ids first among equals. threads: for the products, as many as there are and
        the work is worth by default; results do not depend on them, nor on `isa`.

        TypeError: not float32, or k or candidates no integer. ValueError: another width, k < 1,
        candidates < k or without rescore, rescore of another shape, NaN or infinity in queries or
        candidates, naming the first, queries so large that float32 cannot hold what a distance is
        made of, threads < 1, or another metric.
        """
        if metric is not None and metric != self.metric:
            raise ValueError(
                f"this index was made for {self.metric!r} and cannot be searched by {metric!r}: "
                f"VectorIndex({self.dim}, {self.bits}, metric={metric!r})"
            )
        content = self._content  # whatever is added meanwhile
        source = self._checked(queries, "queries")
        wanted = self._wanted(k, rescore, candidates)
        originals = None if rescore is None else self._originals(rescore, content.count)
        bad = -np.inf if self.metric != "l2" else np.inf
        scores = np.full((len(source), k), bad, np.float32)
        ids = np.full((len(source), k), -1, np.int64)
        count = min(wanted, content.count)
        together = min(_QUERIES, max(1, _PLACES // max(count, 1)))
        for first in range(0, len(source) if count else 0, together):
            part = self._normalized(source[first : first + together])
            found = self._nearest(content, part, first, count, (threads, isa))
            if originals is not None:
                found = self._rescored(part, found[1], originals)
            kept = min(k, count)
            scores[first : first + len(part), :kept] = found[0][:, :kept]
            ids[first : first + len(part), :kept] = found[1][:, :kept]
        return scores, ids

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to the safetensors file `path`, whole or not at all.

        OSError if that cannot be done; a file that was there before is then as it was.
        """
        content = self._content
        arrays: dict[str, npt.NDArray[Any]] = {}
        if content.dimension_scale is not None:
            arrays["dimension_scale"] = content.dimension_scale
        for number, (matrix, bias) in enumerate(content.chunks):
            arrays |= {f"{number}.{part}": getattr(matrix, part) for part in _PARTS}
            if bias is not None:
                arrays[f"{number}.bias"] = bias
        counts = [chunk.matrix.N for chunk in content.chunks]
        values = (self.dim, self.bits, self.scale, self.metric, counts)
        fields = dict(zip(_FIELDS, values, strict=True))
        tensors = {name: StoredTensor.of(array) for name, array in arrays.items()}
        _FILE.write(path, {"index": json.dumps(fields)}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, verify: bool = False) -> VectorIndex:
        """The index in a file, memory-mapped: pages are read when a search first needs them.
        Adding to it leaves the file as it is.

        The header is checked in any case. With `verify` the whole file is read and compared with
        its digest; without, numbers that were damaged on the disk are not noticed.

        ValueError, naming the file, if it is of another kind or version, truncated, damaged, or
        does not hold together. FileNotFoundError if there is none.
        """
        metadata, tensors = _FILE.read(path, verify=verify)
        try:
            fields = json.loads(metadata["index"])
            check_names(fields, _FIELDS, ())
            counts = fields.pop("counts")
            index = cls(**fields)
            arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
            index._content = index._loaded(counts, arrays)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None
        return index

    def _loaded(self, counts: list[int], arrays: dict[str, npt.NDArray[Any]]) -> _Content:
        """The content that a file has as these arrays, of chunks of so many vectors."""
        if not all(type(count) is int and 1 <= count <= _CHUNK for count in counts):
            raise ValueError(f"chunks have 1 to {_CHUNK} vectors, got {counts}")
        parts = (*_PARTS, "bias") if self.metric == "l2" else _PARTS
        names = [f"{number}.{part}" for number in range(len(counts)) for part in parts]
        one = ["dimension_scale"] if self.scale == "dimension" else []
        check_names(arrays, names + (one if counts else []), one)
        chunks: list[Chunk] = []
        for number, count in enumerate(counts):
            panels, column_sums, scale = (arrays[f"{number}.{part}"] for part in _PARTS)
            dtype, bias = _FORMATS[self.bits], arrays.get(f"{number}.bias")
            matrix = PackedMatrix(panels, column_sums, self.dim, count, dtype, scale)
            chunks.append(Chunk(matrix, _shaped(bias, len(matrix.column_sums), "bias")))
        scales = _shaped(arrays.get("dimension_scale"), self.dim, "dimension_scale")
        return _Content(tuple(chunks), scales)

    def _checked(self, given: Any, name: str) -> Floats:
        """A float32 view [n, dim] of finite numbers."""
        source = float_matrix(given, name)
        if source.shape[1] != self.dim:
            raise ValueError(
                f"{name} have shape {source.shape}, and the index holds vectors of {self.dim}: "
                f"expected [n, {self.dim}]"
            )
        for first in range(0, len(source), _CHUNK):
            part = source[first : first + _CHUNK]
            numbers = range(first, first + len(part))
            _check_finite(part, numbers, name, "remove or replace NaN and infinity")
        return source

    def _normalized(self, source: Floats) -> Floats:
        """Vectors [n, dim] of length 1 for cosines, or 0; themselves for other metrics."""
        if self.metric != "cosine":
            return source
        wide = source.astype(np.float64)
        length = np.sqrt(np.einsum("nd,nd->n", wide, wide))
        return (wide / np.where(length > 0, length, 1)[:, None]).astype(np.float32)

    def _codes(
        self, vectors: Floats, dimension_scale: Floats | None
    ) -> tuple[npt.NDArray[np.int8], Floats]:
        """The integers [n, dim] and the scale of each vector."""
        name = _FORMATS[self.bits]
        if dimension_scale is None:
            coded = quantize(vectors, name, axis=0, range=_RANGES[self.bits])
            return coded.values, coded.scale
        most = 2 ** (self.bits - 1) - 1
        with np.errstate(over="ignore"):  # clamped below
            steps = np.rint(vectors / dimension_scale)
        return np.clip(steps, -most, most).astype(np.int8), np.ones(len(vectors), np.float32)

    def _chunk(
        self, codes: npt.NDArray[np.int8], scale: Floats, dimension_scale: Floats | None
    ) -> Chunk:
        fmt = int_format(_FORMATS[self.bits])
        zero = np.zeros(len(codes), np.int32)
        matrix = pack(QTensor(codes.T, scale, zero, fmt, axis=1))
        if self.metric != "l2":
            return Chunk(matrix, None)
        wide = codes.astype(np.float64)
        if dimension_scale is not None:
            wide *= dimension_scale
        half = np.einsum("nd,nd->n", wide, wide) * scale.astype(np.float64) ** 2 / 2
        largest = float(half.max(initial=0))
        if largest > float(np.finfo(np.float32).max):
            raise ValueError(
                f"a squared length of {2 * largest:.4g} is beyond float32; scale the vectors down"
            )
        return Chunk(matrix, padded((-half).astype(np.float32)))

    def _merged(self, one: Chunk, other: Chunk, dimension_scale: Floats | None) -> Chunk:
        matrices = one.matrix, other.matrix
        scales = [m.scale[: m.N] for m in matrices if m.scale is not None]
        codes = np.concatenate([m.unpack().T for m in matrices])
        return self._chunk(codes, np.concatenate(scales), dimension_scale)

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

    def _originals(self, rescore: Any, count: int) -> Floats:
        given = float_matrix(rescore, "rescore")
        if given.shape != (count, self.dim):
            raise ValueError(
                f"rescore has shape {given.shape}; expected the vectors that were added, "
                f"({count}, {self.dim})"
            )
        return given

    def _nearest(
        self,
        content: _Content,
        queries: Floats,
        first: int,
        count: int,
        how: tuple[int | None, str | None],
    ) -> tuple[Floats, Ids]:
        """(scores, ids), [Q, count], by quantized scores; count is at most that of the content.
        `first` is the number of the first query, for errors; `how`: threads and isa."""
        folded = queries
        if content.dimension_scale is not None:
            with np.errstate(over="ignore"):
                folded = queries * content.dimension_scale
            beyond = ~np.isfinite(folded).all(axis=1)
            if beyond.any():
                raise ValueError(
                    f"queries[{first + int(beyond.argmax())}] times the scales of the dimensions "
                    "is beyond float32; scale vectors and queries down"
                )
        made = Queries(np.ascontiguousarray(folded), *how)
        groups = best_groups(made, content.chunks, count)
        scores, ids = scores_of_groups(made, content.chunks, groups)
        # The last groups of chunks have columns without a vector, of id −1; they come last.
        order = np.lexsort((ids, -scores, ids < 0), axis=1)[:, :count]
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        if self.metric == "l2":
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
                scores = squares.astype(np.float32)
        return scores, ids

    def _rescored(self, queries: Floats, ids: Ids, originals: Floats) -> tuple[Floats, Ids]:
        """(scores, ids) of the candidates, ranked by what the originals score."""
        exact = np.empty(ids.shape, np.float64)
        step = max(1, _RESCORED // (ids.shape[1] * self.dim))
        for first in range(0, len(queries), step):
            part = ids[first : first + step]
            wide = self._candidates(part, originals).astype(np.float64)
            query = queries[first : first + step].astype(np.float64)
            if self.metric == "l2":
                difference = wide - query[:, None]
                exact[first : first + step] = -np.einsum("qcd,qcd->qc", difference, difference)
            else:
                exact[first : first + step] = np.einsum("qcd,qd->qc", wide, query)
        order = np.lexsort((ids, -exact), axis=1)
        with np.errstate(over="ignore"):
            scores = np.take_along_axis(exact, order, axis=1).astype(np.float32)
        return np.abs(scores) if self.metric == "l2" else scores, np.take_along_axis(ids, order, 1)

    def _candidates(self, ids: Ids, originals: Floats) -> Floats:
        """The originals of these ids, [*ids.shape, dim]."""
        taken = originals[ids.ravel()]
        _check_finite(taken, ids.ravel(), "rescore", "give the vectors as they were added")
        return self._normalized(taken).reshape(*ids.shape, self.dim)


def _shaped(array: npt.NDArray[Any] | None, length: int, name: str) -> Floats | None:
    if array is not None and array.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), got {array.shape}")
    return array


def _check_finite(source: Floats, numbers: npt.ArrayLike, name: str, hint: str) -> None:
    """ValueError naming the first NaN or infinity in rows of these numbers."""
    bad = ~np.isfinite(source)
    if bad.any():
        row, column = first_index(bad)
        number = np.asarray(numbers)[row]
        raise ValueError(f"{name}[{number}, {column}] is {source[row, column]}; {hint}")


# A child of a fork has copies of locks that other threads held, and not these threads.
_indices: weakref.WeakSet[VectorIndex] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [index._new_lock() for index in list(_indices)])
