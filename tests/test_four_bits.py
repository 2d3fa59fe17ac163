"""Products with 4-bit right operands: exact, on every instruction set, at odd shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.test_products import MICRO_KERNELS, interpreted

import lowbit
from lowbit.isa import SETS
from lowbit.kernels.cpu.shared.layout import padded_k

ISAS = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(one.missing()), reason=one.missing() or "-")
        )
        for name, one in SETS.items()
    ],
)
LIMITS = {"int4": (-8, 8, np.int8), "uint4": (0, 16, np.uint8)}
LEFT = {"u8": (0, 256, np.uint8), "s8": (-128, 128, np.int8), "u4": (0, 16, np.uint8),
        "s4": (-8, 8, np.int8)}  # fmt: skip


def _draw(seed: int, limits: tuple[int, int, type], shape: tuple[int, int]) -> np.ndarray:
    low, high, kind = limits
    return np.random.default_rng(seed).integers(low, high, shape).astype(kind)


def _exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int64) @ b.astype(np.int64)


@ISAS
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 63), (17, 33, 65), (40, 129, 200), (5, 17, 0)])
def test_exact(isa: str, dtype: Any, left: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = _draw(1, LEFT[left], (m, k)), _draw(2, LIMITS[dtype], (k, n))
    packed = lowbit.pack(b, dtype=dtype)
    assert packed.panels.nbytes == -(-n // 16) * padded_k(k) * 8
    for threads in (1, 3):
        result = lowbit.matmul(a, packed, isa=isa, threads=threads)
        np.testing.assert_array_equal(result, _exact(a, b))


@ISAS
@pytest.mark.parametrize("dtype", LIMITS)
def test_extremes(isa: str, dtype: Any) -> None:
    low, high, kind = LIMITS[dtype]
    for a_value in (0, 255):
        for b_value in (low, high - 1):
            a = np.full((5, 300), a_value, np.uint8)
            b = np.full((300, 20), b_value, kind)
            result = lowbit.matmul(a, lowbit.pack(b, dtype=dtype), isa=isa)
            np.testing.assert_array_equal(result, _exact(a, b))


@MICRO_KERNELS
@pytest.mark.parametrize("dtype", LIMITS)
def test_interpreted(micro: object, dtype: Any) -> None:
    """Every micro-kernel, on any machine, every access checked."""
    a, b = _draw(3, LEFT["u8"], (19, 70)), _draw(4, LIMITS[dtype], (70, 37))
    packed = lowbit.pack(b, dtype=dtype)
    out = np.full((19, 37), 0x55555555, np.int32)
    interpreted(micro, a, packed, out, weight=packed.weight, fused=True)  # type: ignore[arg-type]
    np.testing.assert_array_equal(out, _exact(a, b))


@pytest.mark.deep
@given(m=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 150), seed=st.integers(0, 99))
def test_any_shape(m: int, n: int, k: int, seed: int) -> None:
    a, b = _draw(seed, LEFT["s8"], (m, k)), _draw(seed + 1, LIMITS["int4"], (k, n))
    for given_b in (b, np.asfortranarray(b), b[::-1][::-1]):
        packed = lowbit.pack(given_b, dtype="int4")
        np.testing.assert_array_equal(packed.unpack(), b)
        np.testing.assert_array_equal(lowbit.matmul(a, packed), _exact(a, b))


@ISAS
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_scaled(isa: str, dtype: Any, symmetric: bool) -> None:
    """Scales and zero points per column; the same bits as the 8-bit product of the same values."""
    x = np.random.default_rng(5).standard_normal((70, 33)).astype(np.float32)
    weight = lowbit.quantize(x, dtype, axis=1, symmetric=symmetric)
    packed = lowbit.pack(weight)
    assert packed.dtype == dtype
    a = _draw(6, LEFT["u8"], (9, 70))
    scaled = lowbit.matmul_scaled(a, packed, a_scale=0.5, a_zero_point=7, isa=isa)
    exact = (a.astype(np.int64) - 7) @ (weight.values.astype(np.int64) - weight.zero_point)
    expected = exact.astype(np.float32) * np.float32(0.5) * weight.scale
    np.testing.assert_array_equal(scaled, expected)
    activation = np.random.default_rng(7).standard_normal((5, 70)).astype(np.float32)
    y = lowbit.linear_dynamic(activation, packed, isa=isa)
    real = activation.astype(np.float64) @ weight.dequantize().astype(np.float64)
    assert np.abs(y - real).max() < 0.05 * np.abs(real).max()


def test_values_outside_are_refused() -> None:
    b = np.zeros((4, 6), np.uint8)
    b[2, 3] = 16
    with pytest.raises(ValueError, match=r"16.*\(2, 3\)|\(2, 3\).*16"):
        lowbit.pack(b, dtype="uint4")
    signed = np.zeros((4, 6), np.int8)
    signed[1, 5] = -9
    with pytest.raises(ValueError, match=r"-9.*\(1, 5\)|\(1, 5\).*-9"):
        lowbit.pack(signed, dtype="int4")
    with pytest.raises(TypeError, match="int8"):
        lowbit.pack(b, dtype="int4")
    with pytest.raises(ValueError, match="dtype must be one of"):
        lowbit.pack(b, dtype="int2")  # type: ignore[arg-type]


def test_depth_is_bounded_by_what_int32_holds() -> None:
    """15 · 255 fits 561,437 times into int32; one more is refused before anything is read."""
    from lowbit.product.arguments import check_k

    check_k(2**31 // (15 * 255), "uint8", "uint4")
    with pytest.raises(ValueError, match="could overflow"):
        check_k(2**31 // (15 * 255) + 1, "uint8", "uint4")


@pytest.mark.parametrize("dtype", LIMITS)
def test_files(tmp_path: Path, dtype: Any) -> None:
    b = _draw(8, LIMITS[dtype], (50, 21))
    lowbit.save_packed(lowbit.pack(b, dtype=dtype), tmp_path / "b")
    loaded = lowbit.load_packed(tmp_path / "b")
    np.testing.assert_array_equal(loaded.unpack(), b)
    a = _draw(9, LEFT["u8"], (3, 50))
    np.testing.assert_array_equal(lowbit.matmul(a, loaded), _exact(a, b))
