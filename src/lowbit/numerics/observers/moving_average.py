"""The least and greatest value of a batch, averaged over batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.numerics.formats import IntFormat
from lowbit.numerics.observers.observer import Floats, Observer, Rows, observers


@observers.register("moving_average")
@dataclass(eq=False, kw_only=True)
class MovingAverage(Observer):
    """Each batch moves the range towards its own least and greatest value.

        low = low + rate · (least of the batch − low)        and so high

    The first batch sets the range. Jacob et al. 2018 (arXiv:1712.05877, section 3.1) average so in
    training, PyTorch's MovingAverageMinMaxObserver with the same default rate. The result depends
    on the order of batches, so two of these cannot be merged.

    - rate: above 0, at most 1.
    """

    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= 1:
            raise ValueError(f"expected a rate above 0 and at most 1, got {self.rate}")

    def _update(self, rows: Rows, low: Floats, high: Floats) -> None:
        if not self._batches:
            self._average = low, high
            return
        average_low, average_high = self._average
        self._average = (
            average_low + self.rate * (low - average_low),
            average_high + self.rate * (high - average_high),
        )

    def _absorb(self, other: Any) -> None:
        raise TypeError(
            "a moving average depends on the order of batches and cannot be merged; observe them "
            "with one observer, or choose another kind"
        )

    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        return self._average
