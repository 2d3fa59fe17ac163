"""The public products, compiled: exact on every instruction set that this machine has."""

from __future__ import annotations

import copy
import ctypes
import mmap
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowbit
from lowbit.isa import SETS, active, available
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.numerics import int_format, longest_sum, quantize_rows
from lowbit.product import dispatch
from lowbit.product.prepare import RIGHT, prepare
from lowbit.product.product import Product
from lowbit.spec import CORNERS
from lowbit.spec.operations.products import matmul

ISAS = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(one.missing()), reason=one.missing() or "-")
        )
        for name, one in SETS.items()
    ],
)


def variants(array: np.ndarray) -> dict[str, np.ndarray]:
    """The same matrix under other strides: transposed, sliced, reversed, broadcast is not one."""
    rows, columns = array.shape
    wide = np.full((2 * rows + 1, 3 * columns + 2), 77, array.dtype)
    wide[1::2, 1:-1:3] = array
    reverse = np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    padded = np.full((rows, columns + 5), 77, array.dtype)
    padded[:, 2 : 2 + columns] = array
    return {
        "contiguous": np.ascontiguousarray(array),
        "transposed": np.asfortranarray(array),
        "sliced": wide[1::2, 1:-1:3],
        "reversed": reverse,
        "rows apart": padded[:, 2 : 2 + columns],
    }


@ISAS
@pytest.mark.parametrize("dtypes", matmul.signatures)
@pytest.mark.parametrize("fill", CORNERS)
def test_matmul_on_extreme_data(dtypes: str, fill: str, isa: str) -> None:
    case = matmul.case({"M": 9, "N": 40, "K": 1000}, dtypes=dtypes, fill=fill)
    inputs: dict[str, Any] = case.inputs()
    verdict = case.expect(inputs).check(lowbit.matmul(**inputs, isa=isa))
    assert verdict.ok, verdict.message


@ISAS
@pytest.mark.parametrize("dtypes", matmul.signatures)
def test_matmul_of_any_strides(dtypes: str, isa: str) -> None:
    case = matmul.case({"M": 19, "N": 37, "K": 67}, dtypes=dtypes)
    inputs: dict[str, Any] = case.inputs(seed=3)
    expected = case.expect(inputs)
    for a in variants(inputs["a"]).values():
        for b in variants(inputs["b"]).values():
            verdict = expected.check(lowbit.matmul(a, b, isa=isa))
            assert verdict.ok, f"{a.strides} {b.strides}: {verdict.message}"


@pytest.mark.deep("avx2", "avx512_vnni", "generic", "avx512", "avx2_vnni", "amx*")
@ISAS
@given(
    m=st.integers(1, 70), n=st.integers(1, 90), k=st.integers(1, 200),
    dtypes=st.sampled_from(matmul.signatures), threads=st.integers(1, 3), seed=st.integers(0, 9),
)  # fmt: skip
def test_matmul_property(
    isa: str, m: int, n: int, k: int, dtypes: str, threads: int, seed: int
) -> None:
    case = matmul.case({"M": m, "N": n, "K": k}, dtypes=dtypes)
    inputs: dict[str, Any] = case.inputs(seed=seed)
    out = np.full((m, n + 3), 123, np.int32)
    lowbit.matmul(**inputs, isa=isa, threads=threads, out=out[:, 1:-2])
    verdict = case.expect(inputs).check(np.ascontiguousarray(out[:, 1:-2]))
    assert verdict.ok, verdict.message
    assert (out[:, [0, -2, -1]] == 123).all()


@pytest.mark.deep(
    "s8:s8:s32-avx2",
    "s8:u8:s32-avx2",
    "u8:s8:s32-avx2",
    "s8:s8:s32-avx2_vnni",
    "s8:u8:s32-avx2_vnni",
    "u8:s8:s32-avx2_vnni",
)
@ISAS
@pytest.mark.parametrize("dtypes", matmul.signatures)
def test_the_longest_sum_is_exact(dtypes: str, isa: str) -> None:
    variant = matmul.variant(dtypes=dtypes)
    left, right = (variant.tensor(name).format for name in "ab")
    k = longest_sum(left.name, right.name)
    four: Any = right.name if right.bits == 4 else None
    for b_value in (right.low, right.high):
        b = lowbit.pack(np.full((k, 17), b_value, right.storage), dtype=four)
        for a_value in (left.low, left.high):
            a = np.full((2, k), a_value, left.storage)
            assert (lowbit.matmul(a, b, isa=isa) == a_value * b_value * k).all()
    longer = lowbit.pack(np.zeros((k + 1, 1), right.storage), dtype=four)
    with pytest.raises(ValueError, match="could overflow int32"):
        lowbit.matmul(np.zeros((1, k + 1), left.storage), longer)


