"""The kernel texts, interpreted: every micro-kernel on any machine, every access checked."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowbit.api import pack
from lowbit.isa import SETS
from lowbit.jit.memory import OutOfBoundsError
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.integer.in_place import ROWS
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, micro_kernels
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.integer.vectors import VectorKernel
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import FLIP, LINE, PANEL, PANEL_LINE, blocks, padded_k
from lowbit.kernels.cpu.shared.pack import pack as pack_kernel
from lowbit.numerics import QTensor, int_format, quantize, quantize_rows
from lowbit.product import requests
from lowbit.product.dispatch import plan
from lowbit.product.product import Product
from lowbit.spec.operations.products import matmul
from lowbit.weights.panels import PackedMatrix, packed_panels
from lowbit.weights.repacking import Split

SIZES = [(1, 1, 1), (2, 3, 65), (17, 33, 70), (35, 50, 15)]
MICRO_KERNELS = pytest.mark.parametrize(
    "micro",  # those that serve weights without groups
    [one for one in micro_kernels() if not one.refuses(KernelQuery(64, 64, 64, largest_pair=0))],
    ids=repr,
)


def interpreted(
    micro: MicroKernel, a: np.ndarray, b: PackedMatrix, out: np.ndarray, **extra: Any
) -> None:
    """Run the product's text on NumPy, with items small enough that there are several."""
    m, k = a.shape
    lines = blocks(k, LINE)
    split: Split | None = extra.pop("split", None)
    a_format = extra.pop("a_format", Bytes())
    in_place = extra.pop("in_place", False)
    query = KernelQuery(
        m,
        b.N,
        k,
        in_place=in_place,
        signed=a_format.flip > 0,
        split=split.format if split else None,
    )
    shape, block_rows = micro.shape(query)
    assert shape.in_place or not in_place or query.signed
    shape = replace(shape, span=extra.pop("span", 0), ring=extra.pop("ring", 0))
    shape = extra.pop("shape", shape)
    step_rows = block_rows * shape.row_blocks
    private_bytes = step_rows * padded_k(k) + 3 * lines * PANEL_LINE + 6 * shape.step_sums
    private_bytes += micro.scratch_bytes(shape, lines)
    fused = extra.pop("fused", False)
    weight = extra.pop("weight", "s8")
    epilogue = extra.pop("epilogue", Epilogue())
    arguments = {
        "a": a,
        "a_row_stride": a.strides[0] // a.itemsize,
        "a_stride": a.strides[1] // a.itemsize,
        "windows": None,
        "first_row": 0,
        "residual_stride": b.N,
        "packed": np.zeros((blocks(m, step_rows) * step_rows, padded_k(k)), np.uint8),
        "row_scale": np.zeros(m, np.float32),
        "row_zero": np.zeros(m, np.int32),
        "row_sum": np.zeros(m, np.int32),
        "panels": split.memory if split else b.right_for(shape),
        "column_sum": b.column_sums,
        "column_zero": b.zero_points,
        "column_scale": b.scale,
        "bias": None,
        "residual": None,
        "parameters": None,
        "out": out,
        "out_stride": out.strides[0] // 4,
        "m": m,
        "n": b.N,
        "k_size": k,
        "block_rows": block_rows,
        "item_steps": 2,
        "item_panels": 3,
        "threads": 1,
        "private": np.zeros(private_bytes, np.uint8),
        "private_bytes": private_bytes,
        "next_panels": None,
        "next_bytes": 0,
        **extra,
    }
    product.interpret(
        micro.isa, arguments, micro=micro, shape=shape, a_format=a_format, epilogue=epilogue,
        fused=fused, weight=weight,
    )  # fmt: skip


@pytest.mark.parametrize("fused", [False, True])
def test_tiles_turn_back_along_rows_that_the_nearest_cache_does_not_hold(fused: bool) -> None:
    (micro,) = (m for m in micro_kernels() if m.name == "amx")
    case = matmul.case({"M": 70, "N": 130, "K": 330}, dtypes="u8:s8:s32")
    inputs = case.inputs(seed=3)
    out = np.full((70, 130), 0x55555555, np.int32)
    shape, _ = micro.shape(KernelQuery(70, 130, 330, in_place=fused))
    shape = replace(shape, stays=False, ring=0)
    private = np.zeros(1 << 18, np.uint8)
    interpreted(
        micro, inputs["a"], pack(inputs["b"]), out, shape=shape, fused=fused, item_panels=7,
        private=private, private_bytes=private.size,
    )  # fmt: skip
    verdict = case.expect(inputs).check(out)
    assert verdict.ok, verdict.message


