"""Weights that are packed some rows at a time are those that are packed as wholes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lowbit.numerics import int_format
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.packed_rows import pack_rows
from lowbit.weights.panels import PackedMatrix, pack

ARRAYS = ("panels", "column_sums", "scale", "zero_points")


def check(weight: QuantizedWeight, step: int) -> PackedMatrix:
    """Pack a weight by steps of rows, and compare all arrays with those of the whole."""
    rows = len(weight.weight.values)

    def parts() -> Iterator[tuple[int, QuantizedWeight]]:
        for first in range(0, rows, step):
            yield first, weight.rows(slice(first, first + step))

    zeros = weight.zero_point
    whole = pack(weight.weight.T, zero_point=None if zeros is None else zeros.T)
    packed = pack_rows(rows, parts)
    assert packed.format == whole.format
    for name in ARRAYS:
        expected, got = getattr(whole, name), getattr(packed, name)
        assert (got is None) == (expected is None)
        if expected is not None:
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)
    return packed


def drawn(rng: np.random.Generator, kind: str, size: int | None, rows: int, depth: int, real: bool,
          zero_from: int, wide_from: int) -> QuantizedWeight:  # fmt: skip
    """A weight whose zero points are not in the middle from a row on, and whose scales need float32
    from another one on."""
    fmt = int_format(kind)
    groups = () if size is None else (-(-depth // size),)
    values = rng.integers(fmt.qmin, fmt.qmax + 1, (rows, depth)).astype(fmt.storage)
    scale = (2.0 ** rng.integers(-8, 0, (rows, *groups))).astype(np.float32)
    scale[wide_from:] *= np.float32(1.1)
    zeros = np.full(scale.shape, fmt.midpoint, np.float32 if real else np.int32)
    if real:
        zeros[zero_from:] += rng.integers(-3, 4, zeros[zero_from:].shape) / np.float32(4)
    elif fmt.name != "int4":
        zeros[zero_from:] += rng.integers(-3, 4, zeros[zero_from:].shape)
    return QuantizedWeight.of(values, scale, zeros, fmt, size)


@pytest.mark.parametrize("zero_from", [0, 20, 70, 99])
@pytest.mark.parametrize("wide_from", [0, 40, 99])
@pytest.mark.parametrize(
    ("kind", "size", "real"),
    [
        ("uint4", 32, False), ("uint4", 32, True), ("int4", 16, False), ("int8", 32, True),
        ("int8", None, False), ("int8", 32, False),
    ],
)  # fmt: skip
def test_arrays_are_those_of_the_whole(
    kind: str, size: int | None, real: bool, wide_from: int, zero_from: int
) -> None:
    rng = np.random.default_rng(0)
    check(drawn(rng, kind, size, 99, 70, real, zero_from, wide_from), 32)


def test_real_zero_points_behind_integers() -> None:
    """Rows whose zero points are integers come first, as files' blocks of 5 bits may have them."""
    rng = np.random.default_rng(1)
    weight = drawn(rng, "uint4", 32, 64, 96, True, 0, 99)
    assert weight.zero_point is not None
    integers = np.rint(weight.zero_point[:32]).astype(np.int32)
    q = weight.weight
    whole = QuantizedWeight.of(
        q.values, q.scale, np.concatenate([integers, weight.zero_point[32:]]).astype(np.float32),
        q.format, 32,
    )  # fmt: skip
    assert whole.zero_point is not None
    first = QuantizedWeight.of(q.values[:32], q.scale[:32], integers, q.format, 32)
    packed = pack_rows(64, lambda: [(0, first), (32, whole.rows(slice(32, 64)))])
    expected = pack(whole.weight.T, zero_point=whole.zero_point.T)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(packed, name), getattr(expected, name))


def test_parts_are_asked_for_again_only_where_they_must_be() -> None:
    rng = np.random.default_rng(2)
    for zero_from, times in ((0, 1), (99, 1), (50, 2)):
        weight = drawn(rng, "uint4", 32, 99, 64, False, zero_from, 99)
        asked = []

        def parts(
            weight: QuantizedWeight = weight, asked: list[int] = asked
        ) -> Iterator[tuple[int, QuantizedWeight]]:
            asked.append(1)
            for first in range(0, 99, 48):
                yield first, weight.rows(slice(first, first + 48))

        pack_rows(99, parts)
        assert len(asked) == times
