"""Convolution of floats in two dimensions."""

from __future__ import annotations

import numpy as np

from lowbit.spec.operations import Floats, specified

_convolution = specified(
    exercise={"B": 2, "C": 5, "H": 9, "W": 8, "O": 6, "KH": 3, "KW": 2},
    at_most={"KH": 3, "KW": 3},
    operations="2*B*O*C*KH*KW*(H+3-KH)*(W+3-KW)",
)


@_convolution
def conv2d(
    x: Floats[np.ndarray, "B C H W"],
    weight: Floats[np.ndarray, "O C KH KW"],
    bias: Floats[np.ndarray, "O"],
) -> Floats[np.ndarray, "B O H+3-KH W+3-KW"]:
    """z[b, o, i, j] = bias[o] + Σ weight[o, c, u, v] · x[b, c, i + u - 1, j + v - 1]."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[2:], axis=(2, 3))
    return np.einsum("bchwuv,ocuv->bohw", windows, weight) + bias[:, None, None]


@_convolution
def conv2d_nhwc(
    x: Floats[np.ndarray, "B H W C"],
    weight: Floats[np.ndarray, "O C KH KW"],
    bias: Floats[np.ndarray, "O"],
) -> Floats[np.ndarray, "B H+3-KH W+3-KW O"]:
    """conv2d of images whose channels lie together."""
    return conv2d.reference(x.transpose(0, 3, 1, 2), weight, bias).transpose(0, 2, 3, 1)
