"""Quantization of activations, row by row, at the moment they are used.

The kernels do this while they pack the activation. This is the reference that they are
tested against bit for bit, so every step is one elementary float32 operation, rounded by
itself: no fused multiply-add, no float64, subnormals kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import SMALLEST_SCALE

_ONE = np.float32(1.0)


def quantize_rows(
    x: npt.NDArray[np.float32], symmetric: bool
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Quantize each row of `x`, float32 [M, K], to uint8 with a scale and zero point of its own.

    Returns q, uint8 [M, K], C-contiguous; S, float32 [M]; Z, int32 [M]; x ≈ S · (q − Z).
    Per row, where every line is rounded to float32:

        symmetric                           otherwise
        S = max|x| / 127                    S = hi / 255 − lo / 255
                                                hi = max(x, 0), lo = min(x, 0)
        S = 1 if S < 2⁻¹²⁶                  S = 1 if S < 2⁻¹²⁶
        Z = 128                             Z = clamp(round_half_even(−lo / S), 0, 255)
        i = 1 / S                           i = 1 / S
        t = clamp(x · i, −127, 127)         t = clamp(x · i, −Z, 255 − Z)
        q = round_half_even(t) + Z          q = round_half_even(t) + Z

    (Two divisions, since hi − lo can overflow.) Where S would not be a normal float32, Z = 128: an
    all-zero row thus has S = 1 and q = Z = 128, which signed bytes hold as 0, and so has an empty
    row. Rows that small round to zero in the same way: an error of at most 255 · 2⁻¹²⁶.
    A row that holds NaN or infinity has S = NaN, so that whatever is computed from it is NaN,
    and otherwise q and Z of an all-zero row.

    Raises TypeError if `x` is not float32, ValueError if it has not two dimensions.
    """
    if x.dtype != np.float32:
        raise TypeError(f"expected float32 activations, got {x.dtype}; convert with astype")
    if x.ndim != 2:
        raise ValueError(f"expected activations of shape [M, K], got {x.shape}; reshape to rows")
    finite = np.logical_and.reduce(np.isfinite(x), axis=1)
    rows = np.where(finite[:, None], x, np.float32(0))
    low, high = rows.min(axis=1, initial=0), rows.max(axis=1, initial=0)
    if symmetric:
        scale = np.maximum(-low, high) / np.float32(127)
    else:
        scale = high / np.float32(255) - low / np.float32(255)
    zeros = scale < SMALLEST_SCALE
    scale = np.where(zeros, _ONE, scale)
    if symmetric:
        zero_point = np.full_like(scale, 128)
        least, greatest = np.full_like(scale, -127), np.full_like(scale, 127)
    else:
        zero_point = np.where(zeros, np.float32(128), np.clip(np.rint(-low / scale), 0, 255))
        least, greatest = -zero_point, np.float32(255) - zero_point
    steps = rows * (_ONE / scale)[:, None]
    np.clip(steps, least[:, None], greatest[:, None], out=steps)
    np.rint(steps, out=steps)
    steps += zero_point[:, None]
    scale[~finite] = np.nan
    return steps.astype(np.uint8, order="C"), scale, zero_point.astype(np.int32)
