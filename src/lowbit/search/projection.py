"""Queries as products with an index's integers need them, and what makes scores of products.

A vector is kept as v ≈ c + S_v · w∘k, with the centre c, weights w of dimensions and integers k,
and with a bias b. With u = v − c, of which S_v · w∘k is what is kept:

    squared distance   |q − v|² = |q − c|² − 2 · ((q − c)·u − |u|²/2)        b = −|u|²/2
    inner product      q·v = q·c + α · ((q/α − c)·u + c·u)                   b = c·u

for every α. What is lost of u counts times the vector that it is multiplied by. So α is such that
q/α − c is short; a query that does not point to where the vectors are is multiplied as it is:

    inner product      q·v = q·c + q·u                                       no bias
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowbit.search.frame import Doubles, Frame
from lowbit.search.groups import Floats, Ids

_LIKE = 0.25  # of the centre, that a query has along it at least, if it is centred
_SAME = 1.5  # times |q − α·c|² of the best α: with as much α is 1, which makes q = v exact
_LARGE, _SMALLER = 2.0**90, 2.0**-80  # sums of larger numbers times integers might overflow


class Projection(NamedTuple):
    """Some of the queries: score = constant + factor · (values · integers · scale + bias)."""

    rows: Ids
    """Which queries they are, [n]."""
    values: Floats
    """[n, dim]"""
    biased: bool
    constant: Doubles
    """[n]"""
    factor: Doubles
    """[n]; below 0 for distances."""

    def scores(self, products: Floats) -> Doubles:
        """Scores [n, count] of products [n, count]."""
        return self.constant[:, None] + self.factor[:, None] * products.astype(np.float64)

    def products(self, score: float) -> float:
        """What the first query's product is at this score."""
        return float((score - self.constant[0]) / self.factor[0])


def distances(queries: Floats, frame: Frame) -> list[Projection]:
    """All queries, for squared distances."""
    rest = queries.astype(np.float64) - frame.centre
    lengths = np.einsum("qd,qd->q", rest, rest)
    return [
        _projection(
            np.arange(len(queries)), rest, frame, True, lengths, np.full(len(queries), -2.0)
        )
    ]


def inner_products(queries: Floats, frame: Frame) -> list[Projection]:
    """The queries that are centred, and those that are not, for inner products."""
    wide = queries.astype(np.float64)
    centre = frame.centre.astype(np.float64)
    along = np.einsum("qd,d->q", wide, centre)
    squares = np.einsum("qd,qd->q", wide, wide)
    whole = float(centre @ centre)
    share = along / max(whole, float(np.finfo(np.float64).tiny))
    like = share >= _LIKE
    shortest = squares - np.where(like, share, 0) * along  # |q − α·c|², of the best α
    same = squares - 2 * along + whole <= _SAME * shortest
    share = np.where(same, 1, share)
    like |= same
    projections: list[Projection] = []
    near = np.flatnonzero(like)
    if len(near):
        rest = wide[near] / share[near, None] - centre
        projections.append(_projection(near, rest, frame, True, along[near], share[near]))
    far = np.flatnonzero(~like)
    if len(far):
        rest = wide[far]
        factor = np.where(np.abs(rest).max(axis=1) > _LARGE, 1 / _SMALLER, 1)
        rest = rest / factor[:, None]
        projections.append(_projection(far, rest, frame, False, along[far], factor))
    return projections


def _projection(
    rows: Ids, rest: Doubles, frame: Frame, biased: bool, constant: Doubles, factor: Doubles
) -> Projection:
    with np.errstate(over="ignore"):
        values = frame.weighted(rest).astype(np.float32)
    return Projection(rows, values, biased, constant, factor)
