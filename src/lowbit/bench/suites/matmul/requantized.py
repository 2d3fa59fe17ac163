"""8 bits out: what a product gives where the next layer takes bytes again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def quantized(real: Array, scale: float, zero_point: int) -> NDArray[np.uint8]:
    """clamp(round_half_even(real / scale) + zero_point, 0, 255)."""
    return np.clip(np.rint(real / scale) + zero_point, 0, 255).astype(np.uint8)


def quantization_of(real: Array) -> tuple[float, int]:
    """Scale and zero point that spread 8 bits over the range of `real`, widened to hold 0."""
    low, high = min(float(real.min()), 0.0), max(float(real.max()), 0.0)
    scale = float(np.float32((high - low) / 255)) or 1.0
    return scale, int(np.clip(np.rint(-low / scale), 0, 255))
