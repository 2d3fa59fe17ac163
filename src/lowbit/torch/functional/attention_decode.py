"""Attention of a step of generation over a cache of keys and values, and writing into it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.kernels.triton.fast import LARGEST_HEAD, MOST_QUERIES
from lowbit.torch.arguments import check_alike, check_shape, check_tensor
from lowbit.torch.functional.attention import DTYPES
from lowbit.torch.registration import register, specified

_QUANTIZED = (torch.int8, torch.float8_e4m3fn)
_INTEGERS = (torch.int32, torch.int64)


@specified("attention_decode_int8")
@specified("attention_decode")
def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over a cache, for the last 1 to 8 tokens of each sequence.

    q: bfloat16 or float16 [batch, heads, queries, size], size at most 256. k, v: the cache, [batch,
    key heads, capacity, size], or, with `block_table` int32 [batch, n], pages [pages, page size,
    key heads, size], of which sequence b has table[b, 0], table[b, 1] and so on, one after another.
    Any strides; elements of a head that are no neighbours are copied. lengths: int32 or int64
    [batch], how many keys each sequence has, those of the queries with them: query i of n sees the
    first length - n + i + 1 (`causal_diagonal`), and gives zeros if that is none. A length above
    the capacity counts as it. Heads share key heads as in `attention`.

    The cache is of q's dtype, or int8 or float8_e4m3fn with k_scale and v_scale, float32, of the
    cache's shape without the last dimension: a key is its elements times its scale. window: a query
    sees so many keys at most, its own and those before it. cap: scores become
    cap · tanh(score / cap). scale: 1/√size if not given.

    The result is like q, contiguous. Sums are float32; weights are rounded to q's dtype (to
    bfloat16 with scales) before they multiply v. Nothing waits for the device: the grid follows
    from the shapes, so the call can be part of a CUDA graph. Not differentiable.

    TypeError for another dtype; ValueError for shapes that do not match, heads above 256, more than
    8 queries, and a window, cap or scale that is not positive.
    """
    op = "attention_decode"
    check_tensor(op, "q", q, DTYPES)
    _check_cache(op, q, k, v, block_table, k_scale, v_scale, names=("q", "k", "v"))
    if not 1 <= q.shape[2] <= MOST_QUERIES:
        raise ValueError(
            f"{op}: q has {q.shape[2]} queries; from 1 to {MOST_QUERIES} is possible (`attention` "
            "takes more)"
        )
    if not 1 <= q.shape[3] <= LARGEST_HEAD:
        raise ValueError(
            f"{op}: heads have {q.shape[3]} elements; from 1 to {LARGEST_HEAD} is possible"
        )
    check_tensor(op, "lengths", lengths, _INTEGERS)
    check_shape(op, "lengths", lengths, q.shape[:1])
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    for name, value in (("window", window), ("cap", cap), ("scale", scale)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{op}: {name} is {value}; it must be positive")
    return _decode_op(
        q, k, v, lengths, block_table, k_scale, v_scale, window or 0, cap or 0.0, scale
    )


def write_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Put the keys and values of new tokens into a cache, in place.

    k, v: bfloat16 or float16 [batch, key heads, tokens, size], of any number of tokens; what turns
    them by their position (a rotary embedding) comes before. positions: int32 or int64 [batch],
    that of each sequence's first new token; tokens before 0 or from the capacity on are left out.
    The rest is as for `attention_decode`. int8 and float8_e4m3fn caches get values rounded half to
    even at a scale of largest magnitude / 127, or / 448, of the token and head, which is written
    into k_scale and v_scale; one of a row that is not finite is NaN.

    TypeError for another dtype; ValueError for shapes that do not match, and a cache in which
    elements of a head are no neighbours.
    """
    op = "write_cache"
    check_tensor(op, "k", k, DTYPES)
    check_alike(op, k=k, v=v)
    check_shape(op, "v", v, k.shape)
    names = ("k", "k_cache", "v_cache")
    _check_cache(op, k, k_cache, v_cache, block_table, k_scale, v_scale, names=names)
    heads = k_cache.shape[1 if block_table is None else 2]
    if k.shape[1] != heads:
        raise ValueError(f"{op}: k has {k.shape[1]} heads, and the cache {heads}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(3) != 1:
            raise ValueError(f"{op}: elements of a head must be neighbours in {name}")
    check_tensor(op, "positions", positions, _INTEGERS)
    check_shape(op, "positions", positions, k.shape[:1])
    _write_op(k, v, k_cache, v_cache, positions, block_table, k_scale, v_scale)


def _check_cache(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    names: tuple[str, str, str],
) -> None:
    """What attention and the writer ask of a cache, beside q or new keys, called by these names."""
    for name, value in zip(names[1:], (k, v), strict=True):
        check_tensor(op, name, value, (q.dtype, *_QUANTIZED))
        if value.dim() != 4:
            raise ValueError(
                f"{op}: {name} has the shape {list(value.shape)}; it must have four sizes"
            )
    if q.dim() != 4:
        raise ValueError(f"{op}: {names[0]} has the shape {list(q.shape)}; it must have four sizes")
    check_alike(op, **dict(zip(names[1:], (k, v), strict=True)))
    check_shape(op, names[2], v, k.shape)
    batch, heads, _, size = q.shape
    paged = block_table is not None
    key_heads = k.shape[2 if paged else 1]
    if k.shape[3] != size or not (paged or k.shape[0] == batch):
        wanted = (
            f"[pages, page size, key heads, {size}]"
            if paged
            else f"[{batch}, key heads, n, {size}]"
        )
        raise ValueError(
            f"{op}: {names[1]} has the shape {list(k.shape)}; beside {names[0]} of "
            f"{list(q.shape)} it must be {wanted}"
        )
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"{op}: {heads} heads of {names[0]} cannot share {key_heads} key heads evenly"
        )
    if paged:
        check_tensor(op, "block_table", block_table, (torch.int32,))
        if block_table.dim() != 2 or len(block_table) != batch or block_table.stride(1) != 1:
            raise ValueError(f"{op}: block_table must be [{batch}, n], its rows contiguous")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, value in scales.items():
        if (value is None) == (k.dtype in _QUANTIZED):
            given = "is needed" if value is None else "has no use"
            raise ValueError(f"{op}: {name} {given} for a cache of {k.dtype}")
        if value is not None:
            check_tensor(op, name, value, (torch.float32,))
            check_shape(op, name, value, k.shape[:3])


def _gathered(x: Tensor, block_table: Tensor | None) -> Tensor:
    """A cache, or its scales with one element to a head, as [batch, heads, capacity, size]."""
    if block_table is None:
        return x
    pages = x[
        block_table.long().clamp(0, max(len(x) - 1, 0))
    ]  # whatever the table has past the end
    return pages.flatten(1, 2).transpose(1, 2)


def _wide(x: Tensor, scale: Tensor | None, block_table: Tensor | None, group: int) -> Tensor:
    """In float64, a key head for each head of q."""
    found = _gathered(x, block_table).double()
    if scale is not None:
        found = found * _gathered(scale[..., None], block_table).double()
    return found.repeat_interleave(group, 1)


def _decode(
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
) -> Tensor:
    group = q.shape[1] // k.shape[1 if block_table is None else 2]
    k, v = _wide(k, k_scale, block_table, group), _wide(v, v_scale, block_table, group)
    keys, queries = k.shape[2], q.shape[2]
    scores = q.double() @ k.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    last = (
        lengths.clamp(0, keys)[:, None, None]
        - queries
        + torch.arange(queries, device=q.device)[:, None]
    )
    key = torch.arange(keys, device=q.device)
    seen = (key <= last) & (key > last - (window or keys + queries))
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0))
    past = key[:, None] >= lengths[:, None, None, None]  # which may hold anything
    return (weights @ v.masked_fill(past, 0)).to(q.dtype).contiguous()


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as a cache of 8 bits has them, and their scales."""
    x = x.float()
    scale = x.abs().amax(-1) / (127 if dtype == torch.int8 else 448)
    y = x / torch.where(scale == 0, 1, scale)[..., None]
    y = y.round().nan_to_num() if dtype == torch.int8 else y.nan_to_num()
    return y.to(dtype), scale + (x * 0).sum(-1)


def _write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    block_table: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    at = positions.long()[:, None] + torch.arange(k.shape[2], device=k.device)
    if block_table is None:
        page, slot, capacity = (
            torch.arange(len(k), device=k.device)[:, None].expand_as(at),
            at,
            k_cache.shape[2],
        )
    else:
        size, width = k_cache.shape[1], block_table.shape[1]
        capacity = size * width
        page = block_table.long().gather(1, (at // size).clamp(0, width - 1))
        slot = at % size
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    kept = (at >= 0) & (at < capacity)
    page, slot = page[kept], slot[kept]
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = new.transpose(1, 2)[kept]  # [tokens, heads, size]
        if scale is not None:
            rows, factors = _quantized(rows, cache.dtype)
            scale = scale if block_table is None else scale.transpose(1, 2)
            scale[page, :, slot] = factors
        bits = torch.uint8 if cache.itemsize == 1 else cache.dtype
        cache.view(bits)[page, :, slot] = rows.view(bits)


_CACHE = "Tensor? block_table, Tensor{} k_scale, Tensor{} v_scale"
_decode_op = register(
    f"attention_decode(Tensor q, Tensor k, Tensor v, Tensor lengths, {_CACHE.format('?', '?')}, "
    "int window, float cap, float scale) -> Tensor",
    kernel="attention_decode.attention_decode",
    cpu=_decode,
    fake=lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
)
_write_op = register(
    "write_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor positions, "
    f"{_CACHE.format('(c!)?', '(d!)?')}) -> ()",
    kernel="key_value_cache.write_cache",
    cpu=_write,
    fake=lambda *_: None,
)
