# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""The derivative of attention: weights are computed again, from the scores and their saved sums.

One kernel goes along the queries and gives dk and dv, another along the keys and gives dq; nothing
is added up in an order that depends on the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.attention import (
    AttentionConfig,
    launch_blocks,
    padded_head,
    program_of,
    queries_of_program,
    sees,
    sizes_of,
)
from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    described,
    load_rows,
    store_rows,
    tiles_of,
)
from lowbit.kernels.triton.fast.launch import (
    Choice,
    Config,
    Gpu,
    Table,
    choosing,
    from_table,
    gpu_of,
    launch,
    refuse_itemsize,
    too_much_shared,
)


@dataclass(frozen=True)
class KeysConfig(AttentionConfig):
    """For dk and dv: a program has `keys` rows of k and v and walks along q by `queries` rows."""

    def misfit(self, head_size: int) -> str | None:
        return too_much_shared(4 * head_size * (self.keys + self.num_stages * self.queries))


@dataclass(frozen=True)
class BackwardConfig(Config):
    """How dk and dv are made, and how dq is."""

    keys: KeysConfig
    queries: AttentionConfig

    def misfit(self, head_size: int) -> str | None:
        return self.keys.refusal(head_size) or self.queries.refusal(head_size)


# By head size.
TABLE: Table[BackwardConfig] = {
    90: {
        64: BackwardConfig(KeysConfig(64, 128, 8, 2), AttentionConfig(128, 64, 8, 2)),
        128: BackwardConfig(KeysConfig(64, 128, 8, 3), AttentionConfig(128, 64, 8, 3)),
    },
}
_FALLBACK = BackwardConfig(KeysConfig(32, 32, 4, 1), AttentionConfig(64, 32, 4, 1))
_FALLBACK_WIDE = BackwardConfig(KeysConfig(32, 32, 8, 1), AttentionConfig(64, 32, 8, 1))


@choosing("attention_backward")
def backward_choice(gpu: Gpu, head_size: int, itemsize: int = 2) -> Choice[BackwardConfig]:
    """For heads of this size."""
    refuse_itemsize("attention_backward", itemsize)
    kernels, size = "attention_dk_dv_kernel and attention_dq_kernel", padded_head(head_size)
    fallback = _FALLBACK if size <= 128 else _FALLBACK_WIDE
    return from_table(kernels, TABLE, gpu, size, f"heads of {size}", fallback)


@triton.jit
def attention_delta_kernel(
    z_ptr, dz_ptr, delta_ptr, heads, queries, size, sums_stride, z_strides, dz_strides,
    SIZE: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """delta = Σ z · dz over each row: what softmax's derivative takes off every score's."""
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < queries)[:, None] & (column < size)
    z_at = z_ptr + batch * z_strides[0] + head * z_strides[1]
    dz_at = dz_ptr + batch * dz_strides[0] + head * dz_strides[1]
    z = tl.load(z_at + row[:, None] * z_strides[2] + column, mask=inside, other=0.0)
    dz = tl.load(dz_at + row[:, None] * dz_strides[2] + column, mask=inside, other=0.0)
    delta = tl.sum(z.to(tl.float32) * dz.to(tl.float32), axis=1)
    at = tl.program_id(1).to(tl.int64) * sums_stride + row
    tl.store(delta_ptr + at, delta, mask=row < queries)


