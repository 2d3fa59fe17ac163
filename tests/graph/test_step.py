"""What products of a network fetch for those that come after them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lowbit.graph.step import Place, Step, Word, reading_ahead
from lowbit.isa import host
from lowbit.jit.kernel import Program

PROGRAM = cast(Program, None)  # which is not looked at


def _product(node: str, panels: Word, size: int, n: int = 64, item_panels: int = 4) -> Step:
    words: dict[str, Any] = {"n": n, "item_panels": item_panels}
    return Step(PROGRAM, {**words, "next_panels": panels, "next_bytes": size}, node)


def _ahead(steps: list[Step], threads: int = 1) -> list[tuple[Word, Word]]:
    made = reading_ahead(steps, threads)
    assert [one.node for one in made] == [one.node for one in steps]
    found = [one.words for one in made if "next_panels" in one.words]
    return [(words["next_panels"], words["next_bytes"]) for words in found]


def test_each_product_is_told_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "caches", lambda: {"L2": 1000})
    other = Step(PROGRAM, {"x": Place("x")}, "pool")
    steps = [_product("a", 1 << 20, 100), other, _product("b", 2 << 20, 300, item_panels=2),
             _product("c", Place("weights"), 700)]  # fmt: skip
    # Of three quarters of the cache, b itself takes half of its 300.
    assert _ahead(steps) == [(2 << 20, 300), (Place("weights"), 600), (0, 0)]


def test_of_several_threads_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "caches", lambda: {"L2": 1000})
    steps = [_product("a", 1 << 20, 100), _product("b", 2 << 20, 300)]
    assert [size for _, size in _ahead(steps, threads=2)] == [0, 0]
