"""What all observers have: the least and greatest value that they saw, and how many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import affine_parameters, check_finite
from lowbit.numerics.formats import IntFormat, checked_axis, int_format
from lowbit.numerics.qtensor import float_array
from lowbit.registry import Registry

Rows = npt.NDArray[Any]
"""[channels, elements] of float32 or float64."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Summary:
    """What an observer saw; with C channels or, for axis None, without that dimension.

    - low, high: float64 [C], the least and greatest value.
    - elements: how many values there were in each channel, in `batches` that were not empty.
    - counts: int64 [C, bins], or None if the observer keeps no histogram.
    - edges: float64 [C, bins + 1], where the bins begin and end.
    """

    observer: str
    axis: int | None
    batches: int
    elements: int
    low: Floats
    high: Floats
    counts: npt.NDArray[np.int64] | None = None
    edges: Floats | None = None


@dataclass(eq=False, kw_only=True)
class Observer(ABC):
    """Sees any number of batches, then says which range to quantize them with.

    - axis: None for one range, or the axis of the channels that have one each. (A range for each
      token is found at the moment of its use, by `quantize_rows`: there is nothing to observe.)
    """

    axis: int | None = None

    def __post_init__(self) -> None:
        self._batches = self._elements = 0
        self._low = self._high = np.empty(0)

    def observe(self, x: npt.ArrayLike) -> None:
        """See one batch: floats of any shape that has the axis, with as many channels as before.

        An empty batch changes nothing. ValueError names the first NaN or infinity; TypeError: these
        are no floats. After an error, the observer is as it was.
        """
        values = float_array(x)
        check_finite(values)
        rows = self._rows(values)
        if rows.size == 0:
            return
        if self._batches and len(rows) != len(self._low):
            raise ValueError(
                f"expected {len(self._low)} channels on axis {self.axis}, as in earlier batches, "
                f"got {len(rows)}"
            )
        low, high = (each.astype(np.float64) for each in (rows.min(axis=1), rows.max(axis=1)))
        self._update(rows, low, high)
        self._widen(low, high)
        self._elements += rows.shape[1]
        self._batches += 1

    def _widen(self, low: Floats, high: Floats) -> None:
        first = not self._batches
        self._low = low if first else np.minimum(self._low, low)
        self._high = high if first else np.maximum(self._high, high)

    def _rows(self, x: npt.NDArray[Any]) -> Rows:
        x = x if x.dtype == np.float64 else x.astype(np.float32)
        if self.axis is None:
            return x.reshape(1, -1)
        x = np.moveaxis(x, checked_axis(self.axis, x.ndim), 0)
        return x.reshape(len(x), x.size // max(len(x), 1))

    def merge(self, other: Self) -> None:
        """See what `other`, of the same kind and parameters, saw; `other` stays as it is.

        ValueError: they differ in kind, parameters or number of channels.
        """
        names = [field.name for field in fields(self)]
        if type(self) is not type(other) or any(
            getattr(self, name) != getattr(other, name) for name in names
        ):
            raise ValueError(f"expected an observer like {self}, got {other}")
        if not other._batches:
            return
        if self._batches and len(self._low) != len(other._low):
            raise ValueError(f"expected {len(self._low)} channels, got {len(other._low)}")
        self._absorb(other)
        self._widen(other._low, other._high)
        self._elements += other._elements
        self._batches += other._batches

    def range(
        self, dtype: str | IntFormat = "int8", symmetric: bool = True
    ) -> tuple[Floats, Floats]:
        """Low and high, float64 of shape () or [channels], for quantization to a format.

        Some observers choose a range that depends on the format. It need not hold 0; `quantization`
        widens it. ValueError: no batch had a value.
        """
        self._check_data()
        low, high = self._range(int_format(dtype), symmetric)
        return self._shaped(low), self._shaped(high)

    def quantization(
        self, dtype: str | IntFormat = "int8", symmetric: bool = True
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Scale and zero point of the range, as `affine_parameters` gives them."""
        return affine_parameters(*self.range(dtype, symmetric), int_format(dtype), symmetric)

    def summary(self) -> Summary:
        """What it saw until now, in arrays of its own. ValueError: no batch had a value."""
        self._check_data()
        return Summary(
            type(self).__name__, self.axis, self._batches, self._elements,
            self._shaped(self._low), self._shaped(self._high), *self._histogram(),
        )  # fmt: skip

    def _check_data(self) -> None:
        if not self._batches:
            raise ValueError(
                "no data: this observer has seen no value; call observe(x) with batches first"
            )

    def _shaped(self, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return part[0].copy() if self.axis is None else part.copy()

    def _update(self, rows: Rows, low: Floats, high: Floats) -> None:
        """Before a batch, finite and not empty, is counted; low and high are those of its rows."""
        return

    def _absorb(self, other: Any) -> None:
        """Before what another of this kind saw is counted."""
        return

    def _histogram(self) -> tuple[npt.NDArray[np.int64] | None, Floats | None]:
        """Counts and edges for the summary."""
        return None, None

    @abstractmethod
    def _range(self, fmt: IntFormat, symmetric: bool) -> tuple[Floats, Floats]:
        """[channels] each; there was a value."""


observers: Registry[type[Observer]] = Registry("observer", "lowbit.numerics.observers")
"""By name: "minmax", "moving_average", "percentile", "entropy", "mse"."""
