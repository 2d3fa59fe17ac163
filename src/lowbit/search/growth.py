"""How an index that nobody trained finds its frame while its first vectors come."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lowbit.search.codec import Codec, check_finite
from lowbit.search.content import Content
from lowbit.search.frame import Frame
from lowbit.search.groups import Floats
from lowbit.search.storage import Coded

SETTLED = 1 << 10  # vectors that a frame is made of at least, if nobody trains
_CHUNK = 1 << 16  # vectors that are coded together at most
_OUTSIDE = 2.0  # times the greatest scale in training
_FEW = 0.01  # of vectors may be outside without a warning

Progress = Callable[[int, int], None]


def is_settled(content: Content) -> bool:
    """Whether the frame stays, whatever is added."""
    return content.frame is not None and content.early is None


def regrown(codec: Codec, content: Content, source: Floats) -> Content:
    """A content whose frame has not settled, in the frame that it has with more vectors, float32
    [n, dim], at least one. They are among its early ones, if it still has such, and nowhere else.

    The frame is found anew whenever the vectors have doubled. From 1,024 on it stays.
    ValueError: NaN or infinity, naming the first.
    """
    check_finite(source, "vectors")
    before = np.empty((0, codec.dim), np.float32) if content.early is None else content.early
    total = len(before) + len(source)
    if total.bit_length() > len(before).bit_length() or content.frame is None:
        frame = codec.trained([before, source])
        coded = [codec.coded(before, frame)] if len(before) else []
        content = content.recoded(coded, frame)
    early = None if total >= SETTLED else np.concatenate([before, source])
    return replace(content, early=early)


def coded(codec: Codec, source: Floats, frame: Frame, progress: Progress | None) -> list[Coded]:
    """Vectors as they are stored, in parts; `progress` is called after each with (done, of)."""
    parts: list[Coded] = []
    for first in range(0, len(source), _CHUNK):
        part = source[first : first + _CHUNK]
        parts.append(codec.coded(part, frame, first))
        if progress is not None:
            progress(first + len(part), len(source))
    return parts


def warn_outside(parts: Sequence[Coded], frame: Frame, stacklevel: int) -> None:
    """A UserWarning if more than a hundredth of vectors need scales that training has not seen."""
    scales = np.concatenate([part.coarse for part in parts if part.coarse is not None])
    outside = np.flatnonzero(scales > _OUTSIDE * frame.reach)
    if len(outside) <= _FEW * len(scales):
        return
    many = f"{len(outside):,} of {len(scales):,} vectors lie"
    worst = float(scales.max())
    times = f"{worst / frame.reach:.3g} times" if frame.reach else "infinitely"
    warnings.warn(
        f"{many if len(scales) > 1 else 'the vector lies'} outside of what this index was trained "
        f"with, vectors[{outside[0]}] first: steps are up to {times} as coarse as the coarsest "
        "there, and recall falls. Train an index with vectors such as these, and add all to it",
        UserWarning,
        stacklevel=stacklevel + 1,
    )
