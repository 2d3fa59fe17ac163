"""Zero points that leave few large errors, found without data.

Badri, Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"
(mobiusml.github.io/hqq_blog). Of a group, with the scale S as it is, the zero point z of least
Σ |w − S (q − z)|^p is sought, p < 1, which forgives few large errors. A second variable E for the
errors splits that in two, solved in turn, with β growing by κ each time:

    E = sign(e) max(|e| − |e|^(p−1) / β, 0)        e: the errors now        (generalized shrinkage)
    z = mean(q − (w / S − E))

Here e is in units of S, so that a weight and its multiples have the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.methods.activations import Floats
from lowbit.numerics.methods.method import Method, QuantizedWeight, groups, methods
from lowbit.numerics.qtensor import QTensor


@methods.register("hqq")
@dataclass(frozen=True, kw_only=True)
class HQQ(Method):
    """Real zero points, kept beside the integer ones; no group's Σ |e|^p is above the nearest's.

    - norm: p, above 0, below 1. beta: β at first. kappa: κ. turns: how often the two are solved.
    """

    norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01
    turns: int = 20

    needs_activations: ClassVar[bool] = False
    real_zero_points: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.norm < 1 or self.beta <= 0 or self.kappa <= 0:
            raise ValueError(f"expected norm within 0 to 1, beta and kappa above 0, got {self}")

    def _quantize(self, w: Floats, activations: Any) -> QuantizedWeight:
        t = self.nearest(w)
        fmt = t.format
        zero = t.zero_point.astype(np.float32)
        values = np.empty_like(t.values)
        for columns, where in groups(t):
            u = w[:, columns] / t.scale[where][:, None]
            zero[where] = self._zero_points(u, zero[where], fmt)
            values[:, columns] = _integers(u, zero[where], fmt)
        near = np.clip(np.rint(zero), fmt.qmin, fmt.qmax).astype(np.int32)
        weight = QTensor(values, t.scale, near, fmt, t.axis, t.group_size, t.group_axis)
        return QuantizedWeight(weight, zero_point=zero)

    def _zero_points(
        self, u: Floats, zero: npt.NDArray[np.float32], fmt: IntFormat
    ) -> npt.NDArray[np.float32]:
        """[N] of the groups u [N, elements], which are in units of their scales."""
        best, least = zero, np.full(len(u), np.inf)
        beta = self.beta
        for turn in range(self.turns + 1):
            q = _integers(u, zero, fmt)
            error = u - (q - zero[:, None].astype(np.float64))
            size = np.maximum(np.abs(error), 1e-30)
            norm = (size**self.norm).sum(axis=1)
            best, least = np.where(norm < least, zero, best), np.minimum(norm, least)
            if turn < self.turns:
                shrunk = np.sign(error) * np.maximum(size - size ** (self.norm - 1) / beta, 0)
                zero = (q - (u - shrunk)).mean(axis=1).astype(np.float32)
                beta *= self.kappa
        return best


def _integers(u: Floats, zero: npt.NDArray[np.float32], fmt: IntFormat) -> npt.NDArray[Any]:
    return np.clip(np.rint(u + zero[:, None]), fmt.qmin, fmt.qmax).astype(fmt.storage)
