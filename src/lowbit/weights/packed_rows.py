"""A weight that is packed some of its rows at a time: never more of it is in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.shared.layout import PANEL, blocks
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.panels import Numbers, PackedMatrix, pack

Parts = Iterable[tuple[int, QuantizedWeight]]
_ARRAYS = ("panels", "column_sums", "scale", "zero_points")


def pack_rows(rows: int, parts: Callable[[], Parts]) -> PackedMatrix:
    """`lowbit.pack` of the transposed weight [rows, K], in the same bits.

    parts: gives rows of the weight, one part behind another, each with the number of its first row,
    a multiple of 16. How scales and zero points are held follows from all rows: where some need
    more than those before them, all parts are asked for once more.
    """
    need, packing = _Need(), None
    while packing is None:
        packing, need = _packed(rows, parts(), need)
    return packing.matrix()


@dataclass(frozen=True)
class _Need:
    """What rows need: scales as float32, zero points, real ones, these as float32."""

    wide_scales: bool = False
    zeros: bool = False
    real_zeros: bool = False
    wide_zeros: bool = False

    def pack(self, weight: QuantizedWeight) -> PackedMatrix:
        """A part, packed like others that need so much."""
        real = weight.zero_point
        if real is None and self.real_zeros:
            real = weight.weight.zero_point.astype(np.float32)
        numbers = Numbers(not self.wide_scales, not self.wide_zeros, self.zeros, lasting=False)
        return pack(weight.weight.T, zero_point=None if real is None else real.T, numbers=numbers)

    def with_part(self, weight: QuantizedWeight, packed: PackedMatrix) -> _Need:
        """What is needed with a part, too, that was packed like those before it."""
        real = self.real_zeros or weight.zero_point is not None
        scale, zeros = packed.scale, packed.zero_points
        return _Need(
            self.wide_scales or (scale is not None and scale.dtype == np.float32),
            self.zeros or zeros is not None,
            real,
            self.wide_zeros or (real and zeros is not None and zeros.dtype == np.float32),
        )


def _packed(rows: int, parts: Parts, need: _Need) -> tuple[_Packing | None, _Need]:
    """All parts; None: one of them needs more than those before it."""
    packing: _Packing | None = None
    for first, weight in parts:
        packed = need.pack(weight)
        more = need.with_part(weight, packed)
        if packing is None:
            packing, need = _Packing(rows, packed), more
        elif more != need:
            return None, more
        packing.put(first, packed)
    assert packing is not None
    return packing, need


@dataclass
class _Packing:
    """The arrays of a packed matrix of so many columns, of parts like the one that is given."""

    columns: int
    like: PackedMatrix
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            part = getattr(self.like, name)
            if part is not None:
                count = blocks(self.columns, PANEL) * self._unit(part)
                shape = (count, *part.shape[1:])
                self.arrays[name] = aligned_empty(shape, part.dtype, lasting=True)

    def _unit(self, part: npt.NDArray[Any]) -> int:
        """How many entries of the first axis belong to a panel."""
        return len(part) // len(self.like.panels)

    def put(self, first: int, part: PackedMatrix) -> None:
        """Columns from number `first` on."""
        for name, array in self.arrays.items():
            piece = getattr(part, name)
            begin = first // PANEL * self._unit(getattr(self.like, name))
            array[begin : begin + len(piece)] = piece

    def matrix(self) -> PackedMatrix:
        """The packed matrix, when all columns have been put."""
        return replace(self.like, N=self.columns, **self.arrays)
