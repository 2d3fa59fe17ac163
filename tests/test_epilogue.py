"""What follows a product: every step and output, against float64, on every instruction set."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowbit
from lowbit.isa import SETS, available
from lowbit.isa.types import F32Pointer, Int
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.post_op import Elementwise, post_ops
from lowbit.kernels.cpu.shared.post_ops import Clamp, LeakyRelu, QuantizedResidual
from lowbit.numerics import QTensor, int_format, quantize_rows
from lowbit.product.output import OutputSpec
from lowbit.spec.operations.products import matmul_scaled
from lowbit.spec.post_ops import FUNCTIONS as MEANINGS

ISAS = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(bool(one.missing()), reason=one.missing() or "-")
        )
        for name, one in SETS.items()
    ],
)


FUNCTIONS = [name for name, one in post_ops.load().items() if isinstance(one, Elementwise)]


@kernel
def apply(k: Builder, x: F32Pointer, y: F32Pointer, n: Int, *, function: str) -> None:
    """y = function(x), n a multiple of 16."""
    chosen = post_ops.get(function)
    assert isinstance(chosen, Elementwise)
    for i in k.range(0, n, 16):
        (y + i).store(chosen.function((x + i).load(16)))


@ISAS
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_over_all_floats(function: str, isa: str) -> None:
    """A million float32 bit patterns, evenly spread over all of them."""
    x = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)[: 2**20 // 16 * 16]
    x = x[: len(x) // 16 * 16].view(np.float32)
    y = np.full_like(x, 7)
    apply.program(SETS[isa], function=function)(1, x.ctypes.data, y.ctypes.data, len(x))
    finite = np.isfinite(x) & (np.abs(x) < 1e30)
    value, budget = MEANINGS[function].apply(x[finite].astype(np.float64), np.zeros(1))
    assert (np.abs(y[finite] - value) <= budget).all()
    assert np.isnan(y[np.isnan(x)]).all()
    assert not np.isnan(y[~np.isnan(x)]).any()
    generic = np.full_like(x, 7)
    apply.program(SETS["generic"], function=function)(1, x.ctypes.data, generic.ctypes.data, len(x))
    np.testing.assert_array_equal(y, generic)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_ends_of_the_functions(function: str) -> None:
    x = np.array([np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, np.nan] + [0.0] * 9, np.float32)
    y = np.full_like(x, 7)
    apply.interpret(SETS["generic"], {"x": x, "y": y, "n": 16}, function=function)
    assert np.isnan(y[6])
    meaning = MEANINGS[function].meaning(x[:6].astype(np.float64))
    np.testing.assert_allclose(y[:6], meaning, rtol=1e-7, atol=1e-35)


SIZES = (21, 37, 70)
STEPS: list[tuple[Any, ...]] = [
    (),
    ("bias",),
    ("residual", "relu"),
    ("bias", "gelu"),
    ("bias", "gelu_tanh", "residual"),
    ("silu", Clamp(-0.25, 6.0)),
    ("bias", "residual", "silu", Clamp(0.0, 1e30)),
    ("sigmoid", "hardswish", "tanh", "hardsigmoid"),
]


def _problem() -> dict[str, Any]:
    m, n, k = SIZES
    rng = np.random.default_rng(11)
    weight = lowbit.quantize(rng.standard_normal((k, n)), axis=1)
    q = rng.integers(0, 256, (m, k)).astype(np.uint8)
    scale = rng.uniform(0.001, 0.01, m).astype(np.float32)
    zero = rng.integers(0, 256, m).astype(np.int32)
    left = {"a": q, "a_scale": scale, "a_zero_point": zero}
    return {
        "call": {**left, "b": lowbit.pack(weight)},
        "inputs": {**left, "b": weight.values, "b_scale": weight.scale},
        "bias": rng.standard_normal(n).astype(np.float32),
        "residual": rng.standard_normal((m, n)).astype(np.float32),
    }


PROBLEM = _problem()


def _call(steps: tuple[Any, ...], **more: Any) -> Any:
    operands = {name: PROBLEM[name] for name in ("bias", "residual") if name in steps}
    return lowbit.matmul_scaled(**PROBLEM["call"], **operands, post_ops=steps, **more)


@pytest.mark.deep("*-avx512*", "*-amx*")
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_steps(steps: tuple[Any, ...], isa: str) -> None:
    post_ops = tuple((s.low, s.high) if isinstance(s, Clamp) else s for s in steps)
    case = matmul_scaled.case(
        dict(zip("MNK", SIZES, strict=True)),
        without=["b_zero_point"],
        static={"post_ops": post_ops},
    )
    operands = {name: PROBLEM[name] for name in ("bias", "residual")}
    result = _call(steps, isa=isa)
    verdict = case.expect({**PROBLEM["inputs"], **operands}).check(result)
    assert verdict.ok, verdict.message
    for other, threads in itertools.product(available(), (1, 2)):
        np.testing.assert_array_equal(result, _call(steps, isa=other, threads=threads))


@pytest.mark.deep("*hardsigmoid')-*", "*-avx512_vnni", "*-amx*")
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize(("out_dtype", "zero"), [("uint8", 100), ("uint8", 0), ("int8", -3)])
def test_quantized_outputs(steps: tuple[Any, ...], out_dtype: str, zero: int, isa: str) -> None:
    """The float32 result, then the definition, to the bit, but next to a tie where the function is
    coarse; and guarded bytes around the output."""
    scale = np.float32(0.031)
    real = _call(steps, isa=isa) * (np.float32(1) / scale)
    limits = np.iinfo(out_dtype)
    expected = np.clip(np.rint(real) + zero, limits.min, limits.max)
    near = _near_a_tie(real, 0.02) if steps[-1:] == ("gelu",) else False
    around = np.full((SIZES[0], SIZES[1] + 9), 85, out_dtype)
    out = around[:, 4:-5]
    result = _call(
        steps, isa=isa, out_dtype=out_dtype, out_scale=float(scale), out_zero_point=zero, out=out
    )
    assert result is out
    assert (np.abs(out - expected) <= near).all()
    assert (around[:, :4] == 85).all()
    assert (around[:, -5:] == 85).all()


def _near_a_tie(quanta: np.ndarray, by: float) -> np.ndarray:
    return np.abs(quanta - np.floor(quanta) - 0.5) < by


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh"])
def test_gelu_is_accurate_where_quanta_are_fine(function: str) -> None:
    """And where a residual follows, which may leave little of it."""

    def made(*steps: str, **output: Any) -> tuple[str, ...]:
        return OutputSpec.of("bias" in steps, "residual" in steps, steps, **output).post_ops

    def scaled(scale: float) -> dict[str, Any]:
        return {"out_dtype": "int8", "out_scale": scale}

    for scale in 2.0**-8, 2.0**8:
        assert made("bias", function, **scaled(scale)) == ("bias", f"{function}_coarse")
    for scale in 0.999 * 2.0**-8, 1.001 * 2.0**8:
        assert made("bias", function, **scaled(scale)) == ("bias", function)
    assert made(function, "residual", **scaled(0.1)) == (function, "residual")
    assert made(function) == (function,)


@pytest.mark.deep(
    "0.00390625-gelu-avx512_vnni",
    "0.00390625-gelu_tanh-avx512_vnni",
    "0.00390625-gelu-amx*",
    "0.00390625-gelu_tanh-amx*",
)
@ISAS
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("scale", [2.0**-8, 0.02, 2.0**-3, 2.0**8])
def test_coarse_gelu(function: str, scale: float, isa: str) -> None:
    """Over all arguments at once, in steps of the output, where rows share a scale, and in values,
    where each has its own; the same bits everywhere."""
    a = np.arange(256, dtype=np.uint8)[:, None]
    b = lowbit.pack(lowbit.quantize(np.full((1, 64), 127.0), axis=1))  # 127 · 1
    bias = np.linspace(0, 0.06, 64, dtype=np.float32)
    x = (a.astype(np.int64) - 128) * 0.06 + bias.astype(np.float64)
    assert x.min() < -7
    assert x.max() > 7
    exact = MEANINGS[function].meaning(x) / scale + 50
    for a_scale in 0.06 / 127, np.full(256, 0.06 / 127, np.float32):
        y, generic = (
            lowbit.matmul_scaled(
                a, b, a_scale=a_scale, a_zero_point=128, bias=bias, post_ops=("bias", function),
                out_dtype="uint8", out_scale=scale, out_zero_point=50, isa=one,
            )
            for one in (isa, "generic")
        )  # fmt: skip
        np.testing.assert_array_equal(y, generic)
        within = np.abs(y - np.clip(exact, 0, 255))
        assert (within <= 0.5 + 2**-12.9 / scale + 1e-3).all()


IN_STEPS: list[tuple[Any, ...]] = [
    (),
    ("bias",),
    ("bias", "relu"),
    ("relu", "bias", LeakyRelu(0.1)),
    ("bias", "gelu"),
    ("gelu_tanh",),
    ("bias", "silu"),
    ("bias", Clamp(-0.2, 0.9)),
    ("bias", "residual", "relu"),
    (QuantizedResidual(0.02, 7), "bias"),
    ("bias", QuantizedResidual(0.02, -7, "int8"), "relu"),
]


@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("steps", IN_STEPS, ids=str)
@pytest.mark.parametrize(("out_dtype", "zero"), [("uint8", 100), ("uint8", 0), ("int8", -3)])
def test_quantized_outputs_of_rows_that_share_a_scale(
    steps: tuple[Any, ...], out_dtype: str, zero: int, isa: str
) -> None:
    """The same bits everywhere, and those of float64 but where that is next to a tie."""
    rng = np.random.default_rng(3)
    a_scale, scale, inputs = 0.004, 0.031, PROBLEM["inputs"]
    y = (inputs["a"].astype(np.int64) - 9) @ inputs["b"] * (a_scale * inputs["b_scale"])
    operands: dict[str, Any] = {"out_dtype": out_dtype}
    for step in steps:
        if isinstance(step, QuantizedResidual):
            residual = rng.integers(0, 120, y.shape).astype(step.dtype)
            operands["residual"] = residual
            y = y + step.scale * (residual.astype(np.int64) - step.zero_point)
        elif step in ("bias", "residual"):
            operands[step] = PROBLEM[step]
            y = y + PROBLEM[step]
        elif isinstance(step, Clamp):
            y = np.clip(y, step.low, step.high)
        elif step in MEANINGS and step != "relu":
            y = MEANINGS[step].meaning(y)
        else:
            y = np.where(y < 0, y * (step.slope if isinstance(step, LeakyRelu) else 0), y)
    limits = np.iinfo(out_dtype)
    real = y / scale
    expected = np.clip(np.rint(real) + zero, limits.min, limits.max)
    coarse = {"gelu", "gelu_tanh"} & set(steps)
    near = _near_a_tie(real, 0.02 if coarse else 1e-3)
    assert near.mean() < (0.1 if coarse else 0.02)

    def made(isa: str) -> Any:
        return lowbit.matmul_scaled(
            inputs["a"], PROBLEM["call"]["b"], a_scale=a_scale, a_zero_point=9, **operands,
            post_ops=steps, out_scale=scale, out_zero_point=zero, isa=isa,
        )  # fmt: skip

    result = made(isa)
    assert (np.abs(result - expected) <= near).all()
    np.testing.assert_array_equal(result, made("generic"))


EXTREME: list[dict[str, Any]] = [
    {"scale": 1e30, "a_scale": 0.0, "out_scale": 1e-10},
    {"scale": 10.0, "a_scale": 1e-38, "out_scale": 1e-38},
    {"scale": 1.0, "a_scale": 1.0, "out_scale": 1e-30, "bias": 1e10, "residual": -1e10},
    {"scale": 5.0, "a_scale": 1.0, "out_scale": 1e-38, "bias": -10.0},
    {"scale": 1e-30, "a_scale": 1e30, "out_scale": 0.25},
    {"scale": 1.0, "a_scale": 1.0, "out_scale": 0.25, "step": QuantizedResidual(3e38, 0)},
    {"scale": 2.0**-30, "a_scale": 2.0**-30, "out_scale": 2.0**-30},
    {"scale": 2.0**29, "a_scale": 2.0**29, "out_scale": 2.0**29},
]


@pytest.mark.parametrize("given", EXTREME, ids=str)
def test_scales_that_factors_of_would_leave_float32(given: dict[str, Any]) -> None:
    """Then the order of rows with scales of their own is kept, in which nothing overflows."""
    m, n, k = 2, 20, 2
    weight = QTensor(np.ones((k, n), np.int8), np.full(n, given["scale"], np.float32),
                     np.zeros(n, np.int32), int_format("int8"), axis=1)  # fmt: skip
    options: dict[str, Any] = {"out_dtype": "int8", "out_zero_point": 7}
    options["out_scale"] = given["out_scale"]
    if "bias" in given:
        options["bias"] = np.full(n, given["bias"], np.float32)
    if "residual" in given:
        options["residual"] = np.full((m, n), given["residual"], np.float32)
    if "step" in given:
        options["post_ops"] = (given["step"],)
        options["residual"] = np.arange(m * n, dtype=np.uint8).reshape(m, n)
    a, packed = np.ones((m, k), np.uint8), lowbit.pack(weight)
    rows = np.full(m, given["a_scale"], np.float32)
    expected = lowbit.matmul_scaled(a, packed, a_scale=rows, **options)
    for _ in range(3):
        made = lowbit.matmul_scaled(a, packed, a_scale=given["a_scale"], **options)
        np.testing.assert_array_equal(made, expected)


@ISAS
@pytest.mark.parametrize("out_dtype", ["uint8", "int8"])
def test_numbers_beyond_32_bits_become_the_ends(out_dtype: Any, isa: str) -> None:
    m, n, k = 5, 40, 2
    values = np.where(np.arange(n) % 3, 1, -1).astype(np.int8)
    weight = QTensor(np.tile(values, (k, 1)), np.ones(n, np.float32), np.zeros(n, np.int32),
                     int_format("int8"), axis=1)  # fmt: skip
    limits = np.iinfo(out_dtype)
    expected = np.tile(np.where(values > 0, limits.max, limits.min), (m, 1))
    for a_scale in (1.0, np.ones(m, np.float32)):
        made = lowbit.matmul_scaled(
            np.ones((m, k), np.uint8), lowbit.pack(weight), a_scale=a_scale, isa=isa,
            out_dtype=out_dtype, out_scale=1e-30, out_zero_point=3,
        )  # fmt: skip
        np.testing.assert_array_equal(made, expected)


def test_a_scale_means_the_same_whatever_holds_it() -> None:
    options: dict[str, Any] = {"out_dtype": "uint8", "out_scale": 0.031, "bias": PROBLEM["bias"]}
    scale = float(np.float32(0.004))
    a, b = PROBLEM["call"]["a"], PROBLEM["call"]["b"]
    expected = lowbit.matmul_scaled(a, b, a_scale=scale, a_zero_point=9, **options)
    for kind in (np.float32, np.float64, np.array):
        for zero in (9, np.int32(9), np.array(9)):
            made = lowbit.matmul_scaled(a, b, a_scale=kind(scale), a_zero_point=zero, **options)
            np.testing.assert_array_equal(made, expected)


@ISAS
def test_bfloat16_output(isa: str) -> None:
    torch = pytest.importorskip("torch")
    real = _call(("bias",), isa=isa)
    made = _call(("bias",), isa=isa, out_dtype="bfloat16")
    expected = torch.from_numpy(real).to(torch.bfloat16)
    assert made.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(made.view(np.uint16), expected.view(torch.uint16).numpy())


NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FABCDEF], np.uint32)


@pytest.mark.deep("*-avx512_vnni", "*-amx*")
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_nan_is_the_same_bits_everywhere(steps: Any, out_dtype: Any, isa: str) -> None:
    """Whichever operand it came from, and where it was made of infinities and zeros."""
    scale = np.ones(SIZES[0], np.float32)
    scale[:5], scale[5], scale[6] = NANS.view(np.float32), np.inf, -np.inf
    call = {**PROBLEM["call"], "a_scale": scale, "a": PROBLEM["call"]["a"].copy()}
    call["a"][:9] = call["a_zero_point"][:9, None]  # sums of zero
    for name in ("bias", "residual"):
        if name in steps:
            operand = call[name] = PROBLEM[name].copy()
            operand[..., :5], operand[..., 5] = NANS[::-1].view(np.float32), -np.inf
    result = lowbit.matmul_scaled(**call, post_ops=steps, out_dtype=out_dtype, isa=isa)
    bits = result.view(np.uint32 if out_dtype == "float32" else np.uint16)
    nan = 0x7FC00000 if out_dtype == "float32" else 0x7FC0
    assert (bits[:7] == nan).all()
    largest = 0x7F800000 if out_dtype == "float32" else 0x7F80
    is_nan = bits & (0x7FFFFFFF if out_dtype == "float32" else 0x7FFF) > largest
    assert (bits[is_nan] == nan).all()
    generic = lowbit.matmul_scaled(**call, post_ops=steps, out_dtype=out_dtype, isa="generic")
    np.testing.assert_array_equal(bits, generic.view(bits.dtype))


@pytest.mark.deep(
    "*-avx2",
    "*-avx512_vnni",
    "int8-uint8-generic",
    "uint8-float32-avx512",
    "*-avx2_vnni",
    "*-amx*",
    "uint8-float32-amx*",
)
@pytest.mark.pairs
@ISAS
@pytest.mark.parametrize("out_dtype", ["float32", "uint8"])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_residual_of_bytes(dtype: str, out_dtype: str, isa: str) -> None:
    """As the same numbers in float32, to the bit: (r − zero point) · scale rounds once."""
    rng = np.random.default_rng(8)
    limits = np.iinfo(dtype)
    added = rng.integers(limits.min, limits.max + 1, SIZES[:2]).astype(dtype)
    step = QuantizedResidual(0.0371, limits.min + 100, dtype)
    output = {"out_dtype": out_dtype, **({"out_scale": 0.1} if out_dtype == "uint8" else {})}
    result = lowbit.matmul_scaled(
        **PROBLEM["call"], residual=added, post_ops=(step, "relu"), isa=isa, **output
    )
    real = (added.astype(np.float32) - np.float32(step.zero_point)) * np.float32(step.scale)
    expected = lowbit.matmul_scaled(
        **PROBLEM["call"], residual=real, post_ops=("residual", "relu"), isa=isa, **output
    )
    np.testing.assert_array_equal(result, expected)
    with pytest.raises(TypeError, match=f"residual must be {dtype}, got float32"):
        lowbit.matmul_scaled(**PROBLEM["call"], residual=real, post_ops=(step,))


@ISAS
def test_leaky_relu(isa: str) -> None:
    real = _call((), isa=isa)
    leaking = _call((LeakyRelu(0.3),), isa=isa)
    np.testing.assert_array_equal(leaking, np.where(real < 0, real * np.float32(0.3), real))


@pytest.mark.deep
def test_linear_dynamic_takes_steps() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 70)).astype(np.float32)
    b = PROBLEM["call"]["b"]
    q, scale, zero = quantize_rows(x, symmetric=False)
    bias, residual = PROBLEM["bias"], PROBLEM["residual"][:9]
    steps = ("bias", "gelu", "residual")
    parts = lowbit.matmul_scaled(
        q, b, a_scale=scale, a_zero_point=zero, bias=bias, residual=residual, post_ops=steps
    )
    whole = lowbit.linear_dynamic(x, b, bias, residual=residual, post_ops=steps)
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize(
    ("steps", "dtype", "scale", "zero", "kept"),
    [
        (("bias", "relu"), "uint8", 0.1, 0, 1),
        (("bias", "relu"), "uint8", 0.1, 1, 2),  # -0.1 is less than 0
        (("bias", "relu"), "int8", 0.1, -128, 1),
        (("bias", "relu"), "float32", None, 0, 2),
        (("bias", "silu", "relu"), "uint8", 0.1, 0, 2),
        (("relu", "bias"), "uint8", 0.1, 0, 2),
        (("bias", lowbit.Clamp(0, 6)), "uint8", 6 / 255, 0, 1),
        (("bias", lowbit.Clamp(0, 6)), "uint8", 6.02 / 255, 0, 2),
        (("bias", lowbit.Clamp(-1, 3e38), "relu"), "uint8", 0.5, 0, 1),
        (("bias", lowbit.Clamp(-1, 1)), "int8", 1 / 127, 0, 2),  # -128 is less than -1
    ],
)
def test_bounds_of_the_outputs_own_format_are_left_out(
    steps: tuple[Any, ...], dtype: str, scale: float | None, zero: int, kept: int
) -> None:
    assert len(OutputSpec.of(True, False, steps, dtype, scale, zero).post_ops) == kept


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"post_ops": ("clamp",)}, "post-operation 'clamp' needs numbers"),
        ({"post_ops": ("sine",)}, "no post-operation is called 'sine'; known: .*gelu_tanh"),
        ({"post_ops": ("bias",), "bias": None}, "'bias' needs the argument bias"),
        ({"post_ops": (), "residual": np.zeros(SIZES[:2], np.float32)}, "residual is given, but"),
        ({"residual": np.zeros((2, 2), np.float32)}, r"residual must have shape \(21, 37\)"),
        ({"out_dtype": "float16"}, "out_dtype 'float16' is not one of float32"),
        ({"out_dtype": "int8"}, "needs a positive, finite out_scale, got None"),
        ({"out_dtype": "int8", "out_scale": 0.0}, "positive, finite out_scale"),
        ({"out_dtype": "int8", "out_scale": 1.0, "out_zero_point": 200}, "outside of int8"),
        ({"out_scale": 1.0}, "belong to a quantized out_dtype"),
    ],
)
def test_bad_arguments(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lowbit.matmul_scaled(**{**PROBLEM["call"], **more})


def test_batched_matmul() -> None:
    rng = np.random.default_rng(5)
    a = rng.integers(-128, 128, (2, 1, 5, 33)).astype(np.int8)
    b = rng.integers(0, 256, (3, 33, 17)).astype(np.uint8)
    expected = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(lowbit.matmul(a, b), expected)
    out = np.empty(expected.shape, np.int32)
    assert lowbit.matmul(a, b, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lowbit.matmul(a, b[0]), a.astype(np.int64) @ b[0])
    np.testing.assert_array_equal(lowbit.matmul(a, lowbit.pack(b[1])), a.astype(np.int64) @ b[1])
    empty = lowbit.matmul(np.zeros((2, 3, 0), np.int8), np.zeros((0, 4), np.int8))
    assert empty.shape == (2, 3, 4)
    assert not empty.any()
    with pytest.raises(ValueError, match="last dimension of a must equal"):
        lowbit.matmul(np.zeros((0, 3, 4), np.int8), np.zeros((0, 5, 4), np.int8))
    with pytest.raises(TypeError, match="NumPy array or a PyTorch tensor, got list"):
        lowbit.matmul(a, [[1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broadcast"):
        lowbit.matmul(np.zeros((2, 3, 4), np.int8), np.zeros((3, 4, 5), np.int8))
    with pytest.raises(ValueError, match="at least two dimensions"):
        lowbit.matmul(a, np.zeros(33, np.int8))
