"""What packed panels are, but for their numbers."""

from __future__ import annotations

from typing import NamedTuple

from lowbit.kernels.cpu.shared.layout import FLIP

# How weights are split for sums of products in 16 bits, and where what was taken away lies.
#
# A product of bytes adds those of two neighbours along K in 16 bits, and two such sums, of lines 2i
# and 2i + 1 of a panel, can be added in 16 bits too. So two or four weights of a column meet. If
# their positive parts sum to at most 128, and the negative ones too, 16 bits hold all that comes:
# 255 · 128 = 32640. Where they sum to more, 96 is taken away from some of the weights that are
# positive, and added to some that are negative. For any two or four bytes there is such a choice.
# What is missing then is 96 · (Σ a over a list of k  -  Σ a over another), for each column.
#
# Lists are cut into chunks of 512 k, or of 128 where one of 512 could overflow 16 bits. They lie
# behind the panels:
#
#     starts      s32 [panels · chunks · 4 + 1]: where lists of four columns begin, in u16 from here
#     lists       u16 [length, 4, 2]: of each column the next k to add and the next to subtract,
#                 from 1 on in the chunk, times 8; 0 where its list has ended before the longest

CHUNKS = 512, 128  # k that lists are for
TOGETHER = 4  # columns whose lists are as long as the longest of them
TAKEN = 96  # from the magnitude of a weight
MOST_LISTED = 128  # k in a list: 255 times that fits 16 bits
MOST_SUM = 128  # of the parts of one sign of weights whose products are summed in 16 bits
SCALE = 8  # what a k is multiplied by in lists, as addresses can be
# Cycles for 32 products, two or four of which are summed in 16 bits; for a k of a list, with 16
# rows.
CYCLES, LISTED = {2: 1.25, 4: 1.05}, 0.9


class SplitFormat(NamedTuple):
    """What split weights are, but for their numbers.

    summed: how many of a column are summed in 16 bits, 2 or 4. corrections: the k in all lists,
    zeros included, for 100 weights, rounded up; 0: there are no lists, and panels are as they were.
    chunk: k that a list is for.
    """

    summed: int
    corrections: int
    chunk: int = CHUNKS[0]


UNPROVEN = 2 * FLIP
"""What a right operand that nobody has looked at must be taken for: any two may be neighbours."""

# What users call the integers, and what the panels hold.
STORED = {"int8": "s8", "uint8": "s8", "int4": "s4", "uint4": "u4"}
NIBBLES = ("u4", "s4")


class PanelFormat(NamedTuple):
    """A right operand [k, n] in panels, as far as it decides which code multiplies it and how.

    - dtype: of the integers, "int8", "uint8", "int4" or "uint4".
    - scaled: whether there are scales. centred: whether values have zero points of their own, not
      only those that make them signed.
    - zero_points: how those that are added to stored values are held: "s32", one for each column;
      "s8" or "f32", for each group; "f16": offsets in their place; "" if there are none.
    - group_size: k of a group; 0 without groups.
    - largest_pair: of the stored values, the largest magnitude that two neighbours along K of one
      sign sum to, as far as it is known.
    - split: how the values are split besides (weights/repacking.py), if they are.
    - moderate: there is one scale for each column, and all are (numerics.float32).
    - halves: scales of groups are float16.
    """

    k: int
    n: int
    dtype: str
    scaled: bool = False
    centred: bool = False
    zero_points: str = ""
    group_size: int = 0
    largest_pair: int = UNPROVEN
    split: SplitFormat | None = None
    moderate: bool = False
    halves: bool = False

    @property
    def stored(self) -> str:
        """What the panels hold: bytes, "s8", or nibbles, "u4" or "s4". With groups they are taken
        unsigned, with 128 ("u8") or 8 ("u4") to be subtracted."""
        kind = STORED[self.dtype]
        if not self.group_size:
            return kind
        return "u4" if kind in NIBBLES else "u8"
