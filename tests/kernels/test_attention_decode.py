"""Attention over a cache, and the writer, in the interpreter; compiled ahead for two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lowbit.kernels.triton.ahead import compile_ahead
from lowbit.kernels.triton.fast import attention_decode as fast
from lowbit.kernels.triton.fast import key_value_cache
from lowbit.kernels.triton.fast.attention_decode import DecodeConfig
from lowbit.kernels.triton.fast.launch import Gpu
from lowbit.torch.functional import attention_decode, write_cache
from lowbit_lab import interpreter

ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# As many parts as there are keys for.
SPLIT = DecodeConfig(16, 4, 2, least=16, programs=512)
WHOLE = DecodeConfig(32, 4, 2, programs=1)

Cache = dict[str, Tensor]


def exact(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int],
    window: int | None = None, cap: float | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """In float64, one sequence, head and query after another."""
    z = torch.zeros(q.shape, dtype=torch.float64)
    batch, heads, queries, size = q.shape
    factor = size**-0.5 if scale is None else scale
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                end = min(lengths[b], k.shape[2]) - queries + i + 1
                first = 0 if window is None else max(0, end - window)
                if end <= first:
                    continue
                head = h * k.shape[1] // heads
                scores = k[b, head, first:end].double() @ q[b, h, i].double() * factor
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                z[b, h, i] = torch.softmax(scores, 0) @ v[b, head, first:end].double()
    return z


def drawn(
    batch: int, heads: int, key_heads: int, queries: int, capacity: int, size: int,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    made = torch.Generator().manual_seed(capacity + size)
    q = torch.randn((batch, queries, heads, size), generator=made).to(dtype).transpose(1, 2)
    k, v = (torch.randn((batch, key_heads, capacity, size), generator=made) for _ in "kv")
    return q, k.to(dtype), v.to(dtype)


def paged(x: Tensor, page: int, table: Tensor) -> Tensor:
    """[batch, heads, capacity, ...] as pages [pages, page, heads, ...]; unused ones are NaN."""
    batch, heads, capacity, *rest = x.shape
    kind = x if x.is_floating_point() and x.itemsize > 1 else x.float()
    pages = torch.full((int(table.max()) + 2, page, heads, *rest), float("nan")).to(kind.dtype)
    parts = x.transpose(1, 2).reshape(batch, capacity // page, page, heads, *rest)
    for b in range(batch):
        for i in range(capacity // page):
            pages[table[b, i]] = parts[b, i].to(pages.dtype)
    return pages.to(x.dtype)


def close(got: Tensor, wanted: Tensor, unit: float) -> None:
    assert torch.isfinite(got).all()
    error = (got.double() - wanted).abs().max().item()
    assert error <= 6 * unit * wanted.abs().max().item()


@pytest.mark.pairs
@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "queries", "size"),
    [(4, 2, 1, 64), (6, 2, 3, 96), (2, 2, 8, 128), (1, 1, 1, 256), (3, 1, 2, 20), (72, 1, 1, 16)],
)
def test_sizes(
    heads: int, key_heads: int, queries: int, size: int, dtype: torch.dtype, config: DecodeConfig
) -> None:
    q, k, v = drawn(5, heads, key_heads, queries, 70, size, dtype)
    k[:, :, 65:], v[:, :, 65:] = float("nan"), float("nan")
    lengths = torch.tensor([0, 1, 33, 64, 65], dtype=torch.int32)
    with interpreter():
        z = fast.attention_decode(q, k, v, lengths, None, None, None, 0, 0.0, size**-0.5, config)
    wanted = exact(q, k, v, lengths.tolist())
    close(z, wanted, ROUNDOFF[dtype])
    assert (z[0] == 0).all()
    close(attention_decode(q, k, v, lengths), wanted, ROUNDOFF[dtype])


@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(
    "how", [{"window": 1}, {"window": 20}, {"cap": 2.0}, {"window": 33, "cap": 5.0}]
)
def test_windows_and_caps(how: dict[str, Any], config: DecodeConfig) -> None:
    q, k, v = drawn(4, 4, 2, 3, 96, 32)
    lengths = torch.tensor([2, 17, 80, 200])
    with interpreter():
        z = fast.attention_decode(
            q,
            k,
            v,
            lengths,
            None,
            None,
            None,
            how.get("window", 0),
            how.get("cap", 0.0),
            1.5,
            config,
        )
    wanted = exact(q, k, v, lengths.tolist(), **how, scale=1.5)
    close(z, wanted, ROUNDOFF[q.dtype])
    assert (z[0, :, 0] == 0).all()  # two keys and three queries
    close(attention_decode(q, k, v, lengths, **how, scale=1.5), wanted, ROUNDOFF[q.dtype])


def dequantized(cache: Tensor, scale: Tensor) -> Tensor:
    return cache.double() * scale.double()[..., None]


def cut(cache: Cache, page: int) -> tuple[Cache, Tensor]:
    """A cache in pages, in some order, and its block table."""
    batch, _, capacity, _ = cache["k"].shape
    count = capacity // page
    table = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(1))
    table = table[: batch * count].reshape(batch, count).int()
    return {name: paged(x, page, table) for name, x in cache.items()}, table


@pytest.mark.pairs
@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("page", [None, 1, 16, 24, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_caches(
    kind: torch.dtype | None, dtype: torch.dtype, page: int | None, config: DecodeConfig
) -> None:
    """What the writer wrote, in steps, is what attention reads, in pages and not."""
    q, k, v = drawn(3, 4, 2, 2, 48, 32, dtype)
    k[:, :, ::5] *= 0.01
    v[1, 1, 7] = 0.0
    lengths = torch.tensor([48, 25, 24], dtype=torch.int32)
    empty = {"k": torch.zeros_like(k, dtype=kind), "v": torch.zeros_like(v, dtype=kind)}
    if kind is not None:
        empty |= {f"{name}_scale": torch.zeros(k.shape[:3]) for name in "kv"}
    cache, table = (empty, None) if page is None else cut(empty, page)
    plain = {name: x.clone() for name, x in cache.items()}
    new = torch.stack([k[b, :, n - 2 : n] for b, n in enumerate(lengths.tolist())])
    values = torch.stack([v[b, :, n - 2 : n] for b, n in enumerate(lengths.tolist())])

    def write(held: Cache, k: Tensor, v: Tensor, at: Tensor) -> None:
        scales = {name: held.get(name) for name in ("k_scale", "v_scale")}
        write_cache(k, v, held["k"], held["v"], at, block_table=table, **scales)

    def prompt(held: Cache, first: int, last: int) -> None:
        write(held, k[:, :, first:last], v[:, :, first:last], torch.full((3,), first))

    # Most of the prompt by PyTorch; across a page's end, and what is new, in the interpreter.
    prompt(cache, 0, 30)
    prompt(cache, 35, 46)
    with interpreter():
        prompt(cache, 30, 35)
        write(cache, new, values, lengths - 2)
        scales: Any = [cache.get(name) for name in ("k_scale", "v_scale")]
        decode: Any = fast.attention_decode
        z = decode(q, cache["k"], cache["v"], lengths, table, *scales, 0, 0.0, 0.3, config)
    prompt(plain, 0, 46)
    write(plain, new, values, lengths - 2)
    for name, x in cache.items():
        assert torch.equal(x.view(torch.uint8), plain[name].view(torch.uint8)), name
    if kind is not None:
        each = [empty, cache][page is None]
        if page is not None:  # brought back from the pages
            assert table is not None
            each = {n: x[table.long()].flatten(1, 2).transpose(1, 2) for n, x in cache.items()}
        wide = (dequantized(each[name], each[f"{name}_scale"]) for name in "kv")
        unit = 2.0**-4 if kind == torch.float8_e4m3fn else 2.0**-7
        for got, (original, name) in zip(wide, ((k, "k"), (v, "v")), strict=True):
            largest = original.double().abs().amax(-1, keepdim=True)
            written = torch.tensor([48, 25, 24])[:, None, None, None] > torch.arange(48)[:, None]
            error = (got - original.double()).abs() * written
            assert (error <= unit * largest).all(), name
        k, v = (dequantized(each[name], each[f"{name}_scale"]) for name in "kv")
    wanted = exact(q, k, v, lengths.tolist(), scale=0.3)
    close(z, wanted, ROUNDOFF[dtype] if kind is None else 2.0**-8)
    named = {"k_scale": scales[0], "v_scale": scales[1], "block_table": table, "scale": 0.3}
    z = attention_decode(q, cache["k"], cache["v"], lengths, **named)
    close(z, wanted, ROUNDOFF[dtype])


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_that_are_not_finite(kind: torch.dtype) -> None:
    k = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16)
    k[0, 0, 1, 3], k[0, 1, 2, 5], k[0, 1, 3] = float("nan"), float("inf"), 0.0
    for inside in (True, False):
        cache, scale = torch.zeros_like(k, dtype=kind), torch.zeros(1, 2, 4)
        given = (k, k, cache, cache.clone(), torch.zeros(1, dtype=torch.int32))
        if inside:
            with interpreter():
                write_cache(*given, k_scale=scale, v_scale=scale.clone())
        else:
            write_cache(*given, k_scale=scale, v_scale=scale.clone())
        assert scale.isnan().nonzero().tolist() == [[0, 0, 1], [0, 1, 2]]
        assert (cache[0, 1, 3].float() == 0).all()


def test_every_number_of_eight_bits_is_read_exactly() -> None:
    """One key: its value comes out as it is."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F].view(torch.float8_e4m3fn)  # all but NaN
    numbers = torch.cat([numbers, numbers[:2]]).view(1, 1, 1, 256)
    q, scale = torch.ones(1, 1, 1, 256), torch.ones(1, 1, 1)
    length = torch.ones(1, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        for cache in (numbers, bits.view(torch.int8).view(1, 1, 1, 256)):
            with interpreter():
                z = attention_decode(
                    q.to(dtype), cache, cache, length, k_scale=scale, v_scale=scale
                )
            assert torch.equal(z, cache.to(dtype))


def test_positions_outside_of_the_cache_are_left_out() -> None:
    k = torch.ones(2, 1, 4, 16, dtype=torch.float16)
    for inside in (True, False):
        cache = torch.zeros(2, 1, 6, 16, dtype=torch.float16)
        at = torch.tensor([-2, 4])
        if inside:
            with interpreter():
                write_cache(k, k, cache, cache.clone(), at)
        else:
            write_cache(k, k, cache, cache.clone(), at)
        written = cache[:, 0, :, 0]
        assert written.tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]


