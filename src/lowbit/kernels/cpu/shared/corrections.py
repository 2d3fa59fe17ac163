"""How weights are split for sums of products in 16 bits, and where what was taken away lies.

A product of bytes adds those of two neighbours along K in 16 bits, and two such sums, of lines 2i
and 2i + 1 of a panel, can be added in 16 bits too. So two or four weights of a column meet. If
their positive parts sum to at most 128, and the negative ones too, 16 bits hold all that comes:
255 · 128 = 32640. Where they sum to more, 96 is taken away from some of the weights that are
positive, and added to some that are negative. For any two or four bytes there is such a choice.
What is missing then is 96 · (Σ a over a list of k  -  Σ a over another), for each column.

Lists are cut into chunks of 512 k, or of 128 where one of 512 could overflow 16 bits. They lie
behind the panels:

    starts      s32 [panels · chunks · 4 + 1]: where lists of four columns begin, in u16 from here
    lists       u16 [length, 4, 2]: of each column the next k to add and the next to subtract, from
                1 on in the chunk, times 8; 0 where its list has ended before the longest
"""

from __future__ import annotations

from typing import NamedTuple

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
