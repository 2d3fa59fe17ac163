"""The affine map between real numbers and integers.

    q = clamp(round_half_even(r / S) + Z, qmin, qmax)        r ≈ S · (q − Z)

This is the convention of PyTorch and of ONNX's QuantizeLinear. (Jacob et al. 2018,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", equation 1, use the same sign of Z; where a text writes q = Int(r / S) − Z, its
zero point is the negative of this one.) The scale S is a float32 and the zero
point Z an int32 within the format, so that 0.0 is always represented exactly.

Scales are chosen and values are quantized in float64 with the scale as rounded to float32:
the result is the true nearest integer whatever the input's float type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat, first_index

# A scale below the smallest normal float32 would lose bits, and its reciprocal overflows.
SMALLEST_SCALE = np.finfo(np.float32).smallest_normal
_LARGEST = np.finfo(np.float32).max


def check_finite(array: npt.NDArray[Any]) -> None:
    """Raise ValueError naming the first NaN or infinity in `array`, in C order, if any."""
    finite = np.isfinite(array)
    if finite.all():
        return
    index = first_index(~finite)
    raise ValueError(
        f"expected finite values, found {float(array[index])} at index {index}; "
        "remove or replace NaN and infinity before quantizing"
    )


def affine_parameters(
    low: npt.ArrayLike, high: npt.ArrayLike, fmt: IntFormat, symmetric: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Scale and zero point for values in [low, high], elementwise over arrays.

    `low` and `high` are broadcast against each other; the two results have their shape. The
    range is first widened to hold 0.

    - Symmetric: Z = `fmt.midpoint` (0 if signed, half of the range if not) and
      S = max(|low|, |high|) / (qmax − Z). The value qmin is then never reached.
    - Else: S = (high − low) / (qmax − qmin), Z = qmin − round_half_even(low / S), clamped.

    Within the range the error of a value is at most S/2, and at the ends at most
    (1/2 + 2⁻¹⁶) S, since S itself is rounded to float32. A range of nothing but 0 gets S = 1.
    A range so small that S would fall below the smallest normal float32, 2⁻¹²⁶, gets
    S = 2⁻¹²⁶; the error is then at most 2⁻¹²⁷, which may be as large as the values.

    Raises ValueError where a bound is not finite, is beyond float32, or low > high.
    """
    low64, high64 = np.broadcast_arrays(
        np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
    )
    _check_range(low64, high64)
    low64, high64 = np.minimum(low64, 0.0), np.maximum(high64, 0.0)
    if symmetric:
        exact = np.maximum(-low64, high64) / (fmt.qmax - fmt.midpoint)
    else:
        exact = (high64 - low64) / (fmt.qmax - fmt.qmin)
    floored = np.where(low64 == high64, 1.0, np.maximum(exact, SMALLEST_SCALE))
    scale = floored.astype(np.float32)
    if symmetric:
        return scale, np.full(scale.shape, fmt.midpoint, dtype=np.int32)
    zero_point = np.clip(fmt.qmin - np.rint(low64 / scale), fmt.qmin, fmt.qmax)
    return scale, np.asarray(zero_point, dtype=np.int32)


def _check_range(low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> None:
    check_finite(low)
    check_finite(high)
    if (low > high).any():
        raise ValueError("expected low <= high everywhere; swap the two or check their order")
    if (np.abs(low) > _LARGEST).any() or (np.abs(high) > _LARGEST).any():
        raise ValueError(
            f"expected a range within float32, ±{_LARGEST:.4g}; scale the values down first"
        )


def quantize_affine(
    x: npt.NDArray[Any], scale: npt.ArrayLike, zero_point: npt.ArrayLike, fmt: IntFormat
) -> npt.NDArray[np.int8] | npt.NDArray[np.uint8]:
    """Integers for the real values `x`: C-contiguous, `x`'s shape, dtype `fmt.storage`.

    `scale` (taken as float32) and `zero_point` are broadcast to `x`. Values outside of what
    the format can hold saturate.

    Raises ValueError if `x` holds NaN or infinity, a scale is not positive and finite, a zero
    point is outside of the format, or the shapes do not broadcast to `x.shape`; TypeError if
    the zero points are not integers.
    """
    check_finite(x)
    scale, zero_point = _checked_parameters(scale, zero_point, x.shape)
    if ((zero_point < fmt.qmin) | (zero_point > fmt.qmax)).any():
        raise ValueError(
            f"expected zero points within {fmt.name}, {fmt.qmin} to {fmt.qmax}, "
            f"got {zero_point.min()} to {zero_point.max()}"
        )
    # An overflow to infinity saturates below, as it should.
    with np.errstate(over="ignore"):
        steps = np.divide(x, scale, dtype=np.float64, order="C")
    steps = np.asarray(steps)
    np.rint(steps, out=steps)
    steps += zero_point
    np.clip(steps, fmt.qmin, fmt.qmax, out=steps)
    return steps.astype(fmt.storage)


def dequantize_affine(
    q: npt.NDArray[Any], scale: npt.ArrayLike, zero_point: npt.ArrayLike
) -> npt.NDArray[np.float32]:
    """The real values S · (q − Z) in float32, in `q`'s shape; one rounding.

    `scale` (taken as float32) and `zero_point` are broadcast to `q`. A product beyond float32,
    which the ends of a range near its limit can give, becomes the largest float32.

    Raises TypeError if `q` is not int8 or uint8 or the zero points are not integers, ValueError
    if a scale is not positive and finite or the shapes do not broadcast to `q.shape`.
    """
    if q.dtype not in (np.int8, np.uint8):
        raise TypeError(f"expected quantized values of dtype int8 or uint8, got {q.dtype}")
    scale, zero_point = _checked_parameters(scale, zero_point, q.shape)
    values = np.asarray(np.subtract(q, zero_point, dtype=np.float32))
    with np.errstate(over="ignore"):
        values *= scale
    return np.clip(values, -_LARGEST, _LARGEST, out=values)


def _checked_parameters(
    scale: npt.ArrayLike, zero_point: npt.ArrayLike, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    scale = np.asarray(scale, dtype=np.float32)
    zero_point = np.asarray(zero_point)
    if zero_point.dtype.kind not in "iu":
        raise TypeError(f"expected zero points of an integer dtype, got {zero_point.dtype}")
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise ValueError("expected scales that are positive and finite")
    for name, array in (("scale", scale), ("zero_point", zero_point)):
        try:
            np.broadcast_to(array, shape)
        except ValueError:
            raise ValueError(
                f"expected {name} to broadcast to the values' shape {shape}, got {array.shape}"
            ) from None
    return scale, zero_point.astype(np.int32)


# Quantization of activations, row by row, at the moment they are used.
#
# The kernels do this while they pack the activation. This is the reference that they are
# tested against bit for bit, so every step is one elementary float32 operation, rounded by
# itself: no fused multiply-add, no float64, subnormals kept.

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
