"""Stop strings, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.lm.stops import Stops


def fed(stops: Stops, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        text, finished = stops.add(piece)
        shown += text
        if finished:
            return shown, True
    return shown + stops.rest(), False


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = Stops(["\nUser:", "###"])
    assert stops.add("Hi") == ("Hi", False)
    assert stops.add(" #") == (" ", False)
    assert stops.add("1\nUs") == ("#1", False)
    assert stops.add("ers") == ("\nUsers", False)
    assert stops.add("##") == ("", False)
    assert stops.rest() == "##"
    assert stops.rest() == ""
    assert stops.add("x\nUser: y") == ("x", True)
    assert stops.rest() == ""


def test_one_string_and_none() -> None:
    assert fed(Stops("abc"), ["xa", "b", "cd"]) == ("x", True)
    assert fed(Stops(()), ["a", "b"]) == ("ab", False)
    with pytest.raises(ValueError, match="a stop string is empty"):
        Stops(["a", ""])


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12)),
)
def test_the_first_to_end_counts_however_text_is_cut(
    text: str, strings: list[str], cuts: list[int]
) -> None:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    expected = (text, False)
    for end in range(len(text) + 1):
        begins = [end - len(one) for one in strings if text[:end].endswith(one)]
        if begins:
            expected = (text[: min(begins)], True)
            break
    assert fed(Stops(strings), pieces) == expected
