"""What float operands look like, and how they are read: as units of 32 bits.

A unit is what one lane of a vector holds of one column (or row): one float32, or a pair of
bfloat16 that follow each other along K. Two bfloat16 operands are read as pairs where the machine
multiplies them. Else operands of 16 bits are widened to float32, which is exact. Packed operands
hold units, whatever they were before:

    left    | block of R rows:   unit 0 of each row | unit 1 of each row | ...
    right   | panel of W columns: unit 0 of each column | unit 1 of each column | ...

so that the inner loops read both from one end to the other. Where K ends in the middle of a pair,
its second half is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.types import Scalar, Vector, f32, u16, u32
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.formats import load_vector
from lowbit.kernels.cpu.shared.functions import widened_float16

_HALF = 16  # bits of a bfloat16
ELEMENTS: dict[str, Scalar] = {"f32": u32, "bf16": u16, "f16": u16}


class Operand(NamedTuple):
    """What an operand is. It keys the code.

    `kind`: "f32", "bf16" or "f16". `along`: the axis whose neighbours are neighbours in memory:
    "k", "x" (rows of the left operand, columns of the right one), or "" for neither. `packed`:
    whether it is brought into units first, or read where it is. `copied`: a left operand that is
    not packed, but whose rows are brought near each other: far apart, they may be in each other's
    way in the caches.
    """

    kind: str
    along: str
    packed: bool
    copied: bool = False


@dataclass(frozen=True)
class Reader:
    """Reads units of an operand of one kind. `pair`: a unit is two bfloat16, else one float32."""

    kind: str
    pair: bool

    @property
    def depth(self) -> int:
        """How many k a unit holds."""
        return 2 if self.pair else 1

    @property
    def bytes(self) -> int:
        """Of an element."""
        return ELEMENTS[self.kind].bytes

    def pointer(self, base: Value) -> Value:
        """`base` as a pointer to this kind's elements."""
        return base.cast(ELEMENTS[self.kind])

    def along(self, at: Value, lanes: int, left: Value | None = None) -> Value:
        """`lanes` units that follow each other along K, where K is contiguous: a u32 vector.

        Of the first `left` elements only, if given; zeros stand for the others.
        """
        if self.pair and left is None:
            return at.cast(u32).load(lanes)
        loaded = load_vector(at, lanes * self.depth, left)
        return loaded.bits(Vector(u32, lanes)) if self.pair else self.widened(loaded)

    def across(self, at: Value, stride: Value, lanes: int, left: Value | None = None) -> Value:
        """The units at one k of `lanes` neighbours, the first `left` of them if given: u32."""
        if self.pair:
            lower, upper = (load_vector(place, lanes, left) for place in (at, at + stride))
            return lower.to(u32) | (upper.to(u32) << _HALF)
        return self.widened(load_vector(at, lanes, left))

    def one(self, at: Value, stride: Value, half: bool = False) -> Value:
        """One unit, a u32; with `half` the second element of a pair is beyond K, thus zero."""
        if not self.pair:
            return self.widened(at.load())
        return at.load().to(u32) if half else at.load().to(u32) | self._upper(at, stride)

    @staticmethod
    def _upper(at: Value, stride: Value) -> Value:
        return (at + stride).load().to(u32) << _HALF

    def widened(self, loaded: Value) -> Value:
        """What was loaded of single elements, as the bits of float32, u32."""
        if self.kind == "f32":
            return loaded
        return widened_float16(loaded) if self.kind == "f16" else loaded.to(u32) << _HALF


def float_of(bits: Value) -> Value:
    """The float32 whose bits are the low half of an s64, which is how a kernel is given one."""
    return bits.to(u32).bits(f32)
