# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false
"""Attention of a step of generation: one to eight queries a sequence, with the keys of a cache.

The queries of all heads that share a key head are rows of one tile, so that keys are read once and
the matrix units serve. The keys of a head are cut among several programs (Dao et al.,
Flash-Decoding, 2023); the last of them to finish joins the parts. How many keys there are, programs
read from memory: the grid follows from the capacity of the cache, as a CUDA graph needs, and
programs beyond the keys return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.attention import LOG2_E, causal, padded_head
from lowbit.kernels.triton.fast.key_value_cache import (
    cache_arguments,
    offsets,
    own_row,
    slots,
)
from lowbit.kernels.triton.fast.launch import (
    LEAST_DOT,
    Choice,
    Config,
    Gpu,
    Table,
    choosing,
    counters,
    from_table,
    gpu_of,
    launch,
    too_much_shared,
)

_MOST_ROWS, _MOST_SUMS = 64, 8192  # of a tile of queries, and elements of its result
_MOST_SPLITS = 128
_NARROW = 128  # heads up to this size


@dataclass(frozen=True)
class DecodeConfig(
    Config, keys=LEAST_DOT, num_warps=1, positive=("num_stages", "least", "programs")
):
    """A program walks along its part of the keys by `keys` rows.

    least: the fewest keys of a part. programs: how many there are for each multiprocessor, if the
    cache is long enough.
    """

    keys: int
    num_warps: int
    num_stages: int
    least: int = 256
    programs: int = 2
    maxnreg: int | None = None

    def misfit(self, head_size: int, itemsize: int = 2) -> str | None:
        """Heads of this size, a power of two, in elements of so many bytes."""
        return too_much_shared(2 * itemsize * head_size * self.num_stages * self.keys)

    def warps(self, rows: int) -> int:
        """For a tile of so many queries: above the least there are more sums in registers."""
        return max(self.num_warps, min(2 * self.num_warps, 8) if rows > LEAST_DOT else 0)

    def splits(self, gpu: Gpu, tiles: int, keys: int) -> int:
        """Among how many programs each of so many tiles of queries divides at most so many keys."""
        wanted = self.programs * gpu.multiprocessors // max(tiles, 1)
        return max(1, min(wanted, triton.cdiv(keys, self.least), _MOST_SPLITS))


# By head size, bytes of an element of the cache, and whether it is in pages. Measured on H200 and
# H100.
TABLE: Table[DecodeConfig] = {
    90: {
        (64, 2, False): DecodeConfig(128, 4, 3, least=128, programs=1),
        (128, 2, False): DecodeConfig(128, 4, 3, least=128, programs=1),
        (128, 2, True): DecodeConfig(64, 4, 5),
        (128, 1, False): DecodeConfig(128, 4, 3),
        (128, 1, True): DecodeConfig(128, 4, 5),
        (256, 2, False): DecodeConfig(32, 8, 3),
    },
}


@choosing("attention_decode")
def decode_choice(
    gpu: Gpu, head_size: int, itemsize: int = 2, paged: bool = False
) -> Choice[DecodeConfig]:
    """For heads of this size in a cache of so many bytes an element."""
    if itemsize not in (1, 2):
        raise ValueError(f"attention_decode takes caches of 1 or 2 bytes, got {itemsize}")
    key = padded_head(head_size), itemsize, paged
    what = f"heads of {key[0]} in {itemsize} bytes{', in pages,' * paged}"
    # Left to itself, the compiler would spill two registers for wide heads.
    wide = DecodeConfig(64, 8, 3, maxnreg=248)
    fallback = DecodeConfig(64, 4, 3) if key[0] <= _NARROW else wide
    return from_table("decode_kernel", TABLE, gpu, key, what, fallback)


def _text(select: tuple[str, str], constants: str, *steps: str) -> tl.constexpr:
    """PTX for two pairs of floats of 16 bits from four bytes. select: how bytes come into halves of
    a; constants: what m and n are; steps: what makes $ of a."""
    pairs = [
        f"prmt.b32 a, $2, 0, {one}; {' '.join(steps).replace('$', f'${i}')}"
        for i, one in enumerate(select)
    ]
    return tl.constexpr(f"{{ .reg .b32 a, b, m, n; {constants} {' '.join(pairs)} }}")


# Bytes, of which the lower 7 bits become the significand of 128 and the sign that of 128 or 256; or
# all, the sign inverted, that of 1024.
_LOW, _HIGH = ("0x4140", "0x4342"), ("0x1404", "0x3424")
_INT8_BFLOAT16 = _text(
    _LOW, "mov.b32 m, 0xBF80BF80;",
    "lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA; lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;",
    "fma.rn.bf16x2 $, b, m, a;",
)  # fmt: skip
_INT8_FLOAT16 = _text(
    _LOW, "mov.b32 m, 0x64806480;",
    "lop3.b32 a, a, 0x00800080, 0x64006400, 0xBE; sub.f16x2 $, a, m;",
)  # fmt: skip
# Bits of e4m3 are put where a float of 16 bits has sign, exponent and significand.
_SIGN = "lop3.b32 a, a, 0x80008000, b, 0xEA;"
_FP8_BFLOAT16 = _text(
    _HIGH, "mov.b32 m, 0x7B807B80; mov.b32 n, 0x80008000;",
    f"shr.u32 b, a, 4; and.b32 b, b, 0x07F007F0; {_SIGN} fma.rn.bf16x2 $, a, m, n;",
)  # fmt: skip
_FP8_FLOAT16 = _text(
    _HIGH, "mov.b32 m, 0x5C005C00;",
    f"shr.u32 b, a, 1; and.b32 b, b, 0x3F803F80; {_SIGN} mul.f16x2 $, a, m;",
)  # fmt: skip


@triton.jit
def floats(x, KIND: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr):
    """Elements of a cache in a dtype of 16 bits, exactly. NaN of e4m3 is lost; the scale of its row
    keeps it. ASM: four at a time, by PTX."""
    HALF: tl.constexpr = KIND == tl.float16  # noqa: SIM300
    if x.dtype == KIND:
        return x
    elif ASM:  # noqa: RET505  # Triton's compiler looks into code after a return.
        text: tl.constexpr = (
            (_FP8_FLOAT16 if HALF else _FP8_BFLOAT16)
            if FP8
            else (_INT8_FLOAT16 if HALF else _INT8_BFLOAT16)
        )
        # Not pure, so that bytes are not brought into the order of the matrix units one by one.
        return tl.inline_asm_elementwise(
            text, "=&r,=&r,r", [x], dtype=KIND.value, is_pure=False, pack=4
        )
    elif FP8:
        bits = x.to(tl.int16)
        shift: tl.constexpr = 7 if HALF else 4
        y = (((bits & 0x80) << 8) | ((bits & 0x7F) << shift)).to(KIND, bitcast=True)
        return y * (256.0 if HALF else 1.329227995784916e36)  # 2**120
    else:
        return x.to(KIND)


@triton.jit
def load_block(cache, page, slot, head, inside, column, size, SCALED: tl.constexpr):
    """Rows of a cache [keys, SIZE], 0 outside, and their scales, float32, if it has some.

    cache: pointer, strides, pointer of scales, and their strides."""
    ptr, strides, scale_ptr, scale_strides = cache
    at = offsets(page, slot, head, strides)
    mask = inside[:, None] & (column < size)[None, :]
    rows = tl.load(ptr + at[:, None] + column[None, :], mask=mask, other=0)
    scales = 1.0
    if SCALED:
        at = offsets(page, slot, head, scale_strides)
        scales = tl.load(scale_ptr + at, mask=inside, other=0.0)
    return rows, scales


@triton.jit
def span_of(
    lengths_ptr, batch, capacity, splits, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """The keys of a sequence, the first and the end of this program's, and how many programs share
    them. Blocks begin at multiples of KEYS."""
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    length = tl.maximum(tl.minimum(length, capacity), 0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES - WINDOW + 1, 0) // KEYS
    blocks = tl.cdiv(length, KEYS) - first
    each = tl.maximum(tl.cdiv(blocks, splits), LEAST)
    begin = first + tl.program_id(0) * each
    end = tl.minimum((begin + each) * KEYS, length)
    return length, begin * KEYS, end, tl.maximum(tl.cdiv(blocks, each), 1)


@triton.jit
def join(
    parts_ptr, lse_ptr, z_ptr, used, first, rows, column, size,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the parts of a tile, of which `first` is where they begin among all, as one: [rows,
    size]. As many parts as registers hold are loaded at once, since only this program still runs.
    """
    SIZE: tl.constexpr = column.shape[0]
    MOST: tl.constexpr = 8192 // (ROWS * SIZE)
    TOGETHER: tl.constexpr = MOST if MOST < SPLITS else SPLITS
    row, split = tl.arange(0, ROWS), tl.arange(0, SPLITS)
    at = (first + split)[:, None] * ROWS + row[None, :]
    mask = (split < used)[:, None] & (row < rows)[None, :]
    each = tl.load(lse_ptr + at, mask=mask, other=-float("inf"), cache_modifier=".cg")
    largest = tl.maximum(tl.max(each, axis=0), -3.0e38)
    weights = tl.sum(tl.exp2(each - largest[None, :]), axis=0)
    z = tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(0, used, TOGETHER):
        part = start + tl.arange(0, TOGETHER)
        place = (first + part)[:, None] * ROWS + row[None, :]
        here = (part < used)[:, None] & (row < rows)[None, :]
        lse = tl.load(lse_ptr + place, mask=here, other=-float("inf"), cache_modifier=".cg")
        values = parts_ptr + place[:, :, None] * SIZE + column[None, None, :]
        values = tl.load(values, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
        z += tl.sum(tl.exp2(lse - largest[None, :])[:, :, None] * values, axis=0)
    z = z / tl.where(weights == 0, 1.0, weights)[:, None]
    to = z_ptr + row[:, None] * size + column[None, :]
    inside = (row < rows)[:, None] & (column < size)[None, :]
    tl.store(to, z.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def attended(
    q, k_cache, v_cache, table, span, place, query, column, size, scale,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Sums over a span of the keys (length, begin, end): the largest score, to the base 2, and the
    sums of weights and of weighted values relative to it. place: head, batch."""
    log2_e = tl.constexpr(1.4426950408889634)
    KIND: tl.constexpr = tl.bfloat16 if SCALED else q.dtype  # of the second product
    length, begin, end = span
    head, batch = place[0], own_row(table, place[1], WHOLE)
    # Finite, so that a row that has not seen a key yet has no -inf less -inf, which is NaN.
    largest = tl.full((q.shape[0],), -3.0e38, tl.float32)
    weights = tl.zeros((q.shape[0],), tl.float32)
    weighted = tl.zeros((q.shape[0], q.shape[1]), tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        page, slot = slots(table, batch, key, inside, PAGE)
        k, factors = load_block(k_cache, page, slot, head, inside, column, size, SCALED)
        scores = tl.dot(q, floats(k, q.dtype, FP8, ASM).T) * scale
        if SCALED:
            scores = scores * factors[None, :]
        if CAP > 0:  # tanh x = 1 - 2 / (1 + exp 2x)
            scores = CAP * log2_e - 2 * CAP * log2_e / (1 + tl.exp2(scores))
        visible = causal(query, key, QUERIES, length, WINDOW) & inside[None, :]
        scores = tl.where(visible, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, axis=1))
        rescale = tl.exp2(largest - now)
        weight = tl.exp2(scores - now[:, None])
        weights = weights * rescale + tl.sum(weight, axis=1)
        weighted = weighted * rescale[:, None]
        v, factors = load_block(v_cache, page, slot, head, inside, column, size, SCALED)
        if SCALED:
            weight = weight * factors[None, :]
        weighted = tl.dot(weight.to(KIND), floats(v, KIND, FP8, ASM), weighted)
        largest = now
    return largest, weights, weighted


@triton.jit(do_not_specialize=("heads", "group", "capacity", "splits"))
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, lengths_ptr, table_ptr, z_ptr,
    parts_ptr, lse_ptr, met_ptr, heads, group, capacity, size, splits, scale,
    q_strides, k_strides, v_strides, k_scale_strides, v_scale_strides, table_stride,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, LIVE: tl.constexpr, ALIKE: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A part of the keys for a tile of queries; z [batch, heads of q, QUERIES, size].

    Program (split, head and block of its rows, batch). heads: of keys, each for `group` of q.
    LEAST: the fewest blocks of keys of a part. SPLITS: `splits` rounded up to a power of two. LIVE:
    the rows of a tile that parts have. ALIKE: k and v have the same strides. scale includes
    log2(e); with CAP it is that of tanh's exponent. Words at met_ptr are 0 before and after.
    """
    split, batch, head = tl.program_id(0), tl.program_id(2), tl.program_id(1) % heads
    column = tl.arange(0, SIZE)
    row = tl.program_id(1) // heads * ROWS + tl.arange(0, ROWS)
    query = row % QUERIES
    at = (head * group + row // QUERIES) * q_strides[1] + query * q_strides[2]
    there = (row < group * QUERIES)[:, None] & (column < size)[None, :]
    q_at = q_ptr + batch.to(tl.int64) * q_strides[0] + at[:, None] + column[None, :]
    q = tl.load(q_at, mask=there, other=0.0)
    length, begin, end, used = span_of(
        lengths_ptr, batch, capacity, splits, QUERIES, WINDOW, KEYS, LEAST
    )
    if split >= used:
        return
    if ALIKE:
        v_strides, v_scale_strides = k_strides, k_scale_strides
    k_cache = (k_ptr, k_strides, k_scale_ptr, k_scale_strides)
    v_cache = (v_ptr, v_strides, v_scale_ptr, v_scale_strides)
    largest, weights, weighted = attended(
        q, k_cache, v_cache, (table_ptr, table_stride), (length, begin, end), (head, batch),
        query, column, size, scale, QUERIES, WINDOW, CAP, PAGE, WHOLE, SCALED, FP8, ASM, KEYS,
    )  # fmt: skip
    blind = weights == 0
    z = weighted / tl.where(blind, 1.0, weights)[:, None]
    z_ptr += (batch * heads + head).to(tl.int64) * (group * QUERIES) * size
    if used == 1:
        to = row[:, None] * size + column[None, :]
        tl.store(z_ptr + to, z.to(z_ptr.dtype.element_ty), mask=there)
    elif SPLITS > 1:
        tile = batch * tl.num_programs(1) + tl.program_id(1)
        first = tile.to(tl.int64) * splits
        lane = tl.arange(0, ROWS)
        place = (first + split) * LIVE + lane
        lse = tl.where(blind, -float("inf"), largest + tl.log2(weights))
        tl.store(lse_ptr + place, lse, mask=lane < LIVE)
        tl.store(
            parts_ptr + place[:, None] * SIZE + column[None, :], z, mask=(lane < LIVE)[:, None]
        )
        tl.debug_barrier()
        if tl.atomic_add(met_ptr + tile, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            above = tl.program_id(1) // heads * ROWS
            rows, z_at = group * QUERIES - above, z_ptr + above * size
            join(parts_ptr, lse_ptr, z_at, used, first, rows, column, size, LIVE, SPLITS)
            tl.atomic_xchg(met_ptr + tile, 0, sem="relaxed")


def tile_rows(queries: int, size: int) -> int:
    """Of so many queries of a key head, how many are rows of one tile."""
    most = min(_MOST_ROWS, max(LEAST_DOT, _MOST_SUMS // size))
    return min(max(LEAST_DOT, triton.next_power_of_2(queries)), most)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    cap: float,
    scale: float,
    config: DecodeConfig | None = None,
) -> Tensor:
    """z like q [batch, heads, queries, size], contiguous; window, cap: 0 for none.

    The rest as the operator takes it. ValueError if `config` does not fit.
    """
    z = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    cache = cache_arguments(k, v, block_table, k_scale, v_scale)
    if 0 in (z.numel(), cache["capacity"]):
        return z.zero_()
    (batch, q_heads, queries, size), gpu = q.shape, gpu_of(q.device)
    heads = cache["k_ptr"].shape[1]
    config = config or decode_choice(gpu, size, k.itemsize, cache["PAGE"] > 0).config
    config.require(cache["SIZE"], k.itemsize)
    rows = tile_rows(q_heads // heads * queries, cache["SIZE"])
    tiles = heads * triton.cdiv(q_heads // heads * queries, rows)
    seen = min(cache["capacity"], window + queries + config.keys if window else 1 << 40)
    splits = config.splits(gpu, batch * tiles, seen)
    live = min(rows, triton.next_power_of_2(q_heads // heads * queries))
    parts = batch * tiles * splits * live if splits > 1 else 0
    sums = torch.empty(parts, cache["SIZE"] + 1, dtype=torch.float32, device=q.device)
    arguments = {
        **cache,
        "q_ptr": q,
        "lengths_ptr": lengths.contiguous(),
        "z_ptr": z,
        "parts_ptr": sums,
        "lse_ptr": sums.view(-1)[parts * cache["SIZE"] :],
        "met_ptr": counters(q.device, batch * tiles) if splits > 1 else lengths,
        "heads": heads,
        "group": q_heads // heads,
        "splits": splits,
        "scale": scale * LOG2_E * (2 / cap if cap else 1),
        "q_strides": q.stride()[:3],
        "QUERIES": queries,
        "WINDOW": window,
        "CAP": cap,
        "ASM": gpu.assembly,
        "ROWS": rows,
        "LIVE": live,
        "ALIKE": all(cache[f"k{x}_strides"] == cache[f"v{x}_strides"] for x in ("", "_scale")),
        "KEYS": config.keys,
        "LEAST": max(1, config.least // config.keys),
        "SPLITS": triton.next_power_of_2(splits),
    }
    options = config.options | {"num_warps": config.warps(rows)}
    launch(decode_kernel, (splits, tiles, batch), arguments, **options)
    return z
