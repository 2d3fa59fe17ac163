"""The derivative of attention: weights are computed again, from the scores and their saved sums.

One kernel goes along the queries and gives dk and dv, another along the keys and gives dq; nothing
is added up in an order that depends on the run. `BackwardConfig.together` has the first kernel
give dq too, in five products for seven, by additions to memory in whatever order they come.
"""

# Triton turns numbers into its own types, which its annotations do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.attention import (
    AttentionConfig,
    reach,
    section_of,
    sees,
    strides_of,
)
from lowbit.kernels.triton.fast.config import not_powers, options_of
from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    described,
    heads_of,
    numbers_of,
    program_of,
    rows_of,
)
from lowbit.kernels.triton.fast.launch import compute_capability, launch

_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class KeysConfig:
    """For dk and dv: a program has `keys` rows of k and v and walks along q by `queries` rows.

    together: it adds to dq as well.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    together: bool = False
    maxnreg: int | None = None

    def refusal(self, head_size: int) -> str | None:
        """Why it does not fit heads of this size, a power of two, in 16 bits; None if it does."""
        if refusal := not_powers(self, "queries", "keys", "num_warps"):
            return refusal
        if min(self.queries, self.keys) < 16:
            return "blocks have at least 16 rows, for the matrix units"
        held = 4 * head_size * (self.keys + self.num_stages * self.queries)
        if held > _SHARED_BYTES:
            return f"its blocks take {held} bytes of shared memory, more than {_SHARED_BYTES}"
        return None


@dataclass(frozen=True)
class BackwardConfig:
    """How dk and dv are made, and how dq is unless it is made together with them."""

    keys: KeysConfig
    queries: AttentionConfig

    def refusal(self, head_size: int) -> str | None:
        """Why it does not fit heads of this size, a power of two, in 16 bits; None if it does."""
        return self.keys.refusal(head_size) or self.queries.refusal(head_size)


# By compute capability, then head size.
TABLE: dict[int, dict[int, BackwardConfig]] = {
    90: {
        64: BackwardConfig(KeysConfig(64, 128, 8, 2), AttentionConfig(128, 64, 8, 2)),
        128: BackwardConfig(KeysConfig(64, 128, 8, 3), AttentionConfig(128, 64, 8, 3)),
    },
}
_FALLBACK = BackwardConfig(KeysConfig(32, 32, 4, 1), AttentionConfig(64, 32, 4, 1))


def backward_config(head_size: int, device: torch.device) -> BackwardConfig:
    """The configuration of the table for this GPU, else one that fits any."""
    return TABLE.get(compute_capability(device), {}).get(head_size, _FALLBACK)


@triton.jit
def attention_delta_kernel(
    z_ptr,
    dz_ptr,
    delta_ptr,
    heads,
    queries,
    size,
    sums_stride,
    z_batch_stride,
    z_head_stride,
    z_row_stride,
    dz_batch_stride,
    dz_head_stride,
    dz_row_stride,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """delta = Σ z · dz over each row: what softmax's derivative takes off every score's."""
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < queries)[:, None] & (column < size)
    z_at = z_ptr + batch * z_batch_stride + head * z_head_stride
    dz_at = dz_ptr + batch * dz_batch_stride + head * dz_head_stride
    z = tl.load(z_at + row[:, None] * z_row_stride + column, mask=inside, other=0.0)
    dz = tl.load(dz_at + row[:, None] * dz_row_stride + column, mask=inside, other=0.0)
    delta = tl.sum(z.to(tl.float32) * dz.to(tl.float32), axis=1)
    at = tl.program_id(1).to(tl.int64) * sums_stride + row
    tl.store(delta_ptr + at, delta, mask=row < queries)


@triton.jit
def attention_dk_dv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dz_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    dq_ptr,
    batches,
    heads,
    group,
    queries,
    keys,
    size,
    sums_stride,
    q_batch_stride,
    q_head_stride,
    q_row_stride,
    k_batch_stride,
    k_head_stride,
    k_row_stride,
    v_batch_stride,
    v_head_stride,
    v_row_stride,
    dz_batch_stride,
    dz_head_stride,
    dz_row_stride,
    dk_batch_stride,
    dk_head_stride,
    dk_row_stride,
    scale,
    section,
    CAUSAL: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A block of keys of one key head: dk and dv over all queries of all heads that share it.

    Everything is the other way round, [KEYS, QUERIES], so that the weights go from registers into
    the next product. Queries past the end add nothing, since q and dz are 0 there; keys past the
    end are not stored. dq, if TOGETHER, is float32, contiguous, and without the scale.
    """
    log2_e = tl.constexpr(1.4426950408889634)
    q_rows = heads_of(
        q_ptr, batches, heads, queries, size, q_batch_stride, q_head_stride, q_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    dz_rows = heads_of(
        dz_ptr, batches, heads, queries, size, dz_batch_stride, dz_head_stride, dz_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    lse_rows = numbers_of(lse_ptr, batches * heads, queries, sums_stride, QUERIES)
    delta_rows = numbers_of(delta_ptr, batches * heads, queries, sums_stride, QUERIES)
    key_heads = heads // group
    k_rows = heads_of(
        k_ptr, batches, key_heads, keys, size, k_batch_stride, k_head_stride, k_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    v_rows = heads_of(
        v_ptr, batches, key_heads, keys, size, v_batch_stride, v_head_stride, v_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    dk_rows = heads_of(
        dk_ptr, batches, key_heads, keys, size, dk_batch_stride, dk_head_stride, dk_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    dv_rows = heads_of(
        dv_ptr, batches, key_heads, keys, size, dk_batch_stride, dk_head_stride, dk_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    blocks = tl.cdiv(keys, KEYS)
    block, batch_head = program_of(section, blocks, batches * key_heads)
    if CAUSAL:
        # Here the first blocks have most to do.
        block = blocks - 1 - block
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    first = block * KEYS
    column = first + tl.arange(0, KEYS)
    # The first block of queries that sees a key of this block, and where those that see all begin.
    begin, whole = 0, 0
    if CAUSAL:
        ahead = queries - keys
        begin = tl.minimum(tl.maximum(first + ahead, 0), queries) // QUERIES * QUERIES
        whole = tl.cdiv(tl.minimum(tl.maximum(first + KEYS - 1 + ahead, 0), queries), QUERIES)
        whole = tl.maximum(whole * QUERIES, begin)

    k = rows_of(k_rows, batch, key_head, first, KEYS, SIZE)
    v = rows_of(v_rows, batch, key_head, first, KEYS, SIZE)
    dk = tl.zeros((KEYS, SIZE), tl.float32)
    dv = tl.zeros((KEYS, SIZE), tl.float32)
    for member in range(group):
        head = key_head * group + member
        query_head = batch * heads + head
        dq_at = dq_ptr
        if TOGETHER:
            dq_at = dq_ptr + query_head.to(tl.int64) * queries * size
        for start in range(begin, queries, QUERIES):
            q = rows_of(q_rows, batch, head, start, QUERIES, SIZE)
            dz = rows_of(dz_rows, batch, head, start, QUERIES, SIZE)
            row = start + tl.arange(0, QUERIES)
            lse = lse_rows.load([query_head, start])
            delta = delta_rows.load([query_head, start])
            weight = tl.exp2(tl.dot(k, q.T) * (scale * log2_e) - lse)
            if CAUSAL and start < whole:
                # On this side the difference costs fewer registers.
                visible = (column + queries - keys)[:, None] <= row[None, :]
                weight = tl.where(visible, weight, 0.0)
            dv = tl.dot(weight.to(dz.dtype), dz, dv)
            ds = (weight * (tl.dot(v, dz.T) - delta)).to(q.dtype)
            dk = tl.dot(ds, q, dk)
            if TOGETHER:
                _add_rows(dq_at, tl.dot(ds.T, k), row, queries, size, SIZE)
    dk = (dk * scale).to(dk_rows.dtype).reshape(1, 1, KEYS, SIZE)
    dk_rows.store([batch, key_head, first, 0], dk)
    dv_rows.store([batch, key_head, first, 0], dv.to(dv_rows.dtype).reshape(1, 1, KEYS, SIZE))


@triton.jit
def _add_rows(at, values, row, rows, size, SIZE: tl.constexpr):
    """Add [row, SIZE] to float32 [rows, size] in memory."""
    column = tl.arange(0, SIZE)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    tl.atomic_add(at + row[:, None] * size + column[None, :], values, mask=inside, sem="relaxed")


@triton.jit
def attention_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dz_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    batches,
    heads,
    group,
    queries,
    keys,
    size,
    sums_stride,
    q_batch_stride,
    q_head_stride,
    q_row_stride,
    k_batch_stride,
    k_head_stride,
    k_row_stride,
    v_batch_stride,
    v_head_stride,
    v_row_stride,
    dz_batch_stride,
    dz_head_stride,
    dz_row_stride,
    dq_batch_stride,
    dq_head_stride,
    dq_row_stride,
    scale,
    section,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """A block of queries: dq = scale · Σ weight · (dz·v - delta) · k. MASKED as in the forward."""
    log2_e = tl.constexpr(1.4426950408889634)
    q_rows = heads_of(
        q_ptr, batches, heads, queries, size, q_batch_stride, q_head_stride, q_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    dz_rows = heads_of(
        dz_ptr, batches, heads, queries, size, dz_batch_stride, dz_head_stride, dz_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    k_rows = heads_of(
        k_ptr, batches, heads // group, keys, size, k_batch_stride, k_head_stride, k_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    v_rows = heads_of(
        v_ptr, batches, heads // group, keys, size, v_batch_stride, v_head_stride, v_row_stride,
        KEYS, SIZE,
    )  # fmt: skip
    dq_rows = heads_of(
        dq_ptr, batches, heads, queries, size, dq_batch_stride, dq_head_stride, dq_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    block, batch_head = program_of(section, tl.cdiv(queries, QUERIES), batches * heads)
    batch, head = batch_head // heads, batch_head % heads
    first = block * QUERIES
    row = first + tl.arange(0, QUERIES)
    seen, whole = reach(first, queries, keys, CAUSAL, QUERIES, KEYS)

    q = rows_of(q_rows, batch, head, first, QUERIES, SIZE)
    dz = rows_of(dz_rows, batch, head, first, QUERIES, SIZE)
    at = batch_head.to(tl.int64) * sums_stride + row
    lse = tl.load(lse_ptr + at, mask=row < queries, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=row < queries, other=0.0)
    dq = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in tl.range(0, seen, KEYS, warp_specialize=SPECIALIZED):
        k = rows_of(k_rows, batch, head // group, start, KEYS, SIZE)
        v = rows_of(v_rows, batch, head // group, start, KEYS, SIZE)
        weight = tl.exp2(tl.dot(q, k.T) * (scale * log2_e) - lse[:, None])
        if MASKED:  # noqa: SIM102  # constant, so that there is no branch without it
            if start >= whole:
                visible = sees(row, start, queries, keys, CAUSAL, KEYS)
                weight = tl.where(visible, weight, 0.0)
        ds = weight * (tl.dot(dz, v.T) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    dq = (dq * scale).to(dq_rows.dtype)
    dq_rows.store([batch, head, first, 0], dq.reshape(1, 1, QUERIES, SIZE))


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    lse: Tensor,
    dz: Tensor,
    causal: bool,
    scale: float,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, of what `attention` was given and returned.

    With config.keys.together dq differs in its last bits from run to run. ValueError if `config`
    does not fit.
    """
    batches, heads, queries, size = q.shape
    key_heads, keys = k.shape[1:3]
    padded = max(16, triton.next_power_of_2(size))
    config = config or backward_config(padded, q.device)
    if refusal := config.refusal(padded):
        raise ValueError(f"{config} does not fit heads of {size}: {refusal}")
    if 0 in (q.numel(), k.numel()):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    q, k, v, dz = aligned(q), aligned(k), aligned(v), aligned(dz)
    lse = aligned(lse.flatten(0, 1))
    shared = {
        "lse_ptr": lse,
        "delta_ptr": _delta(z, dz, lse, padded),
        "sums_stride": lse.stride(0),
        "batches": batches,
        "heads": heads,
        "group": heads // key_heads,
        "queries": queries,
        "keys": keys,
        "size": size,
        **strides_of(q=q, k=k, v=v, dz=dz),
        "scale": scale,
        "CAUSAL": causal,
        "SIZE": padded,
    }
    tensors = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dz_ptr": dz}
    dq, dk, dv = _dk_dv(tensors, shared, config.keys)
    if config.keys.together:
        dq = (dq * scale).to(q.dtype)
    else:
        dq = _dq(tensors, shared, config.queries)
    return dq, dk, dv


def _delta(z: Tensor, dz: Tensor, lse: Tensor, padded: int) -> Tensor:
    """delta, laid out like lse."""
    batches, heads, queries, size = z.shape
    delta = aligned_like(lse)
    rows = 64
    arguments = {
        "z_ptr": z,
        "dz_ptr": dz,
        "delta_ptr": delta,
        "heads": heads,
        "queries": queries,
        "size": size,
        "sums_stride": delta.stride(0),
        **strides_of(z=z, dz=dz),
        "SIZE": padded,
        "QUERIES": rows,
    }
    grid = (triton.cdiv(queries, rows), batches * heads)
    launch(attention_delta_kernel, grid, arguments, num_warps=4)
    return delta


def _dk_dv(
    tensors: dict[str, Tensor], shared: dict[str, Any], config: KeysConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (float32, without scale, of no meaning unless config.together), dk, dv."""
    q, k = tensors["q_ptr"], tensors["k_ptr"]
    padded = shared["SIZE"]
    batches, key_heads, keys, _ = k.shape
    count = triton.cdiv(keys, config.keys)
    dk, dv = aligned_like(k), aligned_like(k)
    if config.together:
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    else:
        dq = torch.empty(0, dtype=torch.float32, device=q.device)
    blocks = {"q_ptr": config.queries, "k_ptr": config.keys, "v_ptr": config.keys}
    blocks["dz_ptr"] = config.queries
    arguments = {
        **shared,
        **{name: described(tensors[name], (1, 1, rows, padded)) for name, rows in blocks.items()},
        **{name: described(shared[name], (1, config.queries)) for name in ("lse_ptr", "delta_ptr")},
        "dk_ptr": described(dk, (1, 1, config.keys, padded)),
        "dv_ptr": described(dv, (1, 1, config.keys, padded)),
        "dq_ptr": dq,
        **strides_of(dk=dk),
        "section": section_of(
            count, batches * key_heads, q.shape[2], padded, shared["CAUSAL"], q.device
        ),
        "TOGETHER": config.together,
        "QUERIES": config.queries,
        "KEYS": config.keys,
    }
    grid = (count * batches * key_heads,)
    launch(attention_dk_dv_kernel, grid, arguments, **options_of(config))
    return dq, dk.contiguous(), dv.contiguous()


def _dq(tensors: dict[str, Tensor], shared: dict[str, Any], config: AttentionConfig) -> Tensor:
    q, k = tensors["q_ptr"], tensors["k_ptr"]
    padded = shared["SIZE"]
    batches, heads, queries, _ = q.shape
    keys, count = k.shape[2], triton.cdiv(queries, config.queries)
    dq = aligned_like(q)
    blocks = {"q_ptr": config.queries, "k_ptr": config.keys, "v_ptr": config.keys}
    blocks["dz_ptr"] = config.queries
    arguments = {
        **shared,
        **{name: described(tensors[name], (1, 1, rows, padded)) for name, rows in blocks.items()},
        "dq_ptr": described(dq, (1, 1, config.queries, padded)),
        **strides_of(dq=dq),
        "section": section_of(count, batches * heads, keys, padded, shared["CAUSAL"], q.device),
        "MASKED": shared["CAUSAL"] or keys % config.keys > 0,
        "QUERIES": config.queries,
        "KEYS": config.keys,
        "SPECIALIZED": config.specialized,
    }
    grid = (count * batches * heads,)
    launch(attention_dq_kernel, grid, arguments, **options_of(config))
    return dq.contiguous()