@pytest.mark.deep("int8-avx2", "uint8-avx2", "int8-avx2_vnni", "uint8-avx2_vnni")
@ISAS
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_one_zero_point_is_that_of_every_row(dtype: type, isa: str) -> None:
    rng = np.random.default_rng(6)
    limits = np.iinfo(dtype)
    a = rng.integers(limits.min, limits.max + 1, (37, 200), dtype=dtype)
    b = lowbit.pack(lowbit.quantize(rng.standard_normal((200, 45)), "int8", axis=1))
    for zero in (limits.min, -3 if limits.min else 3, limits.max):
        # A power of two: the order in which scales are multiplied, which differs, does not matter.
        each = lowbit.matmul_scaled(a, b, a_scale=0.125, a_zero_point=[zero] * 37, isa=isa)
        one = lowbit.matmul_scaled(a, b, a_scale=0.125, a_zero_point=int(zero), isa=isa, threads=2)
        np.testing.assert_array_equal(one, each)


@pytest.mark.deep(
    "*-avx512_vnni", "False-avx2", "False-avx512", "*-amx*", "False-avx2_vnni", "False-amx*"
)
@ISAS
@pytest.mark.parametrize("symmetric", [False, True])
def test_linear_dynamic_is_its_two_parts(symmetric: bool, isa: str) -> None:
    """Bit for bit, on rows of every awkward kind, with strides and a weight with zero points."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 129)).astype(np.float32)
    x *= rng.choice([1e-41, 1e-30, 1, 1e30], (40, 1)).astype(np.float32)
    x[3], x[4, 100], x[5, 0], x[6, 128] = 0, np.nan, np.inf, -np.inf
    weight = rng.standard_normal((129, 50)) + 0.3
    b = lowbit.pack(lowbit.quantize(weight, "uint8", axis=1, symmetric=False))
    bias = rng.standard_normal(50).astype(np.float32)
    q, scale, zero = quantize_rows(x, symmetric)
    parts = lowbit.matmul_scaled(q, b, a_scale=scale, a_zero_point=zero, bias=bias, isa=isa)
    assert np.isnan(parts[4:7]).all()
    assert np.isfinite(np.delete(parts, [4, 5, 6], axis=0)).all()
    for view in variants(x).values():
        whole = lowbit.linear_dynamic(view, b, bias, symmetric=symmetric, isa=isa)
        np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("symmetric", [False, True])
def test_large_rows_with_small_weights(symmetric: bool) -> None:
    """A row's scale times sums is beyond float32; with the weight's scale it is not."""
    rng = np.random.default_rng(3)
    rows = rng.uniform(-1, 1, (6, 64))
    x = (rows * np.array([3.4e38, 1e38, 3e36, 1e30, 1, 1e-30])[:, None]).astype(np.float32)
    weight = rng.standard_normal((64, 20)) * 1e-4
    quantized = lowbit.quantize(weight, "int8", axis=1)
    exact = x.astype(np.float64) @ quantized.dequantize()
    b = lowbit.pack(quantized)
    got = lowbit.linear_dynamic(x, b, symmetric=symmetric)
    sizes = np.abs(exact).max(axis=1, keepdims=True)
    np.testing.assert_allclose(got / sizes, exact / sizes, atol=0.02)
    q, scale, zero = quantize_rows(x, symmetric)
    parts = lowbit.matmul_scaled(q, b, a_scale=scale, a_zero_point=zero)
    np.testing.assert_array_equal(got, parts)
    alone = lowbit.matmul_scaled(q[:1], b, a_scale=scale[0], a_zero_point=int(zero[0]))
    np.testing.assert_array_equal(alone, parts[:1])


@pytest.mark.parametrize("threads", [1, 3])
@ISAS
def test_long_sums_over_many_rows(threads: int, isa: str) -> None:
    """K so long that some kernels multiply it in spans, and several items."""
    rng = np.random.default_rng(8)
    a = rng.integers(0, 256, (75, 20000), dtype=np.uint8)
    b = rng.integers(-128, 128, (20000, 83), dtype=np.int8)
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int32)
    assert np.array_equal(lowbit.matmul(a, b, threads=threads, isa=isa), exact)


def test_chunks_have_the_scales_and_zero_points_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(5)
    m, k = 301, 131
    a = rng.integers(0, 256, (m, k), dtype=np.uint8)
    b = lowbit.pack(lowbit.quantize(rng.standard_normal((k, 20)), axis=1))
    scale = rng.uniform(0.1, 1, m).astype(np.float32)
    zero = rng.integers(0, 256, m, dtype=np.int32)
    parts = [
        lowbit.matmul_scaled(a[rows], b, a_scale=scale[rows], a_zero_point=zero[rows])
        for rows in (slice(0, 40), slice(40, 190), slice(190, m))
    ]
    monkeypatch.setattr(dispatch, "_WORKSPACE", 1 << 14)
    monkeypatch.setattr(dispatch, "_fused", lambda *_: False)
    whole = lowbit.matmul_scaled(a, b, a_scale=scale, a_zero_point=zero)
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_rows_are_served_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the scratch memory holds: same result, in several calls of the kernel."""
    x = np.random.default_rng(0).standard_normal((700, 130)).astype(np.float32)
    b = lowbit.pack(lowbit.quantize(x[:130, :20].T.copy().reshape(130, 20), axis=1))
    whole = lowbit.linear_dynamic(x, b)
    monkeypatch.setattr(dispatch, "_WORKSPACE", 1 << 15)
    asked = Product(700, Quantized(), (130, 1), b.format, active().name, 1, output="f32")
    prepared = prepare.__wrapped__(asked)
    assert prepared.plan
    assert prepared.plan.chunk_rows < 700
    out = np.zeros_like(whole)
    prepared.run({"a": x, **dict(zip(RIGHT, b.addresses, strict=True)), "out": out})
    np.testing.assert_array_equal(out, whole)


