"""What type checkers are told agrees with what runs."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

import lowbit
from lowbit.numerics import IntDtype, Range, int_format
from lowbit.product.types import FloatDtype, OutDtype, PaddingMode
from lowbit.search.codec import Bits, Metric, Scale


@pytest.mark.deep
def test_every_name_is_taken_and_no_other() -> None:
    weight = lowbit.pack(lowbit.quantize(np.ones((32, 2), np.float32), "int4", axis=1))
    x, a = np.ones((1, 32), np.float32), np.ones((1, 32), np.uint8)
    for name in get_args(IntDtype):
        assert int_format(name).name == name
    for name in get_args(Range):
        lowbit.quantize(x, range=name)
    for name in get_args(FloatDtype):
        assert lowbit.linear_weight_only(x, weight, out_dtype=name).dtype.name == name
        assert lowbit.gemm(x, x.T, out_dtype=name).dtype.name == name
    for name in get_args(OutDtype):
        scale = None if name in get_args(FloatDtype) else 1.0
        made = lowbit.matmul_scaled(a, weight, a_scale=1.0, out_dtype=name, out_scale=scale)
        assert made.dtype.name == name
    image, kernel = np.ones((1, 3, 3, 1), np.uint8), np.ones((1, 1, 3, 3), np.int8)
    for name in get_args(PaddingMode):
        packed = lowbit.pack_convolution(kernel)
        assert lowbit.convolution(image, packed, padding=1, padding_mode=name).shape == image.shape
    for bits in get_args(Bits):
        for scale in get_args(Scale):
            for metric in get_args(Metric):
                assert not len(lowbit.VectorIndex(3, bits, scale=scale, metric=metric))
    other: Any = "int5"
    with pytest.raises(ValueError, match="'uint8', 'int8', 'uint4', 'int4'"):
        lowbit.quantize(x, other)
    with pytest.raises(ValueError, match="'dot', 'cosine', 'l2'"):
        lowbit.VectorIndex(3, metric=other)
    with pytest.raises(ValueError, match="float32, bfloat16, uint8, int8"):
        lowbit.matmul_scaled(a, weight, a_scale=1.0, out_dtype=other)
