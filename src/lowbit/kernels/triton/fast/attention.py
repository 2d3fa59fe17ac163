# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Attention without its scores in memory: forward (Dao et al., FlashAttention, 2022 and 2023).

The softmax is taken in powers of two with the scale folded in, and rescaled as larger scores come.
Only blocks on the diagonal, or at the end, are masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    described,
    load_rows,
    store_rows,
    tiles_of,
)
from lowbit.kernels.triton.fast.launch import (
    LEAST_DOT,
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

LOG2_E = 1.4426950408889634
# What the keys and values of a section may take of the second-level cache, if causal.
_SECTION_BYTES = 24 << 20


@dataclass(frozen=True)
class AttentionConfig(Config, queries=LEAST_DOT, keys=LEAST_DOT, num_warps=1):
    """A program has `queries` rows of q and walks along k and v by `keys` rows."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    def misfit(self, head_size: int) -> str | None:
        """Heads of this size, a power of two, have 16 bits."""
        return too_much_shared(2 * head_size * (self.queries + 2 * self.num_stages * self.keys))


# By head size, and whether causal. Measured on an H200.
TABLE: Table[AttentionConfig] = {
    90: {
        (64, False): AttentionConfig(64, 128, 4, 2),
        (64, True): AttentionConfig(64, 128, 4, 2),
        (128, False): AttentionConfig(128, 64, 4, 2),
        (128, True): AttentionConfig(64, 64, 4, 3, maxnreg=168),
        (256, False): AttentionConfig(128, 64, 8, 2),
        (256, True): AttentionConfig(128, 64, 8, 2),
    },
}
# More registers than the compiler would choose, which would spill three for heads of 128.
_FALLBACK = AttentionConfig(64, 32, 4, 2, maxnreg=192)
_FALLBACK_WIDE = AttentionConfig(64, 32, 8, 2)  # of heads above 128


def padded_head(size: int) -> int:
    """The size of a head in the matrix units."""
    return max(LEAST_DOT, triton.next_power_of_2(size))


@choosing("attention")
def attention_choice(
    gpu: Gpu, head_size: int, causal: bool = False, itemsize: int = 2
) -> Choice[AttentionConfig]:
    """For heads of this size."""
    refuse_itemsize("attention", itemsize)
    key = padded_head(head_size), causal
    what = f"heads of {key[0]}{', causal,' * causal}"
    fallback = _FALLBACK if key[0] <= 128 else _FALLBACK_WIDE
    return from_table("attention_kernel", TABLE, gpu, key, what, fallback)


@triton.jit
def program_of(section, blocks, heads):
    """(block, head) of this program, of blocks · heads in one dimension.

    Heads are taken by sections; within one, the last blocks of all its heads, which causal
    attention has the most work for, come first. How many heads to a section: `section_of`.
    """
    program = tl.program_id(0)
    first = program // (section * blocks) * section
    width = tl.minimum(section, heads - first)
    place = program % (section * blocks)
    return blocks - 1 - place // width, first + place % width


@triton.jit
def queries_of_program(
    sizes, section, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """The head (of all batches') and the first query of this program's block; how many keys the
    block sees, and how many in blocks that all of its queries see whole."""
    batches, heads, _, queries, keys, _ = sizes
    block, batch_head = program_of(section, tl.cdiv(queries, QUERIES), batches * heads)
    first = block * QUERIES
    seen = keys
    whole = keys // KEYS * KEYS
    if CAUSAL:
        seen = tl.maximum(tl.minimum(keys, first + QUERIES + keys - queries), 0)
        whole = tl.maximum(tl.minimum(keys, first + 1 + keys - queries), 0) // KEYS * KEYS
    return batch_head, first, seen, whole


@triton.jit
def window_of_program(
    first, sizes, WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """Where the keys that a block of queries sees begin, a multiple of KEYS, and from where on the
    window of its last query has them whole."""
    own = first + sizes[4] - sizes[3] + 1  # keys up to the first query's own
    return tl.maximum(own - WINDOW, 0) // KEYS * KEYS, own + QUERIES - 1 - WINDOW


@triton.jit
def causal(query, key, queries, keys, WINDOW: tl.constexpr):
    """Which keys each query sees, [queries, keys]: the last query sees the last of so many."""
    own = (query + keys - queries)[:, None]
    visible = key[None, :] <= own
    if WINDOW > 0:
        visible = visible & (key[None, :] > own - WINDOW)
    return visible


@triton.jit
def sees(row, start, sizes, CAUSAL: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr = 0):
    """Which of the keys from `start` on each query sees, [rows, KEYS]."""
    queries, keys = sizes[3], sizes[4]
    column = start + tl.arange(0, KEYS)
    visible = (column < keys)[None, :]
    if CAUSAL:
        visible = visible & causal(row, column, queries, keys, WINDOW)
    return visible


@triton.jit
def attention_kernel(
    q_rows, k_rows, v_rows, z_rows, lse_ptr, sizes, scale, section,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of queries: z [batches, heads, queries, size], lse [batches, heads, queries].

    sizes: batches, heads, heads of q that share one of k, queries, keys, size of a head. MASKED:
    some block of keys is not seen whole. scale includes log2(e); with CAP, it is that of the
    exponent of tanh. lse is the logarithm to the base 2 of Σ exp2(score), +inf for a row that sees
    no key. Query i sees the keys up to i + keys - queries, if CAUSAL, and WINDOW of these.
    """
    log2_e = tl.constexpr(1.4426950408889634)
    batches, heads, group, queries, keys, size = sizes
    q_rows = tiles_of(q_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    k_rows = tiles_of(k_rows, (batches, heads // group, keys, size), (1, 1, KEYS, SIZE))
    v_rows = tiles_of(v_rows, (batches, heads // group, keys, size), (1, 1, KEYS, SIZE))
    z_rows = tiles_of(z_rows, (batches, heads, queries, size), (1, 1, QUERIES, SIZE))
    batch_head, first, seen, whole = queries_of_program(sizes, section, CAUSAL, QUERIES, KEYS)
    batch, head = batch_head // heads, batch_head % heads
    row = first + tl.arange(0, QUERIES)

    q = load_rows(q_rows, batch, head, first)
    begin, entire, factor = 0, 0, scale
    if WINDOW > 0:
        begin, entire = window_of_program(first, sizes, WINDOW, QUERIES, KEYS)
    if CAP > 0:
        factor = 1.0
    # Finite, so that a row that has not seen a key yet has no -inf less -inf, which is NaN.
    largest = tl.full((QUERIES,), -3.0e38, tl.float32)
    weights = tl.zeros((QUERIES,), tl.float32)
    weighted = tl.zeros((QUERIES, SIZE), tl.float32)
    for start in tl.range(begin, seen, KEYS):
        k = load_rows(k_rows, batch, head // group, start)
        scores = tl.dot(q, k.T)
        if CAP > 0:  # tanh x = 1 - 2 / (1 + exp 2x)
            scores = CAP * log2_e - 2 * CAP * log2_e / (1 + tl.exp2(scores * scale))
        if MASKED:  # noqa: SIM102  # constant, so that there is no branch without it
            if (start >= whole) | (start < entire):
                visible = sees(row, start, sizes, CAUSAL, KEYS, WINDOW)
                scores = tl.where(visible, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1) * factor)
        rescale = tl.exp2(largest - now)
        weight = tl.exp2(scores * factor - now[:, None])
        weights = weights * rescale + tl.sum(weight, axis=1)
        weighted = weighted * rescale[:, None]
        v = load_rows(v_rows, batch, head // group, start)
        weighted = tl.dot(weight.to(v.dtype), v, weighted)
        largest = now

    blind = weights == 0
    weights = tl.where(blind, 1.0, weights)
    lse = tl.where(blind, float("inf"), largest + tl.log2(weights))
    tl.store(lse_ptr + batch_head.to(tl.int64) * queries + row, lse, mask=row < queries)
    store_rows(z_rows, batch, head, first, weighted * (1.0 / weights)[:, None])


def section_of(gpu: Gpu, blocks: int, heads: int, length: int, size: int, causal: bool) -> int:
    """How many of the heads start their blocks in turn, each to walk along `length` rows of two
    tensors.

    Blocks that all have the same to do: as many heads as fill the GPU, so that the blocks of a head
    run at the same time. Causal: all that the second-level cache holds, since the blocks with most
    to do should come first.
    """
    most = _SECTION_BYTES // (4 * length * size) if causal else gpu.multiprocessors // blocks
    return max(1, min(most, heads))


def launch_blocks(
    kernel: Any, config: Any, walked: int, arguments: Mapping[str, Any], **tensors: Tensor
) -> None:
    """Start a kernel for all blocks of the first tensor; a program walks along `walked` rows of
    others. Each is the parameter NAME_rows, in blocks of config.keys if it is like k and v, else of
    config.queries. arguments: the rest."""
    size, causal = arguments["SIZE"], arguments["CAUSAL"]
    heights = {n: config.keys if n.lstrip("d") in ("k", "v") else config.queries for n in tensors}
    name, first = next(iter(tensors.items()))
    heads, blocks = first.shape[0] * first.shape[1], triton.cdiv(first.shape[2], heights[name])
    given = {
        **{f"{n}_rows": described(x, (1, 1, heights[n], size)) for n, x in tensors.items()},
        **arguments,
        "section": section_of(gpu_of(first.device), blocks, heads, walked, size, causal),
        "QUERIES": config.queries,
        "KEYS": config.keys,
    }
    launch(kernel, (blocks * heads,), given, **config.options)


def sizes_of(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """What kernels call `sizes`."""
    batches, heads, queries, size = q.shape
    return batches, heads, heads // k.shape[1], queries, k.shape[2], size


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """z like q, contiguous, and the logarithms (base 2) of the sums of weights, float32.

    q: [batches, heads, queries, size]; k, v: [batches, key heads, keys, size]; 16 bits. window,
    which needs `causal`, and cap: 0 for none. ValueError if `config` does not fit.
    """
    keys, size = k.shape[2:]
    padded = padded_head(size)
    config = config or attention_choice(gpu_of(q.device), size, causal).config
    config.require(padded)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if 0 in (q.numel(), keys):
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse.fill_(math.inf)
    q, k, v = aligned(q), aligned(k), aligned(v)
    z = aligned_like(q)
    arguments = {
        "lse_ptr": lse,
        "sizes": sizes_of(q, k),
        "scale": scale * LOG2_E * (2 / cap if cap else 1),
        "CAUSAL": causal,
        "WINDOW": window,
        "CAP": cap,
        "MASKED": causal or keys % config.keys > 0,
        "SIZE": padded,
    }
    launch_blocks(attention_kernel, config, keys, arguments, q=q, k=k, v=v, z=z)
    return z.contiguous(), lse
