"""bfloat16, which NumPy does not have, as the uint16 of its bits: the upper half of a float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_QUIET = 0x7FC0


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """As float32 of the same shape, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Numbers of any dtype as bfloat16 of the same shape: through float32, the nearest, ties to
    even. NaN stays NaN."""
    wide = np.asarray(values).astype(np.float32, copy=False)
    bits = wide.view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(wide), bits >> 16 | _QUIET, nearest).astype(np.uint16)
