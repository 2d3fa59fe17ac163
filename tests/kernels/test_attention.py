"""Attention in one call, against float64, within errors that are counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from lowbit.isa import TABLE, available, get
from lowbit.isa.avx512 import starts_like_fma
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.attention.attention import attention
from lowbit.kernels.cpu.attention.plan import (
    AttentionForm,
    AttentionPlan,
    Sizes,
    attention_parameters,
    micro_for,
    plan_attention,
)
from lowbit.kernels.cpu.float.micro_kernel import FloatMicro, float_micro_kernels
from lowbit.spec.attention import causal_diagonal

U, UB = 2.0**-24, 2.0**-8
DTYPES = {
    "f32": np.dtype(np.float32), "bf16": np.dtype(bfloat16), "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
}  # fmt: skip
AFFINE = {"u8": [(0.02, 117), (0.013, 130), (0.03, 90)], "s8": [(0.02, 3), (0.013, -5), (0.03, 0)]}
OUT_AFFINE = {"u8": (0.01, 120), "s8": (0.02, -3)}
# One instruction set and kind of products for each micro-kernel.
CASES = list(
    {
        micro_for(get(isa), products): (isa, products)
        for isa in available()
        for products in ("bf16", "f32")
    }.values()
)


@dataclass
class Problem:
    """Operands [batch, rows, heads, dim] of one packed projection, as a network has them."""

    form: AttentionForm
    sizes: Sizes
    arrays: list[np.ndarray]
    mask: np.ndarray | None = None
    padding: np.ndarray | None = None
    causal: bool = False
    scale: float | None = None

    @property
    def diagonal(self) -> int | None:
        return causal_diagonal(self.sizes.queries, self.sizes.keys) if self.causal else None

    @property
    def factor(self) -> float:
        return self.sizes.head_dim**-0.5 if self.scale is None else self.scale


def _numbers(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if DTYPES[name].kind in "iu":
        limits = np.iinfo(DTYPES[name])
        return rng.integers(limits.min, limits.max + 1, shape).astype(DTYPES[name])
    return rng.standard_normal(shape).astype(DTYPES[name])


def _problem(
    form: AttentionForm, queries: int, keys: int, dim: int, value_dim: int | None = None,
    batch: int = 1, heads: int = 2, key_heads: int | None = None, **more: Any,
) -> Problem:  # fmt: skip
    sizes = Sizes(batch, heads, queries, keys, dim, value_dim or dim, key_heads or heads)
    rng = np.random.default_rng(queries * 1000 + keys + dim)
    if queries == keys and sizes.key_heads == heads and sizes.value_dim == dim:
        packed = _numbers(rng, form.inputs, (batch, queries, 3, heads, dim))
        arrays = [packed[:, :, i] for i in range(3)]
    else:
        arrays = [
            _numbers(rng, form.inputs, (batch, queries, heads, dim)),
            _numbers(rng, form.inputs, (batch, keys, sizes.key_heads, dim)),
            _numbers(rng, form.inputs, (batch, keys, sizes.key_heads, sizes.value_dim)),
        ]
    return Problem(form, sizes, arrays, **more)


def _strides(array: np.ndarray) -> tuple[int, int, int]:
    """Of [batch, rows, heads, ...], as a plan wants them."""
    batch, row, head = (s // array.itemsize for s in array.strides[:3])
    return batch, head, row


def _plan(p: Problem, out: np.ndarray, isa: str, products: str, threads: int) -> AttentionPlan:
    strides: list[tuple[int, ...]] = [_strides(one) for one in (*p.arrays, out)]
    for one in (p.mask, p.padding):  # [batch, heads, queries, keys], whatever they were
        if one is not None:
            strides.append(tuple(s // one.itemsize for s in one.strides[:3]))
    return plan_attention(p.form, p.sizes, strides, get(isa), products, p.diagonal, threads)


def _run(
    p: Problem, isa: str, products: str, threads: int = 1, interpret: bool = False
) -> np.ndarray:
    s = p.sizes
    out = np.full((s.batch, s.queries, s.heads, s.value_dim), 77, DTYPES[p.form.out])
    plan = _plan(p, out, isa, products, threads)
    q, k, v = AFFINE.get(p.form.inputs, [None] * 3)
    scratch = aligned_empty((threads, plan.scratch_bytes), np.uint8)
    scratch[:] = 0xFF  # NaN, should any of it be read
    given = {
        "out": out, **dict(zip(("q", "key", "value"), p.arrays, strict=True)),
        "mask": p.mask, "padding": p.padding,
        "parameters": attention_parameters(p.factor, q, k, v, OUT_AFFINE.get(p.form.out)),
        "geometry": plan.geometry, "scratch": scratch, "items": plan.items,
    }  # fmt: skip
    if interpret:
        attention.interpret(plan.isa, given, form=plan.form, micro=plan.micro)
    else:
        program = attention.program(plan.isa, form=plan.form, micro=plan.micro)
        program.bind(threads, (), **given)()
    return out


def _real(p: Problem) -> list[np.ndarray]:
    """q, k and v [batch, heads, rows, dim] in float64."""
    found = []
    for array, affine in zip(p.arrays, AFFINE.get(p.form.inputs, [None] * 3), strict=True):
        one = array.astype(np.float64)
        if affine is not None:
            one = (one - affine[1]) * affine[0]
        found.append(one.transpose(0, 2, 1, 3))
    group = p.sizes.heads // p.sizes.key_heads
    return [found[0], *(np.repeat(one, group, 1) for one in found[1:])]


def _exact(p: Problem, pair: bool) -> tuple[np.ndarray, np.ndarray]:
    """[batch, rows, heads, dim] in float64, and how far the kernel may be off.

    A score errs by what rounding q and k to bfloat16 makes of its terms (2 ub), and by the sum's
    (d + 4) u; and in the exponent by 6 u of its size and the greatest's and the mask's. A weight
    errs by that, absolutely in the exponent, by 4 u or, of pairs, 1.1e-4 of the polynomial, and by
    ub when it is rounded; v by ub; the sums of n terms by (n + 4) u. Below 2^-126 weights are 0.
    """
    q, k, v = _real(p)
    s = p.sizes
    exact_inputs = p.form.inputs != "f32"
    rounding = 2 * UB + UB * UB if pair and not exact_inputs else 0.0
    scores = q @ k.swapaxes(2, 3) * p.factor
    size = np.abs(q) @ np.abs(k).swapaxes(2, 3) * p.factor
    if p.form.cap:
        scores = p.form.cap * np.tanh(scores / p.form.cap)
        size = size + p.form.cap
    error = size * (rounding + (s.head_dim + 4) * U)
    if p.mask is not None:
        scores = scores + p.mask
        size = size + np.where(np.isinf(p.mask), 0, np.abs(p.mask))
    hidden = np.zeros(scores.shape, bool)
    if p.padding is not None:
        hidden |= np.broadcast_to(p.padding == 0, scores.shape)
    if p.diagonal is not None:
        hidden |= ~np.tri(s.queries, s.keys, p.diagonal, bool)
        if p.form.window:
            hidden |= np.tri(s.queries, s.keys, p.diagonal - p.form.window, bool)
    scores = np.where(hidden, -np.inf, scores)
    greatest = scores.max(-1, keepdims=True, initial=-np.inf)
    error = error + 6 * U * (size + size.max(-1, keepdims=True, initial=0))
    less = scores - np.where(np.isneginf(greatest), 0, greatest)
    powers = np.exp(less)
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)
    # An error that all share cancels, and that of the greatest is in the others' as well.
    worst = error + error.max(-1, keepdims=True, initial=0)
    relative = np.expm1(worst) + (1.2e-4 if pair else 5 * U)
    share = (weights * relative).sum(-1, keepdims=True) + (s.keys + 4) * U
    relative = (1 + relative) * (1 + share / (1 - np.minimum(share, 0.5))) - 1
    kept = relative + (UB * (1 + relative) if pair else 0.0)
    value_rounding = UB if pair and not exact_inputs else 0.0
    magnitude = weights @ np.abs(v)
    off = (weights * kept) @ np.abs(v) * (1 + value_rounding) + value_rounding * magnitude
    off = off + (s.keys + 8) * U * magnitude + s.keys * 2.0**-126 * np.abs(v).max(initial=0)
    return (weights @ v).transpose(0, 2, 1, 3), off.transpose(0, 2, 1, 3)


def _check(p: Problem, got: np.ndarray, exact: np.ndarray, error: np.ndarray) -> None:
    name = p.form.out
    if name in OUT_AFFINE:
        scale, zero = OUT_AFFINE[name]
        limits, steps = np.iinfo(got.dtype), exact / scale
        slack = error / scale + 4 * U * np.abs(steps)
        low, high = (
            np.clip(np.rint(steps + off) + zero, limits.min, limits.max) for off in (-slack, slack)
        )
        assert ((low <= got) & (got <= high)).all()
        return
    rounding = UB if name == "bf16" else 0.0
    worst = np.abs(got.astype(np.float64) - exact) - error - rounding * (np.abs(exact) + error)
    assert not np.isnan(got.astype(np.float32)).any()
    assert worst.max(initial=0) <= 0, (worst.max(), np.abs(error).max())


def _everywhere(p: Problem, interpret: bool = True) -> None:
    """On every instruction set, in one thread and in three, and interpreted: within the budget, and
    of one micro-kernel the same bits."""
    budgets = {}
    for isa, products in CASES:
        got = _run(p, isa, products)
        pair = _plan(p, got, isa, products, 1).micro.pair
        if pair not in budgets:
            budgets[pair] = _exact(p, pair)
        _check(p, got, *budgets[pair])
        assert _run(p, isa, products, 3).tobytes() == got.tobytes(), (isa, products)
        if interpret:
            assert _run(p, isa, products, 1, True).tobytes() == got.tobytes(), (isa, products)


@pytest.mark.deep("*-1", "*-15", "*-2", "*-17")
@pytest.mark.pairs
@pytest.mark.parametrize("tokens", [1, 2, 15, 17, 64, 197, 1000])
@pytest.mark.parametrize("formats", ["f32 f32", "bf16 bf16", "u8 s8", "s8 f32", "f32 u8"])
def test_tokens(tokens: int, formats: str) -> None:
    inputs, out = formats.split()
    _everywhere(_problem(AttentionForm(inputs, out), tokens, tokens, 64), tokens < 60)


@pytest.mark.deep("*-40", "*-8", "u8-1")
@pytest.mark.pairs
@pytest.mark.parametrize("dim", [1, 8, 40, 64, 80, 128])
@pytest.mark.parametrize("inputs", ["f32", "bf16", "u8"])
def test_head_dimensions(dim: int, inputs: str) -> None:
    interpret = dim in (1, 40)  # on one row more than a block's, compiled on two blocks and one
    rows = 17 if interpret else 33
    _everywhere(_problem(AttentionForm(inputs, "f32"), rows, rows, dim), interpret)


@pytest.mark.deep("sizes0", "sizes1")
@pytest.mark.parametrize("sizes", [(5, 77, 24, 40), (70, 3, 8, 17), (1, 300, 64, 64)])
def test_other_keys_and_values(sizes: tuple[int, ...]) -> None:
    _everywhere(_problem(AttentionForm("bf16", "f32"), *sizes, batch=2), interpret=sizes[1] < 100)


@pytest.mark.deep
def test_heads_that_share_keys() -> None:
    _everywhere(_problem(AttentionForm("f32", "f32"), 9, 20, 16, heads=6, key_heads=2, batch=2))


@pytest.mark.deep("f32-sizes1", "s8-sizes1")
@pytest.mark.parametrize("sizes", [(70, 70), (18, 50), (90, 40)])
@pytest.mark.parametrize("inputs", ["f32", "s8"])
def test_causal(sizes: tuple[int, int], inputs: str) -> None:
    p = _problem(AttentionForm(inputs, "f32"), *sizes, 24, 32, causal=True)
    _everywhere(p, interpret=sizes[0] == 18)


@pytest.mark.deep
@pytest.mark.parametrize("sizes", [(70, 70), (40, 290), (90, 40)])
@pytest.mark.parametrize("limits", [(1, 0.0), (33, 0.0), (100, 2.0), (0, 2.0)])
def test_windows_and_caps(sizes: tuple[int, int], limits: tuple[int, float]) -> None:
    form = AttentionForm("bf16", "f32", False, False, *limits)
    _everywhere(_problem(form, *sizes, 24, 32, causal=True), sizes[0] == 40 and limits[0] == 33)


@pytest.mark.deep("pairs/avx512_bf16")
@pytest.mark.parametrize("micro", [one for one in float_micro_kernels if one.pair], ids=repr)
def test_windows_of_pairs(micro: FloatMicro, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, also where the machine has none."""
    monkeypatch.setattr("lowbit.kernels.cpu.attention.plan.micro_for", lambda *_: micro)
    for limits in ((40, 0.0), (70, 2.0)):
        form = AttentionForm("bf16", "f32", False, False, *limits)
        p = _problem(form, 40, 230, 24, heads=1, causal=True)
        _check(p, _run(p, "generic", "bf16", interpret=True), *_exact(p, True))


