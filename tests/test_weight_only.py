"""Products of floats with weights in groups: within the budget, the same bits everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowbit
from lowbit.isa import SETS
from lowbit.jit.memory import OutOfBoundsError
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.rows.digits import Digits, SignedBytes
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.groups import Grouping
from lowbit.kernels.cpu.shared.layout import PANEL_LINE, blocks, padded_k
from lowbit.numerics import QTensor, int_format
from lowbit.spec import Case, Operation
from lowbit.spec.operations.products import linear_groups, linear_weight_only
from lowbit.weights.panels import PackedMatrix
from lowbit_lab.checks.cpu import cpu_functions, weight

ISAS = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(one.missing()), reason=one.missing() or "-")
        )
        for name, one in SETS.items()
    ],
)


GROUPED = [
    one
    for one in micro_kernels()
    if not one.refuses(KernelQuery(64, 64, 256, 30, "u4", Grouping(64, 1, "")))
]


def _run(case: Case, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return cpu_functions.get(case.spec.name)(case, inputs)


def _interpreted(micro: MicroKernel, case: Case, x: np.ndarray, b: PackedMatrix) -> Any:
    """The product's text on NumPy: the output, or why the micro-kernel does not serve."""
    x = x.reshape(case.sizes["M"], -1)
    digits = 1 if case.spec is linear_groups else 3
    (m, k), n = x.shape, b.N
    zeros, held, most = b.format.zero_points, b.format.stored, b.format.largest_pair
    size, flip = min(b.group_size or 0, padded_k(k)), 8 if held == "u4" else 128
    grouping = Grouping(size, digits, zeros, flip, b.format.halves)
    query = KernelQuery(m, n, k, most, held, grouping)
    why = micro.refuses(query)
    if why:
        return why
    shape, block_rows = micro.shape(query)
    step_rows = block_rows // digits * shape.row_blocks
    assert b.scale is not None
    each = np.zeros((m, b.scale.shape[1]), np.float32)
    out = np.full((m, n), np.nan, np.float32)
    symmetric = case.static.get("symmetric", False)
    arguments = {
        "a": x, "a_row_stride": k, "a_stride": 1, "windows": None, "first_row": 0,
        "residual_stride": n,
        "packed": np.zeros(blocks(m, step_rows) * step_rows * digits * padded_k(k), np.uint8),
        "row_scale": each.copy(), "row_zero": np.zeros(m, np.int32),
        "row_sum": each.view(np.int32), "panels": b.panels,
        "column_sum": b.column_sums.view(np.int32),
        "column_zero": None if b.zero_points is None else b.zero_points.view(np.int32),
        "column_scale": b.scale.view(np.float32), "bias": None, "residual": None,
        "parameters": None, "out": out, "out_stride": n, "m": m, "n": n, "k_size": k,
        "block_rows": block_rows, "item_steps": 2, "item_panels": 3, "threads": 1,
        "private": np.zeros(3 * query.k_blocks * PANEL_LINE, np.uint8),
        "private_bytes": 3 * query.k_blocks * PANEL_LINE,
        "next_panels": None, "next_bytes": 0,
    }  # fmt: skip
    product_kernel.interpret(
        micro.isa, arguments, micro=micro, shape=shape,
        weight=held,
        a_format=SignedBytes(grouping, symmetric) if digits == 1 else Digits(grouping),
        epilogue=Epilogue(
            a_zero=digits == 1 and not symmetric, out="f32",
            scales="row" if digits == 1 else "none",
        ),
    )  # fmt: skip
    return out


