"""gemm: against float64 within Higham's bound, on every instruction set, layout and type."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit import api, gemm
from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.product.call_cache import CallCache
from lowbit.product.gemm import prepare_gemm
from lowbit.spec import DTYPES
from lowbit.spec.operations.products import gemm as gemm_spec

SETS = pytest.mark.parametrize("isa", instruction_sets.available())
BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
SHAPES = [
    (1, 1, 1), (1, 130, 33), (2, 3, 65), (17, 15, 16), (15, 17, 129), (63, 65, 40), (127, 2, 63),
    (3, 300, 17),
]  # fmt: skip


def drawn(shape: tuple[int, int], seed: int, dtype: np.dtype[Any] = F32, lies: str = "C") -> Any:
    """Random numbers, by rows ("C"), by columns ("F"), or in every third place, backwards ("S")."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(F32).astype(dtype)
    if lies == "S":
        wide = np.zeros((2 * shape[0], 3 * shape[1]), dtype)
        wide[::-2, ::3] = values
        return wide[::-2, ::3]
    return np.array(values, order=lies)  # type: ignore[call-overload]


def check(
    out: np.ndarray, a: Any, b: Any, c: Any = None, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """Within the budget of the specification."""
    kinds = (DTYPES[x.dtype.name].code for x in (a, b, out, out if c is None else c))
    case = gemm_spec.case(
        {"M": len(a), "K": len(b), "N": b.shape[1]},
        dtypes=":".join(kinds),
        without=["c"] if c is None else [],
        static={"alpha": alpha, "beta": beta},
    )
    verdict = case.expect({"a": a, "b": b, **({} if c is None else {"c": c})}).check(out)
    assert verdict.ok, verdict.message


@pytest.mark.deep(
    "shape7-*",
    "shape3-*",
    "shape1-float32-generic",
    "shape5-bfloat16-avx512",
    "shape5-float32-avx512_vnni",
    "shape5-bfloat16-amx*",
    "shape5-float32-amx*",
)
@pytest.mark.pairs
@SETS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(isa: str, dtype: np.dtype[Any], shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for number, (lies_a, lies_b) in enumerate([("C", "C"), ("C", "F"), ("F", "C"), ("S", "S")]):
        a, b = drawn((m, k), 1, dtype, lies_a), drawn((k, n), 2, dtype, lies_b)
        out = gemm(a, b, isa=isa, threads=1 + number % 2)
        assert out.dtype == F32
        check(out, a, b)


@pytest.mark.pairs
@SETS
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("c_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lies", ["C", "F", "S"])
def test_factors(isa: str, out_dtype: Any, c_dtype: Any, lies: str) -> None:
    """alpha·A·B + beta·C, with an output that lies in any way and keeps what is between."""
    for (m, n, k), (alpha, beta) in itertools.product(
        [(5, 40, 33), (40, 5, 33)], [(1.0, 1.0), (-1.5, 0.25), (0.0, 2.0), (2.0, 0.0)]
    ):
        a, b = drawn((m, k), 1), drawn((k, n), 2)
        c, out = drawn((m, n), 3, c_dtype, "C"), drawn((m, n), 4, out_dtype, lies)
        around = out if out.base is None else out.base
        marks = np.ones(around.shape, bool)
        marks[::-2, ::3] = lies != "S"
        before = around.astype(F32)
        assert gemm(a, b, c, alpha=alpha, beta=beta, out=out, isa=isa) is out
        check(out, a, b, c, alpha, beta)
        if lies == "S":
            np.testing.assert_array_equal(around.astype(F32)[marks], before[marks])


@pytest.mark.parametrize("lies", ["C", "F", "S"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(9, 40, 70), (40, 3, 70), (3, 40, 70)])
def test_in_place(lies: str, dtype: Any, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b, c = drawn((m, k), 1), drawn((k, n), 2), drawn((m, n), 3, dtype, lies)
    before = c.copy()
    assert gemm(a, b, c, alpha=0.5, beta=2.0, out=c) is c
    check(c, a, b, before, 0.5, 2.0)


@pytest.mark.parametrize("lies", ["C", "F"])
def test_c_that_overlaps_the_output(lies: str) -> None:
    """Shifted by a row against the output: what is written must not be read as c."""
    wide = drawn((10, 40), 3, F32, lies)
    a, b, before = drawn((9, 70), 1), drawn((70, 40), 2), wide.copy()
    gemm(a, b, wide[:-1], beta=1.0, out=wide[1:])
    check(wide[1:], a, b, before[:-1], 1.0, 1.0)


def test_what_has_no_part_is_not_read() -> None:
    nan = np.full((3, 3), np.nan, np.float32)
    a, b, c = (drawn((3, 3), seed) for seed in range(3))
    check(gemm(a, b, nan, beta=0.0), a, b)
    np.testing.assert_array_equal(gemm(nan, b, c, alpha=0.0, beta=2.0), 2 * c)
    out = nan.copy()
    gemm(a, b, out=out)
    check(out, a, b)


@SETS
def test_nothing_to_multiply(isa: str) -> None:
    empty = np.zeros((3, 0), np.float32)
    c = drawn((3, 4), 1)
    np.testing.assert_array_equal(gemm(empty, empty.T[:, :2], isa=isa), np.zeros((3, 2)))
    scaled = gemm(empty, np.zeros((0, 4), np.float32), c, beta=3.0, isa=isa)
    np.testing.assert_array_equal(scaled, np.float32(3) * c)
    assert gemm(empty.T, drawn((3, 4), 2), isa=isa).shape == (0, 4)
    assert gemm(c, empty.T[:0, :].reshape(4, 0), isa=isa).shape == (3, 0)


@SETS
@pytest.mark.parametrize("shape", [(2, 40, 50), (40, 40, 50), (20, 3, 50)])
@pytest.mark.parametrize("lies", ["C", "F"])
def test_nan_and_infinity_reach_their_rows_and_columns_only(
    isa: str, shape: tuple[int, int, int], lies: str
) -> None:
    m, n, k = shape
    a, b = drawn((m, k), 1), drawn((k, n), 2, F32, lies)
    a[1, k - 1], b[3, n - 1] = np.nan, np.inf
    out = gemm(a, b, isa=isa)
    assert np.isnan(out[1]).all()
    others = np.arange(m) != 1
    np.testing.assert_array_equal(out[others, n - 1], np.copysign(np.inf, a[others, 3]))
    assert np.isfinite(out[others, : n - 1]).all()


@pytest.mark.pairs
@SETS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(2, 40, 50), (40, 40, 50), (20, 3, 50), (33, 33, 700)])
@pytest.mark.parametrize("lies", ["C", "F"])
def test_nan_is_the_same_bits_everywhere(
    isa: str, dtype: Any, out_dtype: Any, shape: tuple[int, int, int], lies: str
) -> None:
    m, n, k = shape
    a, b = drawn((m, k), 1, dtype), drawn((k, n), 2, dtype, lies)
    c = drawn((m, n), 3)
    word = a[:1, :1].view(np.uint32 if dtype == F32 else np.uint16)
    word[...] = 0xFFC00000 if dtype == F32 else 0xFFC0
    a[1, 0], a[1, 1], b[1, 1:], b[0, 0] = 0, np.inf, 0, -np.inf
    c[m - 1].view(np.uint32)[...] = 0xFFC00123
    nan = np.uint32(0x7FC00000) if out_dtype == F32 else np.uint16(0x7FC0)
    for factors in ({}, {"c": c, "alpha": 1.5, "beta": 2.0}, {"c": c, "alpha": 0, "beta": 1.0}):
        out = gemm(a, b, **factors, out_dtype=out_dtype, isa=isa)
        bits = np.ascontiguousarray(out).view(nan.dtype)[np.isnan(out.astype(F32))]
        assert len(bits) >= n
        assert (bits == nan).all()


@pytest.mark.pairs
@SETS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("lies_a", "lies_b"), [("C", "C"), ("C", "F"), ("F", "C")])
def test_threads_do_not_change_a_bit(isa: str, dtype: Any, lies_a: str, lies_b: str) -> None:
    for m, n, k in [(1, 500, 300), (70, 90, 600), (200, 7, 100)]:
        a, b = drawn((m, k), 1, dtype, lies_a), drawn((k, n), 2, dtype, lies_b)
        one = gemm(a, b, threads=1, isa=isa)
        for threads in (2, 3, 5):
            np.testing.assert_array_equal(gemm(a, b, threads=threads, isa=isa), one)


