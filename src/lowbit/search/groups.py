"""How chunks of an index are searched: maxima of groups, the best groups, what these hold.

A search multiplies quantized queries by one chunk after another. Of each product only the greatest
score of every 8 neighbours, a group, is stored; of these maxima each query keeps the best. What the
8 of such a group score is then computed of the query's floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import threads as thread_runtime
from lowbit.kernels.cpu.integer.octet_scores import octet_scores
from lowbit.kernels.cpu.rows.select import EMPTY, LAST_PLACE, keep_greatest
from lowbit.kernels.cpu.shared.epilogue import OCTET
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.numerics import quantize_rows
from lowbit.product import requests
from lowbit.product.dispatch import threads_key
from lowbit.registry.locks import cached_property
from lowbit.weights.panels import PackedMatrix

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_HALVES = PANEL // OCTET
_FEWEST_MORE, _MOST_MORE = 16, 64  # groups that are looked at beside those that hold the best
_WORTH_THREADS = 1 << 16  # numbers that pass by heaps, or multiply-adds of groups


class Chunk(NamedTuple):
    """Vectors as columns; `bias` is added to the product of each with a query."""

    matrix: PackedMatrix
    bias: Floats | None

    @property
    def groups(self) -> int:
        """Of 8 vectors, the last one maybe of fewer."""
        return blocks(self.matrix.N, OCTET)

    @property
    def scales_of_groups(self) -> Floats:
        """The greatest scale in each group."""
        scale = self.matrix.scale
        assert scale is not None
        padded = np.zeros(self.groups * OCTET, np.float32)
        padded[: self.matrix.N] = np.asarray(scale).ravel()[: self.matrix.N]
        return padded.reshape(-1, OCTET).max(axis=1)


class Queries:
    """Queries, float32 [Q, K], finite and C-contiguous, what kernels make of them, and with how
    many threads and for which instruction set these run."""

    def __init__(self, values: Floats, threads: int | None = None, isa: str | None = None) -> None:
        self.values, self.threads, self.isa = values, threads, isa
        self.stored, self.scale, self.zero = quantize_rows(values, False)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def k_blocks(self) -> int:
        """Blocks of 64 k."""
        return blocks(self.values.shape[1], LINE)

    def count(self, work: int) -> int:
        """How many threads share so much work."""
        if work < _WORTH_THREADS:
            return 1
        return min(len(self), self.threads or thread_runtime.max_threads())

    @cached_property
    def padded(self) -> Floats:
        """The values [Q, K padded to a line]."""
        padded = np.zeros((len(self), self.k_blocks * LINE), np.float32)
        padded[:, : self.values.shape[1]] = self.values
        return padded

    @cached_property
    def lost(self) -> npt.NDArray[np.float64]:
        """How long the differences are between values and their integers times scales, [Q]."""
        integers = self.stored.astype(np.float64) - self.zero[:, None]
        rest = self.values - integers * self.scale[:, None]
        return np.sqrt(np.einsum("qd,qd->q", rest, rest))


def groups_for(count: int) -> int:
    """How many groups of the greatest maxima are looked at closely for so many vectors.

    Maxima are of queries in 8 bits, so that a group with one of the best vectors may come behind
    `count` others.
    """
    return count + min(max(count, _FEWEST_MORE), _MOST_MORE)


def group_maxima(queries: Queries, chunk: Chunk, mask: Mask | None = None) -> Floats:
    """The maxima of `linear_dynamic(queries, matrix, bias)` over each 8 columns, which is not made.

    Returns float32 [Q, 2 · ceil(N / 16)]; columns from N on count as −inf, and so do those where
    the mask, bool [2 · 8 · ceil(N / 16)], is False.
    """
    matrix = chunk.matrix
    out = np.empty((len(queries), blocks(matrix.N, PANEL) * _HALVES), np.float32)
    isa, threads = queries.isa, threads_key(queries.threads)
    b, biased = requests.panel_format(matrix, isa), chunk.bias is not None
    prepared = requests.maxima(len(queries), b, threads, isa, biased, mask is not None)
    right = prepared.weight(matrix)
    prepared.run({**right, "a": queries.values, "out": out, "bias": chunk.bias, "residual": mask})
    return out


def masked(chunks: Sequence[Chunk], mask: Mask | None) -> Iterator[tuple[Chunk, Mask | None]]:
    """Each chunk with its part of a mask over all vectors, behind which follows a panel more."""
    first = 0
    for chunk in chunks:
        last = first + blocks(chunk.matrix.N, PANEL) * PANEL
        yield chunk, None if mask is None else mask[first:last]
        first += chunk.matrix.N


def best_groups(
    queries: Queries, chunks: Sequence[Chunk], count: int, mask: Mask | None = None
) -> Ids:
    """The `count` groups of each query, or all, with the greatest maxima, lower ones first.

    [Q, min(count, groups)], ascending. They hold the `count` best vectors for queries in 8 bits, of
    those that the mask admits. Were one of these in a group G outside, then `count` groups would
    come before G: by a greater maximum, or by the same one and a lower number. In each of them the
    vector with the maximum comes before all of G, by score or by id. So `count` vectors come before
    the one in G, which is not among the best.
    """
    kept = min(count, sum(chunk.groups for chunk in chunks))
    heaps = np.full((len(queries), kept), EMPTY, np.int64)
    program = keep_greatest.program(instruction_sets.active(queries.isa))
    first = 0
    for chunk, part in masked(chunks, mask):
        maxima = group_maxima(queries, chunk, part)
        program(
            queries.count(maxima.size), maxima, maxima.shape[1], chunk.groups, first, heaps, kept,
            kept.bit_length(), len(queries),
        )  # fmt: skip
        first += chunk.groups
    return np.sort(LAST_PLACE - (heaps & LAST_PLACE), axis=1)


def scores_of_groups(queries: Queries, chunks: Sequence[Chunk], groups: Ids) -> tuple[Floats, Ids]:
    """(scores, ids) [Q, groups · 8] of all that the groups [Q, groups] hold, of the queries'
    floats: maxima are of their integers.

    Where a group has a column without a vector, the id is −1.
    """
    scores = np.empty((*groups.shape, OCTET), np.float32)
    count = queries.count(scores.size * queries.values.shape[1])
    firsts = np.zeros(len(chunks) + 1, np.int64)  # group that each chunk begins with
    vectors = np.zeros(len(chunks) + 1, np.int64)  # vectors before each chunk
    np.cumsum([chunk.groups for chunk in chunks], out=firsts[1:])
    np.cumsum([chunk.matrix.N for chunk in chunks], out=vectors[1:])
    isa = instruction_sets.active(queries.isa)
    for number, chunk in enumerate(chunks):
        program = octet_scores.program(
            isa, weight=chunk.matrix.weight, biased=chunk.bias is not None
        )
        panels, _, _, scales = chunk.matrix.addresses
        program(
            count, queries.padded, groups, groups.shape[1], int(firsts[number]),
            int(firsts[number + 1]), panels, queries.k_blocks, scales, chunk.bias, scores,
            len(queries),
        )  # fmt: skip
    of = np.searchsorted(firsts, groups, side="right") - 1  # each group's chunk
    ids = ((groups - firsts[of]) * OCTET + vectors[of])[:, :, None] + np.arange(OCTET)
    ids[ids >= vectors[of + 1][:, :, None]] = -1
    return scores.reshape(len(queries), -1), ids.reshape(len(queries), -1)
