"""Winograd's algorithm for windows of 3 x 3, in whole numbers, and why it is exact.

Four by four outputs that are neighbours need six by six pixels, and 144 products a channel. As
polynomials that are multiplied by way of their values at six points, along both axes, they need 36:

    Y = Aᵀ [ (G w Gᵀ) ∘ (Bᵀ x B) ] A          (Winograd, 1980; Lavin and Gray, "Fast Algorithms for
                                               Convolutional Neural Networks", 2016, F(4x4, 3x3))

The points are 0, 1, −1, 2, −2 and infinity. A and G usually hold sixths and twenty-fourths. Here
all three are of integers. So what comes out along an axis is not the sum, but 3·2^s times that, of
both axes 9·2^s. Sums of 32 bits wrap, and are right modulo 2^32. Nine has an inverse there; 2^s is
shifted away. As s is 6 at most, what is left is right modulo 2^26: it is the sum, if that has 26
bits (`MOST_SUM`), which is known from the weights. Pixels become words of at most 68·255 and
weights of at most 49·128, so the products are those of 16 bits: a quarter as many as of bytes.

Where an axis ends with a tile of three outputs, that takes five of the points, and one of one or
two outputs four of them. Weights are the same: their values at a point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowbit.isa.value import Value

KERNEL, TILE, SEEN = 3, 4, 6  # of a window, of a tile's outputs, of the pixels that these need
POINTS = SEEN * SEEN
SHARE_OF_PRODUCTS = POINTS / (TILE * KERNEL) ** 2
MOST_SUM = 1 << 25  # below which the magnitude of each sum of bytes must be
_INVERSE_OF_9 = pow(9, -1, 1 << 32)
Values = Sequence[Value]


class Tile(NamedTuple):
    """A tile along an axis: of its six points those that it takes, and of each output that comes
    out as 3·2^s times itself, s."""

    points: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def seen(self) -> int:
        """Pixels."""
        return len(self.points)

    def pixels(self, d: Values) -> list[Value]:
        """Bᵀ d."""
        return _PIXELS[self.seen](d)

    def outputs(self, m: Values) -> list[Value]:
        """Aᵀ m."""
        return _OUTPUTS[self.seen](m)


WHOLE = Tile((0, 1, 2, 3, 4, 5), (3, 2, 1, 1))
_THREE = Tile((0, 1, 2, 3, 5), (1, 1, 1))
_TWO = Tile((0, 1, 2, 5), (1, 1))


def last_tile(size: int) -> Tile | None:
    """What follows the whole tiles of so many outputs."""
    return (None, _TWO, _TWO, _THREE)[size % TILE]


def weights(w: Values) -> list[Value]:
    """G w: w0 + w1·t + w2·t² at the six points t; at 0 and infinity three times that."""
    even, odd = w[0] + w[2], w[1]
    four, two = even + (w[2] + (w[2] << 1)), odd << 1
    at_0, at_infinity = (one + (one << 1) for one in (w[0], w[2]))
    return [at_0, even + odd, even - odd, four + two, four - two, at_infinity]


def _pixels_of_four(d: Values) -> list[Value]:
    four, more = d[4] - (d[2] << 2), d[3] - (d[1] << 2)
    even, odd = d[4] - d[2], d[3] - d[1]
    return [
        ((d[0] - d[2]) << 2) + even,
        four + more,
        four - more,
        even + (odd << 1),
        even - (odd << 1),
        (d[5] - d[3]) - (odd << 2),
    ]


def _outputs_of_four(m: Values) -> list[Value]:
    plus, minus = m[1] + m[2], m[1] - m[2]
    far_plus, far_minus = m[3] + m[4], m[3] - m[4]
    return [
        ((m[0] - (plus << 1)) << 1) + far_plus,
        far_minus - (minus << 1),
        far_plus - plus,
        ((far_minus + m[5]) << 1) - minus,
    ]


def _pixels_of_three(d: Values) -> list[Value]:
    """For 0, 1, −1, 2 and infinity."""
    odd, even = d[3] - d[1], d[0] - d[2]
    return [
        (even << 1) + odd,
        odd - d[1] - d[2],
        d[3] - d[2] + ((d[1] - d[2]) << 1),
        odd,
        (d[4] - d[2]) - (odd << 1),
    ]


def _outputs_of_three(m: Values) -> list[Value]:
    thrice = m[1] + (m[1] << 1)
    return [
        m[0] - thrice - m[2] + m[3],
        m[2] - thrice + (m[3] << 1),
        (m[3] << 2) - thrice - m[2] + (m[4] << 1),
    ]


def _pixels_of_two(d: Values) -> list[Value]:
    """For 0, 1, −1 and infinity."""
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[3] - d[1]]


def _outputs_of_two(m: Values) -> list[Value]:
    plus, minus = m[1] + m[2], m[1] - m[2]
    return [
        ((m[0] + plus) << 1) + plus,
        ((m[3] + minus) << 1) + minus,
    ]


_PIXELS = {6: _pixels_of_four, 5: _pixels_of_three, 4: _pixels_of_two}
_OUTPUTS = {6: _outputs_of_four, 5: _outputs_of_three, 4: _outputs_of_two}


def sums_of(down: Tile, along: Tile, m: Sequence[Values]) -> list[list[Value]]:
    """Aᵀ m A without its factors: the sums of a tile's outputs, line by line."""
    columns = [down.outputs([row[j] for row in m]) for j in range(along.seen)]
    lines = [along.outputs([column[i] for column in columns]) for i in range(len(down.shifts))]
    return [
        [(value * _INVERSE_OF_9) >> (i + j) for j, value in zip(along.shifts, line, strict=True)]
        for i, line in zip(down.shifts, lines, strict=True)
    ]