@pytest.mark.deep
@pytest.mark.pairs
@SETS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=str)
def test_chunks(isa: str, dtype: Any, out_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny caches everything is cut: rows, columns and K, in blocks and in chunks."""
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 1 << 10, "L2": 4 << 10, "L3": 16 << 10})
    prepare_gemm.cache_clear()
    for lies_a, lies_b in itertools.product("CF", "CF"):
        a, b = drawn((75, 330), 1, dtype, lies_a), drawn((330, 110), 2, dtype, lies_b)
        c = drawn((75, 110), 3)
        for rows in (3, 75):
            some = a[:rows], b, c[:rows]
            out = gemm(*some, alpha=0.5, beta=1.0, out_dtype=out_dtype.name, isa=isa, threads=2)
            check(out, *some, 0.5, 1.0)
    prepare_gemm.cache_clear()


@pytest.mark.pairs
@pytest.mark.deep(
    "1-90-700-bfloat16-avx2",
    "6-70-500-bfloat16-generic",
    "6-70-500-float32-generic",
    "1-90-700-bfloat16-avx2_vnni",
)
@SETS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 90, 700), (6, 70, 500), (12, 70, 800)])
def test_slices(
    isa: str, dtype: Any, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows by what comes from afar: K is cut by the shape, never by the number of threads."""
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 1 << 12, "L2": 16 << 10, "L3": 1 << 20})
    prepare_gemm.cache_clear()
    a, b, c = drawn((m, k), 1, dtype), drawn((k, n), 2, dtype), drawn((m, n), 3)
    for out_dtype in (F32, BF16):
        some = {"alpha": 1.5, "beta": -0.5, "out_dtype": out_dtype.name, "isa": isa}
        one, other = (gemm(a, b, c, **some, threads=threads) for threads in (1, 3))
        check(one, a, b, c, 1.5, -0.5)
        np.testing.assert_array_equal(other, one)
    prepare_gemm.cache_clear()


