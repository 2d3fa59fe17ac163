"""Buffers that are needed at the same time do not share memory."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowbit.graph.memory import ALIGNMENT, SLACK, Life, arrange

LIVES = st.builds(
    lambda size, first, length: Life(size, first, first + length),
    st.integers(0, 1000), st.integers(0, 20), st.integers(0, 6),
)  # fmt: skip


@given(st.lists(LIVES, max_size=30))
def test_nothing_overlaps(lives: list[Life]) -> None:
    named = {str(i): life for i, life in enumerate(lives)}
    arena = arrange(named)
    for a, b in combinations(named, 2):
        if named[a].first <= named[b].last and named[b].first <= named[a].last:
            low, high = sorted((a, b), key=lambda name: arena.offsets[name])
            assert arena.offsets[low] + named[low].size + SLACK <= arena.offsets[high]
    for name, life in named.items():
        assert arena.offsets[name] % ALIGNMENT == 0
        assert arena.offsets[name] + life.size + SLACK <= arena.size


def test_what_does_not_meet_shares() -> None:
    lives = {"a": Life(1000, 0, 1), "b": Life(1000, 2, 3), "c": Life(10, 0, 3)}
    arena = arrange(lives)
    assert arena.offsets["a"] == arena.offsets["b"]
    assert arena.size < 1400


def test_a_buffer_lies_as_low_as_it_can() -> None:
    """Beside those that are larger, or as large and earlier, as long as it is needed."""
    rng = np.random.default_rng(1)
    for count in (0, 1, 2, 40, 300):
        begins = rng.integers(0, count + 1, count)
        named = {
            f"{i:04}": Life(int(size), int(begin), int(begin + length))
            for i, (size, begin, length) in enumerate(
                zip(rng.integers(1, 40, count) * 64, begins, rng.integers(0, 9, count), strict=True)
            )
        }
        arena = arrange(named)
        placed: dict[str, int] = {}
        for name in sorted(named, key=lambda one: (-named[one].size, named[one].first, one)):
            life = named[name]
            others = [
                (offset, offset + named[other].size + SLACK)
                for other, offset in placed.items()
                if named[other].first <= life.last and life.first <= named[other].last
            ]
            places = [0, *(end for _, end in others)]
            placed[name] = min(
                place for place in places
                if all(place + life.size + SLACK <= begin or end <= place for begin, end in others)
            )  # fmt: skip
        assert arena.offsets == placed
        assert arena.size == max(
            (offset + named[name].size + SLACK for name, offset in placed.items()), default=0
        )
