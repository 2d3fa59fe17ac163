"""What float16 holds of the numbers that come with groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def as_float16(numbers: Array) -> Array:
    """As float16, if that holds them all, none of them denormal."""
    with np.errstate(over="ignore"):
        short = numbers.astype(np.float16)
    return short if ((short == numbers) & _is_normal(short)).all() else numbers


def float16_offsets(scale: Array, zero: Array, otherwise: Array) -> Array:
    """Offsets −scale·zero, float16, if float32 cannot tell their zero points from these."""
    with np.errstate(over="ignore", invalid="ignore"):
        offsets = (-zero * scale).astype(np.float16)
        same = np.abs(offsets / scale.astype(np.float64) + zero) <= 2.0**-23 * np.abs(zero)
    return offsets if (same & _is_normal(offsets)).all() else otherwise


def _is_normal(short: Array) -> Array:
    """Which are 0 or normal numbers: kernels would lose others where denormals are flushed."""
    size = short.view(np.uint16) & np.uint16(0x7FFF)  # NumPy is slow at comparing float16
    return (size == 0) | (size >= 0x400)