def test_nothing_to_attend_to() -> None:
    q, k, v = drawn(2, 2, 1, 1, 0, 16)
    with interpreter():
        z = attention_decode(q, k, v, torch.zeros(2, dtype=torch.int32))
        none = attention_decode(q[:0], k[:0], v[:0], torch.zeros(0, dtype=torch.int32))
    assert (z == 0).all()
    assert none.shape == (0, 2, 1, 16)


def test_how_many_programs_share_a_head() -> None:
    """Twice as many as there are multiprocessors, of 256 keys at least."""
    config, gpu = DecodeConfig(64, 4, 3), Gpu(90, 132)
    assert config.splits(gpu, 8, 8192) == 32
    assert config.splits(gpu, 8, 131072) == 33
    assert config.splits(gpu, 1, 131072) == 128
    assert config.splits(gpu, 128, 8192) == 2
    assert config.splits(gpu, 1024, 8192) == 1
    assert config.splits(gpu, 8, 100) == 1


@pytest.mark.parametrize("kind", [None, torch.int8], ids=str)
def test_opcheck(kind: torch.dtype | None) -> None:
    q, k, v = drawn(2, 2, 1, 2, 32, 16)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    pages = [torch.zeros(4, 16, 1, 16, dtype=kind or q.dtype) for _ in "kv"]
    scales = [None if kind is None else torch.ones(4, 16, 1) for _ in "kv"]
    at = torch.tensor([3, 20], dtype=torch.int32)
    operators = torch.ops.lowbit
    given = (k[:, :, :2], v[:, :, :2], *pages, at, table, *scales)
    torch.library.opcheck(operators.write_cache.default, given)
    given = (q, *pages, at, table, *scales, 5, 2.0, 0.25)
    torch.library.opcheck(operators.attention_decode.default, given)


