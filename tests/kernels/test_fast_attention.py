"""The kernels of attention, forward and backward, in the interpreter at odd shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.kernels.triton.fast import attention as fast
from lowbit.kernels.triton.fast.attention import AttentionConfig
from lowbit.kernels.triton.fast.attention import attention as attention_kernels
from lowbit.kernels.triton.fast.attention_backward import (
    BackwardConfig,
    KeysConfig,
    attention_backward,
)
from lowbit.kernels.triton.fast.launch import Gpu
from lowbit.torch.functional import attention
from lowbit_lab import interpreter

# batch, heads, key heads, queries, keys, head size
SHAPES = [
    (1, 1, 1, 33, 40, 64),
    (2, 4, 2, 17, 50, 16),
    (1, 2, 1, 50, 17, 20),
    (1, 3, 3, 1, 37, 27),
    (1, 1, 1, 5, 1, 128),
    (1, 2, 1, 18, 33, 96),
    (1, 1, 1, 17, 34, 256),
    (1, 2, 1, 20, 64, 16),  # whole blocks of keys: not masked, unless causal
    (1, 1, 1, 16, 48, 32),  # one and a half of them
]
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CONFIG = AttentionConfig(16, 32, 4, 2)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, with heads and queries the other way round in memory, k, v, dz."""
    batch, heads, key_heads, queries, keys, size = shape
    made = torch.Generator().manual_seed(sum(shape))
    q = torch.randn((batch, queries, heads, size), generator=made).to(dtype).transpose(1, 2)
    k, v = (torch.randn((batch, key_heads, keys, size), generator=made).to(dtype) for _ in "kv")
    return q, k, v, torch.randn((batch, heads, queries, size), generator=made).to(dtype)


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    window: int | None = None, cap: float | None = None,
) -> Tensor:  # fmt: skip
    """In float64, by the formula; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scale * torch.einsum("bhid,bhjd->bhij", q, k)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    rows, columns = scores.shape[-2:]
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    seen = (j - i <= columns - rows) if causal else torch.ones((rows, columns), dtype=torch.bool)
    if window is not None:
        seen = seen & (j - i > columns - rows - window)
    some = seen.any(1, keepdim=True)
    # A row that sees nothing: any finite scores, and then nothing of them.
    weights = torch.softmax(scores.masked_fill(~seen & some, -math.inf), -1) * some
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def close(got: Tensor, wanted: Tensor, roundings: int) -> None:
    """Within so many roundings of `got`'s dtype of the largest element. The interpreter cuts off
    what a GPU rounds, which makes each rounding two."""
    assert torch.isfinite(got).all()
    error = (got.double() - wanted).abs().max().item()
    assert error <= 2 * roundings * ROUNDOFF[got.dtype] * wanted.abs().max().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    q, k, v, _ = operands(shape, dtype)
    scale = shape[-1] ** -0.5
    with interpreter():
        z, lse = attention_kernels(q, k, v, causal, scale, config=CONFIG)
    close(z, exact(q.double(), k.double(), v.double(), causal, scale), 3)
    assert z.is_contiguous()
    seen = torch.isfinite(lse)
    assert seen.all() or (causal and shape[3] > shape[4])
    assert (z[~seen] == 0).all()


@pytest.mark.parametrize(
    "how", [{"window": 1}, {"window": 20}, {"cap": 2.0}, {"window": 33, "cap": 5.0}], ids=str
)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2], (1, 1, 1, 70, 130, 16)])
def test_windows_and_caps(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    q, k, v, _ = operands(shape, torch.bfloat16)
    with interpreter():
        z, _ = attention_kernels(q, k, v, True, 0.5, config=CONFIG, **how)
    wanted = exact(q.double(), k.double(), v.double(), True, 0.5, **how)
    close(z, wanted, 3)
    close(attention(q, k, v, causal=True, scale=0.5, **how), wanted, 3)


def test_a_window_has_no_derivative() -> None:
    q, k, v, dz = operands((1, 2, 1, 5, 7, 16), torch.float16)
    leaf = q.detach().requires_grad_()
    with pytest.raises(NotImplementedError, match="no derivative"):
        attention(leaf, k, v, causal=True, window=3).backward(dz)


def test_how_many_heads_take_turns() -> None:
    """As many as an H200 runs at once or, causal, as its cache holds; never more than there are."""
    gpu = Gpu(90, 132)
    for length, full, causal in ((1024, 16, 48), (4096, 4, 12), (16384, 1, 3), (65536, 1, 1)):
        given = (gpu, length // 128, 256, length, 128)
        assert fast.section_of(*given, False) == full
        assert fast.section_of(*given, True) == causal
    assert fast.section_of(gpu, 1, 5, 16, 16, False) == 5
    assert fast.section_of(gpu, 1, 5, 16, 16, True) == 5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[5:7])
def test_backward(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    q, k, v, dz = operands(shape, dtype)
    scale = shape[-1] ** -0.5
    config = BackwardConfig(KeysConfig(32, 16, 4, 2), AttentionConfig(16, 32, 4, 2))
    with interpreter():
        z, lse = attention_kernels(q, k, v, causal, scale, config=CONFIG)
        got = attention_backward(q, k, v, z, lse, dz, causal, scale, config)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide_q, wide_k, wide_v = leaves
    exact(wide_q, wide_k, wide_v, causal, scale).backward(dz.double())
    for mine, leaf in zip(got, leaves, strict=True):
        assert leaf.grad is not None
        assert mine.shape == leaf.shape
        # A single key: its weight is 1 whatever q and k are, and their gradients are nought.
        if leaf.grad.abs().max() > 1e-6:
            close(mine, leaf.grad, 6)
        else:
            assert mine.abs().max() < 1e-2


def test_large_scores_and_negative_ones() -> None:
    """Scores of ±10,000: the largest is taken off, and padding does not count as 0."""
    q = torch.full((1, 1, 17, 16), 25.0, dtype=torch.float16)
    k = torch.full((1, 1, 33, 16), -25.0, dtype=torch.float16)
    v = torch.arange(33.0).to(torch.float16)[:, None].expand(1, 1, 33, 16)
    with interpreter():
        z, _ = attention_kernels(q, k, v, False, 1.0, config=CONFIG)
        same, _ = attention_kernels(q, -k, v, False, 1.0, config=CONFIG)
    assert (z == 16).all()
    assert (same == 16).all()


def test_the_operator_is_differentiable() -> None:
    q, k, v, dz = operands((1, 2, 1, 20, 23, 32), torch.float16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with interpreter():
        attention(*leaves, causal=True).backward(dz)
    mine = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    attention(*leaves, causal=True).backward(dz)
    for got, leaf in zip(mine, leaves, strict=True):
        assert got is not None
        assert leaf.grad is not None
        close(got, leaf.grad.double(), 6)


@pytest.mark.deep
def test_opcheck() -> None:
    q, k, v, _ = operands((1, 2, 1, 5, 7, 16), torch.float16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.lowbit.attention.default, (*leaves, True, 0.25, 0, 0.0))


@pytest.mark.parametrize("size", [0, 3])
def test_nothing_to_attend_to(size: int) -> None:
    q = torch.ones(1, 1, size, 16, dtype=torch.float16)
    with interpreter():
        z, lse = attention_kernels(q, q[:, :, :0], q[:, :, :0], False, 1.0)
    assert z.shape == q.shape
    assert (z == 0).all()
    assert (lse == math.inf).all()


def test_bad_arguments() -> None:
    q = torch.ones(2, 4, 5, 16, dtype=torch.float16)
    k = torch.ones(2, 2, 7, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        attention(q.float(), k.float(), k.float())
    with pytest.raises(TypeError, match="convert one"):
        attention(q, k.bfloat16(), k)
    with pytest.raises(ValueError, match="k and v must be alike"):
        attention(q, k, k[:, :, :6])
    with pytest.raises(ValueError, match="k and v must be alike"):
        attention(q, k[:1], k[:1])
    with pytest.raises(ValueError, match="cannot share 3 key heads"):
        attention(q, k[:, :1].expand(2, 3, 7, 16), k[:, :1].expand(2, 3, 7, 16))
    with pytest.raises(ValueError, match="from 1 to 256"):
        attention(*(x.repeat(1, 1, 1, 17) for x in (q, k, k)))
    with pytest.raises(ValueError, match="positive"):
        attention(q, k, k, scale=-1.0)
    with pytest.raises(ValueError, match="cap is 0"):
        attention(q, k, k, cap=0.0)
    with pytest.raises(ValueError, match="give causal=True"):
        attention(q, k, k, window=3)
    with pytest.raises(ValueError, match="batch, heads, length"):
        attention(q[0], k, k)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AttentionConfig(48, 32, 4, 2), "power of two"),
        (AttentionConfig(8, 32, 4, 2), "queries is 8; it must be 16 or more"),
        (AttentionConfig(128, 128, 8, 4), "shared memory"),
    ],
)
def test_configurations_that_do_not_fit(config: AttentionConfig, message: str) -> None:
    q = torch.ones(1, 1, 5, 128, dtype=torch.float16)
    with pytest.raises(ValueError, match=message):
        attention_kernels(q, q, q, False, 1.0, config=config)
