"""A weight of 4 bits as the kernels read it.

It lies in tiles of 64 rows by 128 k, contiguous, 16 words of 8 nibbles to a row:

    tile [n // 64, k // 128]:  row n % 64:  | word 0: k 0..7 | word 1: k 8..15 | ... | word 15 |

so that a program reads nothing but whole sectors, and 16 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE_ROWS, TILE_DEPTH = 64, 128
WORDS = TILE_DEPTH // 8
MIDDLE = 8  # the nibble that is taken off as it is; zero points are relative to it


@dataclass(frozen=True)
class Int4Weight:
    """A weight [N, K] in tiles: int32 [ceil(N / 64), ceil(K / 128), 64, 16].

    scale, zero: floats [groups, N], and row_scale, row_zero the same by row, [N, groups]; the
    zeros, of the nibbles less 8, are None where all of them are 0. All have N rounded up to 64.
    group_size: the k that share a scale.
    """

    tiles: Tensor
    scale: Tensor
    row_scale: Tensor
    zero: Tensor | None
    row_zero: Tensor | None
    N: int
    K: int
    group_size: int

    def arguments(self, by_row: bool) -> dict[str, Any]:
        """What all kernels take of it."""
        scale, zero = (self.row_scale, self.row_zero) if by_row else (self.scale, self.zero)
        return {
            "tiles_ptr": self.tiles,
            "weight_scale_ptr": scale,
            "zero_ptr": scale if zero is None else zero,
            "N": self.N,
            "K": self.K,
            "GROUP": self.group_size,
            "ZERO": zero is not None,
        }

    def dequantized(self) -> Tensor:
        """float64 [N, K], by plain PyTorch."""
        words = self.tiles.transpose(1, 2).reshape(-1, self.tiles.shape[1] * WORDS)[: self.N]
        shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
        q = ((words[:, :, None] >> shifts) & 15).reshape(self.N, -1)[:, : self.K].double() - MIDDLE
        group = torch.arange(self.K, device=words.device) // self.group_size
        if self.row_zero is not None:
            q = q - self.row_zero.double()[: self.N, group]
        return q * self.row_scale.double()[: self.N, group]