@MICRO_KERNELS
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("fill", "fused"), [("normal", False), ("normal", True), ("max*min", False), ("min*min", False)]
)
def test_integer_product(
    micro: MicroKernel, sizes: tuple[int, int, int], fill: str, fused: bool
) -> None:
    case = matmul.case(dict(zip("MNK", sizes, strict=True)), dtypes="u8:s8:s32", fill=fill)
    inputs = case.inputs(seed=1)
    if micro.refuses(KernelQuery(*sizes, pack(inputs["b"]).largest_pair)):
        inputs["b"] //= 2  # from -64 to 63: any two neighbours sum to 128 at most
    out = np.full(sizes[:2], 0x55555555, np.int32)
    interpreted(micro, inputs["a"], pack(inputs["b"]), out, fused=fused)
    verdict = case.expect(inputs).check(out)
    assert verdict.ok, verdict.message


@MICRO_KERNELS
@pytest.mark.parametrize("uniform", [False, True])
def test_zero_points_of_rows(micro: MicroKernel, uniform: bool) -> None:
    """One for all rows is read where the first is, and nowhere else."""
    rng = np.random.default_rng(4)
    a = rng.integers(0, 256, (19, 70), dtype=np.uint8)
    b = rng.integers(-64, 64, (70, 33), dtype=np.int8)
    zeros = np.full(1, 77, np.int32) if uniform else rng.integers(0, 256, 19, dtype=np.int32)
    out = np.full((19, 33), 0x55555555, np.int32)
    epilogue = Epilogue(a_zero=True, uniform=uniform)
    interpreted(micro, a, pack(b), out, epilogue=epilogue, row_zero=zeros)
    exact = (a.astype(np.int64) - zeros[:, None]) @ b.astype(np.int64)
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize("span", [1, 2, 3])
@pytest.mark.parametrize(
    ("micro", "sizes"),
    [
        (micro, sizes)
        for micro in micro_kernels()
        for sizes in {"amx": [(70, 50, 320), (33, 17, 130)]}.get(micro.name, [(11, 50, 130)])
        if micro.name == "amx" or isinstance(micro, VectorKernel)
    ],
    ids=repr,
)
def test_sums_wait_between_spans_of_k(
    micro: MicroKernel, sizes: tuple[int, int, int], span: int
) -> None:
    case = matmul.case(dict(zip("MNK", sizes, strict=True)), dtypes="u8:s8:s32")
    inputs = case.inputs(seed=2)
    inputs["b"] //= 4  # so that every kernel is exact, also those that sum 8 k in 16 bits
    out = np.full(sizes[:2], 0x55555555, np.int32)
    interpreted(micro, inputs["a"], pack(inputs["b"]), out, span=span)
    verdict = case.expect(inputs).check(out)
    assert verdict.ok, verdict.message


@pytest.mark.drawn(96)
@pytest.mark.pairs
@pytest.mark.parametrize(
    "micro", [m for m in micro_kernels() if isinstance(m, VectorKernel)], ids=repr
)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        *((9, n, k) for n in (1, 4, 6) for k in (1, 3, 31, 130)),
        *((17, 1, 64), (8, 2, 97), (11, 7, 15), (12, 8, 64), (19, 13, 30), (8, 16, 32)),
        *((9, 5, 201), (8, 9, 420), (9, 12, 198)),  # some of several vectors
        *((5, 3, 300), (9, 20, 198), (8, 33, 404)),  # in place by some kernels only
    ],
)
def test_rows_are_multiplied_where_they_lie(
    micro: MicroKernel, sizes: tuple[int, int, int], signed: bool
) -> None:
    """Nothing is read between rows or behind them, whatever pieces they are cut into; rows of the
    output lie apart or not."""
    m, n, k = sizes
    shape, _ = micro.shape(KernelQuery(m, n, k, in_place=True, signed=signed))
    in_place = shape.in_place or (n <= PANEL and m >= ROWS)  # so few columns by all of them
    rng = np.random.default_rng(m * n + k)
    whole = rng.integers(0, 256, (m, k + 3), dtype=np.uint8)
    most = 32 if micro.name == "split" else 64  # which takes what is small enough, or split to be
    b = rng.integers(-most, most, (k, n), dtype=np.int8)
    a, zeros, scales = whole[:, 1 : k + 1], rng.integers(0, 256, m), rng.random(m)
    values = a.astype(np.int64) ^ (FLIP if signed else 0)
    weight = pack(
        QTensor(b, np.ones(n, np.float32), np.zeros(n, np.int32), int_format("int8"), axis=1)
    )
    exact = (values - zeros[:, None]) @ b
    expected = exact.astype(np.float32) * scales.astype(np.float32)[:, None]
    for gap in (0, 5):
        out = np.full((m, n + gap), 7, np.float32)
        interpreted(
            micro, a, weight, out[:, :n], in_place=in_place, fused=True, a_format=Bytes(signed),
            row_zero=zeros.astype(np.int32), row_scale=scales.astype(np.float32),
            epilogue=Epilogue(a_zero=True, out="f32"),
        )  # fmt: skip
        np.testing.assert_array_equal(out[:, :n], expected)
        assert (out[:, n:] == 7).all()