@pytest.mark.deep("False-shape0")
@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1, 1, 45), (2, 1, 1, 45), (1, 3, 37, 45), (2, 3, 37, 45)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(shape: tuple[int, ...], causal: bool) -> None:
    """Broadcast masks of numbers, some minus infinity, and padding; rows without keys are zero."""
    rng = np.random.default_rng(3)
    mask = rng.standard_normal(shape).astype(np.float32)
    mask[rng.random(shape) < 0.2] = -np.inf
    mask[..., 0, :] = -np.inf if shape[2] > 1 else mask[..., 0, :]
    padding = (rng.random((2, 1, 1, 45)) < 0.7).astype(np.uint8) * 255
    whole = (2, 3, 37, 45)
    form = AttentionForm("bf16", "f32", True, True)
    given = {"mask": np.broadcast_to(mask, whole), "padding": np.broadcast_to(padding, whole)}
    p = _problem(form, 37, 45, 40, 24, batch=2, heads=3, causal=causal, scale=0.3, **given)
    _everywhere(p, interpret=causal and shape == (1, 3, 37, 45))
    if shape[2] > 1:
        assert not _run(p, CASES[0][0], "bf16")[:, 0].any()


@pytest.mark.parametrize(("isa", "products"), CASES)
def test_one_key_gives_its_value(isa: str, products: str) -> None:
    """Its weight is 1, whatever its score."""
    p = _problem(AttentionForm("bf16", "f32"), 9, 1, 24)
    value = np.broadcast_to(p.arrays[2].astype(np.float32), (1, 9, 2, 24))
    np.testing.assert_allclose(_run(p, isa, products), value, rtol=2e-7)


