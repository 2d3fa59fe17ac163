"""Attention without its scores in memory: forward (Dao et al., FlashAttention, 2022 and 2023).

The softmax is taken in powers of two with the scale folded in, and rescaled as larger scores come.
Only blocks on the diagonal, or at the end, are masked.
"""

# Triton turns numbers into its own types, which its annotations do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.config import not_powers, options_of
from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    described,
    heads_of,
    program_of,
    rows_of,
)
from lowbit.kernels.triton.fast.launch import compute_capability, launch, multiprocessors

LARGEST_HEAD = 128
LOG2_E = 1.4426950408889634
# What the keys and values of a section may take of the second-level cache, if causal.
_SECTION_BYTES = 24 << 20
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""


@dataclass(frozen=True)
class AttentionConfig:
    """A program has `queries` rows of q and walks along k and v by `keys` rows.

    specialized: whether other warps load than compute (only from Hopper on).
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    specialized: bool = False
    maxnreg: int | None = None

    def refusal(self, head_size: int) -> str | None:
        """Why it does not fit heads of this size, a power of two, in 16 bits; None if it does."""
        if refusal := not_powers(self, "queries", "keys", "num_warps"):
            return refusal
        if min(self.queries, self.keys) < 16:
            return "blocks have at least 16 rows, for the matrix units"
        held = 2 * head_size * (self.queries + 2 * self.num_stages * self.keys)
        if held > _SHARED_BYTES:
            return f"its blocks take {held} bytes of shared memory, more than {_SHARED_BYTES}"
        return None


# By compute capability, then head size: for all keys, and causal. Measured on an H200.
TABLE: dict[int, dict[int, tuple[AttentionConfig, AttentionConfig]]] = {
    90: {
        64: (AttentionConfig(128, 128, 8, 2), AttentionConfig(128, 128, 8, 2)),
        128: (
            AttentionConfig(128, 64, 4, 2),
            AttentionConfig(64, 64, 4, 3, maxnreg=168),
        ),
    },
}
# More registers than the compiler would choose, which would spill three for heads of 128.
_FALLBACK = AttentionConfig(64, 32, 4, 2, maxnreg=192)


def attention_config(head_size: int, causal: bool, device: torch.device) -> AttentionConfig:
    """The configuration of the table for this GPU, else one that fits any."""
    found = TABLE.get(compute_capability(device), {}).get(head_size)
    return found[causal] if found else _FALLBACK


@triton.jit
def reach(first, queries, keys, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """How many keys a block of queries from `first` on sees, and how many in blocks that all of
    its queries see whole."""
    seen = keys
    whole = keys // KEYS * KEYS
    if CAUSAL:
        seen = tl.maximum(tl.minimum(keys, first + QUERIES + keys - queries), 0)
        whole = tl.maximum(tl.minimum(keys, first + 1 + keys - queries), 0) // KEYS * KEYS
    return seen, whole


@triton.jit
def sees(row, start, queries, keys, CAUSAL: tl.constexpr, KEYS: tl.constexpr):
    """Which of the keys from `start` on each query sees, [rows, KEYS]."""
    column = start + tl.arange(0, KEYS)
    visible = (column < keys)[None, :]
    if CAUSAL:
        visible = visible & (column[None, :] <= (row + keys - queries)[:, None])
    return visible


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    z_ptr,
    lse_ptr,
    batches,
    heads,
    group,
    queries,
    keys,
    size,
    q_batch_stride,
    q_head_stride,
    q_row_stride,
    k_batch_stride,
    k_head_stride,
    k_row_stride,
    v_batch_stride,
    v_head_stride,
    v_row_stride,
    z_batch_stride,
    z_head_stride,
    z_row_stride,
    scale,
    section,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """A block of queries: z [batches, heads, queries, size], lse [batches, heads, queries].

    MASKED: some block of keys is not seen whole.

    scale includes log2(e). lse is the logarithm to the base 2 of Σ exp2(scale · q·k), +inf for a
    row that sees no key. Query i sees the keys up to i + keys - queries, if CAUSAL.
    """
    q_rows = heads_of(
        q_ptr, batches, heads, queries, size, q_batch_stride, q_head_stride, q_row_stride,
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
    z_rows = heads_of(
        z_ptr, batches, heads, queries, size, z_batch_stride, z_head_stride, z_row_stride,
        QUERIES, SIZE,
    )  # fmt: skip
    block, batch_head = program_of(section, tl.cdiv(queries, QUERIES), batches * heads)
    batch, head = batch_head // heads, batch_head % heads
    first = block * QUERIES
    row = first + tl.arange(0, QUERIES)
    seen, whole = reach(first, queries, keys, CAUSAL, QUERIES, KEYS)

    q = rows_of(q_rows, batch, head, first, QUERIES, SIZE)
    # Finite, so that a row that has not seen a key yet has no -inf less -inf, which is NaN.
    largest = tl.full((QUERIES,), -3.0e38, tl.float32)
    weights = tl.zeros((QUERIES,), tl.float32)
    weighted = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in tl.range(0, seen, KEYS, warp_specialize=SPECIALIZED):
        k = rows_of(k_rows, batch, head // group, start, KEYS, SIZE)
        scores = tl.dot(q, k.T)
        if MASKED:  # noqa: SIM102  # constant, so that there is no branch without it
            if start >= whole:
                visible = sees(row, start, queries, keys, CAUSAL, KEYS)
                scores = tl.where(visible, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        rescale = tl.exp2(largest - now)
        weight = tl.exp2(scores * scale - now[:, None])
        weights = weights * rescale + tl.sum(weight, axis=1)
        weighted = weighted * rescale[:, None]
        v = rows_of(v_rows, batch, head // group, start, KEYS, SIZE)
        weighted = tl.dot(weight.to(v.dtype), v, weighted)
        largest = now

    blind = weights == 0
    weights = tl.where(blind, 1.0, weights)
    lse = tl.where(blind, float("inf"), largest + tl.log2(weights))
    tl.store(lse_ptr + batch_head.to(tl.int64) * queries + row, lse, mask=row < queries)
    z = (weighted * (1.0 / weights)[:, None]).to(z_rows.dtype)
    z_rows.store([batch, head, first, 0], z.reshape(1, 1, QUERIES, SIZE))


def section_of(
    blocks: int, heads: int, length: int, size: int, causal: bool, device: torch.device
) -> int:
    """How many of the heads start their blocks in turn, each to walk along `length` rows of two
    tensors.

    Blocks that all have the same to do: as many heads as fill the GPU, so that the blocks of a head
    run at the same time. Causal: all that the second-level cache holds, since the blocks with most
    to do should come first.
    """
    most = _SECTION_BYTES // (4 * length * size) if causal else multiprocessors(device) // blocks
    return max(1, min(most, heads))


def strides_of(**tensors: Tensor) -> dict[str, int]:
    """name_batch_stride, name_head_stride and name_row_stride of each."""
    parts = ("batch", "head", "row")
    return {
        f"{name}_{part}_stride": tensor.stride(axis)
        for name, tensor in tensors.items()
        for axis, part in enumerate(parts)
    }


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """z like q, contiguous, and the logarithms (base 2) of the sums of weights, float32.

    q: [batches, heads, queries, size]; k, v: [batches, key heads, keys, size]; 16 bits.
    ValueError if `config` does not fit.
    """
    batches, heads, queries, size = q.shape
    keys = k.shape[2]
    padded = max(16, triton.next_power_of_2(size))
    config = config or attention_config(padded, causal, q.device)
    if refusal := config.refusal(padded):
        raise ValueError(f"{config} does not fit heads of {size}: {refusal}")
    lse = torch.empty((batches, heads, queries), dtype=torch.float32, device=q.device)
    if 0 in (q.numel(), keys):
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse.fill_(math.inf)
    q, k, v = aligned(q), aligned(k), aligned(v)
    z = aligned_like(q)
    blocks = triton.cdiv(queries, config.queries)
    q_block, k_block = (1, 1, config.queries, padded), (1, 1, config.keys, padded)
    arguments = {
        "q_ptr": described(q, q_block),
        "k_ptr": described(k, k_block),
        "v_ptr": described(v, k_block),
        "z_ptr": described(z, q_block),
        "lse_ptr": lse,
        "batches": batches,
        "heads": heads,
        "group": heads // k.shape[1],
        "queries": queries,
        "keys": keys,
        "size": size,
        **strides_of(q=q, k=k, v=v, z=z),
        "scale": scale * LOG2_E,
        "section": section_of(blocks, batches * heads, keys, padded, causal, q.device),
        "CAUSAL": causal,
        "MASKED": causal or keys % config.keys > 0,
        "SIZE": padded,
        "QUERIES": config.queries,
        "KEYS": config.keys,
        "SPECIALIZED": config.specialized,
    }
    launch(attention_kernel, (blocks * batches * heads,), arguments, **options_of(config))
    return z.contiguous(), lse
