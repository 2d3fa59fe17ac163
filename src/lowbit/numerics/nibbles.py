"""4-bit values: one per byte, two per byte, eight per 32-bit word, and the ways between.

The unpacked form is an array of uint8 holding 0..15 (uint4) or of int8 holding −8..7 (int4,
two's complement in four bits). The first value of each byte or word is in its lowest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics.formats import IntFormat, check_values, checked_axis, int_format

PER_BYTE = 2
PER_WORD = 8


def pack_nibbles(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Two 4-bit values to a byte, along the last axis.

    values: uint8 of 0..15 or int8 of −8..7, [..., L], L ≥ 0. Returns uint8 [..., ceil(L/2)],
    C-contiguous: byte i holds value 2i in its low and value 2i + 1 in its high four bits. If L is
    odd the last high nibble is 0.

    Raises TypeError for another dtype; ValueError naming the first value that four bits do not
    hold, or if there is no axis.
    """
    nibbles = _as_nibbles(values)
    low, high = nibbles[..., 0::PER_BYTE], nibbles[..., 1::PER_BYTE]
    packed = np.empty(low.shape, np.uint8)
    np.bitwise_and(low, 0xF, out=packed)
    # A shift of uint8 drops the upper bits, and with them an int4's sign extension.
    packed[..., : high.shape[-1]] |= high << 4
    return packed


def unpack_nibbles(
    packed: npt.ArrayLike, length: int | None = None, dtype: str | IntFormat = "uint4"
) -> npt.NDArray[Any]:
    """The inverse of `pack_nibbles`.

    packed: uint8 [..., B]. length: the number of values along the last axis, 2B − 1 or 2B;
    None is 2B. The nibble beyond an odd length is not looked at. dtype: "uint4" or "int4".
    Returns uint8 of 0..15 or int8 of −8..7, [..., length], C-contiguous.

    Raises TypeError if `packed` is not uint8 or `length` not an integer; ValueError if the
    length does not fit, the format has not four bits, or there is no axis.
    """
    fmt = _four_bits(dtype)
    packed = _packed(packed, np.dtype(np.uint8))
    length = _checked_length(length, packed.shape[-1], PER_BYTE)
    values = np.empty((*packed.shape[:-1], length), np.uint8)
    np.bitwise_and(packed, 0xF, out=values[..., 0::PER_BYTE])
    np.right_shift(packed[..., : length // PER_BYTE], 4, out=values[..., 1::PER_BYTE])
    return _sign_extended(values, fmt)


def to_int32(values: npt.ArrayLike, axis: int) -> npt.NDArray[np.int32]:
    """Eight 4-bit values to a 32-bit word, along `axis`.

    values: uint8 of 0..15 or int8 of −8..7. Returns int32, C-contiguous, whose size along `axis`
    is ceil(L/8): bits 4i to 4i + 3 of word w hold value 8w + i. Nibbles beyond L are 0. GPTQ
    checkpoints pack a weight [K, N] with axis=0 and its zero points [G, N] with axis=1.

    Raises TypeError for another dtype or an axis that is not an integer; ValueError naming the
    first value that four bits do not hold, or if the axis does not exist.
    """
    nibbles = _as_nibbles(values)
    axis = checked_axis(axis, nibbles.ndim)
    shape = list(nibbles.shape)
    shape[axis] = -(-shape[axis] // PER_WORD)
    words = np.zeros(shape, np.uint32)
    # The packed axis last, in views, so that one index serves every axis.
    source, target = np.moveaxis(nibbles, axis, -1), np.moveaxis(words, axis, -1)
    for i in range(PER_WORD):
        part = source[..., i::PER_WORD].astype(np.uint32)
        part &= 0xF
        part <<= 4 * i
        target[..., : part.shape[-1]] |= part
    return words.view(np.int32)


def from_int32(
    words: npt.ArrayLike, axis: int, length: int | None = None, dtype: str | IntFormat = "uint4"
) -> npt.NDArray[Any]:
    """The inverse of `to_int32`.

    words: int32, with W words along `axis`. length: the number of values along it, 8W − 7 to 8W;
    None is 8W. Nibbles beyond it are not looked at. dtype: "uint4" or "int4". Returns uint8 of
    0..15 or int8 of −8..7, C-contiguous.

    Raises TypeError if `words` is not int32 or `axis` or `length` not an integer; ValueError if
    the axis does not exist, the length does not fit, or the format has not four bits.
    """
    fmt = _four_bits(dtype)
    words = _packed(words, np.dtype(np.int32)).view(np.uint32)
    axis = checked_axis(axis, words.ndim)
    length = _checked_length(length, words.shape[axis], PER_WORD)
    shape = list(words.shape)
    shape[axis] = length
    values = np.empty(shape, np.uint8)
    source, target = np.moveaxis(words, axis, -1), np.moveaxis(values, axis, -1)
    nibbles = np.empty_like(source)
    for i in range(PER_WORD):
        part = target[..., i::PER_WORD]
        np.right_shift(source, 4 * i, out=nibbles)
        nibbles &= 0xF
        part[...] = nibbles[..., : part.shape[-1]]
    return _sign_extended(values, fmt)


def _as_nibbles(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The bytes of unpacked 4-bit values, whose lower four bits count."""
    array = np.asarray(values)
    if array.dtype not in (np.uint8, np.int8):
        raise TypeError(
            f"expected 4-bit values as uint8 (0 to 15) or int8 (-8 to 7), got {array.dtype}; "
            "convert them with astype"
        )
    if array.ndim == 0:
        raise ValueError("expected an array of at least one dimension, got a single value")
    check_values(array, int_format("uint4" if array.dtype == np.uint8 else "int4"), "values")
    return array.view(np.uint8)


def _packed(packed: npt.ArrayLike, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array = np.asarray(packed)
    if array.dtype != dtype:
        raise TypeError(
            f"expected packed 4-bit values of dtype {dtype}, got {array.dtype}; an array of the "
            f"same bytes is read with view(np.{dtype})"
        )
    if array.ndim == 0:
        raise ValueError("expected an array of at least one dimension, got a single value")
    return array


def _four_bits(dtype: str | IntFormat) -> IntFormat:
    fmt = int_format(dtype)
    if fmt.bits != 4:
        raise ValueError(f"expected a format of four bits, 'uint4' or 'int4', got {fmt.name!r}")
    return fmt


def _checked_length(length: int | None, units: int, per_unit: int) -> int:
    """How many values `units` bytes or words hold: `length`, if it fits."""
    if length is None:
        return units * per_unit
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"expected length to be None or an int, got {length!r}")
    if length < 0 or -(-length // per_unit) != units:
        least = max(units * per_unit - per_unit + 1, 0)
        raise ValueError(
            f"length {length} does not fit: {units} packed along the axis hold "
            f"{least} to {units * per_unit} values"
        )
    return length


def _sign_extended(values: npt.NDArray[np.uint8], fmt: IntFormat) -> npt.NDArray[Any]:
    """Nibbles 0..15 as values of the format, in place."""
    if not fmt.signed:
        return values
    # Flipping the sign bit adds 8 modulo 16; taking 8 away again leaves −8..7.
    values ^= 8
    values -= 8
    return values.view(np.int8)