class Guarded:
    """Memory that ends, or begins, at a page that must not be touched."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.pages = -(-size // page)
        self.map = mmap.mmap(-1, (self.pages + 2) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for forbidden in (start, start + (self.pages + 1) * page):
            assert libc.mprotect(ctypes.c_void_p(forbidden), page, 0) == 0
        self.bytes = np.frombuffer(self.map, np.uint8, self.pages * page, page)

    def copy(self, array: np.ndarray, at_end: bool) -> np.ndarray:
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        place = self.bytes[-len(raw) :] if at_end else self.bytes[: len(raw)]
        place[:] = raw
        return place.view(array.dtype).reshape(array.shape)


@pytest.mark.skipif(os.name != "posix", reason="guard pages need mprotect")
@ISAS
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 17, 65), (33, 50, 127)])
def test_nothing_outside_the_operands_is_touched(
    sizes: tuple[int, int, int], at_end: bool, isa: str
) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(0)
    a = Guarded(m * k).copy(rng.integers(0, 256, (m, k)).astype(np.uint8), at_end)
    b = Guarded(n * k).copy(rng.integers(-128, 128, (k, n)).astype(np.int8), at_end)
    x = Guarded(4 * m * k).copy(rng.standard_normal((m, k)).astype(np.float32), at_end)
    out = Guarded(4 * m * n).copy(np.zeros((m, n), np.int32), at_end)
    real = Guarded(4 * m * n).copy(np.zeros((m, n), np.float32), at_end)
    lowbit.matmul(a, b, out=out, isa=isa)
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b)
    lowbit.matmul(a.T.copy().T, b.T.copy().T, out=out, isa=isa)
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b)
    scale, zero = np.ones(n, np.float32), np.zeros(n, np.int32)
    packed = lowbit.pack(lowbit.QTensor(b, scale, zero, int_format(b.dtype.name), axis=1))
    lowbit.linear_dynamic(x, packed, out=real, isa=isa)
    np.testing.assert_array_equal(real, lowbit.linear_dynamic(x.copy(), packed))


@ISAS
@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((0, 5), (5, 4)), ((3, 0), (0, 4)), ((3, 5), (5, 0)), ((0, 0), (0, 0))]
)
def test_empty_matrices(a_shape: tuple[int, int], b_shape: tuple[int, int], isa: str) -> None:
    a, b = np.zeros(a_shape, np.int8), np.zeros(b_shape, np.uint8)
    result = lowbit.matmul(a, b, isa=isa)
    assert result.shape == (a_shape[0], b_shape[1])
    assert not result.any()
    weight = lowbit.pack(lowbit.quantize(np.zeros(b_shape, np.float32), axis=1))
    bias = np.arange(b_shape[1], dtype=np.float32)
    real = lowbit.linear_dynamic(np.zeros(a_shape, np.float32), weight, bias, isa=isa)
    np.testing.assert_array_equal(real, np.broadcast_to(bias, result.shape))


@pytest.mark.deep
@pytest.mark.parametrize("isa", [i for i in ("avx512", "avx2") if i in available()])
def test_weights_that_cannot_saturate_get_the_narrow_kernel(isa: str) -> None:
    """Chosen by proof, and exact: at the bound, just past it, and on saturating data."""
    from lowbit.product import dispatch

    rng = np.random.default_rng(3)
    for kind, shift in ((np.int8, 0), (np.uint8, 128)):
        small = rng.integers(-64, 65, (130, 50))
        large = small.copy()
        large[6:8, 3] = 65, 64
        for stored, name in ((small, "narrow"), (large, "widening")):
            b = lowbit.pack((stored + shift).astype(kind))
            chosen = dispatch.consider(SETS[isa], KernelQuery(9, 50, 130, b.largest_pair))[-1]
            assert chosen.micro is not None
            assert chosen.micro.name == name
            for a in (np.full((9, 130), 255, np.uint8), np.full((9, 130), -128, np.int8)):
                expected = a.astype(np.int64) @ b.unpack().astype(np.int64)
                np.testing.assert_array_equal(lowbit.matmul(a, b, isa=isa), expected)


@pytest.mark.pairs
@pytest.mark.deep("sizes1-avx2", "sizes1-avx2_vnni")
@ISAS
@pytest.mark.parametrize("sizes", [(8, 1, 9), (23, 4, 553), (71, 3, 67), (40, 8, 27), (50, 16, 5)])
def test_few_columns(isa: str, sizes: tuple[int, int, int]) -> None:
    """Rows that are read where they lie, at any address; a call like two before is recognized."""
    m, n, k = sizes
    rng = np.random.default_rng(k)
    for kind in (np.uint8, np.int8):
        a = rng.integers(0, 256, m * (k + 3) + 1).astype(np.uint8).view(kind)[1:]
        a = a.reshape(m, k + 3)[:, :k]
        w = rng.integers(-127, 128, (k, n)).astype(np.int8)
        w[0] = 127  # so that a scale of 1/127 gives w back
        q = lowbit.quantize(w / np.float32(127), axis=1)
        b = lowbit.pack(q)
        exact = a.astype(np.int64) @ w.astype(np.int64)
        for out in (np.empty((m, n), np.int32), np.empty((m, n + 3), np.int32)[:, 1 : n + 1]):
            for _ in range(3):
                out[...] = 7
                lowbit.matmul(a, b, out=out, isa=isa)
                np.testing.assert_array_equal(out, exact)
        scale, residual = rng.random((m, 1)).astype(np.float32), rng.random((m, n), np.float32)
        zero = rng.integers(0, 100, m).astype(np.int32)
        sums = exact - zero[:, None].astype(np.int64) * w.sum(axis=0, dtype=np.int64)
        real = sums.astype(np.float32) * scale * q.scale + residual
        for _ in range(3):
            given = lowbit.matmul_scaled(
                a, b, a_scale=scale[:, 0], a_zero_point=zero, residual=residual, isa=isa
            )
            np.testing.assert_array_equal(given, real)


@pytest.mark.deep
def test_a_packed_operand_takes_the_place_of_b() -> None:
    rng = np.random.default_rng(1)
    for kind in (np.int8, np.uint8):
        b = rng.integers(0, 256, (70, 33)).astype(np.uint8).view(kind)
        packed = lowbit.pack(b)
        assert packed.shape == (70, 33)
        np.testing.assert_array_equal(packed.unpack(), b)
        assert packed.unpack().dtype == kind
        assert "70, 33" in repr(packed)
        for m in (1, 5, 100):
            a = rng.integers(-128, 128, (m, 70)).astype(np.int8)
            np.testing.assert_array_equal(lowbit.matmul(a, packed), lowbit.matmul(a, b))


def test_copies_and_pickles_stand_alone() -> None:
    """Addresses belong to one object; a copy must not read the memory of the original."""
    b = np.random.default_rng(0).integers(-128, 128, (40, 30)).astype(np.int8)
    a = np.ones((2, 40), np.uint8)
    packed = lowbit.pack(b)
    copies = [copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))]
    with pytest.raises(ValueError, match="read-only"):
        packed.panels[...] = 0
    packed.panels.flags.writeable = True
    packed.panels[...] = 0
    for one in copies:
        assert one.addresses[0] % 64 == 0
        np.testing.assert_array_equal(lowbit.matmul(a, one), a.astype(np.int64) @ b)


def test_rows_that_are_not_whole_elements_apart() -> None:
    records = np.zeros(5, dtype=[("value", "i4"), ("tag", "u1")])
    records["tag"] = 7
    a, b = np.full((5, 9), 3, np.uint8), np.full((9, 1), -2, np.int8)
    lowbit.matmul(a, b, out=records["value"].reshape(5, 1))
    assert (records["value"] == -54).all()
    assert (records["tag"] == 7).all()
    floats = np.zeros(5, dtype=[("value", "f4"), ("tag", "u1")])
    floats["value"] = np.arange(5)
    weight = lowbit.pack(lowbit.quantize(np.ones((1, 1), np.float32), axis=1))
    np.testing.assert_array_equal(
        lowbit.linear_dynamic(floats["value"].reshape(5, 1), weight),
        lowbit.linear_dynamic(np.arange(5, dtype=np.float32).reshape(5, 1), weight),
    )


@pytest.mark.deep
def test_more_threads_than_any_machine_has() -> None:
    a, b = np.full((50, 40), 3, np.uint8), np.full((40, 30), -2, np.int8)
    assert (lowbit.matmul(a, b, threads=1 << 40) == -240).all()
    with pytest.raises(ValueError, match=r"threads must be an integer of at least 1, got 2\.0"):
        lowbit.matmul(a, b, threads=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, -2, -64, 1.0, 2.5, True, False, "2", np.float32(1)])
def test_a_wrong_number_of_threads_is_wrong_after_any_call(wrong: Any) -> None:
    """Also one that equals, as a key, what was asked for before: 1 == 1.0 == True."""
    a = np.full((50, 40), 3, np.uint8)
    packed = lowbit.pack(np.full((40, 30), -2, np.int8))
    for right in (0, 1, 2, None):  # 0: no call before
        if right != 0:
            lowbit.matmul(a, packed, threads=right)
        with pytest.raises(ValueError, match="threads must be an integer of at least 1, got"):
            lowbit.matmul(a, packed, threads=wrong)
    for kind in (np.int64, np.uint8):
        assert (lowbit.matmul(a, packed, threads=kind(2)) == -240).all()  # type: ignore[arg-type]


def test_packing_does_not_depend_on_the_instruction_set() -> None:
    b = np.random.default_rng(4).integers(-128, 128, (130, 50)).astype(np.int8)
    for view in variants(b).values():
        one = lowbit.pack(view)
        for isa in available():
            other = lowbit.pack(view, isa=isa)
            np.testing.assert_array_equal(one.panels, other.panels)
            np.testing.assert_array_equal(one.column_sums, other.column_sums)


def test_torch_tensors_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    a = torch.randint(-128, 128, (5, 20), dtype=torch.int8)
    b = torch.randint(0, 256, (20, 7), dtype=torch.uint8)
    result = lowbit.matmul(a, b.t().contiguous().t())
    assert result.dtype == torch.int32
    assert torch.equal(result.long(), a.long() @ b.long())
    out = torch.empty(5, 7, dtype=torch.int32)
    assert lowbit.matmul(a, b, out=out) is out
    assert torch.equal(out, result)
    with pytest.raises(ValueError, match="is on meta"):
        lowbit.matmul(a.to("meta"), b)


GOOD_A, GOOD_B = np.zeros((2, 3), np.int8), np.zeros((3, 4), np.int8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": np.zeros((2, 3), np.float32)}, TypeError, "int8 or uint8, got float32; quantize"),
        ({"a": np.zeros((2, 3), np.int64)}, TypeError, "int8 or uint8, got int64; convert"),
        ({"b": np.zeros((3, 4), np.float16)}, TypeError, "b must be of int8 or uint8, got float16"),
        ({"b": np.zeros((4, 4), np.int8)}, ValueError, r"columns of a \(3\) must equal .* \(4\)"),
        ({"a": np.zeros(3, np.int8)}, ValueError, r"a must have two dimensions, got shape \(3,\)"),
        ({"a": [[1, 2, 3]]}, TypeError, "NumPy array or a PyTorch tensor, got list"),
        ({"out": np.zeros((2, 5), np.int32)}, ValueError, r"out must be int32 \(2, 4\)"),
        ({"out": np.zeros((2, 4), np.int64)}, ValueError, "out must be int32"),
        ({"isa": "sse9"}, ValueError, "no instruction set is called 'sse9'; known: amx"),
        ({"threads": 0}, ValueError, "threads must be an integer of at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lowbit.matmul(**{"a": GOOD_A, "b": GOOD_B, **arguments})


def test_out_must_be_writeable_and_apart() -> None:
    out = np.zeros((2, 4), np.int32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        lowbit.matmul(GOOD_A, GOOD_B, out=out)
    memory = np.zeros(64, np.int8)
    with pytest.raises(ValueError, match="shares memory"):
        lowbit.matmul(
            memory[:6].reshape(2, 3), GOOD_B, out=memory[:32].view(np.int32).reshape(2, 4)
        )


def test_bad_arguments_of_the_scaled_products() -> None:
    weight = lowbit.pack(lowbit.quantize(np.ones((3, 4), np.float32), axis=1))
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="b has no scale"):
        lowbit.linear_dynamic(x, lowbit.pack(GOOD_B))
    with pytest.raises(TypeError, match="b must be packed"):
        lowbit.linear_dynamic(x, GOOD_B)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        lowbit.linear_dynamic(x.astype(np.float64), weight)
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\)"):
        lowbit.linear_dynamic(x, weight, np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"a_scale must be one number or have shape \(2,\)"):
        lowbit.matmul_scaled(GOOD_A, weight, a_scale=np.ones(3))
    with pytest.raises(TypeError, match="a_zero_point must be of integers"):
        lowbit.matmul_scaled(GOOD_A, weight, a_scale=1.0, a_zero_point=0.5)
    with pytest.raises(ValueError, match="a_zero_point must lie between -128 and 127, got 200"):
        lowbit.matmul_scaled(GOOD_A, weight, a_scale=1.0, a_zero_point=200)
    with pytest.raises(ValueError, match="got 0 to 4294967301"):
        lowbit.matmul_scaled(GOOD_A, weight, a_scale=1.0, a_zero_point=np.array([0, 2**32 + 5]))
    with pytest.raises(TypeError, match="a_scale must be of real numbers, got complex128"):
        lowbit.matmul_scaled(GOOD_A, weight, a_scale=1j)
    with pytest.raises(ValueError, match="takes one scale, or one for each column"):
        lowbit.pack(lowbit.quantize(np.ones((3, 4), np.float32), axis=0))


def test_an_instruction_set_that_the_machine_lacks() -> None:
    missing = [name for name in SETS if name not in available()]
    if not missing:
        pytest.skip("this machine has them all")
    with pytest.raises(RuntimeError, match=f"{missing[0]!r} cannot run here: .* machine has: "):
        lowbit.matmul(GOOD_A, GOOD_B, isa=missing[0])


@pytest.mark.deep
def test_many_python_threads_at_once() -> None:
    """Each with shapes of its own; scratch memory and plans must not mix."""
    rng = np.random.default_rng(8)
    jobs = []
    for i in range(24):
        a = rng.integers(0, 256, (7 * i + 1, 100 + i)).astype(np.uint8)
        b = rng.integers(-128, 128, (100 + i, 150)).astype(np.int8)
        jobs.append((a, b, a.astype(np.int64) @ b))

    def work(number: int) -> bool:
        a, b, expected = jobs[number % len(jobs)]
        return bool((lowbit.matmul(a, b, threads=1 + number % 3) == expected).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def _in_child(connection: Any) -> None:
    a, b = np.full((300, 300), 3, np.uint8), np.full((300, 300), -2, np.int8)
    connection.send(bool((lowbit.matmul(a, b, threads=2) == -1800).all()))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_computes_too() -> None:
    """After the parent has used its threads, which a child does not have."""
    pytest.importorskip("torch")  # with its OpenMP runtime, which would hang in the child
    _in_child(type("Sink", (), {"send": staticmethod(lambda good: None)}))
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(theirs,))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv()
    child.join(60)
    assert child.exitcode == 0