@triton.jit
def queries_that_see(first, sizes, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The first block of queries that sees a key of the block from `first` on, and where those that
    see all of it begin."""
    queries, keys = sizes[3], sizes[4]
    begin, whole = 0, 0
    if CAUSAL:
        ahead = queries - keys
        begin = tl.minimum(tl.maximum(first + ahead, 0), queries) // QUERIES * QUERIES
        whole = tl.cdiv(tl.minimum(tl.maximum(first + KEYS - 1 + ahead, 0), queries), QUERIES)
        whole = tl.maximum(whole * QUERIES, begin)
    return begin, whole


@triton.jit
def attention_dk_dv_kernel(
    q_rows, k_rows, v_rows, dz_rows, lse_rows, delta_rows, dk_rows, dv_rows,
    sizes, scale, section,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head: dk and dv over all queries of all heads that share it.

    Everything is the other way round, [KEYS, QUERIES], so that the weights go from registers into
    the next product. Queries past the end add nothing, since q and dz are 0 there; keys past the
    end are not stored.
    """
    log2_e = tl.constexpr(1.4426950408889634)
    batches, heads, group, queries, keys, size = sizes
    key_heads = heads // group
    q_rows = tiles_of(q_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    dz_rows = tiles_of(dz_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    lse_rows = tiles_of(lse_rows, (batches * heads, queries), (1, QUERIES))
    delta_rows = tiles_of(delta_rows, (batches * heads, queries), (1, QUERIES))
    k_rows = tiles_of(k_rows, (batches, key_heads, keys, size), (1, 1, KEYS, SIZE))
    v_rows = tiles_of(v_rows, (batches, key_heads, keys, size), (1, 1, KEYS, SIZE))
    dk_rows = tiles_of(dk_rows, (batches, key_heads, keys, size), (1, 1, KEYS, SIZE))
    dv_rows = tiles_of(dv_rows, (batches, key_heads, keys, size), (1, 1, KEYS, SIZE))
    blocks = tl.cdiv(keys, KEYS)
    block, batch_head = program_of(section, blocks, batches * key_heads)
    if CAUSAL:
        # Here the first blocks have most to do.
        block = blocks - 1 - block
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    first = block * KEYS
    column = first + tl.arange(0, KEYS)
    begin, whole = queries_that_see(first, sizes, CAUSAL, QUERIES, KEYS)

    k, v = load_rows(k_rows, batch, key_head, first), load_rows(v_rows, batch, key_head, first)
    dk, dv = tl.zeros((KEYS, SIZE), tl.float32), tl.zeros((KEYS, SIZE), tl.float32)
    for member in range(group):
        head = key_head * group + member
        query_head = batch * heads + head
        for start in range(begin, queries, QUERIES):
            q, dz = load_rows(q_rows, batch, head, start), load_rows(dz_rows, batch, head, start)
            row = start + tl.arange(0, QUERIES)
            lse, delta = lse_rows.load([query_head, start]), delta_rows.load([query_head, start])
            weight = tl.exp2(tl.dot(k, q.T) * (scale * log2_e) - lse)
            if CAUSAL and start < whole:
                # On this side the difference costs fewer registers.
                visible = (column + queries - keys)[:, None] <= row[None, :]
                weight = tl.where(visible, weight, 0.0)
            dv = tl.dot(weight.to(dz.dtype), dz, dv)
            ds = (weight * (tl.dot(v, dz.T) - delta)).to(q.dtype)
            dk = tl.dot(ds, q, dk)
    store_rows(dk_rows, batch, key_head, first, dk * scale)
    store_rows(dv_rows, batch, key_head, first, dv)


@triton.jit
def attention_dq_kernel(
    q_rows, k_rows, v_rows, dz_rows, lse_ptr, delta_ptr, dq_rows,
    sizes, sums_stride, scale, section,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of queries: dq = scale · Σ weight · (dz·v - delta) · k. MASKED as in the forward."""
    log2_e = tl.constexpr(1.4426950408889634)
    batches, heads, group, queries, keys, size = sizes
    q_rows = tiles_of(q_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    dz_rows = tiles_of(dz_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    k_rows = tiles_of(k_rows, (batches, heads // group, keys, size), (1, 1, KEYS, SIZE))
    v_rows = tiles_of(v_rows, (batches, heads // group, keys, size), (1, 1, KEYS, SIZE))
    dq_rows = tiles_of(dq_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    batch_head, first, seen, whole = queries_of_program(sizes, section, CAUSAL, QUERIES, KEYS)
    batch, head = batch_head // heads, batch_head % heads
    row = first + tl.arange(0, QUERIES)

    q, dz = load_rows(q_rows, batch, head, first), load_rows(dz_rows, batch, head, first)
    at = batch_head.to(tl.int64) * sums_stride + row
    lse = tl.load(lse_ptr + at, mask=row < queries, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=row < queries, other=0.0)
    dq = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in tl.range(0, seen, KEYS):
        k = load_rows(k_rows, batch, head // group, start)
        v = load_rows(v_rows, batch, head // group, start)
        weight = tl.exp2(tl.dot(q, k.T) * (scale * log2_e) - lse[:, None])
        if MASKED:  # noqa: SIM102  # constant, so that there is no branch without it
            if start >= whole:
                visible = sees(row, start, sizes, CAUSAL, KEYS)
                weight = tl.where(visible, weight, 0.0)
        ds = weight * (tl.dot(dz, v.T) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    store_rows(dq_rows, batch, head, first, dq * scale)


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

    ValueError if `config` does not fit.
    """
    queries, size, keys = *q.shape[2:], k.shape[2]
    padded = padded_head(size)
    config = config or backward_choice(gpu_of(q.device), size).config
    config.require(padded)
    if 0 in (q.numel(), k.numel()):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    q, k, v, dz = aligned(q), aligned(k), aligned(v), aligned(dz)
    dq, dk, dv = aligned_like(q), aligned_like(k), aligned_like(k)
    lse = aligned(lse.flatten(0, 1))
    delta = _delta(z, dz, lse, padded)
    inputs = {"q": q, "dz": dz, "k": k, "v": v}
    shared = {"sizes": sizes_of(q, k), "scale": scale, "CAUSAL": causal, "SIZE": padded}
    block = (1, config.keys.queries)
    sums = {"lse_rows": described(lse, block), "delta_rows": described(delta, block)}
    launch_blocks(
        attention_dk_dv_kernel, config.keys, queries, shared | sums, dk=dk, dv=dv, **inputs
    )
    sums = {
        "lse_ptr": lse,
        "delta_ptr": delta,
        "sums_stride": lse.stride(0),
        "MASKED": causal or keys % config.queries.keys > 0,
    }
    launch_blocks(attention_dq_kernel, config.queries, keys, shared | sums, dq=dq, **inputs)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


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
        "z_strides": z.stride(),
        "dz_strides": dz.stride(),
        "SIZE": padded,
        "QUERIES": rows,
    }
    grid = (triton.cdiv(queries, rows), batches * heads)
    launch(attention_delta_kernel, grid, arguments, num_warps=4)
    return delta
