"""Rounding one input's weights after another, the later ones making up for the errors so far.

Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (arXiv:2210.17323). With the Hessian H = 2 X Xᵀ of the output error, rounding column k
of W by e changes the columns that are not yet rounded by −e / [H⁻¹]_kk · [H⁻¹]_k (equation 2); all
the H⁻¹ that this takes are rows of one Cholesky factor (section 4, step 3), and columns far ahead
are changed a block at a time (step 2, equations 4 and 5). H is damped by a share of its mean
diagonal. (Files that other GPTQ programs wrote are read by `lowbit.numerics.read_gptq`.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.methods.activations import Activations, Floats
from lowbit.numerics.methods.method import Method, QuantizedWeight, methods
from lowbit.numerics.qtensor import QTensor

_BLOCK = 128


@methods.register("gptq")
@dataclass(frozen=True, kw_only=True)
class GPTQ(Method):
    """The integers of less output error for scales and zero points as `quantize` chooses them.

    Since these are chosen beforehand, the order of rounding is free and nothing is permuted.

    - damping: above 0; the share of the mean diagonal of H that is added to its diagonal.
    - largest_first: whether inputs are rounded in the order of their mean squares ("act-order"), or
      as they come.
    """

    damping: float = 0.01
    largest_first: bool = True

    def __post_init__(self) -> None:
        if self.damping <= 0:
            raise ValueError(f"expected damping above 0, got {self.damping}")

    def _quantize(self, w: Floats, activations: Activations) -> QuantizedWeight:
        t = self.nearest(w)
        diagonal = np.diagonal(activations.gram)
        order = np.arange(w.shape[1])
        if self.largest_first:
            order = np.argsort(-diagonal, kind="stable")
        # In units of the mean diagonal, so that no size of inputs over- or underflows.
        hessian = activations.gram[np.ix_(order, order)] / (diagonal.mean() or 1.0)
        hessian[np.diag_indices_from(hessian)] += self.damping
        factor = np.linalg.cholesky(np.linalg.inv(hessian)).T.astype(np.float64)
        scale, zero_point = (
            np.broadcast_to(t.spread(part), w.shape).T[order].astype(np.float64)
            for part in (t.scale, t.zero_point)
        )
        values = np.empty_like(t.values)
        values[:, order] = _rounded(w.T[order], scale, zero_point, factor, t.format).T
        weight = QTensor(
            values, t.scale, t.zero_point, t.format, t.axis, t.group_size, t.group_axis
        )
        return QuantizedWeight(weight)


def _rounded(
    w: Floats, scale: Floats, zero_point: Floats, factor: Floats, fmt: IntFormat
) -> Floats:
    """Integers [K, N] for w [K, N], which is changed on the way; the factor [K, K] is upper."""
    q = np.empty_like(w)
    errors = np.empty_like(w)
    for start in range(0, len(w), _BLOCK):
        stop = min(start + _BLOCK, len(w))
        for k in range(start, stop):
            q[k] = np.clip(np.rint(w[k] / scale[k]) + zero_point[k], fmt.qmin, fmt.qmax)
            errors[k] = (w[k] - scale[k] * (q[k] - zero_point[k])) / factor[k, k]
            w[k + 1 : stop] -= np.multiply.outer(factor[k, k + 1 : stop], errors[k])
        w[stop:] -= factor[start:stop, stop:].T @ errors[start:stop]
    return q
