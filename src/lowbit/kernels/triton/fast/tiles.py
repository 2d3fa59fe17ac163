"""How weights of 4 bits [N, K] lie in memory for GPUs: in tiles of 64 rows by 128 k, contiguous, 16
words of 8 nibbles to a row, the first in the lowest bits:

    tile [n // 64, k // 128]:  row n % 64:  | word 0: k 0..7 | word 1: k 8..15 | ... | word 15 |

so that a program reads nothing but whole sectors, and 16 bytes a thread. Scales and zero points are
there twice, by row and by group; a kernel takes those whose neighbours it needs together.
"""

from __future__ import annotations

TILE_ROWS, TILE_DEPTH = 64, 128
WORDS = TILE_DEPTH // 8  # of a row in a tile
MIDDLE = 8  # the nibble that is taken off as it is; zero points are relative to it
GROUP_UNIT = 32  # k that share digits of x, which a group cannot divide
