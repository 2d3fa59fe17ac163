"""The steps in Numba: exact at odd shapes, within their arrays, and refusing what is no uint4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("jaxtyping")
from numba import njit

from lowbit.spec import Operation
from lowbit.spec.operations.products import product_of_packed_rows
from lowbit_lab.steps.registry import Layout, Step, step, steps
from lowbit_lab.steps.uint4 import (
    COLUMNS,
    LONGEST,
    PACKED_ROWS,
    ROWS,
    SPAN,
    TILE,
    check_operands,
)

SHAPES = [(1, 1, 1), (1, 9, 31), (5, 1, 64), (3, 130, 1), (7, TILE + 3, 65), (2, 2 * TILE, 577)]
EACH = pytest.mark.parametrize("one", steps("uint4"), ids=lambda one: one.name)
POISON = -0x55555556
GUARD = 64


def draw(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [M, K] and vectors [N, K] over the full range, both ends of it among them."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.integers(0, 16, (size, k), dtype=np.uint8) for size in (m, n))
    a[0, 0] = b[-1, -1] = 15
    a[-1, -1] = b[0, 0] = 0
    return a, b


def sizes_of(operation: Operation, inputs: tuple[np.ndarray, ...]) -> dict[str, int]:
    given = zip(operation.inputs, inputs, strict=True)
    return {dim: size for t, a in given for dim, size in zip(t.dims, a.shape, strict=True)}


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) @ b.T.astype(np.int64)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, TILE + 1, 2 * SPAN + 1)], ids=str)
def test_stays_within_its_arrays(one: Step, shape: tuple[int, int, int]) -> None:
    """Compiled with every index checked, between guards, on a poisoned output."""
    kernel: Any = one.kernel
    arranged = one.layout.arrange(*draw(*shape))
    m, n, _ = shape
    memory = np.full(m * n + 2 * GUARD, POISON, np.int32)
    out = memory[GUARD:-GUARD].reshape(m, n)
    before = [array.copy() for array in arranged]
    njit(boundscheck=True)(kernel.py_func)(*arranged, out)

    operation = one.layout.operation
    inputs = dict(zip("ab", arranged, strict=True))
    expected = operation.case(sizes_of(operation, arranged)).expect(inputs)
    assert not expected.wrong(out.astype(np.int64)).any()
    assert (memory[:GUARD] == POISON).all()
    assert (memory[-GUARD:] == POISON).all()
    for array, old in zip(arranged, before, strict=True):
        np.testing.assert_array_equal(array, old)


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact(one: Step, shape: tuple[int, int, int]) -> None:
    a, b = draw(*shape)
    result = one.prepare(a, b)()
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result, exact(a, b))


@EACH
def test_largest_sums(one: Step) -> None:
    """Sums past 16 bits, in more than two spans of the narrow ones."""
    a, b = np.full((2, 601), 15, np.uint8), np.full((3, 601), 15, np.uint8)
    np.testing.assert_array_equal(one.prepare(a, b)(), np.full((2, 3), 225 * 601))


@EACH
def test_strides_do_not_matter(one: Step) -> None:
    a, b = draw(6, 10, 14)
    np.testing.assert_array_equal(
        one.prepare(a[::2, ::-2], b.T.copy().T[::3, ::-2])(), exact(a[::2, ::-2], b[::3, ::-2])
    )


@pytest.mark.parametrize("layout", [COLUMNS, ROWS, PACKED_ROWS], ids=lambda one: one.text)
@pytest.mark.parametrize("k", [1, 8, 33])
def test_operations_mean_the_same_product(layout: Layout, k: int) -> None:
    a, b = draw(4, 6, k)
    arranged = layout.arrange(a, b)
    np.testing.assert_array_equal(layout.operation(*arranged), exact(a, b))
    sizes = sizes_of(layout.operation, arranged)
    assert layout.operation.result.shape(sizes) == (4, 6)


def test_packed_bytes_by_hand() -> None:
    a, b = np.array([[0x21, 0xF3]], np.uint8), np.array([[0x10, 0xF2]], np.uint8)
    assert product_of_packed_rows(a, b).tolist() == [[1 * 0 + 2 * 1 + 3 * 2 + 15 * 15]]


def test_spans_fit_sixteen_bits() -> None:
    assert 15 * 15 * 2 * SPAN < 2**16
    assert 15 * 15 * LONGEST < 2**31 <= 15 * 15 * (LONGEST + 1)


def test_steps_have_ideas_of_their_own() -> None:
    several = steps("uint4")
    assert [one.number for one in several] == list(range(1, len(several) + 1))
    assert len({one.name for one in several}) == len({one.idea for one in several}) == len(several)
    for one in several:
        text = " ".join((one.kernel.__doc__ or "").split())
        assert one.idea
        assert "Bytes: " in text, one.name
        assert "Limit: " in text, one.name


def test_a_step_is_taken_once() -> None:
    def another(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        raise AssertionError

    assert steps("uint4")[0].name == "naive_loops"
    with pytest.raises(ValueError, match="'1' already"):
        step("uint4", 1, ROWS)(another)
    assert steps("uint4")[0].name == "naive_loops"


ONES = np.ones((2, 3), np.uint8)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (ONES.astype(np.int8), ONES, TypeError, "a is of int8; give uint4 values 0 to 15 as uint8"),
        (ONES, ONES.astype(np.float32), TypeError, "b is of float32"),
        (ONES[0], ONES, ValueError, r"a has the shape \(3,\); expected \[M, K\]"),
        (ONES, ONES[:0], ValueError, r"b has the shape \(0, 3\); expected \[N, K\]"),
        (ONES, ONES.T, ValueError, "rows of different lengths"),
        (ONES, 15 * ONES + np.eye(2, 3, dtype=np.uint8), ValueError, r"found 16 at index \(0, 0\)"),
    ],
)
def test_what_is_no_uint4_is_refused(
    a: np.ndarray, b: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_operands(a, b)
    with pytest.raises(error, match=message):
        steps("uint4")[0].prepare(a, b)


def test_sums_that_could_overflow_are_refused() -> None:
    # Rows without memory of their own: as many zeros as one more than fits.
    row = np.broadcast_to(np.zeros(1, np.uint8), (1, LONGEST + 1))
    with pytest.raises(ValueError, match=f"K is {LONGEST + 1}; 32-bit sums hold {LONGEST}"):
        check_operands(row, row)
