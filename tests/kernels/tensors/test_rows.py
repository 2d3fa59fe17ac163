"""LayerNorm, RMSNorm and softmax over rows, against float64, with errors that are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from lowbit.kernels.cpu.tensors.rows import (
    NormalizeForm,
    SoftmaxForm,
    normalize,
    normalize_parameters,
    plan_normalize,
    plan_softmax,
    softmax,
    softmax_parameters,
)

RunAll = Callable[..., dict[str, np.ndarray]]
UNIT = 2.0**-24
DTYPES = {
    "f32": np.dtype(np.float32), "bf16": np.dtype(bfloat16), "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
}  # fmt: skip
AFFINE = {"u8": (0.037, 117), "s8": (0.021, -5)}
WIDTHS = (1, 2, 15, 17, 64, 197, 1000)
THREADS = 3  # run_all's most


def _data(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if DTYPES[name].kind in "iu":
        limits = np.iinfo(DTYPES[name])
        return rng.integers(limits.min, limits.max + 1, shape).astype(DTYPES[name])
    return (rng.standard_normal(shape) * 3 + 1).astype(DTYPES[name])


def _real(stored: np.ndarray, name: str) -> np.ndarray:
    """What it stands for, as float32, which 8 bits are rounded to once."""
    if name not in AFFINE:
        return stored.astype(np.float32)
    scale, zero = AFFINE[name]
    return (stored.astype(np.int32) - zero).astype(np.float32) * np.float32(scale)


def _stored(real: np.ndarray, name: str) -> np.ndarray:
    if name not in AFFINE:
        return real.astype(DTYPES[name])
    limits, (scale, zero) = np.iinfo(DTYPES[name]), AFFINE[name]
    steps = real.astype(np.float32) * (np.float32(1) / np.float32(scale))
    return (np.rint(np.clip(steps, limits.min - zero, limits.max - zero)) + zero).astype(
        DTYPES[name]
    )


def _near(got: np.ndarray, name: str, exact: np.ndarray, error: np.ndarray) -> None:
    """`got` is what some number within `error` of `exact` is stored as, up to the rounding of
    bfloat16, or of the product with an inverse scale."""
    if name in AFFINE:
        scale, zero = AFFINE[name]
        limits = np.iinfo(DTYPES[name])
        steps, slack = exact / scale, error / scale + 4 * UNIT * np.abs(exact / scale)
        low, high = (
            np.clip(np.rint(steps + s) + zero, limits.min, limits.max) for s in (-slack, slack)
        )
        assert ((low <= got) & (got <= high)).all()
        return
    rounding = 2.0**-8 if name == "bf16" else 0.0
    worst = np.abs(got.astype(np.float64) - exact) - error - rounding * (np.abs(exact) + error)
    assert worst.max(initial=0) <= 0, worst.max()


def _normalized(
    x: np.ndarray, epsilon: float, centred: bool, weight: Any, bias: Any
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and how far float32 may be off, to first order with 1 % for the rest.

    A sum of n terms in 32 lanes errs by γ = (n/32 + 6) u of the sum of their sizes. So the mean
    errs by e = (γ + u) mean|x|, a centred number by e + u|d|, and the deviation, relatively, by
    (γ + 8 u) / 2 and half of 2 e mean|d| / variance, and by what e² adds.
    """
    x = x.astype(np.float64)
    n = x.shape[1]
    gamma = (n / 32 + 6) * UNIT
    centre = x.mean(1, keepdims=True) if centred else 0.0
    off = (gamma + UNIT) * np.abs(x).mean(1, keepdims=True) if centred else 0.0
    rest = x - centre
    square = (rest * rest).mean(1, keepdims=True) + epsilon
    inverse = 1 / np.sqrt(square)
    relative = (gamma + 8 * UNIT) / 2 + (
        off * np.abs(rest).mean(1, keepdims=True) + off**2
    ) / square
    w = 1.0 if weight is None else weight.astype(np.float64)
    b = 0.0 if bias is None else bias.astype(np.float64)
    product = rest * inverse * w
    error = np.abs(w) * inverse * off + np.abs(product) * (relative + 5 * UNIT)
    return product + b, 1.01 * (error + UNIT * np.abs(product + b)) + 1e-44


