"""Products of matrices and convolution."""

# Dimensions are text.
# ruff: noqa: F722, F821, UP037

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int32, UInt8

from lowbit.spec.typed import Array, operation

_DTYPES = ("float32", "bfloat16", "float16")
_SHORT = ("bfloat16", "float16")
_SIZES = {"B": 2, "M": 40, "K": 70, "N": 50}
_NIBBLES = np.arange(0, 32, 4)


@operation(exercise=_SIZES, dtypes=_DTYPES)
def batched_matmul(
    x: Float[np.ndarray, "B M K"], y: Float[np.ndarray, "B K N"]
) -> Float[np.ndarray, "B M N"]:
    """z_b = x_b y_b."""
    return x @ y


@operation(exercise=_SIZES, dtypes=_DTYPES, result="dx")
def batched_matmul_dx(
    x: Float[np.ndarray, "B M K"], y: Float[np.ndarray, "B K N"], dz: Float[np.ndarray, "B M N"]
) -> Float[np.ndarray, "B M K"]:
    """dx_b = dz_b y_bᵀ."""
    return dz @ y.swapaxes(1, 2)


@operation(exercise=_SIZES, dtypes=_DTYPES, result="dy")
def batched_matmul_dy(
    x: Float[np.ndarray, "B M K"], y: Float[np.ndarray, "B K N"], dz: Float[np.ndarray, "B M N"]
) -> Float[np.ndarray, "B K N"]:
    """dy_b = x_bᵀ dz_b."""
    return x.swapaxes(1, 2) @ dz


def _parts(words: Array, scale: Array, zero: Array) -> tuple[Array, Array, Array]:
    """The values, and the scale and zero point of each."""
    values = (words[:, :, None] >> _NIBBLES & 15).reshape(len(words), -1)
    group = values.shape[1] // scale.shape[1]
    wide, centre = (np.repeat(one, group, axis=1) for one in (scale, zero & 15))
    return values, wide, centre


def _int4(x: Array, words: Array, scale: Array, zero: Array) -> Array:
    values, wide, centre = _parts(words, scale, zero)
    return x @ (wide * (values - centre)).T


def _int4_slack(x: Array, words: Array, scale: Array, zero: Array, unit: float) -> Array:
    """The weight may be rounded to x's dtype; one row of x to 16 bits relative to the greatest of
    each 32; and the zero point's share may be subtracted at the end, from 8 on."""
    values, wide, centre = _parts(words, scale, zero)
    size = np.abs(wide)
    rounded = np.abs(x) @ (size * np.abs(values - centre)).T
    greatest = np.abs(x).reshape(len(x), -1, 32).max(axis=2).repeat(32, axis=1)
    terms = greatest @ (size * (np.abs(values - 8) + np.abs(centre - 8))).T
    return unit * rounded + (2.0**-15 * (len(x) == 1) + (x.shape[1] + 8) * 2.0**-24) * terms


@operation(
    exercise={"M": 20, "N": 70, "K": 256}, multiple_of={"K": 128}, dtypes=_SHORT, slack=_int4_slack
)
def int4_matmul(
    x: Float[np.ndarray, "M K"],
    words: Int32[np.ndarray, "N K//8"],
    scale: Float[np.ndarray, "N K//128"],
    zero: UInt8[np.ndarray, "N K//128"],
) -> Float[np.ndarray, "M N"]:
    """z = x wᵀ, w = scale · (value - zero) in groups of 128 of a row; 8 values to a word, the first
    in its lowest bits; of zero the lower 4 bits."""
    return _int4(x, words, scale, zero)


@operation(
    exercise={"M": 3, "N": 70, "K": 96}, multiple_of={"K": 32}, dtypes=_SHORT, slack=_int4_slack
)
def int4_matmul_32(
    x: Float[np.ndarray, "M K"],
    words: Int32[np.ndarray, "N K//8"],
    scale: Float[np.ndarray, "N K//32"],
    zero: UInt8[np.ndarray, "N K//32"],
) -> Float[np.ndarray, "M N"]:
    """int4_matmul in groups of 32."""
    return _int4(x, words, scale, zero)


def _convolved(x: Array, weight: Array, bias: Array) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    return np.einsum("bchwuv,ocuv->bohw", windows, weight) + bias[:, None, None]


_IMAGE = {"B": 2, "C": 5, "H": 9, "W": 8, "O": 6, "KH": 3, "KW": 2}


@operation(exercise=_IMAGE, at_most={"KH": 3, "KW": 3}, dtypes=_DTYPES)
def conv2d(
    x: Float[np.ndarray, "B C H W"],
    weight: Float[np.ndarray, "O C KH KW"],
    bias: Float[np.ndarray, "O"],
) -> Float[np.ndarray, "B O H+3-KH W+3-KW"]:
    """z[b, o, i, j] = bias[o] + Σ weight[o, c, u, v] · x[b, c, i + u - 1, j + v - 1]."""
    return _convolved(x, weight, bias)


@operation(exercise=_IMAGE, at_most={"KH": 3, "KW": 3}, dtypes=_DTYPES)
def conv2d_nhwc(
    x: Float[np.ndarray, "B H W C"],
    weight: Float[np.ndarray, "O C KH KW"],
    bias: Float[np.ndarray, "O"],
) -> Float[np.ndarray, "B H+3-KH W+3-KW O"]:
    """conv2d of images whose channels lie together."""
    return _convolved(x.transpose(0, 3, 1, 2), weight, bias).transpose(0, 2, 3, 1)
