"""Products of floats with weights in groups: what they refuse, bounds of groups, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.test_weight_only import random_weight

import lowbit
from lowbit.numerics import QTensor, int_format


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    packed, x = lowbit.pack(random_weight(64, 20, 32)), np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        lowbit.linear_weight_only(x.astype(np.float64), packed)
    with pytest.raises(ValueError, match="columns of x"):
        lowbit.linear_weight_only(x[:, :63], packed)
    with pytest.raises(ValueError, match="two dimensions"):
        lowbit.linear_weight_only(x[0], packed)
    with pytest.raises(ValueError, match="out_dtype"):
        lowbit.linear_weight_only(x, packed, out_dtype="uint8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups of 32"):
        lowbit.matmul(x.astype(np.int8), packed)
    with pytest.raises(ValueError, match="groups of 32"):
        lowbit.matmul_scaled(x.astype(np.int8), packed, a_scale=1.0)
    with pytest.raises(ValueError, match="multiple of 8"):
        lowbit.pack(random_weight(64, 20, 12))
    across = lowbit.quantize(np.ones((64, 32)), axis=0, group_size=32)
    with pytest.raises(ValueError, match="lie along K"):
        lowbit.pack(across)
    for group in (None, 32):
        with pytest.raises(ValueError, match="b is quantized to int4, and dtype is 'uint4'"):
            lowbit.pack(random_weight(64, 20, group), dtype="uint4")
    with pytest.raises(TypeError, match="packed"):
        lowbit.linear_weight_only(x, np.ones((64, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_are_bounded_by_what_int32_holds(bits: int) -> None:
    """128 · 15 fits 1,118,481 times into int32, 128 · 255 65,793 times; padding to 64 k counts."""
    most = (2**31 - 1) // (128 * (2**bits - 1)) // 64 * 64
    for k in (most, most + 1):
        q = QTensor(np.full((k, 1), 7, np.int8), np.ones(1, np.float32), np.zeros(1, np.int32),
                    int_format("int4" if bits == 4 else "int8"), 1)  # fmt: skip
        packed, x = lowbit.pack(q), np.ones((1, k), np.float32)
        if k == most:
            np.testing.assert_allclose(lowbit.linear_weight_only(x, packed), 7 * k, rtol=1e-6)
            continue
        with pytest.raises(ValueError, match="smaller group_size"):
            lowbit.linear_weight_only(x, packed)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["uint4", "int8"])
def test_files(dtype: str, tmp_path: Path) -> None:
    for group, zero in ((32, None), (None, None), (24, 0.5)):
        q = random_weight(70, 37, group, dtype)
        real = None if zero is None else q.zero_point + zero
        packed = lowbit.pack(q, zero_point=real)
        lowbit.save_packed(packed, tmp_path / "b")
        loaded = lowbit.load_packed(tmp_path / "b")
        assert loaded.group_size == packed.group_size
        x = np.random.default_rng(9).standard_normal((3, 70)).astype(np.float32)
        for function in (lowbit.linear_weight_only, lowbit.linear_dynamic):
            np.testing.assert_array_equal(function(x, loaded), function(x, packed))
