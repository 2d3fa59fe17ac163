"""Observers: they see batches of a tensor and say with which range to quantize it.

    observer = observers.get("entropy")(axis=None)
    for batch in batches:
        observer.observe(batch)
    scale, zero_point = observer.quantization("uint8", symmetric=False)

One file an observer; docs/calibration.md says when to choose which.
"""

from __future__ import annotations

from lowbit.numerics.observers.observer import Observer, Summary, observers

__all__ = ["Observer", "Summary", "observers"]