def test_no_key_takes_part() -> None:
    padding = np.zeros((1, 2, 5, 40), np.uint8)
    form = AttentionForm("f32", "f32", padding=True)
    for isa, products in CASES:
        assert not _run(_problem(form, 5, 40, 16, padding=padding), isa, products).any()
        assert not _run(_problem(AttentionForm("f32", "f32"), 5, 0, 16), isa, products).any()


def test_what_is_not_finite() -> None:
    """NaN in a query spreads over its row, in a key over all rows that attend to it, and in a value
    over its column; an infinite score, too. What is masked hides its score."""
    for isa, products in CASES:
        for number, place in ((0, (0, 4, 1, 3)), (1, (0, 6, 1, 3)), (2, (0, 6, 1, 3))):
            p = _problem(AttentionForm("f32", "f32"), 20, 20, 16, causal=True)
            clean = _run(p, isa, products)
            p.arrays[number][place] = np.nan
            got, expected = _run(p, isa, products), np.zeros(clean.shape, bool)
            if number == 0:
                expected[0, 4, 1] = True
            elif number == 1:
                expected[0, 6:, 1] = True
            else:  # a weight of 0 times NaN
                expected[0, :, 1, 3] = np.isnan(got[0, :, 1, 3])
                assert expected[0, 6:, 1, 3].all()
            np.testing.assert_array_equal(np.isnan(got), expected)
            np.testing.assert_array_equal(got[~expected], clean[~expected])
        padding = np.ones((1, 2, 20, 20), np.uint8)
        padding[..., 6] = 0
        p = _problem(AttentionForm("f32", "f32", padding=True), 20, 20, 16, padding=padding)
        clean = _run(p, isa, products)
        p.arrays[1][0, 6] = np.inf
        assert _run(p, isa, products).tobytes() == clean.tobytes()


