"""Few columns packed so that many k of each are multiplied at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import blocks


def columns(stored: npt.NDArray[np.int8], held: int, piece: int) -> npt.NDArray[np.uint8]:
    """Columns [K, N] as pieces of `piece` k of each: uint8 [ceil(K / piece), held, piece].

    `held`, no less than N, counts the columns; those behind N are zeros. The last vectors hold the
    last `piece` k, with zeros for those which the vectors before them hold
    (kernels/cpu/integer/in_place.py). `piece` is at most K.
    """
    k, n = stored.shape
    whole, rest = divmod(k, piece)
    made = aligned_empty((blocks(k, piece), held, piece), np.uint8)
    made[...] = 0
    turned = stored.view(np.uint8).T
    made[:whole, :n] = turned[:, : k - rest].reshape(n, whole, piece).transpose(1, 0, 2)
    if rest:
        made[-1, :n, piece - rest :] = turned[:, k - rest :]
    return made
