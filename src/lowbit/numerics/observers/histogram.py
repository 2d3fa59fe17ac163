"""Histograms whose range grows with the data, and what observers that keep one have in common.

The bins of a channel are 2ᵉ wide and lie on both sides of 0; bin i ≥ 0 holds values from i · 2ᵉ to
below (i + 1) · 2ᵉ, and the negative ones mirror it. Where a greater value comes, e grows and pairs
of bins become one. Each bin thus lies within one of the next coarser histogram: no count is lost or
guessed, and neither the order of batches nor how they are cut changes the counts.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.observer import Floats, Observer, Rows

_LEAST_EXPONENT = -1074  # 2 to this power is the least float64 above 0
_CHUNK = 1 << 16  # elements: what is made of them stays in the cache


class Histogram:
    """Counts [channels, bins] of values, and the sums of the values in each bin."""

    def __init__(self, channels: int, bins: int) -> None:
        self.half = bins // 2
        self.exponent = np.full(channels, _LEAST_EXPONENT, np.int64)
        self.counts = np.zeros((channels, bins), np.int64)
        self.sums = np.zeros((channels, bins))

    def add(self, rows: Rows) -> None:
        """Count rows [channels, elements], which are finite."""
        largest = np.abs(rows).max(axis=1).astype(np.float64)
        # largest < 2**power, so it falls into the upper half of the bins on its side.
        power = np.frexp(largest)[1].astype(np.int64) - (self.half.bit_length() - 1)
        self.grow(np.where(largest > 0, power, _LEAST_EXPONENT))
        bins = 2 * self.half
        for channel, row in enumerate(rows):
            for start in range(0, row.size, _CHUNK):
                part = row[start : start + _CHUNK].astype(np.float64)
                steps = np.abs(np.ldexp(part, -self.exponent[channel])).astype(np.int64)
                index = self.half + np.where(part < 0, -1 - steps, steps)
                self.counts[channel] += np.bincount(index, minlength=bins)
                self.sums[channel] += np.bincount(index, weights=part, minlength=bins)

    def grow(self, exponent: npt.NDArray[np.int64]) -> None:
        """Make bins at least 2**exponent [channels] wide."""
        for channel in np.flatnonzero(exponent > self.exponent):
            shift = min(int(exponent[channel] - self.exponent[channel]), 63)
            index = (np.arange(-self.half, self.half) >> shift) + self.half
            for part in (self.counts, self.sums):
                wider = np.zeros_like(part[channel])
                np.add.at(wider, index, part[channel])
                part[channel] = wider
        self.exponent = np.maximum(self.exponent, exponent)

    def merge(self, other: Histogram) -> None:
        """Count what `other` counted."""
        self.grow(other.exponent)
        same = deepcopy(other)
        same.grow(self.exponent)
        self.counts += same.counts
        self.sums += same.sums

    def edges(self) -> Floats:
        """[channels, bins + 1]"""
        return np.ldexp(np.arange(-self.half, self.half + 1.0), self.exponent[:, None])


class Channel(NamedTuple):
    """The histogram of one channel, and the least and greatest value."""

    counts: npt.NDArray[np.int64]
    sums: Floats
    edges: Floats
    low: float
    high: float

    def clipped(self, low: float, high: float, symmetric: bool) -> tuple[float, float]:
        """A range without the part of it that no value reaches."""
        if symmetric:
            limit = min(max(-low, high), max(-self.low, self.high))
            return -limit, limit
        return max(low, self.low), min(high, self.high)


@dataclass(eq=False, kw_only=True)
class HistogramObserver(Observer):
    """An observer that finds its range in a histogram.

    - bins: a power of two; half of them are for negative values. The greatest magnitude of a
      channel lies in the outer half of the bins on its side. 16 bytes a bin and channel are kept.
    """

    bins: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bins < 4 or self.bins & (self.bins - 1):
            raise ValueError(f"expected bins to be a power of two, at least 4, got {self.bins}")

    def _update(self, rows: Rows, low: Floats, high: Floats) -> None:
        if not self._batches:
            self._counted = Histogram(len(rows), self.bins)
        self._counted.add(rows)

    def _absorb(self, other: Any) -> None:
        if not self._batches:
            self._counted = Histogram(len(other._low), self.bins)
        self._counted.merge(other._counted)

    def _histogram(self) -> tuple[npt.NDArray[np.int64] | None, Floats | None]:
        return self._shaped(self._counted.counts), self._shaped(self._counted.edges())

    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        counted = self._counted
        parts: Any = (counted.counts, counted.sums, counted.edges(), self._low, self._high)
        found = [
            self._search(Channel(*channel), fmt, symmetric) for channel in zip(*parts, strict=True)
        ]
        return np.array([low for low, _ in found]), np.array([high for _, high in found])

    @abstractmethod
    def _search(self, channel: Channel, fmt: IntFormat, symmetric: bool) -> tuple[float, float]:
        """The range of one channel; with `symmetric`, −t to t."""
