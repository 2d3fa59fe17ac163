"""The range that loses least information, by the Kullback-Leibler divergence.

Migacz 2017, "8-bit Inference with TensorRT" (GTC, "Entropy Calibration - pseudocode"), and the
function get_entropy_threshold of ONNX Runtime's quantization/calibrate.py, which is that for values
of both signs. For each candidate, a range of whole bins of a histogram:

- P: its bins; what lies outside is added to the outermost bins (it saturates there).
- Q: its bins without what lies outside, merged evenly into as many levels as the format has; each
  level's count is then spread evenly over those of its bins that are not empty in P.

The range with the least KL(P ‖ Q) = Σ P log(P / Q), both normalized, is taken. What is left open:

- Bin i of a candidate goes to level floor(i · levels / bins).
- Where something saturates into a level that is empty otherwise, the divergence is infinite.
- The two bins at 0 count no more than those beside them, as in NVIDIA's pytorch-quantization: 0.0
  is exact with any range, so a peak of zeros, as after a ReLU, must not decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.histogram import Channel, HistogramObserver
from lowbit.numerics.observers.observer import Floats, observers

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
