# pyright: reportGeneralTypeIssues=false
"""Rows of a mixture: sorted by their experts, and what the experts made of them, added up."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import launch

_SORTED, _SUMMED = 4096, 1024  # pairs, and columns, at a time


@triton.jit
def top_experts_kernel(
    scores_ptr, shares_ptr, experts_ptr, count, score_stride,
    TOP: tl.constexpr, BLOCK: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """A program takes a row: the largest that is left, so many times."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + row * score_stride + i, mask=i < count, other=-float("inf"))
    share = tl.exp(scores - tl.max(scores, axis=0))
    # Above what is taken or isn't there, even if it is infinite or NaN.
    left = tl.where(i < count, tl.maximum(scores, -3.0e38), -float("inf"))
    rank = tl.full([BLOCK], TOP, tl.int32)
    for k in tl.static_range(TOP):
        best = i == tl.argmax(left, axis=0)
        rank = tl.where(best, k, rank)
        left = tl.where(best, -float("inf"), left)
    taken = rank < TOP
    share /= tl.sum(tl.where(taken, share, 0.0) if NORMALIZED else share, axis=0)
    tl.store(shares_ptr + row * TOP + rank, share, mask=taken)
    tl.store(experts_ptr + row * TOP + rank, i.to(tl.int64), mask=taken)


def top_experts(scores: Tensor, top: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """As `lowbit.torch.functional.top_experts`."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, count = scores.shape
    shares = scores.new_empty(rows, top)
    experts = torch.empty(rows, top, dtype=torch.int64, device=scores.device)
    arguments: dict[str, Any] = {
        "scores_ptr": scores, "shares_ptr": shares, "experts_ptr": experts, "count": count,
        "score_stride": scores.stride(0), "TOP": top, "BLOCK": triton.next_power_of_2(count),
        "NORMALIZED": normalized,
    }  # fmt: skip
    launch(top_experts_kernel, (rows,), arguments, num_warps=1)
    return shares, experts


@triton.jit
def route_kernel(
    experts_ptr, rows_ptr, places_ptr, ends_ptr, count, each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes an expert: it counts the pairs before its own, then gives its own places."""
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, count, BLOCK):
        chosen = tl.load(experts_ptr + at + i, mask=at + i < count, other=expert)
        before += (chosen < expert).to(tl.int32)
    end = tl.sum(before, axis=0)
    for at in range(0, count, BLOCK):
        inside = at + i < count
        own = (tl.load(experts_ptr + at + i, mask=inside, other=-1) == expert) & inside
        place = end + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(places_ptr + at + i, place, mask=own)
        tl.store(rows_ptr + place, (at + i) // each, mask=own)
        end += tl.sum(own.to(tl.int32), axis=0)
    tl.store(ends_ptr + expert, end)


def route(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `lowbit.torch.functional.route`."""
    experts = experts.contiguous()
    pairs = experts.numel()
    rows, places, ends = (
        torch.empty(shape, dtype=torch.int32, device=experts.device)
        for shape in ((pairs,), experts.shape, (count,))
    )
    block = min(max(triton.next_power_of_2(pairs), 32), _SORTED)
    arguments: dict[str, Any] = {
        "experts_ptr": experts, "rows_ptr": rows, "places_ptr": places, "ends_ptr": ends,
        "count": pairs, "each": max(experts.shape[1], 1), "BLOCK": block,
    }  # fmt: skip
    launch(route_kernel, (count,), arguments, num_warps=min(max(block // 256, 1), 8))
    return rows, places, ends


@triton.jit
def routed_sum_kernel(
    x_ptr, places_ptr, shares_ptr, residual_ptr, z_ptr, width, each, x_stride, residual_stride,
    ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = residual + the rows of x at a row's places, each times its share, in their order."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    total = tl.zeros([BLOCK], tl.float32)
    if ADDED:
        total = tl.load(residual_ptr + row * residual_stride + i, mask=inside, other=0.0)
        total = total.to(tl.float32)
    for k in range(each):
        place = tl.load(places_ptr + row * each + k).to(tl.int64)
        share = tl.load(shares_ptr + row * each + k)
        x = tl.load(x_ptr + place * x_stride + i, mask=inside, other=0.0)
        total += share * x.to(tl.float32)
    tl.store(z_ptr + row * width + i, total.to(z_ptr.dtype.element_ty), mask=inside)


def routed_sum(x: Tensor, places: Tensor, shares: Tensor, residual: Tensor | None) -> Tensor:
    """As `lowbit.torch.functional.routed_sum`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    (rows, each), width = places.shape, x.shape[1]
    z = x.new_empty(rows, width)
    arguments: dict[str, Any] = {
        "x_ptr": x, "places_ptr": places.contiguous(), "shares_ptr": shares.contiguous(),
        "residual_ptr": x if residual is None else residual, "z_ptr": z, "width": width,
        "each": each, "x_stride": x.stride(0), "ADDED": residual is not None,
        "residual_stride": 0 if residual is None else residual.stride(0), "BLOCK": _SUMMED,
    }  # fmt: skip
    launch(routed_sum_kernel, (rows, -(-width // _SUMMED)), arguments, num_warps=4)
    return z