@pytest.mark.deep("u4-*", "*-vnni/avx512_vnni", "*-vnni/amx*")
@pytest.mark.pairs
@pytest.mark.parametrize("micro", GROUPED, ids=repr)
@pytest.mark.parametrize("spec", [linear_weight_only, linear_groups], ids=str)
@pytest.mark.parametrize("dtype", ["u4", "s8"])
def test_interpreted(micro: MicroKernel, spec: Operation, dtype: str) -> None:
    """Every micro-kernel that does not refuse, on any machine, every access checked."""
    served = 0
    for m, n, g, s in ((1, 21, 2, 24), (4, 50, 3, 64), (19, 33, 2, 128)):
        sizes = {"M": m, "N": n, "G": g, "S": s}
        case = spec.case(sizes, dtypes=f"f32:{dtype}:f32", without=["bias", "residual"])
        inputs = case.inputs(3)
        out = _interpreted(micro, case, inputs["x"], weight(case, inputs))
        if isinstance(out, str):
            continue
        served += 1
        verdict = case.expect(inputs).check(out)
        assert verdict.ok, verdict.message
        np.testing.assert_array_equal(out, _run(case, inputs))
    saturates = dtype == "s8" and micro.name == "narrow"
    assert (served > 0) is not (saturates or micro.isa.name.startswith("neon"))


@pytest.mark.parametrize("spec", [linear_weight_only, linear_groups], ids=str)
@pytest.mark.parametrize("dtype", ["int4", "uint8"])
@pytest.mark.parametrize(
    ("m", "k", "n", "group", "symmetric"),
    [
        (37, 256, 100, 128, True),  # several items; a panel that is left over
        (40, 300, 70, 128, False),  # a last group of less than 64 k
        (33, 97, 33, 32, True),  # tiles of 32 k
        (19, 200, 50, 96, False),  # three of them in a group
        (12, 700, 80, 256, True),  # four panels at once, groups longer than tiles take turns
        (70, 70, 40, 192, False),  # one group
    ],
)
def test_tiles_interpreted(
    spec: Operation, dtype: str, m: int, k: int, n: int, group: int, symmetric: bool
) -> None:
    """Groups in tiles: the bits of vectors, every access checked."""
    micro = next(one for one in GROUPED if one.isa.name == "amx")
    case = spec.case({"M": m, "N": n, "G": 1, "S": 8}, dtypes="f32:u4:f32")
    packed = lowbit.pack(random_weight(k, n, group, dtype, symmetric=symmetric))
    x = np.random.default_rng(k).standard_normal((m, k)).astype(np.float32)
    run = lowbit.linear_dynamic if spec is linear_groups else lowbit.linear_weight_only
    out = _interpreted(micro, case, x, packed)
    np.testing.assert_array_equal(out, run(x, packed, isa="generic"))


@pytest.mark.deep("*-avx512_vnni", "*-False-int8-generic", "64-512-*", "*-amx*")
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("m", "k", "n", "group"),
    [
        (64, 512, 96, 128),
        (65, 777, 47, 64),
        (100, 1000, 33, 32),
        (35, 400, 80, 96),
        (9, 999, 130, 256),
        (3, 1111, 81, 16),
    ],
)
def test_rows_have_the_same_bits(
    isa: str, dtype: str, m: int, k: int, n: int, group: int, symmetric: bool
) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = random_weight(k, n, group, dtype, symmetric=symmetric)
    packed = lowbit.pack(q)
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    x[1] *= 1e4
    for run, rows, digits in (
        (lowbit.linear_dynamic, x, 2.0**-6),
        (lowbit.linear_weight_only, x, 2.0**-20),
        (lowbit.linear_weight_only, x.astype(ml_dtypes.bfloat16), 2.0**-12),
    ):
        y = run(rows, packed, isa=isa)
        np.testing.assert_array_equal(y, run(rows, packed, isa="generic"))
        for r in (0, 1, m - 1):
            wide = rows[r : r + 1].astype(np.float32)
            _near(y[r : r + 1], wide, q.dequantize(), digits)


