"""Numbers on their way to float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BEYOND = float(2**128 - 2**103)
"""The least magnitude that rounds to infinity."""


LEAST, MOST = 2.0**-30, 2.0**30


def moderate(scales: Any) -> bool:
    """Whether all are from LEAST to below MOST. A product of three such scales, or inverses of
    them, and an int32 is a normal number of float32, whatever the order."""
    inside = (scales >= LEAST) & (scales < MOST)
    return inside if isinstance(inside, bool) else bool(inside.all())


def float32_number(value: Any, name: str) -> float:
    """`value` as a float that float32 holds, after rounding; infinities and NaN are themselves.

    TypeError: it is no number. ValueError: it is finite, and too large.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    except OverflowError:
        raise ValueError(f"{name} must be within float32, ±3.4e38, got more") from None
    if BEYOND <= abs(number) < float("inf"):
        raise ValueError(f"{name} must be within float32, ±3.4e38, got {value}")
    return number


def float32_array(values: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    """A copy as float32. ValueError: a number is finite, and too large."""
    with np.errstate(over="ignore"):
        result = values.astype(np.float32)
    if values.dtype.itemsize > 4 and not np.isfinite(result).all():
        beyond = np.isinf(result) & np.isfinite(values)
        if beyond.any():
            largest = values.flat[int(np.argmax(beyond))]
            raise ValueError(f"{name} must be within float32, ±3.4e38, got {largest}")
    return result
