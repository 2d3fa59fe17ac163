"""What packed panels are, but for their numbers."""

from __future__ import annotations

from typing import NamedTuple

from lowbit.kernels.cpu.shared.corrections import SplitFormat
from lowbit.kernels.cpu.shared.layout import FLIP

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
      "s8" or "f32", for each group; "" if there are none.
    - group_size: k of a group; 0 without groups.
    - largest_pair: of the stored values, the largest magnitude that two neighbours along K of one
      sign sum to, as far as it is known.
    - split: how the values are split besides (weights/split.py), if they are.
    - moderate: there is one scale for each column, and all are (numerics.float32).
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

    @property
    def stored(self) -> str:
        """What the panels hold: bytes, "s8", or nibbles, "u4" or "s4". With groups they are taken
        unsigned, with 128 ("u8") or 8 ("u4") to be subtracted."""
        kind = STORED[self.dtype]
        if not self.group_size:
            return kind
        return "u4" if kind in NIBBLES else "u8"
