"""The float kernel texts: interpreted for every instruction set, compiled where they can run."""

from __future__ import annotations

import re
import struct
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

from lowbit.isa import SETS
from lowbit.isa.amx import AMX_BF16, ldtilecfg, tdpbf16ps, tileloadd, tilerelease, tilestored
from lowbit.isa.avx512 import AVX512_BF16, vdpbf16ps
from lowbit.isa.generic import fma
from lowbit.isa.types import F32Pointer, Int, U8Pointer, bf16
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.jit.memory import OutOfBoundsError
from lowbit.kernels.cpu.float.dots import float_dots
from lowbit.kernels.cpu.float.micro_kernel import (
    FloatMicro,
    FloatShape,
    float_micro_kernels,
)
from lowbit.kernels.cpu.float.operand import Operand
from lowbit.kernels.cpu.float.product import float_product
from lowbit.kernels.cpu.float.vectors import (
    FMA_256,
    FMA_512,
    MULTIPLY_ADD,
    PAIRS_512,
    VectorMicro,
)
from lowbit.kernels.cpu.shared.layout import blocks
from lowbit.kernels.cpu.shared.serving import consider
from lowbit.product.float_dispatch import cut
from lowbit.spec import DTYPES
from lowbit.spec.operations.products import gemm as gemm_spec

