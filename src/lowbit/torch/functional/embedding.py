"""Rows of a quantized weight, looked up: what an embedding is, on either device.

One operator over the parts of whatever packing the weight is in, made of PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.kernels.triton.fast.tiles import MIDDLE, to_values
from lowbit.torch.registration import register

if TYPE_CHECKING:
    from lowbit.torch.weight import QuantizedWeight

_PANEL, _UNIT, _MIDDLE = 16, 16, 8


def embedding(indices: Tensor, weight: QuantizedWeight) -> Tensor:
    """weight[indices]: [..., in_features], in the dtype that the weight shows.

    indices: int32 or int64, any shape, on the weight's device. The rows are those of
    `weight.dequantize()`. TypeError for other dtypes; IndexError beyond the rows that there are.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"a quantized embedding takes int32 or int64 indices, got {indices.dtype}; convert "
            "them with .long()"
        )
    found = weight.rows(indices, weight.dtype)
    return found if weight.input_scale is None else found / weight.input_scale.to(found.dtype)


def _embedding(
    indices: Tensor,
    parts: Sequence[Tensor],
    packing: str,
    dtype: str,
    group_size: int | None,
    packed_group: int,
    out_features: int,
    in_features: int,
    shown: torch.dtype,
) -> Tensor:
    rows = indices.reshape(-1).long()
    if rows.device.type == "cpu" and rows.numel():
        low, high = (int(end) for end in torch.aminmax(rows))
        if low < 0 or high >= out_features:
            given = low if low < 0 else high
            raise IndexError(f"index {given} is not within the {out_features} rows of the table")
    q, scale, zero = _LOOKUPS[packing](rows, parts, dtype)
    q = q[:, :in_features].to(torch.float32)
    if scale.dim() == 1:
        scale = scale[:, None]
    groups = torch.arange(in_features, device=q.device) // (packed_group or max(in_features, 1))
    if zero is not None:
        q = q - zero.to(torch.float32)[:, groups]
    found = scale[:, groups] * q
    return found.to(shown).reshape(*indices.shape, in_features)


Found = tuple[Tensor, Tensor, Tensor | None]
"""Integers [rows, at least in_features], and scales and zero points [rows, groups]."""


def _in_rows(rows: Tensor, parts: Sequence[Tensor], dtype: str) -> Found:
    integers, scale, *zero = (part.index_select(0, rows) for part in parts)
    if dtype != "int8":
        integers = torch.stack((integers & 15, integers >> 4), -1).flatten(1)
    if dtype == "int4":  # two's complement
        integers = (integers ^ _MIDDLE).to(torch.int8) - _MIDDLE
    return integers, scale, zero[0] if zero else None


def _in_panels(rows: Tensor, parts: Sequence[Tensor], dtype: str) -> Found:
    panels, _, scale, *zero = parts
    panel, column = rows // _PANEL, rows % _PANEL
    # [rows, lines, 4]: of each line of a panel the four k of one column.
    lines = panels.view(len(panels), -1, _PANEL, 4)[panel, :, column]
    if dtype == "int8":
        zeros = zero[0][rows][:, None] if zero else None
        return lines.view(torch.int8).flatten(1), scale[rows], zeros
    pairs = torch.stack((lines & 15, lines >> 4), 2).flatten(1)
    beside = [part[panel, :, column] for part in (scale, *zero)]
    return pairs.to(torch.int8) - _MIDDLE, beside[0], beside[1] if zero else None


def _in_tiles(rows: Tensor, parts: Sequence[Tensor], dtype: str) -> Found:
    tiles, _, scale, *zero = parts
    units = to_values(tiles[rows // _UNIT]).view(len(rows), _UNIT, -1)
    values = units[torch.arange(len(rows), device=rows.device), rows % _UNIT].to(torch.int16)
    middle = MIDDLE[4 * tiles.shape[2]]
    return values - middle, scale[rows], zero[0][rows] if zero else None


def _in_bytes(rows: Tensor, parts: Sequence[Tensor], dtype: str) -> Found:
    return _in_rows(rows, parts[:2], dtype)


_LOOKUPS = {"rows": _in_rows, "panels": _in_panels, "tiles": _in_tiles, "bytes": _in_bytes}


def _fake(indices: Tensor, *rest: Any) -> Tensor:
    return indices.new_empty((*indices.shape, rest[-2]), dtype=rest[-1])


register(
    "embedding(Tensor indices, Tensor[] parts, str packing, str dtype, int? group_size, "
    "int packed_group, int out_features, int in_features, ScalarType shown) -> Tensor",
    cpu=_embedding,
    anywhere=True,
    fake=_fake,
)
