"""Means with standard errors, and how far outputs are from those of a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Metric:
    """A figure, its standard error (of the same unit), and the number of samples behind it."""

    value: float
    error: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


def mean(values: npt.ArrayLike, clusters: npt.ArrayLike | None = None) -> Metric:
    """The mean of one figure a sample [N]. clusters [N]: samples of the same number are not
    independent (views of one image), and only their means count for the error.

    The error is NaN for less than two samples or clusters. ValueError if there is no sample.
    """
    found = np.asarray(values, np.float64)
    if not found.size:
        raise ValueError("there are no samples to take a mean of")
    groups = np.arange(found.size) if clusters is None else np.asarray(clusters)
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    total = np.bincount(index, found - found.mean())
    n = len(sizes)
    # The sum of each cluster's deviations, so that larger clusters weigh more.
    error = math.sqrt(float((total**2).sum()) * n / (n - 1)) / found.size if n > 1 else math.nan
    return Metric(float(found.mean()), error, int(found.size))


def sqnr(outputs: Array, reference: Array) -> Array:
    """Signal-to-quantization-noise ratio of each sample [N], in dB: outputs [N, ...] against the
    reference's. Infinite where they are equal."""
    wanted = reference.astype(np.float64).reshape(len(reference), -1)
    noise = outputs.astype(np.float64).reshape(wanted.shape) - wanted
    with np.errstate(divide="ignore"):
        return 10 * np.log10((wanted**2).sum(1) / (noise**2).sum(1))


def classified(
    scores: Array,
    labels: Array | None,
    reference: Array | None,
    clusters: npt.ArrayLike | None = None,
) -> dict[str, Metric]:
    """Of class scores [N, classes]: `top1` where there are labels [N]; with a reference's scores,
    `agreement` of the highest class, and `sqnr_db`."""
    found: dict[str, Metric] = {}
    if labels is not None:
        found["top1"] = mean(scores.argmax(1) == labels, clusters)
    if reference is not None:
        found["agreement"] = mean(scores.argmax(1) == reference.argmax(1), clusters)
        found["sqnr_db"] = mean(np.minimum(sqnr(scores, reference), 200), clusters)
    return found
