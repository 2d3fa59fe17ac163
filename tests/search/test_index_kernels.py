"""The kernels of search: interpreted for every instruction set, and compiled for this machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit.isa import active, named
from lowbit.kernels.cpu.integer.octet_scores import octet_scores
from lowbit.kernels.cpu.rows.select import EMPTY, LAST_PLACE, keep_greatest, mark, marked
from lowbit.search.groups import Queries


def _select(numbers: np.ndarray, count: int, width: int, interpreted: bool) -> np.ndarray:
    """The places of the greatest, by the kernel, given the numbers in two parts."""
    heaps = np.full((len(numbers), count), EMPTY, np.int64)
    cut = width // 3
    for first, last in ((0, cut), (cut, width)):
        part = np.ascontiguousarray(numbers[:, first:last])
        if interpreted:
            arguments = {
                "numbers": part, "stride": part.shape[1], "width": part.shape[1], "base": first,
                "heaps": heaps, "count": count, "levels": count.bit_length(), "rows": len(part),
            }  # fmt: skip
            keep_greatest.interpret(named("generic"), arguments)
        else:
            keep_greatest.program(active())(
                2, part, part.shape[1], part.shape[1], first, heaps, count, count.bit_length(),
                len(part),
            )  # fmt: skip
    return np.sort(LAST_PLACE - (heaps & LAST_PLACE), axis=1)


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("kind", ["any", "rising", "falling", "equal", "few", "extreme"])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (7, 3), (200, 1), (203, 10), (300, 99)])
def test_the_greatest_are_kept(width: int, count: int, kind: str, interpreted: bool) -> None:
    rng = np.random.default_rng(width)
    rows = 3
    numbers = rng.standard_normal((rows, width)).astype(np.float32)
    if kind in ("rising", "falling"):
        numbers = np.sort(numbers, axis=1)[:, :: 1 if kind == "rising" else -1]
    elif kind == "equal":
        numbers[...] = -1.5
    elif kind == "few":
        numbers = rng.integers(-2, 3, (rows, width)).astype(np.float32) * np.float32(-0.0 - 1)
    elif kind == "extreme":
        values = [-np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, -3.4e38, 3.4e38]
        numbers = rng.choice(np.array(values, np.float32), (rows, width))
    expected = np.sort(np.argsort(-numbers, axis=1, kind="stable")[:, :count], axis=1)
    np.testing.assert_array_equal(_select(numbers, count, width, interpreted), expected)


@pytest.mark.parametrize("interpreted", [True, False])
def test_marks_of_places(interpreted: bool) -> None:
    places = np.array([3, 0, 3, -1, 9, 10, 11, 1 << 62, -(1 << 63)])
    marks = np.zeros(14, np.uint8)
    arguments = {"places": places, "count": len(places), "marks": marks, "end": 10}
    if interpreted:
        mark.interpret(named("generic"), arguments)
    else:
        mark.program(active())(1, *arguments.values())
    assert np.flatnonzero(marks).tolist() == [0, 3, 9, 10]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("interpreted", [False, True])
def test_places_of_marks(share: float, interpreted: bool) -> None:
    marks = (np.random.default_rng(0).random(200) < share).astype(np.uint8)
    want = np.flatnonzero(marks)
    for room in {0, 1, len(want) // 2, len(want)}:
        places = np.full(room + 2, -7)
        arguments = {"marks": marks, "count": 200, "places": places[:-1], "room": room}
        if interpreted:
            marked.interpret(named("generic"), arguments)
        else:
            marked.program(active())(1, *arguments.values())
        assert places[: min(room, len(want))].tolist() == want[:room].tolist()
        assert places[-1] == -7


@pytest.mark.parametrize("named_ids", [False, True])
def test_many_ids_as_a_filter_are_as_their_mask(named_ids: bool) -> None:
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((300, 16)).astype(np.float32)
    index = lowbit.VectorIndex(16, bits=8)
    index.add(vectors, ids=np.arange(300)[::-1] * 3 if named_ids else None)
    wanted = rng.choice(index.ids, 150)  # some of them twice
    others = np.array([-7, 901, 1 << 40])  # are nobody's
    mask = np.isin(index.ids, wanted)
    for ids in (np.append(wanted, others), np.append(wanted, others).astype(np.uint64)[:150]):
        scores, found = index.search(vectors[:3], 20, filter=ids)
        want_scores, want = index.search(vectors[:3], 20, filter=mask)
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(scores, want_scores)
    few = np.append(np.repeat(wanted[:2], 100), others)  # many that are few
    assert set(index.search(vectors[0], 5, filter=few)[1]) == {*wanted[:2].tolist(), -1}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_scores_of_groups_are_those_of_floats(dtype: Any, biased: bool) -> None:
    rng = np.random.default_rng(2)
    quantized = lowbit.quantize(rng.standard_normal((70, 37)), dtype, axis=1)
    packed = lowbit.pack(quantized)
    queries = Queries(rng.standard_normal((2, 70)).astype(np.float32))
    bias = np.zeros(48, np.float32)
    bias[:37] = rng.standard_normal(37) * biased
    whole = queries.values.astype(np.float64) @ quantized.dequantize() + bias[:37]
    groups = np.array([[2, 11, 14, 10], [13, 12, 15, 14]])  # of which 10 to 14 are here
    untouched = np.float32(7)
    out = np.full((2, 4, 8), untouched)
    arguments = {
        "values": queries.padded, "octets": groups, "places": 4, "first": 10, "beyond": 15,
        "panels": packed.panels, "k_blocks": queries.k_blocks, "column_scale": packed.scale,
        "bias": bias if biased else None, "out": out, "rows": 2,
    }  # fmt: skip
    octet_scores.interpret(named("generic"), arguments, weight=packed.weight, biased=biased)
    for row, place in np.ndindex(2, 4):
        group = groups[row, place] - 10
        expected = whole[row, group * 8 : group * 8 + 8] if 0 <= group < 5 else [untouched] * 8
        np.testing.assert_allclose(out[row, place, : len(expected)], expected, rtol=1e-5, atol=1e-5)
