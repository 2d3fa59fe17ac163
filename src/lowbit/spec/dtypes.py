"""Number formats: names, codes, storage, ranges and roundoff."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lowbit.numerics import int_format
from lowbit.numerics.formats import dtype_of

Array = NDArray[Any]


@dataclass(frozen=True)
class DType:
    """A number format.

    name: NumPy's, or that of ml_dtypes. code: in signatures such as `u8:s8:s32`. storage: the
    NumPy dtype of arrays; 4-bit integers lie one to a byte. low, high: the range of an integer.
    unit: the unit roundoff of a float (Higham, Accuracy and Stability, section 2.1), 0 for an
    integer; least_normal, least, largest: its smallest normal, smallest and largest number.
    """

    name: str
    code: str
    bits: int
    storage: np.dtype[Any]
    low: int = 0
    high: int = 0
    unit: float = 0.0
    least_normal: float = 0.0
    least: float = 0.0
    largest: float = 0.0

    @property
    def is_float(self) -> bool:
        """Whether it is a float."""
        return self.unit > 0

    def widened(self, values: Array) -> Array:
        """What stored elements mean: float64, int64 or bool."""
        if self.is_float:
            return values.astype(np.float64)
        return values if values.dtype.kind == "b" else values.astype(np.int64)


def _integer(name: str, code: str) -> DType:
    if name.endswith("int4"):
        fmt = int_format(name)
        return DType(name, code, fmt.bits, fmt.storage, fmt.qmin, fmt.qmax)
    info = np.iinfo(name)
    return DType(name, code, info.bits, np.dtype(name), int(info.min), int(info.max))


def _float(name: str, code: str) -> DType:
    storage = dtype_of(name)
    info = ml_dtypes.finfo(storage)
    numbers = (info.smallest_normal, info.smallest_subnormal, info.max)
    least_normal, least, largest = (float(number) for number in numbers)
    unit = float(info.eps) / 2
    return DType(name, code, info.bits, storage, 0, 0, unit, least_normal, least, largest)


DTYPES: Mapping[str, DType] = {
    one.name: one
    for one in (
        *(_integer(f"int{bits}", f"s{bits}") for bits in (4, 8, 16, 32, 64)),
        *(_integer(f"uint{bits}", f"u{bits}") for bits in (4, 8, 16, 32, 64)),
        *(_float(f"float{bits}", f"f{bits}") for bits in (16, 32, 64)),
        _float("bfloat16", "bf16"),
        DType("bool", "b1", 8, np.dtype(bool), 0, 1),
    )
}
"""By name."""

FLOAT32_UNIT = DTYPES["float32"].unit
"""The relative error of one operation of float32, in which kernels compute."""