@SETS
def test_bfloat16_with_subnormal_numbers(isa: str) -> None:
    """Machines that multiply pairs of bfloat16 take subnormal ones for zero, others do not; each
    error is at most the term itself."""
    a = drawn((20, 64), 1, BF16)
    a[:, ::2] = np.float32(2.0**-130)
    b = drawn((64, 40), 2, BF16)
    out = gemm(a, b, isa=isa)
    check(out, a, b)


def test_bfloat16_results_round_half_to_even() -> None:
    a = np.array([[1 + 2.0**-8], [1 + 3 * 2.0**-8], [np.nan], [np.inf], [3.4e38]], np.float32)
    for columns in (1, 20):
        b = np.ones((1, columns), np.float32)
        out = gemm(a, b, out_dtype="bfloat16").astype(np.float32)
        expected = [1, 1 + 2.0**-6, np.nan, np.inf, np.inf]
        np.testing.assert_array_equal(out, np.repeat(expected, columns).reshape(5, columns))
        # Where nothing is multiplied the same rounding is done elsewhere.
        c = np.repeat(a, columns, axis=1)
        scaled = gemm(a, b, c, alpha=0.0, beta=1.0, out_dtype="bfloat16")
        np.testing.assert_array_equal(scaled.astype(np.float32), out)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    for kind, out_kind in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        a = torch.from_numpy(drawn((5, 40), 1)).to(kind)
        weight = torch.from_numpy(drawn((30, 40), 2)).to(kind).requires_grad_()
        c = torch.from_numpy(drawn((5, 30), 3)).to(out_kind)
        out = gemm(a, weight.T, c, beta=0.5, out_dtype=out_kind)
        assert out.dtype == out_kind
        assert not out.requires_grad
        result = out.float().numpy()
        if out_kind == torch.bfloat16:
            result = result.astype(BF16)
        check(result, a.float().numpy(), weight.T.detach().float().numpy(), c.float().numpy(),
              1.0, 0.5)  # fmt: skip
        tall = gemm(weight, a.T)
        check(tall.numpy(), weight.detach().float().numpy(), a.T.float().numpy())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("lies_a", "lies_b"), [("C", "C"), ("C", "F"), ("F", "C")])