def _normalize(
    run_all: RunAll, form: NormalizeForm, x: np.ndarray, epsilon: float = 1e-5, seed: int = 0,
    interpret: bool = True,
) -> tuple[dict[str, np.ndarray], Any, Any]:  # fmt: skip
    rng = np.random.default_rng(seed)
    rows, width = x.shape
    weight = rng.standard_normal(width).astype(np.float32) if form.weight else None
    bias = rng.standard_normal(width).astype(np.float32) if form.bias else None
    plan = plan_normalize(form, rows, width)
    arguments = {
        "out": np.full((rows, width), 77, DTYPES[form.out]),
        "x": x, "weight": weight, "bias": bias,
        "parameters": normalize_parameters(epsilon, AFFINE.get(form.x), AFFINE.get(form.out)),
    }  # fmt: skip
    scratch = np.zeros((THREADS, plan.scratch_bytes // 4), np.float32)
    given = {**arguments, **plan.words, "scratch": scratch}
    result = run_all(normalize, given, interpret=interpret, apart=("scratch",), form=form)
    return result, weight, bias


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("formats", ["f32 f32", "bf16 bf16", "u8 s8", "s8 f32", "f32 u8"])
def test_layer_norm(run_all: RunAll, formats: str, width: int) -> None:
    x_format, out = formats.split()
    form = NormalizeForm(x_format, out)
    x = _data(np.random.default_rng(width), x_format, (5, width))
    got, weight, bias = _normalize(run_all, form, x, interpret=width < 200)
    _near(got["out"], out, *_normalized(_real(x, x_format), 1e-5, True, weight, bias))


@pytest.mark.deep("affine2-1")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [(False, False), (True, False), (False, True)])
def test_rms_norm_weights_and_biases(
    run_all: RunAll, affine: tuple[bool, bool], width: int
) -> None:
    for centred in (False, True):
        form = NormalizeForm("f32", "f32", centred, *affine)
        x = _data(np.random.default_rng(width), "f32", (4, width))
        got, weight, bias = _normalize(run_all, form, x, 1e-6, interpret=width < 100)
        _near(got["out"], "f32", *_normalized(x, 1e-6, centred, weight, bias))


def test_a_mean_far_from_zero(run_all: RunAll) -> None:
    """A variance of 1 at a mean of 4096: Σ x² − n·mean² would have lost it."""
    x = (np.random.default_rng(0).standard_normal((6, 768)) + 4096).astype(np.float32)
    got, weight, bias = _normalize(run_all, NormalizeForm("f32", "f32"), x, interpret=False)
    exact, error = _normalized(x, 1e-5, True, weight, bias)
    _near(got["out"], "f32", exact, error)
    assert error.max() < 0.2


def test_what_spreads_over_a_row(run_all: RunAll) -> None:
    x = _data(np.random.default_rng(1), "f32", (4, 33))
    x[0, 5], x[1, 32], x[2] = np.nan, -np.inf, 7.5
    got, _, bias = _normalize(run_all, NormalizeForm("f32", "f32"), x)
    assert np.isnan(got["out"][:2]).all()
    np.testing.assert_array_equal(got["out"][2], bias)
    assert np.isfinite(got["out"][3]).all()


def test_many_rows_and_none(run_all: RunAll) -> None:
    for rows in (0, 1, 131):
        x = _data(np.random.default_rng(2), "s8", (rows, 768))
        got, weight, bias = _normalize(run_all, NormalizeForm("s8", "s8"), x, interpret=False)
        _near(got["out"], "s8", *_normalized(_real(x, "s8"), 1e-5, True, weight, bias))


def test_what_normalize_refuses() -> None:
    with pytest.raises(ValueError, match="no format"):
        plan_normalize(NormalizeForm("s32", "f32"), 1, 1)
    with pytest.raises(ValueError, match="no format"):
        plan_normalize(NormalizeForm("f32", "s32"), 1, 1)
    with pytest.raises(ValueError, match="epsilon"):
        normalize_parameters(-1.0)


def _softmax(
    run_all: RunAll, form: SoftmaxForm, x: np.ndarray, scale: float = 1.0,
    mask: np.ndarray | None = None, interpret: bool = True,
) -> np.ndarray:  # fmt: skip
    rows, width = x.shape
    strides = (width, width if mask is not None and mask.ndim == 2 else 0, width)
    plan = plan_softmax(form, rows, width, strides)
    given = {
        "out": np.full((rows, width), 77, DTYPES[form.out]), "x": x, "mask": mask,
        "parameters": softmax_parameters(scale, AFFINE.get(form.x), AFFINE.get(form.out)),
        "scratch": np.zeros((THREADS, plan.scratch_bytes // 4), np.float32), **plan.words,
    }  # fmt: skip
    return run_all(softmax, given, interpret=interpret, apart=("scratch",), form=form)["out"]


def _weights(
    x: np.ndarray, scale: float, mask: Any, logarithm: bool
) -> tuple[np.ndarray, np.ndarray]:
    """In float64, and how far float32 may be off.

    t errs by 2 u of its terms, and so does the greatest; t − max by that and u of itself. The
    power errs by this absolute error, relatively, by 4 u of its own (Cephes: 2 ulp), and by e^-87
    below its end; the sum by (n/32 + 6) u of itself and by the mean error of its terms.
    """
    terms = [x.astype(np.float64) * np.float32(scale)] + ([] if mask is None else [mask])
    t = np.sum(terms, axis=0)
    size = np.sum([np.abs(np.where(np.isinf(term), 0, term)) for term in terms], axis=0)
    less = t - t.max(1, keepdims=True)
    finite = np.where(np.isinf(less), 0, less)
    argument = 2 * UNIT * (size + size.max(1, keepdims=True)) + UNIT * np.abs(finite)
    power = np.exp(less)
    total = power.sum(1, keepdims=True)
    worst = argument + 4 * UNIT
    share = (power * worst).sum(1, keepdims=True) / total + (x.shape[1] / 32 + 6) * UNIT
    if logarithm:
        value = less - np.log(total)
        # The logarithm of a sum of at most n errs by 3 u of itself at the most.
        error = (
            argument
            + share
            + 4 * UNIT * (np.log(total) + np.abs(np.where(np.isinf(value), 0, value)))
        )
        return value, 1.01 * error + 1e-37 * x.shape[1]
    value = power / total
    return value, 1.01 * value * (worst + share + 3 * UNIT) + 1.7e-38


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("formats", ["f32 f32", "bf16 bf16", "u8 u8", "s8 f32", "f32 s8"])
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(run_all: RunAll, formats: str, width: int, logarithm: bool) -> None:
    x_format, out = formats.split()
    x = _data(np.random.default_rng(width), x_format, (5, width))
    form = SoftmaxForm(x_format, out, logarithm=logarithm)
    got = _softmax(run_all, form, x, 0.7, interpret=width < 200)
    _near(got, out, *_weights(_real(x, x_format), 0.7, None, logarithm))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax_with_masks(run_all: RunAll, shared: bool, logarithm: bool) -> None:
    rng = np.random.default_rng(5)
    x = _data(rng, "f32", (6, 77)) * 20
    mask = rng.standard_normal((77,) if shared else x.shape).astype(np.float32)
    mask[..., rng.random(77) < 0.4] = -np.inf
    got = _softmax(run_all, SoftmaxForm("f32", "f32", True, logarithm), x, 1.5, mask)
    exact, error = _weights(x, 1.5, np.broadcast_to(mask, x.shape), logarithm)
    hidden = np.broadcast_to(np.isinf(mask), x.shape)
    np.testing.assert_array_equal(got[hidden], -np.inf if logarithm else 0.0)
    _near(got[~hidden], "f32", exact[~hidden], error[~hidden])


@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax_of_what_is_not_finite(run_all: RunAll, logarithm: bool) -> None:
    x = _data(np.random.default_rng(6), "f32", (5, 35))
    x[0, 3], x[1, 34], x[2], x[3, 7] = np.nan, np.inf, -np.inf, -np.inf
    got = _softmax(run_all, SoftmaxForm("f32", "f32", logarithm=logarithm), x)
    assert np.isnan(got[:3]).all()
    assert got[3, 7] == (-np.inf if logarithm else 0.0)
    assert np.isfinite(np.delete(got[3], 7)).all()
    assert np.isfinite(got[4]).all()


def test_softmax_refuses_formats() -> None:
    with pytest.raises(ValueError, match="no format"):
        plan_softmax(SoftmaxForm("f32", "s32"), 1, 1)
