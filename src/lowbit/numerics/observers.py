"""Observers: they see batches of a tensor and say with which range to quantize it.

    observer = observers.get("entropy")(axis=None)
    for batch in batches:
        observer.observe(batch)
    scale, zero_point = observer.quantization("uint8", symmetric=False)

A new one is added to this file; docs/networks.md says when to choose which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import affine_parameters, dequantize_affine, quantize_affine
from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observer import (
    Channel,
    Floats,
    HistogramObserver,
    Observer,
    Rows,
    Summary,
    observers,
)

__all__ = ["Observer", "Summary", "observers"]


@observers.register("minmax")
@dataclass(eq=False, kw_only=True)
class MinMax(Observer):
    """From the least to the greatest value of all batches: nothing saturates."""

    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        return self._low, self._high


@observers.register("moving_average")
@dataclass(eq=False, kw_only=True)
class MovingAverage(Observer):
    """Each batch moves the range towards its own least and greatest value.

        low = low + rate · (least of the batch − low)        and so high

    The first batch sets the range. Jacob et al. 2018 (arXiv:1712.05877, section 3.1) average so in
    training, PyTorch's MovingAverageMinMaxObserver with the same default rate. The result depends
    on the order of batches, so two of these cannot be merged.

    - rate: above 0, at most 1.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 1:
            raise ValueError(f"expected a rate above 0 and at most 1, got {self.rate}")

    def _update(self, rows: Rows, low: Floats, high: Floats) -> None:
        if not self._batches:
            self._average = low, high
            return
        average_low, average_high = self._average
        self._average = (
            average_low + self.rate * (low - average_low),
            average_high + self.rate * (high - average_high),
        )

    def _absorb(self, other: Any) -> None:
        raise TypeError(
            "a moving average depends on the order of batches and cannot be merged; observe them "
            "with one observer, or choose another kind"
        )

    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        return self._average


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


# The range that loses least information, by the Kullback-Leibler divergence.
#
# Migacz 2017, "8-bit Inference with TensorRT" (GTC, "Entropy Calibration - pseudocode"), and the
# function get_entropy_threshold of ONNX Runtime's quantization/calibrate.py, which is that for
# values of both signs. For each candidate, a range of whole bins of a histogram:
#
# - P: its bins; what lies outside is added to the outermost bins (it saturates there).
# - Q: its bins without what lies outside, merged evenly into as many levels as the format has; each
#   level's count is then spread evenly over those of its bins that are not empty in P.
#
# The range with the least KL(P ‖ Q) = Σ P log(P / Q), both normalized, is taken. What is left open:
#
# - Bin i of a candidate goes to level floor(i · levels / bins).
# - Where something saturates into a level that is empty otherwise, the divergence is infinite.
# - The two bins at 0 count no more than those beside them, as in NVIDIA's pytorch-quantization: 0.0
#   is exact with any range, so a peak of zeros, as after a ReLU, must not decide.

Indices = npt.NDArray[np.int64]


@observers.register("entropy")
@dataclass(eq=False, kw_only=True)
class Entropy(HistogramObserver):
    """The range of least KL divergence: −t to t if symmetric, else that part of it with values.

    Candidates have at least one bin for each level of the format. The search of a channel takes
    a few hundredths of a second.
    """

    def _search(self, channel: Channel, fmt: IntFormat, symmetric: bool) -> tuple[float, float]:
        half = self.bins // 2
        counts = channel.counts.astype(np.float64)
        counts[half] = min(counts[half : half + 2])
        counts[half - 1] = min(counts[half - 2 : half])
        filled = np.flatnonzero(counts)
        if filled.size == 0:
            return channel.clipped(channel.low, channel.high, symmetric)
        left, right = max(half - filled[0], 0), max(filled[-1] + 1 - half, 0)
        reach = np.arange(1, max(left, right) + 1)
        begin = half - (reach if symmetric else np.minimum(reach, left))
        end = half + (reach if symmetric else np.minimum(reach, right))
        levels = 2 * (fmt.qmax - fmt.midpoint) + 1 if symmetric else fmt.qmax - fmt.qmin + 1
        enough = (end - begin >= levels) | (reach == reach[-1])
        begin, end = begin[enough], end[enough]
        best = int(np.argmin(divergences(counts, begin, end, levels)))
        low, high = channel.edges[[begin[best], end[best]]].tolist()
        return channel.clipped(low, high, symmetric)


def divergences(counts: Floats, begin: Indices, end: Indices, levels: int) -> Floats:
    """KL(P ‖ Q) of the candidates that hold the bins from `begin` to below `end`, in one pass.

    With counts p in P and q in Q, of sums T and S, it is (Σ p log p − Σ p log q) / T + log(S / T).
    Both sums come from running sums over bins, as q is the same wherever p > 0 in a level.
    """
    edges = begin[:, None] - (-np.arange(levels + 1) * (end - begin)[:, None] // levels)
    running, filled, logs = (_running(each) for each in (counts, counts > 0, _x_log_x(counts)))
    level, bins = np.diff(running[edges]), np.diff(filled[edges])
    inside, total = running[end] - running[begin], running[-1]
    ends = (
        (counts[begin], running[begin], 0),
        (counts[end - 1], total - running[end], -1),
    )
    p_log_p = logs[end] - logs[begin]
    for outermost, outside, at in ends:
        p_log_p += _x_log_x(outermost + outside) - _x_log_x(outermost)
        bins[:, at] += (outermost == 0) & (outside > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_q = np.log(level / bins)
        p_log_q = np.where(level > 0, level * log_q, 0.0).sum(axis=1)
        for _, outside, at in ends:
            p_log_q += np.where(outside > 0, outside * log_q[:, at], 0.0)
        found = (p_log_p - p_log_q) / total + np.log(inside / total)
    return np.where(np.isnan(found) | (inside == 0), np.inf, found)


def _running(x: npt.NDArray[Any]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(x, dtype=np.float64)])


def _x_log_x(x: Floats) -> Floats:
    return x * np.log(np.where(x > 0, x, 1.0))


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
