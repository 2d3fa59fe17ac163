"""Split weights: what is taken away, what is added again, and which products they serve."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.kernels.test_products import interpreted

import lowbit
from lowbit import isa
from lowbit.isa import SETS
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, micro_kernels
from lowbit.kernels.cpu.shared.layout import PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import CHUNKS, MOST_SUM, SCALE, TAKEN, SplitFormat
from lowbit.product import dispatch, requests
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.repacking import Split, split

MICRO = next(one for one in micro_kernels() if one.name == "split")
RNG = np.random.default_rng(7)
FILLS = ("full range", "normal", "all 127", "all -128", "alternating", "by fours", "one column")
needs_avx2 = pytest.mark.skipif("avx2" not in isa.available(), reason="the machine has no AVX2")


def weights(fill: str, k: int, n: int) -> np.ndarray:
    """int8 [k, n]."""
    if fill == "full range":
        return RNG.integers(-128, 128, (k, n)).astype(np.int8)
    if fill == "normal":
        return np.clip(RNG.normal(0, 38, (k, n)).round(), -127, 127).astype(np.int8)
    b = np.full((k, n), -128 if "-128" in fill else 127, np.int8)
    if fill == "alternating":
        b[::2] = -128
    if fill == "by fours":
        b[np.arange(k) % 4 < 2] = -128
    if fill == "one column":
        b[:, 1:] = RNG.integers(-8, 9, (k, n - 1))
    return b


def again(made: Split, packed: PackedMatrix) -> np.ndarray:
    """The panels that were split, from their parts: int8 [panels, k, 16]."""
    count, lines, _ = packed.panels.shape
    panels = made.memory.reshape(-1)[: packed.panels.size].view(np.int8)
    values = panels.reshape(count, lines, PANEL, 4).transpose(0, 1, 3, 2).reshape(count, -1, PANEL)
    values = values.astype(np.int64)
    if not made.format.corrections:
        return values
    chunk = made.format.chunk
    table = made.memory[packed.panels.size :].view(np.uint16)
    groups = [*product(range(count), range(blocks(lines * 4, chunk)), range(4))]
    starts = table[: 2 * (len(groups) + 1)].view(np.int32)
    for (panel, which, four), first, last in zip(groups, starts, starts[1:], strict=False):
        lists = table[first:last].reshape(-1, 4, 2)
        for column, sign in product(range(4), range(2)):
            k = lists[:, column, sign].astype(np.int64) // SCALE
            place = panel, which * chunk + k[k > 0] - 1, four * 4 + column
            values[place] += -TAKEN if sign else TAKEN  # each is in one list, once
    return values


def meeting(made: Split, packed: PackedMatrix) -> np.ndarray:
    """The weights whose products are summed in 16 bits: [any, summed]."""
    count, lines, _ = packed.panels.shape
    panels = made.memory.reshape(-1)[: packed.panels.size].view(np.int8).astype(np.int64)
    together = made.format.summed // 2
    cut = panels.reshape(count, lines // together, together, PANEL, 2, 2)
    return np.moveaxis(cut, 2, 4).reshape(-1, made.format.summed)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("sizes", [(1, 1), (70, 33), (515, 16), (1100, 20)])
def test_parts_are_small_and_make_the_whole(fill: str, sizes: tuple[int, int]) -> None:
    b = weights(fill, *sizes)
    packed = lowbit.pack(b)
    made = packed.split
    if made is None:  # as pairs are small already
        assert packed.largest_pair <= MOST_SUM
        return
    parts = meeting(made, packed)
    assert np.maximum(parts, 0).sum(axis=1).max() <= MOST_SUM
    assert np.maximum(-parts, 0).sum(axis=1).max() <= MOST_SUM
    whole = again(made, packed)
    columns = whole.transpose(1, 0, 2).reshape(padded_k(sizes[0]), -1)
    np.testing.assert_array_equal(columns[: sizes[0], : sizes[1]], b)
    assert not columns[sizes[0] :].any()
    assert not columns[:, sizes[1] :].any()


@pytest.mark.deep
def test_any_four_weights_can_be_split() -> None:
    """All fours of values where something changes: at the ends, about 96 and its half and third."""
    edges = [-128, -127, -97, -96, -95, -81, -64, -49, -48, -33, -32, -1]
    values = np.array([*edges, 0, *(-v for v in edges[1:])], np.int8)
    fours = np.array([*product(values, repeat=4)], np.int8)
    b = np.zeros((64, len(fours)), np.int8)
    b[[0, 1, 4, 5]] = fours.T
    packed = lowbit.pack(b)
    made = packed.split
    assert made is not None
    parts = meeting(made, packed)
    assert max(np.maximum(s * parts, 0).sum(axis=1).max() for s in (1, -1)) <= MOST_SUM


def test_small_weights_need_no_lists_and_no_memory() -> None:
    packed = lowbit.pack(RNG.integers(-32, 33, (130, 50)).astype(np.int8))
    made = packed.split
    assert made is not None
    assert made.format == SplitFormat(4, 0)
    assert np.shares_memory(made.memory, packed.panels)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 65), (17, 33, 70), (37, 18, 15), (3, 5, 530)])
@pytest.mark.parametrize("fused", [False, True])
def test_interpreted(fill: str, sizes: tuple[int, int, int], fused: bool) -> None:
    m, n, k = sizes
    b = weights(fill, k, n)
    packed = lowbit.pack(b)
    made = split(packed.panels)
    if made is None:
        pytest.skip("pairs are small already")
    a = RNG.integers(0, 256, (m, k)).astype(np.uint8)
    a[0] = 255
    out = np.full((m, n), 0x55555555, np.int32)
    interpreted(MICRO, a, packed, out, fused=fused, split=made)
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b)


def served_by(a: np.ndarray, packed: PackedMatrix) -> str:
    left = a.shape, a.strides, a.dtype
    plan = requests.integers(left, requests.panel_format(packed, "avx2"), 1, "avx2").plan
    assert plan is not None
    return plan.micro.name


@pytest.mark.deep
@pytest.mark.pairs
@needs_avx2
@pytest.mark.parametrize("fill", ["full range", "normal", "one column"])
@pytest.mark.parametrize("sizes", [(32, 40, 130), (67, 33, 513), (97, 50, 1030)])
def test_products_are_exact(fill: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    b = weights(fill, k, n)
    for kind in (np.int8, np.uint8):
        packed = lowbit.pack(b if kind is np.int8 else b.view(np.uint8) ^ np.uint8(128))
        for a in (
            RNG.integers(0, 256, (m, k)).astype(np.uint8),
            np.full((m, 2 * k), 255, np.uint8)[:, ::2],
            RNG.integers(-128, 128, (m, k)).astype(np.int8),
            np.full((m, k), 127, np.int8),
        ):
            assert served_by(a, packed) == "split"
            exact = a.astype(np.int64) @ packed.unpack().astype(np.int64)
            for threads in (3, 1, 1, 1, 1):  # the last of which are recognized
                found = lowbit.matmul(a, packed, isa="avx2", threads=threads)
                np.testing.assert_array_equal(found, exact)


@needs_avx2
def test_a_column_that_overflows_lists_of_512_k_gets_shorter_ones() -> None:
    packed = lowbit.pack(weights("one column", 1030, 50))
    assert packed.split is not None
    assert packed.split.format.chunk == CHUNKS[1]


@pytest.mark.deep("float32")
@needs_avx2
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "uint8", "int8"])
def test_every_output_has_the_same_bits(out_dtype: Any) -> None:
    x = RNG.standard_normal((67, 530)).astype(np.float32)
    weight = lowbit.pack(lowbit.quantize(RNG.standard_normal((530, 50)).astype(np.float32), axis=1))
    assert served_by(np.zeros((67, 530), np.uint8), weight) == "split"
    bias = RNG.standard_normal(50).astype(np.float32)
    outs = [
        lowbit.matmul_scaled(
            (x * 40 + 128).clip(0, 255).astype(np.uint8), weight, a_scale=0.02, a_zero_point=128,
            bias=bias, post_ops=("bias", "relu"), out_dtype=out_dtype, isa=name,
            **({"out_scale": 0.5, "out_zero_point": 3} if "int" in out_dtype else {}),
        )
        for name in ("avx2", "generic")
    ]  # fmt: skip
    assert outs[0].tobytes() == outs[1].tobytes()
    if out_dtype == "float32":
        outs = [lowbit.linear_dynamic(x, weight, bias, isa=name) for name in ("avx2", "generic")]
        assert outs[0].tobytes() == outs[1].tobytes()


def test_who_is_served() -> None:
    """Many rows of any weights, unless too many k are in lists; few rows by what needs none."""
    for m, form, name in (
        (64, SplitFormat(4, 0), "split"),
        (1, SplitFormat(4, 0), "split"),
        (64, SplitFormat(2, 17), "split"),
        (1, SplitFormat(2, 17), "widening"),
        (64, SplitFormat(4, 200), "widening"),
        (64, None, "widening"),
    ):
        query = KernelQuery(m, 512, 512, split=form)
        micro = dispatch.consider(SETS["avx2"], query)[-1].micro
        assert micro is not None
        assert micro.name == name
        assert bool(MICRO.refuses(query)) is (name != "split")
    assert [name for name in SETS if dispatch.wants_split(name)] == ["avx2"]


@pytest.mark.deep("1")
@needs_avx2
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_exact(groups: int) -> None:
    """All groups by one kernel, whose lists may be of other lengths."""
    x = RNG.integers(0, 256, (3, 9, 10, 64)).astype(np.uint8)
    weight = RNG.integers(-128, 128, (40, 64 // groups, 3, 3)).astype(np.int8)
    packed = lowbit.pack_convolution(weight, groups=groups)
    form = requests.group_format(packed, "avx2").split
    assert form is not None
    forms = [requests.panel_format(matrix, "avx2").split for matrix in packed.matrices]
    assert form.corrections == max(one.corrections for one in forms if one)
    found, expected = (
        lowbit.convolution(x, packed, padding=1, isa=name) for name in ("avx2", "generic")
    )
    np.testing.assert_array_equal(found, expected)


def test_groups_that_are_split_in_other_ways_are_not() -> None:
    weight = np.full((32, 32, 3, 3), 3, np.int8)
    weight[16:] = RNG.integers(-128, 128, weight[16:].shape)
    packed = lowbit.pack_convolution(weight, groups=2)
    assert requests.group_format(packed, "avx2").split is None


def test_few_columns_are_left_to_long_pieces() -> None:
    """Of rows where they lie: with lists always, else where a piece would begin within a pair."""
    for n, k, form, name in (
        (1, 512, SplitFormat(2, 17), "widening"),
        (8, 512, SplitFormat(2, 17), "widening"),
        (16, 512, SplitFormat(4, 3), "split"),
        (1, 512, SplitFormat(4, 0), "split"),
        (4, 511, SplitFormat(4, 0), "widening"),
        (5, 511, SplitFormat(4, 0), "split"),
    ):
        query = KernelQuery(64, n, k, split=form, in_place=True)
        micro = dispatch.consider(SETS["avx2"], query)[-1].micro
        assert micro is not None
        assert micro.name == name
