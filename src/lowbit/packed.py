"""A right operand, packed once for every M and every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.kernels.cpu.layout import GROUP, LINE, PANEL, blocks, padded_k

_ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised array whose first byte is at a multiple of 64."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(kind).reshape(shape)


@dataclass(frozen=True, eq=False, repr=False)
class PackedMatrix:
    """The matrix b[K, N] of 8-bit integers in panels, as kernels/cpu/layout.py draws them.

    - panels: uint8 [ceil(N/16), K rounded up to 64 / 4, 64], C-contiguous, 64-byte aligned.
    - column_sums: int32 [ceil(N/16)·16], Σ_k of the stored values less their zero point.
    - dtype: "int8" or "uint8", what `unpack` gives back.
    - scale: float32 [ceil(N/16)·16], one for each column, or None for plain integers.
    - zero_points: int32 [ceil(N/16)·16] of the stored values, or None if all are 0.

    Made by `lowbit.pack`.
    """

    panels: npt.NDArray[np.uint8]
    column_sums: npt.NDArray[np.int32]
    K: int
    N: int
    dtype: str
    scale: npt.NDArray[np.float32] | None = None
    zero_points: npt.NDArray[np.int32] | None = None
    # Where panels, sums, zero points and scale begin (0: absent); asking NumPy takes microseconds.
    addresses: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        expected = (blocks(self.N, PANEL), padded_k(self.K) // GROUP, LINE)
        if self.panels.shape != expected or self.panels.dtype != np.uint8:
            raise ValueError(
                f"a packed {self.K}x{self.N} matrix has panels uint8 {expected}, "
                f"got {self.panels.dtype} {self.panels.shape}"
            )
        if not self.panels.flags.c_contiguous:
            raise ValueError("panels must be C-contiguous")
        parts = (self.panels, self.column_sums, self.zero_points, self.scale)
        addresses = tuple(0 if part is None else part.ctypes.data for part in parts)
        object.__setattr__(self, "addresses", addresses)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.K, self.N

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        parts = (self.panels, self.column_sums, self.scale, self.zero_points)
        return sum(part.nbytes for part in parts if part is not None)

    def unpack(self) -> npt.NDArray[Any]:
        """The integers that were packed: int8 or uint8 [K, N]."""
        stored = self.panels.reshape(*self.panels.shape[:2], PANEL, GROUP)
        rows = stored.transpose(1, 3, 0, 2).reshape(padded_k(self.K), -1)[: self.K, : self.N]
        if self.dtype == "uint8":
            return rows ^ np.uint8(0x80)
        return np.ascontiguousarray(rows).view(np.int8)

    def __repr__(self) -> str:
        extra = "" if self.scale is None else ", scaled per column"
        return f"PackedMatrix({self.dtype} [{self.K}, {self.N}]{extra}, {self.nbytes:,} bytes)"
