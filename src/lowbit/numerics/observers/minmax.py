"""The range from the least to the greatest value."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.observer import Floats, Observer, observers


@observers.register("minmax")
@dataclass(eq=False, kw_only=True)
class MinMax(Observer):
    """From the least to the greatest value of all batches: nothing saturates."""

    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        return self._low, self._high
