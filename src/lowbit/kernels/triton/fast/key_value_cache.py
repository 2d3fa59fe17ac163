"""The cache of keys and values: how kernels find a token in it, and writing into it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.attention import padded_head
from lowbit.kernels.triton.fast.launch import launch


@triton.jit
def slots(table, batch, at, inside, PAGE: tl.constexpr):
    """Where tokens of a sequence are: (page, int64, and slot in it). Without pages (PAGE is 0) the
    sequence is its own. table: pointer and stride of the block table."""
    if PAGE > 0:
        row = table[0] + batch.to(tl.int64) * table[1]
        page = tl.load(row + at // PAGE, mask=inside, other=0)
        return page.to(tl.int64), (at % PAGE).to(tl.int64)
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return batch.to(tl.int64), at.to(tl.int64)


@triton.jit
def own_row(table, batch, WHOLE: tl.constexpr):
    """Which row of the cache is a sequence's, int32: by the block table, where it has one page."""
    row = batch
    if WHOLE:
        row = tl.load(table[0] + batch.to(tl.int64) * table[1]).to(tl.int32)
    return row


@triton.jit
def offsets(page, slot, head, strides):
    """Of elements or rows of a cache, by its strides of page, head and slot."""
    return page * strides[0] + head * strides[1] + slot * strides[2]


def cache_arguments(
    k: Tensor, v: Tensor, block_table: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> dict[str, Any]:
    """What kernels take of a cache, [batch, heads, capacity, size] or, with a block table, [pages,
    page size, heads, size]: from here on the former, pages in place of sequences. WHOLE: each
    sequence is one page, so that only its row is looked up; PAGE: the size of pages, else 0."""
    scaled = k_scale is not None and v_scale is not None
    tensors = {
        "k": k,
        "v": v,
        "k_scale": k_scale if scaled else k,
        "v_scale": v_scale if scaled else v,
    }
    if block_table is not None:
        tensors = {name: x.transpose(1, 2) for name, x in tensors.items()}
    bits = {torch.float8_e4m3fn: torch.uint8}
    tensors = {name: x.view(bits.get(x.dtype, x.dtype)) for name, x in tensors.items()}
    capacity, size = tensors["k"].shape[2:]
    pages, table = 1, tensors["k"]
    if block_table is not None:
        pages, table = block_table.shape[1], block_table
    return {
        **{f"{name}_ptr": x for name, x in tensors.items()},
        **{f"{name}_strides": x.stride()[:3] for name, x in tensors.items()},
        "table_ptr": table,
        "table_stride": table.stride(0),
        "capacity": capacity * pages,
        "PAGE": capacity if pages > 1 else 0,
        "WHOLE": block_table is not None and pages == 1,
        "SCALED": scaled,
        "FP8": k.dtype == torch.float8_e4m3fn,
        "SIZE": padded_head(size),
        "size": size,
    }


@triton.jit
def quantized(x, FP8: tl.constexpr, KIND: tl.constexpr):
    """A row as (integers or bits of e4m3, scale): round half to even, the largest magnitude to 127
    or 448. A row that is not finite has a scale that is NaN."""
    x = x.to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), 448.0 if FP8 else 127.0)
    y = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    if FP8:
        # Scaled down so that float32 is subnormal where e4m3 is; then 20 bits are rounded off.
        bits = (tl.abs(y) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2**-120
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        q = tl.minimum(bits, 0x7E) | tl.where(y < 0, 0x80, 0)
    else:
        q = (y + 12582912.0) - 12582912.0  # 1.5 · 2**23: no bits are left after the point
    return q.to(KIND), scale + tl.sum(x * 0.0, axis=0)


@triton.jit
def write_kernel(
    new_k_ptr, new_v_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, positions_ptr, table_ptr,
    capacity, size, new_k_strides, new_v_strides,
    k_strides, v_strides, k_scale_strides, v_scale_strides, table_stride,
    PAGE: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The key and the value of one token, program (token, head, batch)."""
    token, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(positions_ptr + batch).to(tl.int32) + token
    column = tl.arange(0, SIZE)
    inside = (at >= 0) & (at < capacity)
    mask = inside & (column < size)
    table, wide = (table_ptr, table_stride), batch.to(tl.int64)
    page, slot = slots(table, own_row(table, batch, WHOLE), at, inside, PAGE)
    k = tl.load(
        new_k_ptr + offsets(wide, token, head, new_k_strides) + column, mask=mask, other=0.0
    )
    v = tl.load(
        new_v_ptr + offsets(wide, token, head, new_v_strides) + column, mask=mask, other=0.0
    )
    if SCALED:
        k, k_scale = quantized(k, FP8, k_ptr.dtype.element_ty)
        v, v_scale = quantized(v, FP8, v_ptr.dtype.element_ty)
        tl.store(k_scale_ptr + offsets(page, slot, head, k_scale_strides), k_scale, mask=inside)
        tl.store(v_scale_ptr + offsets(page, slot, head, v_scale_strides), v_scale, mask=inside)
    tl.store(k_ptr + offsets(page, slot, head, k_strides) + column, k, mask=mask)
    tl.store(v_ptr + offsets(page, slot, head, v_strides) + column, v, mask=mask)


def write_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """As `lowbit.torch.functional.write_cache` takes it."""
    batch, heads, tokens, _ = k.shape
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    arguments = {
        **cache_arguments(k_cache, v_cache, block_table, k_scale, v_scale),
        "new_k_ptr": k,
        "new_v_ptr": v,
        "positions_ptr": positions.contiguous(),
        "new_k_strides": k.stride()[:3],
        "new_v_strides": v.stride()[:3],
    }
    launch(write_kernel, (tokens, heads, batch), arguments, num_warps=1)
