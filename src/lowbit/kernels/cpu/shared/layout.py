"""How 8-bit operands lie in memory once they are packed: one layout for every instruction set.

The right operand b[K, N] is cut into panels of 16 columns. A panel holds K/4 lines of 64 bytes,
and a line 16 columns of 4 consecutive k:

    panel p:  line 0   | b[0..3, 16p] | b[0..3, 16p+1] | ... | b[0..3, 16p+15] |
              line 1   | b[4..7, 16p] | b[4..7, 16p+1] | ... | b[4..7, 16p+15] |

So one line is one 512-bit register whose dword lanes are columns (VPDPBUSD), two 256-bit ones, or
one row of an AMX tile, of which 16 lines make a whole one in a contiguous kilobyte.

The left operand a[M, K] is cut into blocks of R rows and 64 k. A block holds R lines of 64 bytes,
a line being 64 consecutive k of one row; the blocks of the same rows follow each other. R is the
number of rows that a micro-kernel takes at once, so it reads one block after another.

A panel of 4-bit values has K/8 lines of 64 bytes, each of them two lines in one: the low nibbles
are the bytes of the first, the high ones those of the second. Signed values have 8 added; signed
bytes with scales for groups of k (shared/groups.py) have 128 added.

K is padded to 64 and N to 16 with zeros. Lines start at multiples of 64 bytes. Values are stored
as u8 on the left and s8 on the right, whatever their own sign: 128 is added or taken away, and
accounted for as a zero point.
"""

from __future__ import annotations

PANEL = 16  # columns in a panel
QUAD = 4  # consecutive k of one column that lie together
LINE = PANEL * QUAD  # bytes in a line; also the k in a block of the left operand
QUADS = LINE // QUAD  # of consecutive k, in a line's 64
PANEL_LINE = PANEL * LINE  # bytes of a panel for 64 k; also those of 16 columns of int32, 16 rows
FLIP = 128  # what changes a signed byte into an unsigned one and back
NIBBLE_FLIP = 8  # what changes a signed nibble into an unsigned one and back


def blocks(count: int, size: int) -> int:
    """How many pieces of `size` cover `count`."""
    return -(-count // size)


def padded_k(k: int) -> int:
    """K, rounded up to whole lines."""
    return blocks(k, LINE) * LINE
