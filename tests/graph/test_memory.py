"""Buffers that are needed at the same time do not share memory."""

from __future__ import annotations

from itertools import combinations

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
        if named[a].meets(named[b]):
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