def compiled(kernel: Any, sm: int, options: dict[str, int], **given: Any) -> Any:
    strides, rows = ("i32", "i32", "i32"), ("i32", "i32", 1)
    named: dict[str, Any] = {
        name: "*bf16" if name.endswith("_ptr") else strides if "strides" in name else "i32"
        for name in kernel.arg_names
    }
    named |= {
        "table_ptr": "*i32",
        "lengths_ptr": "*i32",
        "positions_ptr": "*i32",
        "met_ptr": "*i32",
    }
    named |= {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    named |= {f"{x}_scale_ptr": "*fp32" for x in "kv"} | {f"{x}_scale_strides": rows for x in "kv"}
    named |= dict.fromkeys(("heads", "group", "splits"), "i32:1")
    named |= {
        "QUERIES": 1,
        "WINDOW": 0,
        "CAP": 0.0,
        "PAGE": 0,
        "WHOLE": False,
        "SCALED": False,
        "FP8": False,
        "ASM": True,
    }
    named |= {
        "ROWS": 16,
        "LIVE": 4,
        "ALIKE": True,
        "SIZE": 128,
        "KEYS": 64,
        "LEAST": 4,
        "SPLITS": 32,
    } | given
    arguments = {name: named[name] for name in kernel.arg_names}
    return compile_ahead(kernel, arguments, sm, **options)


@pytest.mark.drawn(7)
@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("cache", ["bf16", "i8", "fp8"])
@pytest.mark.parametrize(
    ("size", "rows", "given"),
    [
        (64, 16, {}),
        (128, 16, {}),
        (128, 16, {"PAGE": 16}),
        (128, 16, {"WHOLE": True}),
        (256, 16, {"PAGE": 64}),
        (128, 64, {"QUERIES": 8, "WINDOW": 100, "CAP": 50.0}),
        (256, 32, {"QUERIES": 8, "PAGE": 16, "CAP": 50.0}),
    ],
)
@pytest.mark.parametrize("sm", [80, 90])
def test_compiled_ahead(sm: int, size: int, rows: int, given: dict[str, Any], cache: str) -> None:
    """Copies of 16 bytes, products on the matrix units, nothing in local memory."""
    config = fast.decode_choice(
        Gpu(sm, 132), size, 2 if cache == "bf16" else 1, "PAGE" in given
    ).config
    if cache != "bf16":
        kind = "*u8" if cache == "fp8" else "*i8"
        given = {"k_ptr": kind, "v_ptr": kind, "SCALED": True, "FP8": cache == "fp8", **given}
    given = {"ROWS": rows, "SIZE": size, "KEYS": config.keys, **given}
    options = config.options | {"num_warps": config.warps(rows)}
    made = compiled(fast.decode_kernel, sm, options, **given)
    assert made.local == 0
    assert "HMMA" in made.sass or "HGMMA" in made.sass
    assert "cp.async.cg.shared.global [ %" in made.ptx
    assert made.wide_loads > 0


@pytest.mark.parametrize("cache", ["bf16", "i8", "fp8"])
@pytest.mark.parametrize("sm", [80, 90])
def test_the_writer_compiled_ahead(sm: int, cache: str) -> None:
    kind = {"bf16": "*bf16", "i8": "*i8", "fp8": "*u8"}[cache]
    given = {"k_ptr": kind, "v_ptr": kind, "SCALED": cache != "bf16", "FP8": cache == "fp8"}
    made = compiled(key_value_cache.write_kernel, sm, {"num_warps": 1}, PAGE=16, **given)
    assert made.local == 0


def test_bad_arguments() -> None:
    q, k, v = drawn(2, 4, 2, 1, 10, 16)
    n = torch.tensor([3, 4])
    table = torch.zeros(2, 1, dtype=torch.int32)
    scale = torch.ones(2, 2, 10)
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        attention_decode(q.float(), k, v, n)
    with pytest.raises(TypeError, match="k is float16"):
        attention_decode(q, k.half(), v.half(), n)
    with pytest.raises(ValueError, match="cannot share 2 key heads"):
        attention_decode(q[:, :3], k, v, n)
    with pytest.raises(ValueError, match=r"it must be \[2, key heads, n, 16\]"):
        attention_decode(q, k[:1], v[:1], n)
    with pytest.raises(ValueError, match="neighbours"):
        write_cache(k, v, k.mT.contiguous().mT, v, n)
    with pytest.raises(ValueError, match="9 queries"):
        attention_decode(q.expand(2, 4, 9, 16), k, v, n)
    with pytest.raises(ValueError, match="from 1 to 256"):
        attention_decode(q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v.repeat(1, 1, 1, 17), n)
    with pytest.raises(ValueError, match="k_scale is needed"):
        attention_decode(q, k.to(torch.int8), v.to(torch.int8), n)
    with pytest.raises(ValueError, match="k_scale has no use"):
        attention_decode(q, k, v, n, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match="window is 0"):
        attention_decode(q, k, v, n, window=0)
    with pytest.raises(ValueError, match="block_table must be"):
        attention_decode(q, k.transpose(1, 2), v.transpose(1, 2), n, block_table=table[:1])
    with pytest.raises(TypeError, match="lengths is float32"):
        attention_decode(q, k, v, n.float())
    with pytest.raises(ValueError, match="k has 4 heads, and the cache 2"):
        write_cache(q, q, k, v, n)
    with pytest.raises(ValueError, match="shared memory"):
        DecodeConfig(128, 4, 4).require(256)