@pytest.mark.parametrize(
    "sizes", [(40, 17, 70), (70, 1, 300), (65, 32, 64), (33, 48, 130), (50, 64, 128), (49, 33, 30)]
)
def test_tiles_read_rows_where_they_lie(sizes: tuple[int, int, int]) -> None:
    """But those of the last step, and those that lie apart, if lines reach beyond them."""
    amx = next(kernel for kernel in micro_kernels() if kernel.name == "amx")
    m, n, k = sizes
    case = matmul.case({"M": m, "N": n, "K": k}, dtypes="u8:s8:s32")
    inputs = case.inputs(seed=m)
    shape, block_rows = amx.shape(KernelQuery(m, n, k, in_place=True))
    assert shape.in_place
    assert m > block_rows * shape.row_blocks
    assert shape.panels == blocks(n, 16)
    apart = np.full((m, k + 9), 255, np.uint8)
    apart[:, :k] = inputs["a"]
    for a in (inputs["a"], apart[:, :k]):
        out = np.full((m, n), 7, np.int32)
        interpreted(amx, a, pack(inputs["b"]), out, in_place=True, fused=True)
        assert case.expect(inputs).check(out).ok
    assert not amx.shape(KernelQuery(m, n, k, in_place=True, signed=True))[0].in_place


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "ring"),
    [
        *itertools.product([(70, 20, 700), (33, 16, 1000), (7, 60, 130), (3, 1, 65)], [4, 8]),
        ((70, 100, 300), 0),
        ((13, 150, 64), 0),
    ],
)
def test_lines_are_made_in_the_course_of_products(
    sizes: tuple[int, int, int], signed: bool, ring: int
) -> None:
    micro = next(kernel for kernel in micro_kernels() if kernel.name == "amx")
    case = matmul.case(dict(zip("MNK", sizes, strict=True)), dtypes="s8:s8:s32")
    inputs = case.inputs(seed=3)
    if not signed:
        case = matmul.case(dict(zip("MNK", sizes, strict=True)), dtypes="u8:s8:s32")
        inputs["a"] = inputs["a"].view(np.uint8)
    out = np.full(sizes[:2], 0x55555555, np.int32)
    zeros = {"row_zero": np.full(1, FLIP, np.int32)} if signed else {}
    interpreted(
        micro, inputs["a"].view(np.uint8), pack(inputs["b"]), out, ring=ring, fused=True,
        a_format=Bytes(signed, shared=True), epilogue=Epilogue(a_zero=signed, uniform=True),
        **zeros,
    )  # fmt: skip
    verdict = case.expect(inputs).check(out)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("sizes", [(70, 100, 3000), (65, 40, 2200), (131, 50, 2500)])
