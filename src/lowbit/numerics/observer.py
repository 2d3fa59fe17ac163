"""What all observers have, and what those have that keep a histogram."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import affine_parameters, check_finite
from lowbit.numerics.formats import IntFormat, checked_axis, int_format
from lowbit.numerics.qtensor import float_array
from lowbit.registry import Registry

# What all observers have: the least and greatest value that they saw, and how many.

Rows = npt.NDArray[Any]
"""[channels, elements] of float32 or float64."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Summary:
    """What an observer saw; with C channels or, for axis None, without that dimension.

    - low, high: float64 [C], the least and greatest value.
    - elements: how many values there were in each channel, in `batches` that were not empty.
    - counts: int64 [C, bins], or None if the observer keeps no histogram.
    - edges: float64 [C, bins + 1], where the bins begin and end.
    """

    observer: str
    axis: int | None
    batches: int
    elements: int
    low: Floats
    high: Floats
    counts: npt.NDArray[np.int64] | None = None
    edges: Floats | None = None


@dataclass(eq=False, kw_only=True)
class Observer(ABC):
    """Sees any number of batches, then says which range to quantize them with.

    - axis: None for one range, or the axis of the channels that have one each. (A range for each
      token is found at the moment of its use, by `quantize_rows`: there is nothing to observe.)
    """

    axis: int | None = None

    def __post_init__(self) -> None:
        self._batches = self._elements = 0
        self._low = self._high = np.empty(0)

    def observe(self, x: npt.ArrayLike) -> None:
        """See one batch: floats of any shape that has the axis, with as many channels as before.

        An empty batch changes nothing. ValueError names the first NaN or infinity; TypeError: these
        are no floats. After an error, the observer is as it was.
        """
        values = float_array(x)
        check_finite(values)
        rows = self._rows(values)
        if rows.size == 0:
            return
        if self._batches and len(rows) != len(self._low):
            raise ValueError(
                f"expected {len(self._low)} channels on axis {self.axis}, as in earlier batches, "
                f"got {len(rows)}"
            )
        low, high = (each.astype(np.float64) for each in (rows.min(axis=1), rows.max(axis=1)))
        self._update(rows, low, high)
        self._widen(low, high)
        self._elements += rows.shape[1]
        self._batches += 1

    def _widen(self, low: Floats, high: Floats) -> None:
        first = not self._batches
        self._low = low if first else np.minimum(self._low, low)
        self._high = high if first else np.maximum(self._high, high)

    def _rows(self, x: npt.NDArray[Any]) -> Rows:
        x = x if x.dtype == np.float64 else x.astype(np.float32)
        if self.axis is None:
            return x.reshape(1, -1)
        x = np.moveaxis(x, checked_axis(self.axis, x.ndim), 0)
        return x.reshape(len(x), x.size // max(len(x), 1))

    def merge(self, other: Self) -> None:
        """See what `other`, of the same kind and parameters, saw; `other` stays as it is.

        ValueError: they differ in kind, parameters or number of channels.
        """
        names = [field.name for field in fields(self)]
        if type(self) is not type(other) or any(
            getattr(self, name) != getattr(other, name) for name in names
        ):
            raise ValueError(f"expected an observer like {self}, got {other}")
        if not other._batches:
            return
        if self._batches and len(self._low) != len(other._low):
            raise ValueError(f"expected {len(self._low)} channels, got {len(other._low)}")
        self._absorb(other)
        self._widen(other._low, other._high)
        self._elements += other._elements
        self._batches += other._batches

    def range(
        self, dtype: str | IntFormat = "int8", symmetric: bool = True
    ) -> tuple[Floats, Floats]:
        """Low and high, float64 of shape () or [channels], for quantization to a format.

        Some observers choose a range that depends on the format. It need not hold 0; `quantization`
        widens it. ValueError: no batch had a value.
        """
        self._check_data()
        low, high = self._range(int_format(dtype), symmetric)
        return self._shaped(low), self._shaped(high)

    def quantization(
        self, dtype: str | IntFormat = "int8", symmetric: bool = True
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Scale and zero point of the range, as `affine_parameters` gives them."""
        return affine_parameters(*self.range(dtype, symmetric), int_format(dtype), symmetric)

    def summary(self) -> Summary:
        """What it saw until now, in arrays of its own. ValueError: no batch had a value."""
        self._check_data()
        return Summary(
            type(self).__name__, self.axis, self._batches, self._elements,
            self._shaped(self._low), self._shaped(self._high), *self._histogram(),
        )  # fmt: skip

    def _check_data(self) -> None:
        if not self._batches:
            raise ValueError(
                "no data: this observer has seen no value; call observe(x) with batches first"
            )

    def _shaped(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return part[0].copy() if self.axis is None else part.copy()

    def _update(self, rows: Rows, low: Floats, high: Floats) -> None:
        """Before a batch, finite and not empty, is counted; low and high are those of its rows."""
        return

    def _absorb(self, other: Any) -> None:
        """Before what another of this kind saw is counted."""
        return

    def _histogram(self) -> tuple[npt.NDArray[np.int64] | None, Floats | None]:
        """Counts and edges for the summary."""
        return None, None

    @abstractmethod
    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        """[channels] each; there was a value."""


observers: Registry[type[Observer]] = Registry("observer", "lowbit.numerics.observers")
"""By name: "minmax", "moving_average", "percentile", "entropy", "mse"."""


# Histograms whose range grows with the data, and what observers that keep one have in common.
#
# The bins of a channel are 2ᵉ wide and lie on both sides of 0; bin i ≥ 0 holds values from i · 2ᵉ
# to below (i + 1) · 2ᵉ, and the negative ones mirror it. Where a greater value comes, e grows and
# pairs of bins become one. Each bin thus lies within one of the next coarser histogram: no count is
# lost or guessed, and neither the order of batches nor how they are cut changes the counts.

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
