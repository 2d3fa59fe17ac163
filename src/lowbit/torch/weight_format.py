"""How the numbers of a weight are held: which integers, which of them share a scale.

The kernels read one layout (`lowbit.packed`), files hold another, in plain rows. What is between
them stands here, once for all formats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.kernels.cpu.shared.layout import NIBBLE_FLIP, PANEL, blocks, padded_k
from lowbit.numerics import QTensor, Range, int_format, pack_nibbles, quantize, unpack_nibbles
from lowbit.packed import PackedMatrix, nibbles_to_bytes, unpack_panels
from lowbit.packing import pack
from lowbit.spec import longest_sum

Array = npt.NDArray[Any]


class WeightFormat(NamedTuple):
    """What a weight [out, in] is quantized to, and how.

    - integers: "int8" or "int4", without zero points, or "uint4", with one for each scale.
    - group_size: of 4-bit integers, how many neighbours along `in` share a scale, a multiple of 8;
      the last group may be shorter. None: a whole output channel.
    - range: what scales and zero points are chosen from, see `lowbit.quantize`.
    """

    integers: str
    group_size: int | None = None
    range: Range = "minmax"

    @property
    def layout(self) -> tuple[str, int | None]:
        """What decides how a weight is held. Where it is the same, weights can be exchanged."""
        return self.integers, self.group_size

    @property
    def four_bits(self) -> bool:
        """Whether two of the integers are in a byte."""
        return self.integers != "int8"

    @property
    def zero_points(self) -> bool:
        """Whether the integers have zero points."""
        return self.integers == "uint4"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the arrays in which a file holds such a weight; see `stored`."""
        return ("values", "scale", "zero_point") if self.zero_points else ("values", "scale")

    def groups(self, in_features: int) -> int:
        """How many scales an output channel has."""
        return 1 if self.group_size is None else blocks(in_features, self.group_size)

    def packed_group(self, in_features: int) -> int:
        """The group size that kernels are given: of 4-bit integers only, 0 else."""
        if not self.four_bits:
            return 0
        size = self.group_size
        return padded_k(in_features) if size is None or size >= in_features else size

    def check_sums(self, in_features: int) -> None:
        """Raise ValueError if the sum over one scale could overflow int32."""
        summed = min(self.group_size or in_features, in_features)
        if self.four_bits:
            most = longest_sum("s8", "u4")
        else:
            most = longest_sum("u8", "s8", shifted=(True, False))
        if summed > most:
            raise ValueError(
                f"a sum over {summed} inputs could overflow int32; at most {most} cannot: "
                f"leave it out with filter_fn" + (", or use groups" if self.four_bits else "")
            )

    def quantize(self, weight: Array) -> PackedMatrix:
        """Pack a float weight [out, in]. ValueError names the first NaN or infinity."""
        depth = weight.shape[1]
        size = min(self.group_size or depth, depth) if self.four_bits else None
        quantized = quantize(
            weight,
            self.integers,
            axis=0,
            group_size=size,
            symmetric=not self.zero_points,
            range=self.range,
        )
        return pack(_transposed(quantized))

    def stored(self, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The arrays in which a file holds a weight of `shape`, by name: dtype and shape.

        "values": int8 [out, in], or uint8 [out, ceil(in / 2)] with the first of two in the low
        half; "scale": float32 [out] or [out, groups]; "zero_point": uint8 [out, groups].
        """
        rows, depth = shape
        if not self.four_bits:
            return {"values": ("int8", (rows, depth)), "scale": ("float32", (rows,))}
        each = rows, self.groups(depth)
        described = {
            "values": ("uint8", (rows, blocks(depth, 2))),
            "scale": ("float32", each),
            "zero_point": ("uint8", each),
        }
        return {name: described[name] for name in self.parts}

    def unpack(self, packed: PackedMatrix) -> dict[str, Array]:
        """What `stored` describes."""
        values = np.ascontiguousarray(packed.unpack().T)
        assert packed.scale is not None
        if not self.four_bits:
            return {"values": values, "scale": packed.scale[: packed.N].copy()}
        parts = {"values": pack_nibbles(values), "scale": _rows(packed.scale, packed.N)}
        if self.zero_points:
            zeros = packed.zero_points
            if zeros is None:  # all in the middle
                zeros = np.zeros(packed.scale.shape, np.int8)
            parts["zero_point"] = (_rows(zeros, packed.N) + NIBBLE_FLIP).astype(np.uint8)
        return parts

    def pack(self, parts: dict[str, Array], in_features: int) -> PackedMatrix:
        """The inverse of `unpack`. ValueError for zero points above 15."""
        values, scale = parts["values"], parts["scale"]
        group = None
        if self.four_bits:
            values = unpack_nibbles(values, in_features, self.integers)
            group = min(self.group_size or in_features, in_features)
        zeros = parts.get("zero_point", np.zeros(scale.shape, np.uint8)).astype(np.int32)
        given = QTensor(values, scale, zeros, int_format(self.integers), 0, group)
        return pack(_transposed(given))

    def __str__(self) -> str:
        if not self.four_bits:
            return "int8, one scale per row"
        group = f"{self.group_size} of a row" if self.group_size else "row"
        each = f"one scale{' and zero point' * self.zero_points} per {group}"
        return f"{self.integers}, {each}, range {self.range}"


INT8 = WeightFormat("int8")


def _transposed(q: QTensor) -> QTensor:
    """A QTensor [out, in] with axis=0 as [in, out], in views."""
    group_axis = None if q.group_size is None else 0
    return QTensor(
        q.values.T, q.scale.T, q.zero_point.T, q.format, 1, q.group_size, group_axis
    )  # fmt: skip


def _rows(each: Array, columns: int) -> Array:
    """Numbers [panels, groups, 16] as [columns, groups], in memory of their own."""
    return each.transpose(0, 2, 1).reshape(-1, each.shape[1])[:columns].copy()


def dequantized(
    panels: Array, scale: Array, zero_points: Array | None, k: int, n: int, group_size: int
) -> npt.NDArray[np.float32]:
    """float32 [n, k] of what a PackedMatrix holds; group_size as `packed_group` gives it."""
    if group_size:
        panels = nibbles_to_bytes(panels, signed=True)
    values = unpack_panels(panels, k, n).T.astype(np.float32, order="C")
    size = group_size or padded_k(k)
    if zero_points is not None:
        values -= np.repeat(_rows(zero_points, n), size, axis=1)[:, :k]
    values *= np.repeat(_rows(scale.reshape(len(panels), -1, PANEL), n), size, axis=1)[:, :k]
    return values
