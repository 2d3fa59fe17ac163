"""4-bit values in bytes and words, against Python's own integers."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowbit.numerics import from_int32, int_format, pack_nibbles, to_int32, unpack_nibbles

FORMATS = ["uint4", "int4"]

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=19)
uint4 = hnp.arrays(np.uint8, shapes, elements=st.integers(0, 15))
int4 = hnp.arrays(np.int8, shapes, elements=st.integers(-8, 7))


def name_of(values: npt.NDArray[Any]) -> str:
    return "uint4" if values.dtype == np.uint8 else "int4"


def packed_number(values: list[int]) -> int:
    """The values in one Python integer, the first in the lowest four bits."""
    return sum((value % 16) << (4 * i) for i, value in enumerate(values))


@given(values=uint4 | int4)
def test_bytes_hold_two_values_and_give_them_back(values: npt.NDArray[Any]) -> None:
    packed = pack_nibbles(values)
    length = values.shape[-1]
    assert (packed.dtype, packed.shape) == (np.uint8, (*values.shape[:-1], -(-length // 2)))
    assert packed.flags.c_contiguous
    for index in np.ndindex(packed.shape):
        pair = values[(*index[:-1], slice(2 * index[-1], 2 * index[-1] + 2))]
        assert int(packed[index]) == packed_number(pair.tolist())
    back = unpack_nibbles(packed, length, name_of(values))
    assert (back.dtype, back.flags.c_contiguous) == (values.dtype, True)
    np.testing.assert_array_equal(back, values)


@given(values=uint4 | int4, data=st.data())
def test_words_hold_eight_values_and_give_them_back(values: npt.NDArray[Any], data: Any) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    words = to_int32(values, axis)
    length = values.shape[axis]
    assert (words.dtype, words.shape[axis]) == (np.int32, -(-length // 8))
    assert words.flags.c_contiguous
    rows, lanes = np.moveaxis(values, axis, -1), np.moveaxis(words, axis, -1)
    for index in np.ndindex(lanes.shape):
        eight = rows[(*index[:-1], slice(8 * index[-1], 8 * index[-1] + 8))]
        assert int(lanes[index]) % 2**32 == packed_number(eight.tolist())
    back = from_int32(words, axis, length, name_of(values))
    assert (back.dtype, back.flags.c_contiguous) == (values.dtype, True)
    np.testing.assert_array_equal(back, values)


@pytest.mark.parametrize("name", FORMATS)
def test_all_values_in_all_positions(name: str) -> None:
    fmt = int_format(name)
    for position in range(8):
        values = np.zeros((16, 8), fmt.storage)
        values[:, position] = np.arange(fmt.qmin, fmt.qmax + 1)
        np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(values), 8, name), values)
        words = to_int32(values, 1)
        assert [int(w) % 2**32 for w in words[:, 0]] == [
            (v % 16) << (4 * position) for v in range(fmt.qmin, fmt.qmax + 1)
        ]
        np.testing.assert_array_equal(from_int32(words, 1, dtype=name), values)


def test_every_byte_and_its_sign() -> None:
    every = np.arange(256, dtype=np.uint8)
    pairs = unpack_nibbles(every[:, None])
    np.testing.assert_array_equal(pairs, np.stack([every % 16, every // 16], axis=1))
    signed = unpack_nibbles(every[:, None], dtype="int4")
    assert signed.dtype == np.int8
    wide = pairs.astype(np.int64)
    np.testing.assert_array_equal(signed, np.where(wide > 7, wide - 16, wide))
    np.testing.assert_array_equal(pack_nibbles(signed)[:, 0], every)


def test_padding_is_zero_and_not_looked_at() -> None:
    assert pack_nibbles(np.array([-1, -1, -1], np.int8)).tolist() == [0xFF, 0x0F]
    assert to_int32(np.array([[-1], [-1], [-1]], np.int8), 0).tolist() == [[0xFFF]]
    assert unpack_nibbles(np.array([0x21, 0xF3], np.uint8), 3).tolist() == [1, 2, 3]
    assert from_int32(np.array([-1], np.int32), 0, 1).tolist() == [15]


def test_strides_do_not_matter() -> None:
    values = np.random.default_rng(3).integers(-8, 8, (18, 21)).astype(np.int8)
    for view in (
        values.T,
        values[::-1, ::-2],
        values[:, 3:4],
        np.broadcast_to(values[:1], (4, 21)),
    ):
        copy = view.copy()
        np.testing.assert_array_equal(pack_nibbles(view), pack_nibbles(copy))
        for axis in (0, 1):
            words = to_int32(view, axis)
            np.testing.assert_array_equal(words, to_int32(copy, axis))
            again = from_int32(np.asfortranarray(words), axis, view.shape[axis], "int4")
            np.testing.assert_array_equal(again, view)


def test_bytes_and_words_are_the_same_on_a_little_endian_machine() -> None:
    values = np.random.default_rng(4).integers(0, 16, (5, 24), dtype=np.uint8)
    words = to_int32(values, -1).astype("<i4")
    np.testing.assert_array_equal(words.view(np.uint8), pack_nibbles(values))


@pytest.mark.parametrize("pack", [pack_nibbles, lambda v: to_int32(v, 0)])
@pytest.mark.parametrize(
    ("dtype", "bad", "message"),
    [
        (np.uint8, 16, "within uint4, 0 to 15, found 16 at"),
        (np.uint8, 255, "within uint4, 0 to 15, found 255 at"),
        (np.int8, 8, "within int4, -8 to 7, found 8 at"),
        (np.int8, -9, "within int4, -8 to 7, found -9 at"),
    ],
)
def test_the_first_value_beyond_four_bits_is_named(
    pack: Any, dtype: Any, bad: int, message: str
) -> None:
    values = np.zeros((3, 4), dtype)
    values[2, 0] = values[1, 3] = bad
    with pytest.raises(ValueError, match=message + r" index \(1, 3\)"):
        pack(values)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.bool_, np.uint16])
def test_dtypes_that_are_refused(dtype: Any) -> None:
    array = np.zeros((2, 2), dtype)
    for pack in (pack_nibbles, lambda v: to_int32(v, 0)):
        with pytest.raises(TypeError, match=f"int8 .*, got {np.dtype(dtype)}"):
            pack(array)
    with pytest.raises(TypeError, match=f"dtype uint8, got {np.dtype(dtype)}"):
        unpack_nibbles(array)
    if dtype is not np.int32:
        with pytest.raises(TypeError, match=f"dtype int32, got {np.dtype(dtype)}"):
            from_int32(array, 0)


@pytest.mark.parametrize(
    ("length", "error", "message"),
    [
        (4, ValueError, "length 4 does not fit: 3 packed along the axis hold 5 to 6 values"),
        (7, ValueError, "length 7 does not fit"),
        (-1, ValueError, "length -1 does not fit"),
        (5.0, TypeError, r"expected length to be None or an int, got 5\.0"),
        (True, TypeError, "got True"),
    ],
)
def test_bad_lengths_of_bytes(length: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        unpack_nibbles(np.zeros(3, np.uint8), length)


@pytest.mark.parametrize("length", [8, 17, -3])
def test_bad_lengths_of_words(length: int) -> None:
    with pytest.raises(ValueError, match="2 packed along the axis hold 9 to 16 values"):
        from_int32(np.zeros((2, 3), np.int32), 0, length)
    with pytest.raises(ValueError, match="0 packed along the axis hold 0 to 0 values"):
        from_int32(np.zeros((0, 3), np.int32), 0, 1)


def test_bad_axes_formats_and_single_values() -> None:
    values, words = np.zeros((2, 8), np.uint8), np.zeros((2, 1), np.int32)
    for call in (lambda axis: to_int32(values, axis), lambda axis: from_int32(words, axis)):
        for axis in (2, -3):
            with pytest.raises(ValueError, match=f"axis {axis} does not exist"):
                call(axis)
        for wrong in (1.0, True, None):
            with pytest.raises(TypeError, match="expected axis to be an int"):
                call(wrong)
    for unpack in (
        lambda name: unpack_nibbles(values, dtype=name),
        lambda name: from_int32(words, 0, dtype=name),
    ):
        with pytest.raises(ValueError, match="format of four bits, 'uint4' or 'int4', got 'int8'"):
            unpack("int8")
    for call, dtype in ((pack_nibbles, np.uint8), (unpack_nibbles, np.uint8)):
        with pytest.raises(ValueError, match="at least one dimension"):
            call(np.zeros((), dtype))
    with pytest.raises(ValueError, match="at least one dimension"):
        from_int32(np.zeros((), np.int32), 0)


def test_memory_is_about_three_times_the_input() -> None:
    values = np.random.default_rng(5).integers(0, 16, (1024, 1024), dtype=np.uint8)
    packed, words = pack_nibbles(values), to_int32(values, 0)
    for call, array in (
        (pack_nibbles, values),
        (lambda v: to_int32(v, 0), values),
        (lambda p: unpack_nibbles(p, dtype="int4"), packed),
        (lambda w: from_int32(w, 0, dtype="int4"), words),
    ):
        tracemalloc.start()
        call(array)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 3.1 * array.nbytes
