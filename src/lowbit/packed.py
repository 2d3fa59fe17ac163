"""A right operand, packed once for every M and every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import ALIGNMENT, aligned_empty
from lowbit.kernels.cpu.shared.layout import FLIP, GROUP, LINE, NIBBLE_FLIP, PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import STORED, UNPROVEN, PanelFormat

_CHUNK = 1 << 20  # pairs that are looked at together
NIBBLE_MASK = 15
GROUP_UNIT = 8  # k in a line of nibbles, which a group cannot divide
_SHORT = {"int32": "s32", "int8": "s8", "float32": "f32"}


def bytes_to_nibbles(panels: npt.NDArray[np.uint8], signed: bool) -> npt.NDArray[np.uint8]:
    """Panels of 4-bit values in bytes as panels of nibbles; see layout.py."""
    panel_count, lines, _ = panels.shape
    pairs = panels.reshape(panel_count, lines // 2, 2, LINE)
    flip = NIBBLE_FLIP if signed else 0
    result = aligned_empty((panel_count, lines // 2, LINE), np.uint8)
    np.left_shift(pairs[:, :, 1] + np.uint8(flip), 4, out=result)
    result |= pairs[:, :, 0] + np.uint8(flip) & np.uint8(NIBBLE_MASK)
    return result


def nibbles_to_bytes(panels: npt.NDArray[np.uint8], signed: bool) -> npt.NDArray[np.uint8]:
    """What `bytes_to_nibbles` was given."""
    panel_count, lines, _ = panels.shape
    pairs = np.empty((panel_count, lines, 2, LINE), np.uint8)
    pairs[:, :, 0], pairs[:, :, 1] = panels & np.uint8(NIBBLE_MASK), panels >> 4
    if signed:
        pairs -= np.uint8(NIBBLE_FLIP)
    return pairs.reshape(panel_count, 2 * lines, LINE)


def unpack_panels(panels: npt.NDArray[np.uint8], k: int, n: int) -> npt.NDArray[np.int8]:
    """The stored values in panels, int8 [k, n], C-contiguous."""
    stored = panels.reshape(*panels.shape[:2], PANEL, GROUP).transpose(1, 3, 0, 2)
    rows = stored.reshape(padded_k(k), panels.shape[0] * PANEL)[:k, :n]
    return np.ascontiguousarray(rows).view(np.int8)


def largest_pair_of(panels: npt.NDArray[np.uint8]) -> int:
    """`PackedMatrix.largest_pair` of panels of bytes."""
    pairs = panels.view(np.int8).reshape(-1, 2)
    largest = 0
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK].astype(np.int16)
        for signed in (chunk, -chunk):
            largest = max(largest, int(np.maximum(signed, 0).sum(axis=1).max(initial=0)))
    return largest


@dataclass(frozen=True, eq=False, repr=False)
class PackedMatrix:
    """The matrix b[K, N] of 8-bit or 4-bit integers in panels (kernels/cpu/shared/layout.py).

    - panels: uint8 [ceil(N/16), K rounded up to 64 / 4, 64], C-contiguous, 64-byte aligned; of
      4-bit integers half as many lines.
    - column_sums: int32 [ceil(N/16)·16], Σ_k of the stored values less their zero point.
    - dtype: "int8", "uint8", "int4" or "uint4", what `unpack` gives back (4-bit integers one to
      an int8 or uint8).
    - scale: float32 [ceil(N/16)·16], one for each column, or None for plain integers.
    - zero_points: int32 [ceil(N/16)·16] of the stored values, or None if all are 0.
    - group_size: how many k share a scale, a multiple of 8; None: all. Only of 4-bit integers. With
      groups, scale is float32 [ceil(N/16), groups, 16]; so are zero_points, int8 or float32, of the
      nibbles less 8; and column_sums are those of the real values, float32.

    Made by `lowbit.pack`, kept by `lowbit.save_packed` and `lowbit.load_packed`.
    """

    panels: npt.NDArray[np.uint8]
    column_sums: npt.NDArray[Any]
    K: int
    N: int
    dtype: str
    scale: npt.NDArray[np.float32] | None = None
    zero_points: npt.NDArray[Any] | None = None
    group_size: int | None = None
    # Where panels, sums, zero points and scale begin (0: absent); asking NumPy takes microseconds.
    addresses: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise ValueError(f"dtype must be one of {', '.join(STORED)}, got {self.dtype!r}")
        for name, size in (("K", self.K), ("N", self.N)):
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {size!r}")
        lines = padded_k(self.K) // GROUP // (1 if self.weight == "s8" else 2)
        expected = (blocks(self.N, PANEL), lines, LINE)
        if self.panels.shape != expected or self.panels.dtype != np.uint8:
            raise ValueError(
                f"a packed {self.K}x{self.N} matrix has panels uint8 {expected}, "
                f"got {self.panels.dtype} {self.panels.shape}"
            )
        unaligned = self.panels.size and self.panels.ctypes.data % ALIGNMENT
        if not self.panels.flags.c_contiguous or unaligned:
            raise ValueError("panels must be C-contiguous and 64-byte aligned")
        self._protect("panels", self.panels)
        for name, (kinds, shape) in self._expected().items():
            part = getattr(self, name)
            if part is None:
                continue
            self._protect(name, part)
            if part.dtype.name not in kinds or part.shape != shape or not part.flags.c_contiguous:
                raise ValueError(
                    f"{name} must be {' or '.join(kinds)} {shape}, got {part.dtype} {part.shape}"
                )
        parts = (self.panels, self.column_sums, self.zero_points, self.scale)
        addresses = tuple(0 if part is None else part.ctypes.data for part in parts)
        object.__setattr__(self, "addresses", addresses)

    def _expected(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """The types and the shape of what lies beside the panels."""
        panels = blocks(self.N, PANEL)
        columns = (panels * PANEL,)
        if self.group_size is None:
            kinds = {"column_sums": "int32", "scale": "float32", "zero_points": "int32"}
            return {name: ((kind,), columns) for name, kind in kinds.items()}
        size, most = self.group_size, max(padded_k(self.K), GROUP_UNIT)
        fits = type(size) is int and 1 <= size <= most and size % GROUP_UNIT == 0
        if self.weight == "s8" or self.scale is None or not fits:
            raise ValueError(
                f"groups are of 4-bit integers with scales, a multiple of {GROUP_UNIT} of the "
                f"{self.K} in each, got {self.dtype}, group_size={size!r}"
            )
        each = (panels, self.groups, PANEL)
        return {
            "column_sums": (("float32",), columns),
            "scale": (("float32",), each),
            "zero_points": (("int8", "float32"), each),
        }

    def _protect(self, name: str, part: npt.NDArray[Any]) -> None:
        """Keep a view that cannot be written: what has been found out about it must stay true."""
        view = part.view()
        view.flags.writeable = False
        object.__setattr__(self, name, view)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew, since addresses hold for one object only."""
        parts = (self.panels, self.column_sums, self.K, self.N, self.dtype)
        return _restored, (*parts, self.scale, self.zero_points, self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.K, self.N

    @property
    def weight(self) -> str:
        """What the panels hold: "s8", or nibbles, "u4" or "s4"."""
        return STORED[self.dtype]

    @property
    def groups(self) -> int:
        """How many groups there are along K, the last of which may be shorter; 1 without."""
        return max(1, blocks(self.K, self.group_size)) if self.group_size else 1

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        parts = (self.panels, self.column_sums, self.scale, self.zero_points)
        return sum(part.nbytes for part in parts if part is not None)

    @cached_property
    def format(self) -> PanelFormat:
        """What this is, but for its numbers, and what needs no look at all of them."""
        zeros = "" if self.zero_points is None else _SHORT[self.zero_points.dtype.name]
        largest = UNPROVEN if self.weight == "s8" else 2 * NIBBLE_MASK
        return PanelFormat(self.K, self.N, self.dtype, self.scale is not None,
                           self.group_size is None and self.centred, zeros,
                           self.group_size or 0, largest)  # fmt: skip

    @cached_property
    def proven_format(self) -> PanelFormat:
        """`format` with the largest pair, for which all values are looked at, once."""
        return self.format._replace(largest_pair=self.largest_pair)

    @cached_property
    def grouped(self) -> PackedMatrix:
        """The same 4-bit integers with groups: itself, or one group for all of K."""
        if self.group_size is not None or self.scale is None:
            return self
        zeros = np.zeros(len(self.scale), np.int32)
        if self.zero_points is not None:
            zeros += self.zero_points
        if self.weight == "u4":
            zeros -= NIBBLE_FLIP
        each = (len(self.panels), 1, PANEL)
        return PackedMatrix(
            panels=self.panels,
            column_sums=(self.scale * self.column_sums).astype(np.float32),
            K=self.K,
            N=self.N,
            dtype=self.dtype,
            scale=self.scale.reshape(each),
            zero_points=zeros.astype(np.int8).reshape(each) if zeros.any() else None,
            group_size=max(padded_k(self.K), GROUP_UNIT),
        )

    @cached_property
    def centred(self) -> bool:
        """Whether values have zero points of their own, not only those that make them signed."""
        signed = -FLIP if self.dtype == "uint8" else 0
        if self.zero_points is None:
            return signed != 0
        return bool((self.zero_points[: self.N] != signed).any())

    @cached_property
    def largest_pair(self) -> int:
        """What decides whether sums of two products fit 16 bits: over all pairs k = 2i, 2i + 1 of
        stored values in a column, the largest sum of their positive parts, or of their negative
        parts' magnitudes. Computed when first asked for; of nibbles, the most it can be."""
        if self.weight != "s8":
            return 2 * NIBBLE_MASK
        return largest_pair_of(self.panels)

    def unpack(self) -> npt.NDArray[Any]:
        """The integers that were packed: int8 or uint8 [K, N]."""
        panels = self.panels
        if self.weight != "s8":
            panels = nibbles_to_bytes(panels, self.weight == "s4")
        stored = unpack_panels(panels, self.K, self.N)
        if self.dtype == "uint4":
            return stored.view(np.uint8)
        return stored.view(np.uint8) ^ np.uint8(FLIP) if self.dtype == "uint8" else stored

    def __repr__(self) -> str:
        extra = "" if self.scale is None else ", scaled per column"
        if self.group_size is not None:
            extra += f" and {self.group_size} k"
        return f"PackedMatrix({self.dtype} [{self.K}, {self.N}]{extra}, {self.nbytes:,} bytes)"


def _restored(panels: npt.NDArray[np.uint8], *parts: Any) -> PackedMatrix:
    """A PackedMatrix of arrays that have been copied, to wherever memory was free."""
    aligned = aligned_empty(panels.shape, np.uint8)
    aligned[...] = panels
    return PackedMatrix(aligned, *parts)
