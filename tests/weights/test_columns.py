"""Few columns packed in long pieces."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.api import matmul, pack
from lowbit.isa import available
from lowbit.weights.repacking import columns


@pytest.mark.parametrize(
    ("k", "n", "held", "piece"), [(64, 1, 1, 64), (131, 3, 4, 16), (33, 2, 2, 32)]
)
def test_every_k_is_in_one_vector(k: int, n: int, held: int, piece: int) -> None:
    """The product of pieces, the last of which ends where K does, is the product."""
    rng = np.random.default_rng(0)
    b = rng.integers(-128, 128, (k, n)).astype(np.int8)
    made = columns(b, held, piece).view(np.int8)
    assert made.ctypes.data % 64 == 0
    assert not made[:, n:].any()
    starts = [min(start, k - piece) for start in range(0, k, piece)]
    a = rng.integers(0, 256, (5, k)).astype(np.int64)
    sums = sum(a[:, at : at + piece] @ one.T for at, one in zip(starts, made[:, :n], strict=True))
    np.testing.assert_array_equal(sums, a @ b)


@pytest.mark.deep(
    "*-avx2", "*-avx512_vnni", "*-avx512", "2-*", "1-*", "8-*", "*-avx2_vnni", "*-amx*"
)
@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("m", [1, 2, 3, 5, 7, 8, 11])
def test_few_rows_and_columns_are_exact(isa: str, m: int) -> None:
    rng = np.random.default_rng(m)
    for n in (1, 2, 3, 4, 7):
        for k in (1, 3, 63, 64, 65, 200, 259):
            for dtype in (np.uint8, np.int8):
                a = rng.choice(np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1]), (m, k))
                b = rng.integers(-128, 128, (k, n)).astype(np.int8)
                expected = a.astype(np.int32) @ b.astype(np.int32)
                packed = pack(b)
                for threads in (1, 2):
                    given = matmul(a.astype(dtype), packed, isa=isa, threads=threads)
                    np.testing.assert_array_equal(given, expected)