def test_rows_of_spans_are_packed_in_the_course_of_products(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As planned for small caches: private memory is exactly what it takes."""
    small = {"L1d": 1 << 14, "L2": 1 << 17, "L3": 1 << 20}
    monkeypatch.setattr("lowbit.isa.host.caches", lambda: small)
    case = matmul.case(dict(zip("MNK", sizes, strict=True)), dtypes="u8:s8:s32")
    inputs = case.inputs(seed=4)
    a, b, out = inputs["a"], pack(inputs["b"]), np.full(sizes[:2], 0x55555555, np.int32)
    asked = Product(len(a), Bytes(), (sizes[2], 1), requests.panel_format(b, "amx"), "amx", 1)
    planned = plan(asked)
    assert planned.micro.name == "amx"
    assert planned.shape.span and planned.fused  # noqa: PT018
    interpreted(
        planned.micro, a, b, out, shape=planned.shape, fused=True, a_format=asked.a,
        item_steps=planned.item_steps, item_panels=planned.item_panels,
        private=np.zeros(planned.private_bytes, np.uint8), private_bytes=planned.private_bytes,
    )  # fmt: skip
    verdict = case.expect(inputs).check(out)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("sizes", [(16, 16, 2048), (64, 32, 4096)])
def test_a_ring_is_for_panels_of_bytes(sizes: tuple[int, int, int]) -> None:
    """Panels that are unpacked lie behind rows, of which the plan then has to count all lines."""
    micro = next(kernel for kernel in micro_kernels() if kernel.name == "amx")
    assert micro.shape(KernelQuery(*sizes))[0].ring > 0
    for weight in ("s4", "u4"):
        assert micro.shape(KernelQuery(*sizes, weight=weight))[0].ring == 0


@MICRO_KERNELS
@pytest.mark.parametrize(("symmetric", "fused"), [(False, False), (True, False), (False, True)])
def test_quantized_product(micro: MicroKernel, symmetric: bool, fused: bool) -> None:
    """From float32 rows, a weight with zero points, bias, and rows of every awkward kind."""
    rng = np.random.default_rng(3)
    m, n, k = 9, 21, 70
    x = rng.standard_normal((m, k)).astype(np.float32)
    x[1], x[2, 5], x[3, -1], x[4], x[5] = 0, np.nan, -np.inf, np.abs(x[4]), 1e-41
    weight = quantize(rng.standard_normal((k, n)) + 0.5, "uint8", axis=1, symmetric=False)
    if micro.refuses(KernelQuery(m, n, k, pack(weight).largest_pair)):
        weight = replace(
            weight, values=weight.values // 2 + 64, zero_point=weight.zero_point // 2 + 64
        )
    bias = np.zeros(32, np.float32)
    bias[:n] = rng.standard_normal(n)
    out = np.full((m, n), 7, np.float32)
    interpreted(
        micro, x, pack(weight), out, bias=bias,
        a_format=Quantized(symmetric), fused=fused,
        epilogue=Epilogue(a_zero=True, b_zero=True, post_ops=("bias",), out="f32"),
    )  # fmt: skip
    np.testing.assert_array_equal(out, _quantized_reference(x, weight, bias[:n], symmetric))
    nan = out.view(np.uint32)[np.isnan(out)]
    assert len(nan) == 2 * n
    assert (nan == 0x7FC00000).all()


def _quantized_reference(
    x: np.ndarray, weight: QTensor, bias: np.ndarray, symmetric: bool
) -> np.ndarray:
    q, scale, zero = quantize_rows(x, symmetric)
    exact = (q.astype(np.int64) - zero[:, None]) @ (
        weight.values.astype(np.int64) - weight.zero_point
    )
    return exact.astype(np.float32) * scale[:, None] * weight.scale + bias


@MICRO_KERNELS
def test_output_rows_with_gaps(micro: MicroKernel) -> None:
    """A sliced output: the elements between its rows are not its own, and stay untouched."""
    case = matmul.case({"M": 5, "N": 19, "K": 8}, dtypes="u8:s8:s32")
    inputs = case.inputs()
    inputs["b"] //= 2  # which every kernel serves
    whole = np.full((5, 40), 99, np.int32)
    out = whole[:, 3:22]
    interpreted(micro, inputs["a"], pack(inputs["b"]), out)
    assert case.expect(inputs).check(out).ok
    assert (whole[:, :3] == 99).all()
    assert (whole[:, 22:] == 99).all()


@pytest.mark.parametrize("micro", [m for m in micro_kernels() if m.name == "narrow"], ids=repr)
def test_the_proof_is_needed(micro: MicroKernel) -> None:
    """At the bound the narrow kernel is exact on the worst data; one past it, it is not."""
    a = np.full((3, 8), 255, np.uint8)
    for b_value, extra, exact in ((64, 0, True), (-64, 0, True), (64, 1, False), (-64, -1, False)):
        b = np.full((8, 5), b_value, np.int8)
        b[2] += extra
        packed = pack(b)
        assert packed.largest_pair == 128 + abs(extra)
        assert (micro.refuses(KernelQuery(3, 5, 8, packed.largest_pair)) == "") is exact
        out = np.zeros((3, 5), np.int32)
        interpreted(micro, a, packed, out)
        # 255 · 129 = 32895 saturates at 32767, and 255 · -129 = -32895 at -32768.
        assert (out == a.astype(np.int64) @ b).all() == exact


def test_the_interpreter_sees_an_output_that_is_too_small() -> None:
    case = matmul.case({"M": 5, "N": 19, "K": 8}, dtypes="u8:s8:s32")
    inputs = case.inputs()
    with pytest.raises(OutOfBoundsError, match=r"store of .* bytes at byte .* of out"):
        interpreted(
            micro_kernels()[0], inputs["a"], pack(inputs["b"]), np.zeros((5, 18), np.int32),
            n=19, out_stride=19,
        )  # fmt: skip


def test_the_interpreter_sees_a_read_past_the_left_operand() -> None:
    case = matmul.case({"M": 3, "N": 3, "K": 100}, dtypes="u8:s8:s32")
    inputs = case.inputs()
    wide = np.zeros((3, 200), np.uint8)
    with pytest.raises(OutOfBoundsError, match=r"load of .* of a, "):
        interpreted(
            micro_kernels()[0], wide[:, :90], pack(inputs["b"]), np.zeros((3, 3), np.int32),
            k_size=100,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4"])
@pytest.mark.parametrize(("along", "order"), [("n", "C"), ("k", "F"), ("", "sliced")])
@pytest.mark.parametrize("sizes", [(1, 1, 0), (5, 16, 0), (66, 35, 0), (130, 35, 24)])
def test_pack_interpreted(along: str, order: str, sizes: tuple[int, int, int], dtype: str) -> None:
    """As compiled, in each format: what was packed, with sums of columns or of groups."""
    (k, n, group), fmt = sizes, int_format(dtype)
    rng, nibbles = np.random.default_rng(0), fmt.bits == 4
    whole = rng.integers(fmt.qmin, fmt.qmax + 1, (k, 2 * n)).astype(fmt.storage)
    b = whole[:, ::-2] if order == "sliced" else np.array(whole[:, :n], order=order)  # type: ignore[call-overload]
    panels = aligned_empty((blocks(n, 16), padded_k(k) // (8 if nibbles else 4), LINE), np.uint8)
    panels[...] = 0xEE
    sums = np.zeros((blocks(n, 16), blocks(k, group or k), 16), np.int32)
    half, signed = 1 << fmt.bits - 1, dtype in ("int8", "int4")
    zero = fmt.midpoint if group or not nibbles else 0
    pack_kernel.interpret(
        SETS["generic"],
        {
            "b": b, "k_stride": b.strides[0], "n_stride": b.strides[1], "panels": panels,
            "sums": sums, "k_size": k, "n": n, "group": group or padded_k(k),
        },
        along=along,
        flip=half if signed == bool(nibbles or group) else 0,
        zero=zero,
        nibbles=nibbles,
    )  # fmt: skip
    again, its_sums = packed_panels(b, dtype, group=group or None)
    np.testing.assert_array_equal(again, panels)
    np.testing.assert_array_equal(its_sums, sums if group else sums.reshape(-1))
    rows = np.zeros((blocks(k, group or k) * (group or k), blocks(n, 16) * 16), np.int64)
    rows[:k, :n] = b.astype(np.int64) - zero
    expected = rows.reshape(-1, group or k, rows.shape[1]).sum(1)
    np.testing.assert_array_equal(sums.transpose(1, 0, 2).reshape(expected.shape), expected)
    if not group:
        np.testing.assert_array_equal(PackedMatrix(panels, its_sums, k, n, dtype).unpack(), b)


@pytest.mark.parametrize("masked", [False, True])
@MICRO_KERNELS
def test_group_maxima(micro: MicroKernel, masked: bool) -> None:
    """The greatest of each 8 columns; those past the last one, or masked, count as −∞."""
    rng = np.random.default_rng(6)
    m, n, k = 19, 37, 70
    a = rng.integers(0, 256, (m, k)).astype(np.uint8)
    weight = quantize(rng.standard_normal((k, n)).astype(np.float32), "int4", axis=1)
    packed = pack(weight)
    out = np.full((m, 6), 7, np.float32)
    mask = rng.random(48) < 0.3
    scale = rng.uniform(0.5, 2, m).astype(np.float32)
    interpreted(
        micro, a, packed, out, row_scale=scale, weight=packed.weight, fused=True,
        epilogue=Epilogue(out="max8_masked" if masked else "max8"), residual=mask,
    )  # fmt: skip
    sums = a.astype(np.int64) @ weight.values.astype(np.int64)
    scores = np.full((m, 48), -np.inf, np.float32)
    scores[:, :n] = sums.astype(np.float32) * scale[:, None] * weight.scale
    if masked:
        scores[:, ~mask] = -np.inf
    np.testing.assert_array_equal(out, scores.reshape(m, 6, 8).max(axis=2))
