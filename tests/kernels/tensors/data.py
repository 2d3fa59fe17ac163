"""Formats of tensors in NumPy: their data, what it stands for, and how results are stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ml_dtypes import bfloat16

DTYPES = {
    "f32": np.dtype(np.float32), "bf16": np.dtype(bfloat16), "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8), "s32": np.dtype(np.int32),
}  # fmt: skip
SIZES = (0, 1, 15, 16, 17, 63, 65, 1000)

Affine = tuple[float, int]  # scale, zero point
AFFINE: dict[str, Affine] = {"u8": (0.037, 117), "s8": (0.11, -5), "s32": (0.0003, 7)}


def data(rng: np.random.Generator, name: str, shape: Sequence[int]) -> np.ndarray:
    """The full range of integers; floats with NaN and infinities."""
    dtype = DTYPES[name]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    numbers = (rng.standard_normal(shape) * 4).astype(np.float32)
    odd = rng.random(shape) < 0.1
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38], np.float32)
    return np.where(odd, rng.choice(special, shape), numbers).astype(dtype)


def real(stored: np.ndarray, affine: Affine | None) -> np.ndarray:
    """What is stored, as float32."""
    if affine is None:
        return stored.astype(np.float32)
    whole = stored.astype(np.int32) - np.int32(affine[1])
    return whole.astype(np.float32) * np.float32(affine[0])


def stored(numbers: np.ndarray, name: str, affine: Affine | None) -> np.ndarray:
    """float32 in a format."""
    if affine is None:
        return numbers.astype(DTYPES[name])
    limits, zero = np.iinfo(DTYPES[name]), affine[1]
    steps = numbers * (np.float32(1) / np.float32(affine[0]))
    steps = np.where(np.isnan(steps), np.float32(limits.min - zero), steps)
    steps = np.clip(steps, np.float32(limits.min - zero), np.float32(limits.max - zero))
    return (np.rint(steps).astype(np.int32) + zero).astype(DTYPES[name])


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """The same bits, but for those of NaN."""
    assert got.dtype == expected.dtype
    got, expected = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    if got.dtype.kind in "iub":
        np.testing.assert_array_equal(got, expected)
        return
    number = ~np.isnan(expected.astype(np.float32))
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~number)
    np.testing.assert_array_equal(got.view(bits)[number], expected.view(bits)[number])


def poisoned(name: str, shape: Sequence[int]) -> np.ndarray:
    """Where an output will be."""
    return np.full(shape, 77, DTYPES[name])