@pytest.mark.parametrize("shape", [(1, 40, 70), (20, 40, 70), (40, 3, 70), (70, 100, 64)])
def test_a_call_that_was_made_before_gives_the_same_bits(
    dtype: Any, lies_a: str, lies_b: str, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    operands = [(drawn((m, k), seed, dtype, lies_a), drawn((k, n), -seed - 1 + 9, dtype, lies_b))
                for seed in range(2)]  # fmt: skip
    expected = [gemm(a, b, threads=2) for a, b in operands]
    for _ in range(3):
        out = np.empty((m, n), np.float32)
        gemm(*operands[0])
        gemm(*operands[0], alpha=1.0, out=out)
    for (a, b), right in zip(operands, expected, strict=True):
        out = np.full((m, n), np.nan, np.float32)
        assert gemm(a, b).tobytes() == right.tobytes()
        assert gemm(a, b, out=out) is out
        assert out.tobytes() == right.tobytes()
        check(gemm(a, b, alpha=-0.5), a, b, alpha=-0.5)
        check(gemm(a, b, right, beta=2.0), a, b, right, 1.0, 2.0)


def test_an_output_in_an_operand_is_refused_though_such_calls_were_made_before() -> None:
    a, b, out = drawn((8, 8), 1), drawn((8, 8), 2), np.empty((8, 8), np.float32)
    for _ in range(3):
        gemm(a, b, out=out)
    for one in (a, b):
        with pytest.raises(ValueError, match="out shares memory with a or b"):
            gemm(a, b, out=one)


@pytest.mark.parametrize("shape", [(9, 40, 70), (40, 3, 70), (3, 40, 70), (20, 40, 70)])
def test_calls_with_c_become_known(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where c is the output. An output that is elsewhere in c comes to Python, each time."""
    m, n, k = shape
    order = "F" if n < 16 else "C"
    a, b, wide = drawn((m, k), 1), drawn((k, n), 2, F32, order), drawn((m + 1, n), 3)
    before, c = wide.copy(), wide[:-1].copy(order=order)
    expected = gemm(a, b, c, alpha=0.5, beta=2.0, out=np.empty_like(c))
    for _ in range(2):
        gemm(a, b, c, alpha=0.5, beta=2.0, out=np.empty_like(c))
        gemm(a, b, drawn((m, n), 4), beta=1.0, out=drawn((m, n), 5))
    prepared = []
    asked = api.prepare_gemm
    monkeypatch.setattr(api, "prepare_gemm", lambda *facts: prepared.append(1) or asked(*facts))
    assert gemm(a, b, c, alpha=0.5, beta=2.0, out=np.empty_like(c)).tobytes() == expected.tobytes()
    assert gemm(a, b, c, alpha=0.5, beta=2.0, out=c) is c
    assert c.tobytes() == expected.tobytes()
    assert not prepared
    gemm(a, b, wide[:-1], beta=1.0, out=wide[1:])
    assert prepared
    check(wide[1:], a, b, before[:-1], 1.0, 1.0)


def test_a_known_call_is_one_in_which_all_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CallCache("gemm", arrays=2)
    cache._arguments = api._gemm._arguments
    monkeypatch.setattr(api, "_gemm", cache)
    a, b = drawn((6, 31), 1), drawn((31, 23), 2)
    gemm.__self__.__wrapped__(a, b)  # type: ignore[attr-defined]
    gemm.__self__.__wrapped__(a, b)  # type: ignore[attr-defined]
    ((_, call),) = cache.ways(None)._calls.values()
    defaults = None, 1.0, 0.0, None, None, None, None
    usual = gemm.__self__.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    known = (None, usual["alpha"], usual["beta"], None, None, None, None)
    assert known == defaults
    np.testing.assert_array_equal(call(a, b, *known), gemm(a, b))
    wide = drawn((6, 62), 3)
    for other in (a.astype(BF16), a[:5], wide[:, ::2], a.tolist()):
        assert call(other, b, *known) is None
    for place, other in [(0, b), (1, 2.0), (4, "bfloat16"), (5, 2), (6, "generic")]:
        assert call(a, b, *known[:place], other, *known[place + 1 :]) is None


def test_readonly_operands() -> None:
    a, b = drawn((3, 40), 1), drawn((40, 20), 2)
    a.flags.writeable = b.flags.writeable = False
    check(gemm(a, b), a, b)


A, B = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": np.ones((2, 4), np.float32)}, ValueError, r"columns of a \(3\) must equal the rows"),
        ({"a": A.astype(np.float64)}, TypeError, "a must be float32 or bfloat16, got float64"),
        ({"a": A.astype(">f4")}, TypeError, "foreign order"),
        ({"a": A[0]}, ValueError, "a must have two dimensions"),
        ({"a": A.tolist()}, TypeError, "NumPy array or a PyTorch tensor, got list"),
        ({"b": B.astype(BF16)}, TypeError, "a is float32 and b is bfloat16"),
        ({"beta": 1.0}, ValueError, "beta is given without c"),
        ({"c": B, "beta": 1.0}, ValueError, r"c must have shape \(2, 4\), got \(3, 4\)"),
        ({"out": B}, ValueError, r"out must have shape \(2, 4\), got \(3, 4\)"),
        ({"out": np.ones((2, 4))}, TypeError, "out must be float32 or bfloat16"),
        ({"out": np.ones((2, 4), F32), "out_dtype": "bfloat16"}, ValueError, "but out_dtype is"),
        ({"out_dtype": "float16"}, ValueError, "out_dtype must be float32 or bfloat16"),
        ({"alpha": "much"}, TypeError, "alpha must be a number, got 'much'"),
        ({"alpha": 1e39}, ValueError, r"alpha must be within float32, ±3.4e38, got 1e\+39"),
        ({"threads": 0}, ValueError, "threads must be"),
        ({"threads": True}, ValueError, "threads must be"),
        ({"isa": "sse9"}, ValueError, "no instruction set is called 'sse9'"),
        (
            {"a": np.ndarray((2, 3), F32, bytes(64), 0, (14, 4))},
            ValueError,
            "strides of .* bytes, no multiples",
        ),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gemm(**{"a": A, "b": B, **arguments})


def test_outputs_that_must_not_be_written() -> None:
    square = drawn((4, 4), 1)
    with pytest.raises(ValueError, match="out shares memory with a or b"):
        gemm(square, drawn((4, 4), 2), out=square)
    with pytest.raises(ValueError, match="out shares memory with a or b"):
        gemm(drawn((4, 4), 2), square.T, out=square)
    fixed = np.zeros((4, 4), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        gemm(square, square, out=fixed)
