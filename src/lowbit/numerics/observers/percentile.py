"""The range that holds all but a given share of the values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.histogram import Channel, HistogramObserver
from lowbit.numerics.observers.observer import observers


@observers.register("percentile")
@dataclass(eq=False, kw_only=True)
class Percentile(HistogramObserver):
    """A range of whole bins that holds at least `percentile` % of the values.

    Half of the rest may lie below it and half above; if symmetric, all of the rest may lie outside
    of −t to t. The range is the narrowest that does so, and no wider than the values. (McKinstry
    et al. 2018, arXiv:1809.04191, calibrate so; Wu et al. 2020, arXiv:2004.09602, compare.)

    - percentile: from 50 to 100.
    """

    percentile: float = 99.99

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 50 <= self.percentile <= 100:
            raise ValueError(f"expected percentile from 50 to 100, got {self.percentile}")

    def _search(self, channel: Channel, fmt: IntFormat, symmetric: bool) -> tuple[float, float]:
        counts, edges = channel.counts, channel.edges
        half = self.bins // 2
        if symmetric:
            folded = counts[half:] + counts[:half][::-1]
            limit = edges[self.bins - self._left_out(folded[::-1], 1)]
            return channel.clipped(-limit, limit, True)
        low = edges[self._left_out(counts, 2)]
        high = edges[self.bins - self._left_out(counts[::-1], 2)]
        return channel.clipped(low, high, False)

    def _left_out(self, counts: npt.NDArray[np.int64], sides: int) -> int:
        """How many of the first bins hold no more than may lie outside on one of the sides."""
        total = int(counts.sum())
        # What is an integer but for the rounding of the product is that integer.
        allowed = int((100 - self.percentile) * total / (100 * sides) + 1e-6)
        return int(np.searchsorted(counts.cumsum(), allowed, side="right"))
