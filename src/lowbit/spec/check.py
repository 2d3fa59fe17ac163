"""Comparing a result with its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.spec.dtypes import DType

Array = NDArray[Any]


@dataclass(frozen=True)
class Verdict:
    """Whether a result is within its budget; if not, `message` says where it is furthest off."""

    ok: bool
    max_error: float
    message: str


@dataclass(frozen=True, eq=False)
class Expected:
    """The reference result of one input and the error allowed to each of its elements.

    `reference` is int64 or float64 of the output's shape; `budget` broadcasts to it.
    """

    reference: Array
    budget: Array
    dtype: DType

    def check(self, result: Array) -> Verdict:
        """Compare a result with the reference, element by element.

        An element passes when |result - reference| <= budget. Where the reference is NaN the
        result must be, and nowhere else.
        """
        shape, storage = self.reference.shape, self.dtype.storage
        if result.shape != shape or result.dtype != storage:
            found = f"{result.dtype}{list(result.shape)}"
            return Verdict(False, math.inf, f"got {found}, expected {storage}{list(shape)}")
        if result.size == 0:
            return Verdict(True, 0.0, "empty")
        expected = self.reference
        with np.errstate(invalid="ignore"):
            if self.dtype.low is None:
                error = np.abs(result.astype(np.float64) - expected)
            else:
                error = np.abs(result.astype(np.int64) - expected)
        # A NaN is right exactly where the reference has one, and is then no error at all.
        error = np.where(np.isnan(error), math.inf, error)
        error = np.where(np.isnan(expected) & np.isnan(result), 0, error)
        budget = np.broadcast_to(np.nan_to_num(self.budget), shape)
        excess = error - budget
        worst = np.unravel_index(int(np.argmax(excess)), shape)
        wrong = int(np.count_nonzero(excess > 0))
        max_error = float(error.max())
        if not wrong:
            return Verdict(True, max_error, f"within budget, largest error {max_error:g}")
        return Verdict(
            False,
            max_error,
            f"{wrong} of {result.size} elements are wrong; furthest off is "
            f"{[int(i) for i in worst]}: got {result[worst]}, expected {expected[worst]} "
            f"within {budget[worst]:g}",
        )
