"""Layers of GPTQ checkpoints, against a plain reading of the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lowbit.numerics import quantize, read_gptq, to_int32

K, N, GROUP = 48, 16, 16
RNG = np.random.default_rng(21)
VALUES = RNG.integers(0, 16, (K, N), dtype=np.uint8)
ZEROS = RNG.integers(1, 16, (K // GROUP, N), dtype=np.uint8)
SCALES = RNG.uniform(0.01, 2, (K // GROUP, N)).astype(np.float16)
PLAIN = (np.arange(K) // GROUP).astype(np.int32)


def layer(**changes: Any) -> dict[str, Any]:
    """The arguments of a sound layer in the format gptq_v2, and what is changed in them."""
    return {
        "qweight": to_int32(VALUES, 0),
        "qzeros": to_int32(ZEROS, 1),
        "scales": SCALES,
        "checkpoint_format": "gptq_v2",
    } | changes


def nibble(word: int, i: int) -> int:
    return (word % 2**32) >> (4 * i) & 15


def plain_weight(parts: dict[str, Any], g_idx: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The weight [K, N] in the layer's own order, element by element."""
    offset = 1 if parts["checkpoint_format"] == "gptq" else 0
    weight = np.empty((g_idx.size, parts["qweight"].shape[1]))
    for k, n in np.ndindex(weight.shape):
        g = int(g_idx[k])
        q = nibble(int(parts["qweight"][k // 8, n]), k % 8)
        z = nibble(int(parts["qzeros"][g, n // 8]), n % 8) + offset
        weight[k, n] = float(parts["scales"][g, n]) * (q - z)
    return weight


@pytest.mark.parametrize("g_idx", [None, PLAIN, PLAIN.astype(np.int64)])
def test_zero_points_are_stored_less_one_in_v1_and_as_they_are_in_v2(g_idx: Any) -> None:
    v2 = layer(g_idx=g_idx)
    v1 = v2 | {"qzeros": to_int32(ZEROS - 1, 1), "checkpoint_format": "gptq"}
    for parts in (v1, v2):
        read = read_gptq(**parts)
        assert read.permutation is None
        weight = read.weight
        assert (weight.axis, weight.group_axis, weight.group_size) == (1, 0, GROUP)
        np.testing.assert_array_equal(weight.values, VALUES)
        np.testing.assert_array_equal(weight.zero_point, ZEROS)
        np.testing.assert_array_equal(weight.scale, SCALES.astype(np.float32))
        expected = plain_weight(parts, PLAIN)
        np.testing.assert_array_equal(weight.dequantize(), expected.astype(np.float32))


def test_v2_has_all_sixteen_zero_points() -> None:
    zeros = np.arange(48).reshape(3, 16).astype(np.uint8) % 16
    read = read_gptq(**layer(qzeros=to_int32(zeros, 1)))
    np.testing.assert_array_equal(read.weight.zero_point, zeros)


def test_a_v1_zero_point_stored_as_15_is_refused() -> None:
    stored = ZEROS - 1
    stored[1, 9] = stored[2, 0] = 15
    with pytest.raises(ValueError, match=r"index \(1, 9\) is stored as 15"):
        read_gptq(**layer(qzeros=to_int32(stored, 1), checkpoint_format="gptq"))


def test_act_order_sorts_the_rows_and_tells_how() -> None:
    rng = np.random.default_rng(22)
    g_idx = rng.permutation(PLAIN)
    parts = layer(g_idx=g_idx)
    read = read_gptq(**parts)
    order = read.permutation
    assert order is not None
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(K))
    np.testing.assert_array_equal(g_idx[order], PLAIN)
    inside = np.diff(order)[np.diff(PLAIN) == 0]
    assert (inside > 0).all(), "rows of one group keep their order"
    expected = plain_weight(parts, g_idx)
    np.testing.assert_array_equal(read.weight.dequantize(), expected[order].astype(np.float32))
    x = rng.normal(size=(3, K))
    np.testing.assert_allclose(x[:, order] @ read.weight.dequantize(), x @ expected, rtol=1e-4)


def test_a_shorter_last_group_and_whole_channels() -> None:
    g_idx = np.arange(K) // 20
    short = read_gptq(**layer(group_size=20))
    np.testing.assert_array_equal(
        short.weight.dequantize(), plain_weight(layer(), g_idx).astype(np.float32)
    )
    shuffled = np.random.default_rng(23).permutation(g_idx)
    read = read_gptq(**layer(g_idx=shuffled))
    assert (read.weight.group_size, read.permutation is None) == (20, False)
    one = {"qzeros": to_int32(ZEROS[:1], 1), "scales": SCALES[:1]}
    for changes in ({}, {"group_size": -1}, {"group_size": K}, {"g_idx": np.zeros(K, np.int32)}):
        whole = read_gptq(**layer(**one, **changes))
        assert (whole.weight.group_size, whole.permutation) == (K, None)


def test_what_quantize_makes_survives_the_checkpoint() -> None:
    w = np.random.default_rng(24).normal(size=(K, N)).astype(np.float32)
    t = quantize(w, "uint4", axis=1, group_size=GROUP, group_axis=0, symmetric=False)
    zeros = to_int32(t.zero_point.astype(np.uint8), 1)
    read = read_gptq(**layer(qweight=to_int32(t.values, 0), scales=t.scale, qzeros=zeros))
    np.testing.assert_array_equal(read.weight.dequantize(), t.dequantize())


def test_bfloat16_scales() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    scales = SCALES.astype(ml_dtypes.bfloat16)
    read = read_gptq(**layer(scales=scales))
    np.testing.assert_array_equal(read.weight.scale, scales.astype(np.float32))


def with_one(array: npt.NDArray[Any], index: Any, value: float) -> npt.NDArray[Any]:
    changed = array.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"qweight": np.zeros((6, 16), np.int64)}, TypeError, "qweight of dtype int32, got int64"),
        ({"qzeros": np.zeros((3, 2), np.uint32)}, TypeError, "qzeros of dtype int32, got uint32"),
        ({"scales": SCALES.astype(np.int32)}, TypeError, "float32, got int32"),
        ({"scales": SCALES.astype(np.float64)}, TypeError, "float32, got float64"),
        ({"g_idx": PLAIN.astype(np.float32)}, TypeError, "g_idx of an integer dtype, got float32"),
        ({"group_size": 16.0}, TypeError, r"group_size to be None or an int, got 16\.0"),
        ({"qweight": np.zeros(6, np.int32)}, ValueError, r"\[K/8, N\], .*, got \(6,\)"),
        ({"qweight": np.zeros((6, 12), np.int32)}, ValueError, r"N a multiple of 8, got \(6, 12\)"),
        ({"qweight": np.zeros((0, 16), np.int32)}, ValueError, r"got \(0, 16\)"),
        ({"scales": SCALES[:, :8]}, ValueError, r"N = 16, .*, got \(3, 8\)"),
        ({"scales": SCALES[:0]}, ValueError, r"got \(0, 16\)"),
        ({"scales": SCALES[:2]}, ValueError, r"qzeros of shape .* = \(2, 2\), got \(3, 2\)"),
        ({"scales": with_one(SCALES, (1, 3), np.inf)}, ValueError, r"inf at index \(1, 3\)"),
        ({"scales": with_one(SCALES, (1, 3), 0)}, ValueError, r"found 0\.0 at index \(1, 3\)"),
        ({"scales": with_one(SCALES, (2, 0), -1)}, ValueError, r"found -1\.0 at index \(2, 0\)"),
        ({"g_idx": PLAIN[:-1]}, ValueError, r"g_idx of shape \(48,\), .* got \(47,\)"),
        ({"g_idx": with_one(PLAIN, 5, 3)}, ValueError, "within 0 to 2, .* found 3 at index 5"),
        ({"g_idx": with_one(PLAIN, 5, -1)}, ValueError, "found -1 at index 5"),
        ({"g_idx": with_one(PLAIN, 47, 1)}, ValueError, r"got groups of \[16, 17, 15\]"),
        ({"g_idx": PLAIN * 0}, ValueError, "groups of 48 rows do not cut 48 rows into the 3"),
        ({"g_idx": PLAIN, "group_size": 17}, ValueError, "with 17 rows in every group"),
        ({"group_size": 24}, ValueError, "groups of 24 rows do not cut 48 rows into the 3"),
        ({"group_size": 0}, ValueError, "groups of 0 rows"),
        ({"checkpoint_format": "marlin"}, ValueError, "unknown checkpoint_format 'marlin'"),
    ],
)
def test_bad_layers(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_gptq(**layer(**changes))


def test_an_open_group_size_is_asked_for() -> None:
    qweight = to_int32(VALUES[:40], 0)
    with pytest.raises(ValueError, match="40 rows in 3 groups leave the group size open"):
        read_gptq(**layer(qweight=qweight))
    assert read_gptq(**layer(qweight=qweight, group_size=16)).weight.scale.shape == (3, 16)
