"""Comparing a result with its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowbit.registry.locks import cached_property
from lowbit.spec.dtypes import Array, DType


@dataclass(frozen=True)
class Verdict:
    """Whether a result is within its budget; if not, `message` says where it is furthest off."""

    ok: bool
    max_error: float
    message: str


@dataclass(frozen=True, eq=False)
class Expected:
    """The reference result of one input and the error allowed to each of its elements.

    reference: int64, float64 or bool, of the output's shape; budget: broadcasts to it; dtype: of
    the output.
    """

    reference: Array
    budget: Array
    dtype: DType

    @cached_property
    def _allowed(self) -> Array:
        # Only the same infinity is right where the reference has one.
        return np.where(np.isfinite(self.reference), self.budget, 0)

    def _error(self, got: Array) -> Array:
        """|got - reference|; 0 where both are NaN or the same infinity, infinite where one is."""
        expected = self.reference
        if not self.dtype.is_float:
            return np.abs(got.astype(np.int64) - expected.astype(np.int64))
        got = got.astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(got - expected)
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            # So is an infinity where the reference, within its budget, is too large for the dtype.
            overflow = np.abs(expected) + self._allowed >= self.dtype.largest
            same |= overflow & (got == np.copysign(np.inf, expected))
        finite = np.isfinite(got) & np.isfinite(expected)
        return np.where(same, 0, np.where(finite, error, math.inf))

    def wrong(self, got: Array) -> NDArray[np.bool_]:
        """Which elements of a result are outside of the budget."""
        return self._error(np.asarray(got)) > self._allowed

    def check(self, result: Array) -> Verdict:
        """Compare a result with the reference, element by element.

        An element passes when |result - reference| <= budget. Where the reference is NaN the
        result must be, and nowhere else. Shape and dtype must be those of the specification.
        """
        shape, storage = self.reference.shape, self.dtype.storage
        if result.shape != shape or result.dtype != storage:
            found = f"{result.dtype}{list(result.shape)}"
            return Verdict(False, math.inf, f"got {found}, expected {storage}{list(shape)}")
        if result.size == 0:
            return Verdict(True, 0.0, "empty")
        error, wrong = self._error(result), self.wrong(result)
        excess = np.where(wrong, error, 0) - np.where(wrong, self._allowed, 0)
        worst = np.unravel_index(int(np.argmax(excess)), shape)
        max_error = float(error.max())
        if not wrong.any():
            return Verdict(True, max_error, f"within budget, largest error {max_error:g}")
        return Verdict(
            False,
            max_error,
            f"{np.count_nonzero(wrong)} of {result.size} elements are wrong; furthest off is "
            f"{[int(i) for i in worst]}: got {result[worst]}, expected {self.reference[worst]} "
            f"within {self._allowed[worst]:g}",
        )