@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize(
    ("m", "group"), [(1, 32), (2, 16), (7, 64), (40, 32), (33, 128), (5, None)]
)
def test_sums_of_bytes_are_exact(isa: str, m: int, group: int | None) -> None:
    """Over the full range of both sides, with extremes side by side: nothing saturates."""
    rng, k, n = np.random.default_rng(m), 291, 37
    extremes = np.array([-128, 127, -127, 0], np.int8)
    values = np.where(rng.random((k, n)) < 0.5, rng.choice(extremes, (k, n)),
                      rng.integers(-128, 128, (k, n))).astype(np.int8)  # fmt: skip
    values[:, :2], values[::2, 2], values[1::2, 2] = (-128, 127), -128, 127
    x = rng.choice([-127, 127, 126, -1], (m, k)).astype(np.float32)
    x[:, 0] = 127  # so that scales are 1
    x[0] = 127
    each = (n,) if group is None else (-(-k // group), n)
    along = () if group is None else (group, 0)
    for dtype in ("int8", "uint8"):
        flip = 128 if dtype == "uint8" else 0
        q = QTensor((values.view(np.uint8) + np.uint8(flip)).view(dtype),
                    np.ones(each, np.float32), np.full(each, flip, np.int32), int_format(dtype),
                    1, *along)  # fmt: skip
        wide, packed = values.astype(np.int64), lowbit.pack(q).grouped
        y = lowbit.linear_dynamic(x, packed, symmetric=True, isa=isa)
        np.testing.assert_array_equal(y, x.astype(np.int64) @ wide)
        _near(lowbit.linear_weight_only(x, packed, isa=isa), x, wide, 2.0**-20)


@ISAS
@pytest.mark.parametrize("group", [64, 72, 128])
def test_groups_whose_sums_int32_does_not_hold(isa: str, group: int) -> None:
    """All numbers are the greatest that digits hold, all weights the least: nothing wraps."""
    k, n = 2 * group, 3
    each = (2, n)
    weight = QTensor(np.full((k, n), -8, np.int8), np.ones(each, np.float32),
                     np.zeros(each, np.int32), int_format("int4"), 1, group, 0)  # fmt: skip
    x = np.ones((2, k), np.float32)
    x[1] = -1
    y = lowbit.linear_weight_only(x, lowbit.pack(weight), isa=isa)
    np.testing.assert_allclose(y, np.repeat([[-8.0 * k], [8.0 * k]], n, axis=1), rtol=1e-6)


def test_tiles_serve_groups_of_32() -> None:
    micro = next(one for one in GROUPED if one.isa.name == "amx")
    for size, serves in ((32, True), (96, True), (128, True), (40, False), (16, False)):
        query = KernelQuery(64, 64, 960, 30, "u4", Grouping(size, 1, ""))
        assert (micro.refuses(query) == "") is serves


def test_reads_past_the_panels_are_seen() -> None:
    micro = next(one for one in micro_kernels() if one.name == "vnni")
    case = linear_weight_only.case({"M": 1, "N": 20, "G": 2, "S": 64}, without=["bias", "residual"])
    inputs = case.inputs(1)
    packed = weight(case, inputs)
    object.__setattr__(packed, "panels", packed.panels[:-1])
    with pytest.raises(OutOfBoundsError, match="panels"):
        _interpreted(micro, case, inputs["x"], packed)


def random_weight(
    k: int,
    n: int,
    group: int | None,
    dtype: Any = "int4",
    seed: int = 0,
    symmetric: bool = False,
) -> QTensor:
    w = np.random.default_rng(seed).standard_normal((k, n)).astype(np.float32)
    if group is None:
        return lowbit.quantize(w, dtype, axis=1, symmetric=False)
    return lowbit.quantize(w, dtype, axis=1, group_size=group, group_axis=0, symmetric=symmetric)


def _near(y: np.ndarray, x: np.ndarray, w: np.ndarray, digits: float) -> None:
    reference = x.astype(np.float64) @ w.astype(np.float64)
    mass = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    assert (np.abs(y - reference) <= digits * (mass + np.abs(x).max() * np.abs(w).sum(0))).all()


@pytest.mark.pairs
@pytest.mark.deep("147-64-int4-avx512", "147-64-int4-amx*")
@ISAS
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize(
    ("k", "group"), [(65, 32), (147, 64), (100, 40), (77, None), (5, 8), (12, 12)]
)
def test_last_groups_may_be_shorter(isa: str, dtype: str, k: int, group: int | None) -> None:
    q = random_weight(k, 37, group, dtype)
    packed = lowbit.pack(q)
    np.testing.assert_array_equal(packed.unpack(), q.values)
    x = np.random.default_rng(1).standard_normal((11, k)).astype(np.float32)
    _near(lowbit.linear_weight_only(x, packed, isa=isa), x, q.dequantize(), 2.0**-20)
    x[3], x[5] = 0, 1e-40
    y = lowbit.linear_dynamic(x, packed.grouped, isa=isa)
    _near(y, x, q.dequantize(), 2.0**-6)
    assert not y[3].any()  # a row of zeros is exact
    assert not y[5].any()


@pytest.mark.deep("int8-generic")
@ISAS
@pytest.mark.parametrize("dtype", ["uint4", "int8", "uint8"])
def test_real_zero_points(isa: str, dtype: str) -> None:
    q = random_weight(96, 20, 32, dtype)
    zero = np.random.default_rng(3).uniform(q.format.qmin, q.format.qmax, q.scale.shape)
    packed = lowbit.pack(q, zero_point=zero)
    weight = (q.values - np.repeat(zero, 32, axis=0)) * np.repeat(q.scale, 32, axis=0)
    x = np.random.default_rng(4).standard_normal((4, 96)).astype(np.float32)
    _near(lowbit.linear_weight_only(x, packed, isa=isa), x, weight, 2.0**-20)
    _near(lowbit.linear_dynamic(x, packed, isa=isa), x, weight, 2.0**-6)
    with pytest.raises(ValueError, match="of the scales"):
        lowbit.pack(q, zero_point=zero[:1])
    for bad in (np.nan, 1e300):
        with pytest.raises(ValueError, match="finite"):
            lowbit.pack(q, zero_point=zero * bad)
    with pytest.raises(ValueError, match="groups"):
        lowbit.pack(random_weight(96, 20, None), zero_point=zero)


def _as_in_gguf(dtype: Any, k: int, n: int, group: int) -> tuple[QTensor, Any, np.ndarray]:
    """Scales and minima of float16: the integers, zero points, the weight."""
    rng, fmt, each = np.random.default_rng(k), int_format(dtype), (-(-k // group), n)
    values = rng.integers(fmt.qmin, fmt.qmax + 1, (k, n)).astype(fmt.storage)
    scale = (rng.uniform(0.5, 1, each) * 2.0 ** rng.integers(-13, 0, each)).astype(np.float16)
    least = (scale * rng.uniform(-1.2, 0.2, each) * fmt.qmax).astype(np.float16)
    scale[0, 0], least[np.abs(least) < 2.0**-14], least[0, :2] = 2.0**-14, 0, 0
    wide, low = (np.repeat(one.astype(np.float64), group, axis=0)[:k] for one in (scale, least))
    zero = fmt.qmin - least.astype(np.float64) / scale
    q = QTensor(values, scale.astype(np.float32), np.full(each, fmt.midpoint, np.int32), fmt, 1,
                group, 0)  # fmt: skip
    return q, zero, wide * (values.astype(np.float64) - fmt.qmin) + low


@pytest.mark.deep("*-avx512_vnni", "*-avx512", "*-amx*")
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("dtype", ["uint4", "uint8"])
@pytest.mark.parametrize(("m", "k", "n", "group"), [(1, 100, 37, 32), (40, 200, 50, 16)])
def test_scales_and_offsets_of_float16(
    isa: str, dtype: str, m: int, k: int, n: int, group: int, tmp_path: Path
) -> None:
    q, zero, weight = _as_in_gguf(dtype, k, n, group)
    packed, scaled = lowbit.pack(q, zero_point=zero), lowbit.pack(q)
    assert (packed.format.halves, packed.format.zero_points) == (True, "f16")
    assert (scaled.format.halves, scaled.format.zero_points) == (True, "")
    x = np.random.default_rng(4).standard_normal((m, k)).astype(np.float32)
    for b, wide in ((packed, weight), (scaled, q.dequantize())):
        y, z = lowbit.linear_weight_only(x, b, isa=isa), lowbit.linear_dynamic(x, b, isa=isa)
        _near(y, x, wide, 2.0**-20)
        _near(z, x, wide, 2.0**-6)
        np.testing.assert_array_equal(y, lowbit.linear_weight_only(x, b, isa="generic"))
        np.testing.assert_array_equal(z, lowbit.linear_dynamic(x, b, isa="generic"))
        lowbit.save_packed(b, tmp_path / "b")
        loaded = lowbit.load_packed(tmp_path / "b", verify=True)
        np.testing.assert_array_equal(y, lowbit.linear_weight_only(x, loaded, isa=isa))
        np.testing.assert_array_equal(b.unpack(), q.values)
    again = scaled.quantized()
    np.testing.assert_array_equal(again.scale, q.scale)


def test_what_float16_does_not_hold_stays_float32() -> None:
    q, zero, _ = _as_in_gguf("uint4", 100, 37, 32)
    packed = lowbit.pack(q, zero_point=zero + 0.001)
    assert (packed.format.halves, packed.format.zero_points) == (True, "f32")
    for bad in (1 / 3, 1e5, 1e-9, 2.0**-15):
        q.scale[1, 2] = bad
        assert not lowbit.pack(q).format.halves
        assert not lowbit.pack(q, zero_point=zero).format.halves
    q.scale[...] = 1  # no offsets, which is not the same as no zero points
    packed = lowbit.pack(q, zero_point=np.zeros(q.scale.shape))
    assert packed.format.zero_points == "f16"
    y = lowbit.linear_weight_only(np.ones((1, 100), np.float32), packed)
    np.testing.assert_allclose(y[0], q.values.sum(axis=0, dtype=np.int64), rtol=1e-6)


@pytest.mark.parametrize("micro", GROUPED, ids=repr)
@pytest.mark.parametrize("spec", [linear_weight_only, linear_groups], ids=str)
def test_float16_interpreted(micro: MicroKernel, spec: Operation) -> None:
    q, zero, _ = _as_in_gguf("uint4", 100, 37, 32)
    packed = lowbit.pack(q, zero_point=zero)
    case = spec.case({"M": 19, "N": 37, "G": 1, "S": 8}, dtypes="f32:u4:f32")
    x = np.random.default_rng(4).standard_normal((19, 100)).astype(np.float32)
    out = _interpreted(micro, case, x, packed)
    if not isinstance(out, str):
        run = lowbit.linear_dynamic if spec is linear_groups else lowbit.linear_weight_only
        np.testing.assert_array_equal(out, run(x, packed, isa="generic"))


def test_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    sizes = {"M": 5, "N": 33, "G": 3, "S": 64}
    case = linear_weight_only.case(sizes, dtypes="bf16:s4:f32", without=["residual"])
    inputs = case.inputs(2)
    x = torch.from_numpy(inputs["x"].view(np.int16)).view(torch.bfloat16)
    packed, rows = weight(case, inputs), x.reshape(5, -1)
    y = lowbit.linear_weight_only(rows, packed, inputs["bias"])
    assert y.dtype == torch.float32
    verdict = case.expect(inputs).check(y.numpy())
    assert verdict.ok, verdict.message
    rounded = lowbit.linear_weight_only(rows, packed, inputs["bias"], out_dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded, y.bfloat16(), rtol=0, atol=0)
    turned = torch.empty(192, 5, dtype=torch.bfloat16).T
    turned.copy_(rows)
    again = lowbit.linear_weight_only(turned, packed, inputs["bias"])
    torch.testing.assert_close(again, y, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    packed = lowbit.pack(random_weight(64, 20, 32))
    x = np.ones((3, 64), np.float32)
    x[1, 40] = bad
    for y in (lowbit.linear_weight_only(x, packed), lowbit.linear_dynamic(x, packed)):
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_any_magnitude(magnitude: float) -> None:
    q = random_weight(64, 20, 32)
    x = np.full((2, 64), magnitude, np.float32)
    x[:, ::2] *= -0.5
    y = lowbit.linear_weight_only(x, lowbit.pack(q))
    reference = x.astype(np.float64) @ q.dequantize()
    inside = np.abs(reference) < 3e38
    bound = 1e-5 * np.abs(reference) + 1e-31 + magnitude * 1e-5
    assert (np.abs(y - reference)[inside] <= bound[inside]).all()


@ISAS
def test_groups_that_are_tiny_count_as_zeros(isa: str) -> None:
    """Where a step of fixed point would not be a normal number; the next group is not affected."""
    torch = pytest.importorskip("torch")
    q = random_weight(64, 20, 32)
    packed = lowbit.pack(q)
    for kind, least in ((torch.float32, 2.0**-104), (torch.bfloat16, 2.0**-111)):
        x = torch.full((1, 64), least / 2, dtype=kind)
        assert not lowbit.linear_weight_only(x, packed, isa=isa).any()
        x[:, :32] = 2 * least
        y = lowbit.linear_weight_only(x, packed, isa=isa)
        expected = 2 * least * q.dequantize()[:32].sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(y[0].numpy(), expected, rtol=1e-4, atol=0)


def test_layouts_steps_and_outputs() -> None:
    q = random_weight(70, 37, 24)
    packed = lowbit.pack(q)
    rng = np.random.default_rng(7)
    x, bias = rng.standard_normal((9, 70)).astype(np.float32), rng.standard_normal(37)
    residual = rng.standard_normal((9, 37)).astype(np.float32)
    plain = lowbit.linear_weight_only(x, packed)
    every_other = np.repeat(x, 2, axis=0)[::2], np.repeat(x, 2, axis=1)[:, ::2]
    for view in (np.asfortranarray(x), *every_other):
        np.testing.assert_array_equal(lowbit.linear_weight_only(view, packed), plain)
    out = np.full((37, 9), np.nan, np.float32).T
    assert lowbit.linear_weight_only(x, packed, out=out) is out
    np.testing.assert_array_equal(out, plain)
    all_of_it = lowbit.linear_weight_only(
        x, packed, bias, residual=residual, post_ops=("bias", "relu", "residual")
    )
    expected = np.maximum(plain + bias.astype(np.float32), 0) + residual
    np.testing.assert_array_equal(all_of_it, expected)
    for shape in ((0, 70), (9, 70)):
        empty = lowbit.pack(random_weight(70, 0, 24)) if shape[0] else packed
        assert lowbit.linear_weight_only(x[: shape[0]], empty).size == 0


@pytest.mark.deep("int4-8-avx2", "int8-None-avx512_vnni", "int4-8-avx2_vnni", "int8-None-amx*")
@ISAS
@pytest.mark.parametrize("group", [None, 8, 32])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_weight_without_rows_gives_the_bias(group: int | None, dtype: str, isa: str) -> None:
    packed, x = lowbit.pack(random_weight(0, 21, group, dtype)), np.ones((9, 0), np.float32)
    bias = np.arange(21, dtype=np.float32)
    for function in (lowbit.linear_weight_only, lowbit.linear_dynamic):
        y = function(x, packed, bias, isa=isa)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, (9, 21)))


def test_many_rows_are_served_in_chunks() -> None:
    """More rows than one call's workspace holds."""
    q = random_weight(64, 16, 64)
    x = np.random.default_rng(8).standard_normal((50_000, 64)).astype(np.float32)
    packed = lowbit.pack(q)
    bias, residual = np.ones(16, np.float32), np.arange(50_000 * 16, dtype=np.float32)
    residual = residual.reshape(50_000, 16)
    y = lowbit.linear_weight_only(x, packed, bias, residual=residual)
    some = np.r_[0:40, 43_600:43_720, 49_960:50_000]  # a chunk ends at 43,648, or some rows before
    np.testing.assert_array_equal(
        y[some], lowbit.linear_weight_only(x[some], packed, bias, residual=residual[some])
    )
