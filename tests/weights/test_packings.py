"""Each packing of a weight gives back the neutral record that it was made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit.numerics import QTensor, int_format
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.packings import Panels, Rows, Tiles
from lowbit.weights.panels import PackedMatrix

FORMATS = [
    INT8,
    WeightFormat("int4", 32),
    WeightFormat("uint4", 96),
    WeightFormat("uint4"),
    WeightFormat("int4"),
    WeightFormat("uint4", 8),
]
SHAPES = [(1, 1), (3, 256), (17, 71), (64, 128), (130, 300)]


def _drawn(format: WeightFormat, shape: tuple[int, int]) -> QTensor:
    """All values, all zero points, any scale."""
    rng = np.random.default_rng(0)
    fmt = int_format(format.dtype)
    values = rng.integers(fmt.qmin, fmt.qmax + 1, shape).astype(fmt.storage)
    group = format.group_of(shape[1])
    each = (shape[0],) if group is None else (shape[0], -(-shape[1] // group))
    scale = rng.uniform(1e-3, 1, each).astype(np.float32)
    zeros = np.full(each, fmt.midpoint, np.int32)
    if format.zero_points:
        zeros = rng.integers(0, 16, each).astype(np.int32)
    return QTensor(values, scale, zeros, fmt, 0, group)


def _same(one: QTensor, other: QTensor) -> None:
    assert (one.format, one.axis) == (other.format, other.axis)
    assert (one.group_size, one.group_axis) == (other.group_size, other.group_axis)
    for name in ("values", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)


@pytest.mark.parametrize("packing", [Panels(), Tiles(), Rows()], ids=["panels", "tiles", "rows"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(packing: Any, format: WeightFormat, shape: tuple[int, int]) -> None:
    q = _drawn(format, shape)
    if refusal := packing.refusal(format, shape[1]):
        assert isinstance(packing, Tiles)
        assert format == INT8 or (format.group_size == 8 and shape[1] > 8), refusal
        return
    arrays = packing.pack(QuantizedWeight(q))
    assert set(arrays) <= set(packing.parts)
    _same(packing.unpack(arrays, format, shape).weight, q)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_files_hold_the_record(format: WeightFormat, shape: tuple[int, int]) -> None:
    q = _drawn(format, shape)
    arrays = format.to_stored(QuantizedWeight(q))
    described = format.stored(shape)
    assert {n: (a.dtype.name, a.shape) for n, a in arrays.items()} == described
    _same(format.from_stored(arrays, shape).weight, q)


def test_tiles_lie_as_they_are_drawn() -> None:
    q = _drawn(WeightFormat("uint4", 32), (70, 300))
    arrays = Tiles().pack(QuantizedWeight(q))
    tiles = arrays["tiles"].view(np.uint32)
    assert tiles.shape == (8, 6, 1, 32, 4)
    for n, k in ((0, 0), (5, 7), (63, 127), (64, 128), (69, 299)):
        word = tiles[n // 16, k // 64, 0, n % 8 * 4 + k % 8 // 2, k % 64 // 16]
        place = 4 * (k % 2) + 2 * (k % 16 // 8) + n % 16 // 8
        assert word >> (4 * place) & 15 == q.values[n, k]
        assert arrays["scale"][n, k // 32] == q.scale[n, k // 32]
        assert arrays["zero"][n, k // 32] == q.zero_point[n, k // 32] - 8
        assert arrays["words"][k // 32, n] & 255 == q.zero_point[n, k // 32]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4"])
@pytest.mark.parametrize("groups", [False, True])
def test_packed_matrices_give_back_what_was_quantized(dtype: Any, groups: bool) -> None:
    w = np.random.default_rng(1).standard_normal((70, 33))
    along: dict[str, Any] = {"group_size": 16, "group_axis": 0} if groups else {}
    q = lowbit.quantize(w, dtype, axis=1, symmetric=False, **along)
    _same(lowbit.pack(q).quantized(), q)
    np.testing.assert_array_equal(lowbit.pack(q).unpack(), q.values)


def test_layers_have_scales_of_float32() -> None:
    q = lowbit.quantize(np.zeros((32, 16)), "uint4", axis=0, group_size=16)
    assert lowbit.pack(q.T).format.halves
    assert Panels().pack(QuantizedWeight(q))["scale"].dtype == np.float32


def test_what_was_not_quantized_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match="without a scale"):
        lowbit.pack(np.ones((3, 3), np.int8)).quantized()
    q = lowbit.quantize(np.ones((8, 3)), "uint4", axis=1, group_size=8, group_axis=0)
    with pytest.raises(ValueError, match="real zero points"):
        lowbit.pack(q, zero_point=np.full((1, 3), 7.5)).quantized()


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("group_size", [None, 3])
def test_transposed(axis: Any, group_size: int | None) -> None:
    if group_size and axis in (1, (0, 1)):
        return
    x = np.random.default_rng(2).standard_normal((5, 7))
    q = lowbit.quantize(x, "uint8", axis=axis, group_size=group_size, symmetric=False)
    np.testing.assert_array_equal(q.T.dequantize(), q.dequantize().T)
    _same(q.T.T, q)
    with pytest.raises(ValueError, match="two dimensions"):
        _ = lowbit.quantize(x[0]).T


def test_panels_that_do_not_begin_at_a_line_of_the_cache_are_copied_to_one() -> None:
    packed = lowbit.pack(np.arange(-40, 30, dtype=np.int8).reshape(14, 5))
    memory = np.zeros(packed.panels.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64 + 1
    panels = memory[start : start + packed.panels.nbytes].reshape(packed.panels.shape)
    panels[...] = packed.panels
    again = PackedMatrix(panels, packed.column_sums, 14, 5, "int8")
    assert again.addresses[0] == again.panels.ctypes.data
    assert again.addresses[0] % 64 == 0
    panels[...] = 0  # of which it is a copy
    np.testing.assert_array_equal(again.unpack(), packed.unpack())