def test_large_scores() -> None:
    """Differences of thousands: one weight is 1, and the others are 0."""
    p = _problem(AttentionForm("f32", "f32"), 30, 30, 16, scale=1000.0)
    for isa, products in CASES:
        if not micro_for(get(isa), products).pair:
            _check(p, _run(p, isa, products), *_exact(p, False))
    assert _exact(p, False)[1].max() < 1


def test_products_fall_back_to_float32() -> None:
    assert not micro_for(get("generic"), "bf16").pair
    dots = starts_like_fma() and not TABLE.get("avx512_bf16").missing()
    faster = dots or not TABLE.get("amx_bf16").missing()
    assert micro_for(TABLE.get("amx"), "bf16").pair == faster
    assert not micro_for(TABLE.get("amx"), "f32").pair


def test_what_is_refused() -> None:
    sizes, isa = Sizes(1, 2, 3, 4, 8, 8, 2), get(available()[0])
    strides = [(1, 1, 1)] * 4
    for form, given, kinds, message in (
        (AttentionForm("s32", "f32"), sizes, strides, "no format"),
        (AttentionForm("f32", "f32"), Sizes(1, 3, 3, 4, 8, 8, 2), strides, "share"),
        (AttentionForm("f32", "f32"), Sizes(1, 2, 3, 4, 0, 8, 2), strides, "positive"),
        (AttentionForm("f32", "f32", True), sizes, strides, "5 times three strides"),
        (AttentionForm("f32", "f32", window=9), sizes, strides, "diagonal"),
        (AttentionForm("f32", "f32", True, window=9), sizes, strides, "without masks"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_attention(form, given, kinds, isa)
    with pytest.raises(ValueError, match="'bf16' or 'f32'"):
        plan_attention(AttentionForm("f32", "f32"), sizes, strides, isa, "f16")
    for scale in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="scale"):
            attention_parameters(scale)