MICROS = pytest.mark.parametrize("micro", float_micro_kernels, ids=repr)
VECTOR_MICROS = [FMA_512, FMA_256, MULTIPLY_ADD]
SIZES = [
    (1, 1, 1),
    (1, 460, 9),
    (3, 21, 5),
    (9, 50, 37),
    pytest.param((34, 33, 70)),
]
X86 = pytest.mark.skipif(
    not llvm.get_process_triple().startswith("x86_64"), reason="LLVM here generates no x86 code"
)
UNIT = 2.0**-24


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def drawn(shape: tuple[int, int], kind: str, along: str, seed: int) -> np.ndarray:
    """Random numbers; `along` "x" and "k" are for a left operand [x, k], "" is strided."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if kind == "bf16":
        values = values.astype(ml_dtypes.bfloat16)
    if along == "x":
        return np.asfortranarray(values)
    if along == "":
        wide = np.zeros((shape[0], 2 * shape[1]), values.dtype)
        wide[:, ::-2] = values
        return wide[:, ::-2]
    return values


def arguments(
    micro: FloatMicro,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    out: np.ndarray,
    **extra: Any,
) -> dict[str, Any]:
    """All arguments of a product but the static ones: b is [k, n], several items and K blocks."""
    (m, k), n = a.shape, b.shape[1]
    rows, vectors = cut(micro, m, n)
    padded = blocks(k, 32) * 32
    unit = 2 if micro.pair else 4
    width = vectors * micro.lanes
    return {
        "a": a,
        "a_row_stride": a.strides[0] // a.itemsize,
        "a_stride": a.strides[1] // a.itemsize,
        "b": b,
        "b_column_stride": b.strides[1] // b.itemsize,
        "b_stride": b.strides[0] // b.itemsize,
        "shared": np.zeros(blocks(m, rows) * rows * padded * unit, np.uint8),
        "private": np.zeros(2 * (2 * width + rows) * (padded * unit + 64), np.uint8),
        "private_bytes": 0,
        "group_panels": 2,
        "c": c,
        "c_stride": 0 if c is None else c.strides[0] // 4,
        "partial": out if out.itemsize == 4 else np.zeros((m, n), np.float32),
        "partial_stride": out.strides[0] // 4 if out.itemsize == 4 else n,
        "out": out,
        "out_stride": out.strides[0] // out.itemsize,
        "m": m,
        "n": n,
        "k_size": k,
        "k_block": 32,
        "k_slice": 0,
        "item_blocks": 2,
        "item_panels": 3,
        "alpha": bits(1.5),
        "beta": bits(-0.5),
        "reads_c": int(c is not None),
        "first": 1,
        "last": 1,
        **extra,
    }


def statics(
    micro: FloatMicro, m: int, n: int, left: Operand, right: Operand, out_kind: str = "f32"
) -> dict[str, Any]:
    rows, vectors = cut(micro, m, n)
    width = vectors * micro.lanes
    tail = blocks(n % width, micro.lanes) if n > width else 0
    shape = FloatShape(rows, vectors, tail, n % micro.lanes != 0)
    operands = {"left": left, "right": right, "out_kind": out_kind}
    ahead = (2, 0) if m % 2 else (0, 64)
    return {"micro": micro, "shape": shape, **operands, "ahead": ahead, "sliced": False}


def check(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> None:
    """Within the budget of the specification."""
    kinds = (DTYPES[x.dtype.name].code for x in (a, b, out, out if c is None else c))
    case = gemm_spec.case(
        {"M": len(a), "K": len(b), "N": b.shape[1]},
        dtypes=":".join(kinds),
        without=["c"] if c is None else [],
        static={"alpha": 1.5, "beta": -0.5},
    )
    verdict = case.expect({"a": a, "b": b, **({} if c is None else {"c": c})}).check(out)
    assert verdict.ok, verdict.message


@pytest.mark.deep("*-sizes4-*")
@pytest.mark.pairs
@MICROS
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("along", ["k", "x", ""])
def test_packed_product(micro: FloatMicro, sizes: tuple[int, int, int], along: str) -> None:
    m, n, k = sizes
    for kind in ("bf16",) if micro.pair else ("f32", "bf16"):
        a, b = drawn((m, k), kind, along, 1), drawn((n, k), kind, along, 2).T
        c = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
        out = np.full((m, n), np.nan, np.float32)
        operand = Operand(kind, along, packed=True)
        static = statics(micro, m, n, operand, operand)
        float_product.interpret(micro.isa, arguments(micro, a, b, c, out), **static)
        check(out, a, b, c)


@pytest.mark.parametrize("micro", VECTOR_MICROS, ids=repr)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_plain_product(micro: FloatMicro, kind: str, sizes: tuple[int, int, int]) -> None:
    """Operands read where they are, nothing beyond them touched; c is not read where it has no
    part, and in gaps between the rows of the output nothing is written."""
    m, n, k = sizes
    a, b = drawn((m, k), kind, "k", 1), drawn((n, k), kind, "x", 2).T
    wide = np.full((m, n + 7), 99, np.float32)
    out = wide[:, 3 : n + 3]
    static = statics(micro, m, n, Operand(kind, "k", False), Operand(kind, "x", False))
    given = arguments(micro, a, b, None, out, shared=None, private=None)
    float_product.interpret(micro.isa, given, **static)
    check(out, a, b, None)
    assert (wide[:, :3] == 99).all()
    assert (wide[:, n + 3 :] == 99).all()


@pytest.mark.deep(
    "sizes4-bf16-fma/avx2",
    "sizes4-bf16-multiply-add/generic",
    "sizes4-f32-fma/avx2",
    "sizes4-f32-multiply-add/generic",
    "sizes4-bf16-fma/avx2_vnni",
    "sizes4-f32-fma/avx2_vnni",
)
@pytest.mark.parametrize("micro", VECTOR_MICROS, ids=repr)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_slices(micro: FloatMicro, kind: str, sizes: tuple[int, int, int]) -> None:
    """K in slices with sums of their own, which meet c, and are rounded, once."""
    m, n, k = sizes
    a, b = drawn((m, k), kind, "k", 1), drawn((n, k), kind, "x", 2).T
    c = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    out = np.full((m, n), np.nan, a.dtype)
    operands = Operand(kind, "k", False), Operand(kind, "x", False)
    static = {**statics(micro, m, n, *operands, out_kind=kind), "sliced": True}
    for size in 64, 48:  # one that is no multiple of a block, too
        sums = np.full((blocks(k, size), m, n), np.nan, np.float32)
        given = {"shared": sums, "private": None, "k_slice": size}
        given = arguments(micro, a, b, c, out, **given)
        float_product.interpret(micro.isa, given, **static)
        check(out, a, b, c)


@pytest.mark.parametrize("micro", VECTOR_MICROS, ids=repr)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_copied_rows(micro: FloatMicro, kind: str, sizes: tuple[int, int, int]) -> None:
    """Rows of the left operand brought near each other, whole vectors at a time; its last one ends
    where its memory does."""
    m, n, k = sizes
    a, b = drawn((m, k), kind, "k", 1), drawn((n, k), kind, "k", 2).T
    out = np.full((m, n), np.nan, np.float32)
    left = Operand(kind, "k", packed=False, copied=True)
    static = statics(micro, m, n, left, Operand(kind, "k", packed=True))
    float_product.interpret(micro.isa, arguments(micro, a, b, None, out), **static)
    check(out, a, b, None)


@MICROS
def test_bfloat16_output_of_several_blocks(micro: FloatMicro) -> None:
    """Partial sums stay in float32: one rounding to bfloat16 at the end."""
    m, n, k = 5, 19, 70
    a, b = drawn((m, k), "bf16", "k", 1), drawn((n, k), "bf16", "k", 2).T
    c = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    out = np.zeros((m, n), ml_dtypes.bfloat16)
    operand = Operand("bf16", "k", packed=True)
    static = statics(micro, m, n, operand, operand, "bf16")
    float_product.interpret(micro.isa, arguments(micro, a, b, c, out), **static)
    check(out, a, b, c)


@pytest.mark.deep("multiply-add/generic")
@MICROS
def test_compiled_as_interpreted(micro: FloatMicro) -> None:
    if micro.isa.missing():
        pytest.skip(micro.isa.missing())
    m, n, k, kind = 19, 70, 75, "bf16" if micro.pair else "f32"
    a, b = drawn((m, k), kind, "k", 1), drawn((n, k), kind, "x", 2).T
    c = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    static = statics(micro, m, n, Operand(kind, "k", micro.pair), Operand(kind, "x", True))
    outs = np.zeros((3, m, n), np.float32)
    float_product.interpret(micro.isa, arguments(micro, a, b, c, outs[0]), **static)
    program = float_product.program(micro.isa, **static)
    for threads in (1, 2):
        given = arguments(micro, a, b, c, outs[threads])
        given["private_bytes"] = len(given["private"]) // threads
        raw = [v.ctypes.data if isinstance(v, np.ndarray) else v for v in given.values()]
        program(threads, *raw)
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])


@pytest.mark.parametrize("micro", [*VECTOR_MICROS, PAIRS_512], ids=repr)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 17, 75), (5, 9, 32), (2, 3, 7)])
def test_dots(micro: VectorMicro, kind: str, m: int, n: int, k: int) -> None:
    if micro.pair and kind != "bf16":
        pytest.skip("float32 does not come in pairs")
    a, b = drawn((m, k), kind, "k", 1), drawn((n, k), kind, "k", 2)
    c = np.random.default_rng(3).standard_normal((m, n)).astype(np.float32)
    for out_type in (np.float32, ml_dtypes.bfloat16):
        out = np.zeros((m, n), out_type)
        given = {
            "a": a, "a_row_stride": k, "b": b, "b_column_stride": k, "c": c, "c_stride": n,
            "out": out, "out_stride": n,
            "m": m, "n": n, "k_size": k, "item_blocks": 2,
            "alpha": bits(1.5), "beta": bits(-0.5), "reads_c": 1,
        }  # fmt: skip
        float_dots.interpret(
            micro.isa, given, micro=micro, rows=2, columns=4, kind=kind,
            out_kind="f32" if out.itemsize == 4 else "bf16",
        )  # fmt: skip
        check(out, a, b.T, c)


def test_the_interpreter_sees_a_read_beyond_an_operand() -> None:
    a, b = drawn((3, 8), "f32", "k", 1), drawn((20, 8), "f32", "x", 2).T
    out = np.zeros((3, 20), np.float32)
    operands = Operand("f32", "k", False), Operand("f32", "x", False)
    given = arguments(FMA_512, a, b, None, out, shared=None, private=None, k_size=9)
    with pytest.raises(OutOfBoundsError, match="load of"):
        float_product.interpret(FMA_512.isa, given, **statics(FMA_512, 3, 20, *operands))


@X86
@pytest.mark.parametrize(
    ("micro", "rows", "vectors", "register"), [(FMA_512, 8, 3, "zmm"), (FMA_256, 6, 2, "ymm")]
)
def test_the_innermost_loop_spills_nothing(
    micro: VectorMicro, rows: int, vectors: int, register: str
) -> None:
    text = float_product.assembly(
        micro.isa,
        micro=micro,
        shape=FloatShape(rows, vectors, 0, False),
        left=Operand("f32", "k", False),
        right=Operand("f32", "x", True),
        out_kind="f32",
        ahead=(0, 0),
        sliced=False,
    )
    products = [line for line in text.splitlines() if "vfmadd231ps" in line]
    accumulators = {re.split(r"[\s,{(]+", line.strip().replace("%", ""))[-1] for line in products}
    assert len(products) >= rows * vectors
    assert len({name for name in accumulators if name.startswith(register)}) >= rows * vectors
    loops = re.split(r"^\.L\w+:", text, flags=re.MULTILINE)
    inner = max(loops, key=lambda part: part.count("vfmadd231ps"))
    assert not re.search(rf"\(%rsp.*%{register}|%{register}.*\(%rsp", inner)


@kernel
def pair_products(
    k: Builder, a: U8Pointer, b: U8Pointer, c: F32Pointer, out: F32Pointer, count: Int
) -> None:
    """vdpbf16ps of `count` vectors."""
    for i in k.range(0, count):
        left, right = a.cast(bf16) + i * 32, b.cast(bf16) + i * 32
        sums = vdpbf16ps((c + i * 16).load(16), left.load(32), right.load(32))
        (out + i * 16).store(sums)


@pytest.mark.skipif(bool(AVX512_BF16.missing()), reason=AVX512_BF16.missing() or "-")
def test_pair_products_mean_what_the_machine_does() -> None:
    """All bit patterns are drawn: NaN, infinity and subnormal numbers come up."""
    rng, count = np.random.default_rng(7), 2000
    a, b = (rng.integers(0, 1 << 16, (count, 32)).astype(np.uint16) for _ in range(2))
    c = rng.integers(0, 1 << 32, (count, 16)).astype(np.uint32).view(np.float32)
    c[::2] = rng.standard_normal((count // 2, 16))
    a[::2], b[::2] = ((v[::2] & 0x807F) | 0x3F80 for v in (a, b))
    a, b = (v.view(ml_dtypes.bfloat16) for v in (a, b))
    out = np.zeros((count, 16), np.float32)
    pair_products.program(AVX512_BF16)(1, *(v.ctypes.data for v in (a, b, c, out)), count)
    with np.errstate(all="ignore"):
        meant = [vdpbf16ps.meaning(*row) for row in zip(c, a, b, strict=True)]
    np.testing.assert_array_equal(out, np.array(meant))


def test_fused_products_round_once() -> None:
    """Against exact rational arithmetic, where rounding twice would differ."""
    one = np.float32(1)
    tiny = np.float32(2.0**-60)
    half = np.float32(1 + 2.0**-12)
    # (1 + 2^-12)^2 lies exactly between two float32 numbers; the addend decides.
    product = np.array([half, half, half]), np.array([half, half, half])
    addend = np.array([tiny, 0, -tiny], np.float32)
    expected = np.float32(1 + 2.0**-11) + np.array([2.0**-23, 0, 0], np.float32)
    np.testing.assert_array_equal(fma.meaning(*product, addend), expected)
    with np.errstate(invalid="ignore"):
        assert fma.meaning(one, one, np.float32(np.inf)) == np.inf
        assert np.isnan(fma.meaning(one, np.float32(np.nan), one))


@kernel
def tile_product(k: Builder, config: U8Pointer, a: U8Pointer, b: U8Pointer, c: F32Pointer) -> None:
    """c += a·b of one tile of bfloat16."""
    tiles = [k.tile(i) for i in range(8)]
    ldtilecfg(config, *tiles)
    for number, pointer in enumerate((c, a, b)):
        tileloadd(tiles[number], pointer, k.index(64))
    tdpbf16ps(*tiles[:3])
    tilestored(tiles[0], c, k.index(64))
    tilerelease(*tiles)


def tile_case() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    config = np.zeros(64, np.uint8)
    config[0], config[16:22:2], config[48:51] = 1, 64, 16
    return {
        "config": config,
        "a": rng.standard_normal((16, 32)).astype(ml_dtypes.bfloat16),
        "b": rng.standard_normal((16, 32)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal((16, 16)).astype(np.float32),
    }


def test_tile_products() -> None:
    case = tile_case()
    a = case["a"].astype(np.float64)
    b = case["b"].astype(np.float64).reshape(16, 16, 2).transpose(0, 2, 1).reshape(32, 16)
    exact = case["c"] + a @ b
    budget = 34 * UNIT * 1.001 * (np.abs(case["c"]) + np.abs(a) @ np.abs(b))
    tile_product.interpret(AMX_BF16, case)
    assert (np.abs(case["c"] - exact) <= budget).all()


@pytest.mark.skipif(bool(AMX_BF16.missing()), reason=AMX_BF16.missing() or "-")
def test_tile_products_mean_what_the_machine_does() -> None:
    meant, done = tile_case(), tile_case()
    tile_product.interpret(AMX_BF16, meant)
    tile_product.program(AMX_BF16)(1, *(array.ctypes.data for array in done.values()))
    np.testing.assert_array_equal(done["c"], meant["c"])


@X86
def test_tile_code_is_generated_on_any_x86_machine() -> None:
    assert "tdpbf16ps" in tile_product.assembly(AMX_BF16)


@pytest.mark.parametrize("along", ["", "x", "k"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_every_level_has_a_micro_kernel(kind: str, along: str) -> None:
    for level in SETS.values():
        right = Operand(kind, along, packed=not along)
        micro = consider(float_micro_kernels, level, right)[-1].micro
        assert micro is not None
        assert not micro.pair or kind == "bf16"
