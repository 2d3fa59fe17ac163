"""How weights of 4 bits [N, K] lie in memory for GPUs: in tiles of 64 rows by 128 k, contiguous, 16
words of 8 nibbles to a row, the first in the lowest bits:

    tile [n // 64, k // 128]:  row n % 64:  | word 0: k 0..7 | word 1: k 8..15 | ... | word 15 |

so that a program reads nothing but whole sectors, and 16 bytes a thread. Scales and zero points are
there twice, by row and by group; a kernel takes those whose neighbours it needs together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE_ROWS, TILE_DEPTH = 64, 128
WORDS = TILE_DEPTH // 8  # of a row in a tile
MIDDLE = 8  # the nibble that is taken off as it is; zero points are relative to it
GROUP_UNIT = 32  # k that share digits of x, which a group cannot divide


def to_tiles(words: Any) -> Any:
    """Whole rows of words [64·a, 16·b], an array or a tensor, as tiles [a, b, 64, 16]: a view."""
    rows, length = words.shape
    return words.reshape(rows // TILE_ROWS, TILE_ROWS, length // WORDS, WORDS).swapaxes(1, 2)


def to_rows(tiles: Any) -> Any:
    """What `to_tiles` was given."""
    tall, deep, rows, words = tiles.shape
    return tiles.swapaxes(1, 2).reshape(tall * rows, deep * words)


@dataclass(frozen=True)
class Int4Weight:
    """A weight [N, K] in tiles: int32 [ceil(N / 64), ceil(K / 128), 64, 16].

    scale: floats [groups, N]. zero: likewise, floats or int8, of the nibbles less 8, or None where
    all of them are 0. row_scale, row_zero: the same by row, [N, groups]. N is rounded up to 64.
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
        words = to_rows(self.tiles)[: self.N]
        shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
        q = ((words[:, :, None] >> shifts) & 15).reshape(self.N, -1)[:, : self.K].double() - MIDDLE
        group = torch.arange(self.K, device=words.device) // self.group_size
        if self.row_zero is not None:
            q = q - self.row_zero.double()[: self.N, group]
        return q * self.row_scale.double()[: self.N, group]
