"""The range of least squared error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.numerics.affine import affine_parameters, dequantize_affine, quantize_affine
from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.histogram import Channel, HistogramObserver
from lowbit.numerics.observers.observer import Floats, observers

_FACTORS: Floats = 0.96 ** np.arange(160.0)  # down to 0.0015
_ONES: Floats = np.ones(160)


@observers.register("mse")
@dataclass(eq=False, kw_only=True)
class MSE(HistogramObserver):
    """The least and greatest value moved inwards, to where the squared error is least.

    First what is beyond ±t is cut off, for the best of t = max|x| · 0.96ⁱ; then, unless symmetric,
    each end by itself is multiplied by the best of these factors, twice in turn.

    A range's error is that of quantizing the mean of each bin, with the project's own arithmetic,
    as often as the bin has values. It is the error of the values themselves but for a constant and
    for the bins in which rounding changes from one integer to the next. Of ranges that are as good
    the widest is taken. (Shin, Hwang, Sung 2016, arXiv:1511.06488, search a grid, too; for weights,
    which need no histogram, `quantize(range="mse")` does.)
    """

    def _search(self, channel: Channel, fmt: IntFormat, symmetric: bool) -> tuple[float, float]:
        low, high = min(channel.low, 0.0), max(channel.high, 0.0)
        limit = max(-low, high) * _FACTORS
        low, high = _best(channel, np.maximum(low, -limit), np.minimum(high, limit), fmt, symmetric)
        if symmetric:
            return channel.clipped(low, high, True)
        for _ in range(2):
            low, high = _best(channel, low * _ONES, high * _FACTORS, fmt, False)
            low, high = _best(channel, low * _FACTORS, high * _ONES, fmt, False)
        return low, high


def _best(
    channel: Channel, low: Floats, high: Floats, fmt: IntFormat, symmetric: bool
) -> tuple[float, float]:
    """The first of the ranges with the least error."""
    scale, zero_point = (part[:, None] for part in affine_parameters(low, high, fmt, symmetric))
    filled = channel.counts > 0
    counts = channel.counts[filled]
    means = np.broadcast_to(channel.sums[filled] / counts, (len(low), len(counts)))
    q = quantize_affine(means, scale, zero_point, fmt)
    error = np.square(dequantize_affine(q, scale, zero_point) - means) @ counts
    best = int(np.argmin(error))
    return float(low[best]), float(high[best])
