"""Plans: every part of the output is made exactly once, by the best kernel that may serve."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from itertools import product as combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.api import pack
from lowbit.isa import SETS, active, available, chain, get, host
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import threads
from lowbit.jit.memory import Access
from lowbit.kernels.cpu.integer import amx
from lowbit.kernels.cpu.integer.micro_kernel import KernelQuery, MicroKernel, Shape, micro_kernels
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import PanelFormat
from lowbit.product import dispatch
from lowbit.product import prepare as prepare_module
from lowbit.product.dispatch import Plan
from lowbit.product.prepare import RIGHT, prepare
from lowbit.product.product import Product
from lowbit.weights.panels import padded

SIZES = st.one_of(st.integers(1, 40), st.integers(1, 5000))


def product(isa: str, m: int, n: int, k: int, threads: int = 1) -> Product:
    return Product(m, Bytes(), (k, 1), PanelFormat(k, n, "int8"), isa, threads)


def plan(isa: str, m: int, n: int, k: int, threads: int = 1) -> Plan:
    return dispatch.plan(product(isa, m, n, k, threads))


def items(plan: Plan, rows: int, n: int) -> Iterator[tuple[range, range]]:
    """The (rows, panels) of each item of a chunk, as the frame in product.py cuts them."""
    step_rows = plan.block_rows * plan.shape.row_blocks
    steps, panels = blocks(rows, step_rows), blocks(n, PANEL)
    across = blocks(panels, plan.item_panels)
    for item in range(blocks(steps, plan.item_steps) * across):
        first_step, first_panel = item // across * plan.item_steps, item % across * plan.item_panels
        last_step = min(first_step + plan.item_steps, steps)
        yield (
            range(first_step * step_rows, min(last_step * step_rows, rows)),
            range(first_panel, min(first_panel + plan.item_panels, panels)),
        )


@given(
    isa=st.sampled_from(available()), m=SIZES, n=SIZES, k=SIZES, threads=st.sampled_from([1, 2, 7])
)
def test_items_cover_the_output_once(isa: str, m: int, n: int, k: int, threads: int) -> None:
    made = plan(isa, m, n, k, threads)
    panels = blocks(n, PANEL)
    first, seen = 0, np.zeros((m, panels), np.int8)
    while first < m:
        rows = min(made.chunk_rows, m - first)
        for some_rows, some_panels in items(made, rows, n):
            assert some_rows
            assert some_panels
            seen[
                first + some_rows.start : first + some_rows.stop,
                some_panels.start : some_panels.stop,
            ] += 1
        first += rows
    assert (seen == 1).all()


@given(
    isa=st.sampled_from(available()), m=SIZES, n=SIZES, k=SIZES, threads=st.sampled_from([1, 2, 7])
)
def test_plans_fit_their_kernel(isa: str, m: int, n: int, k: int, threads: int) -> None:
    made = plan(isa, m, n, k, threads)
    step_rows = made.block_rows * made.shape.row_blocks
    assert made.item_panels % made.shape.panels == 0
    assert made.shape.rows in (0, made.block_rows)
    assert made.chunk_rows == m or made.chunk_rows % step_rows == 0
    if made.shape.piece:
        assert (made.chunk_rows, made.packed_bytes, made.private_bytes) == (m, 0, 0)
        assert step_rows <= m
    elif made.shape.span:  # sums wait there
        waiting = made.shape.panels if made.shape.panels_stay else made.item_panels
        sums = made.item_steps * waiting * made.shape.step_sums
        assert (made.fused, made.private_bytes) == (False, sums)
    elif made.private_bytes:  # rows are packed beside their product
        assert made.chunk_rows == m
        held = made.shape.ring * LINE or padded_k(k)
        assert (made.packed_bytes, made.private_bytes) == (0, step_rows * held)
    else:
        assert made.chunk_rows == m or made.chunk_rows % step_rows == 0
        packed_rows = blocks(made.chunk_rows, step_rows) * step_rows
        assert made.packed_bytes == packed_rows * padded_k(k)
    assert made.micro.refuses(KernelQuery(m, n, k)) == ""
    assert made.micro.isa in chain(get(isa))


def interpreted(
    asked: Product, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, list[Access], Plan, tuple[np.ndarray, np.ndarray]]:
    """A product by the text of its kernel, cut as the plan says, in the interpreter that records
    every access, on a set that this machine may lack: the output, accesses, plan and operands."""
    m, n, k = asked.m, asked.b.n, asked.b.k
    with monkeypatch.context() as patch:
        patch.setattr(InstructionSet, "missing", lambda self: "")
        get.cache_clear()
        made = dispatch.plan(asked)
    get.cache_clear()
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, (m, k)).astype(np.uint8)
    b = rng.integers(-128, 128, (k, n)).astype(np.int8)
    scale, bias = rng.uniform(0.001, 0.02, n), rng.standard_normal(n)
    packed, trace = pack(b), list[Access]()
    out = np.full((m, n), -1, {"s32": np.int32, "f32": np.float32, "s8": np.int8}[asked.output])
    arguments = {
        "a": a, "a_row_stride": k, "a_stride": 1, "windows": None, "first_row": 0,
        "residual": rng.standard_normal((m, n)).astype(np.float32), "residual_stride": n,
        "packed": np.zeros(made.packed_bytes, np.uint8), "row_sum": None,
        "row_scale": np.full(m, 0.01, np.float32), "row_zero": np.full(m, 3, np.int32),
        "panels": packed.right_for(made.shape), "column_sum": packed.column_sums,
        "column_zero": None, "column_scale": padded(scale.astype(np.float32)),
        "bias": padded(bias.astype(np.float32)), "parameters": np.array([7, 5], np.float32),
        "out": out, "out_stride": n, "m": m, "n": n, "k_size": k,
        "block_rows": made.block_rows, "item_steps": made.item_steps,
        "item_panels": made.item_panels, "threads": asked.threads,
        "private": np.zeros(made.private_bytes, np.uint8), "private_bytes": made.private_bytes,
        "next_panels": None, "next_bytes": 0,
    }  # fmt: skip
    product_kernel.interpret(
        made.micro.isa, arguments, trace, micro=made.micro, shape=made.shape,
        a_format=asked.a, epilogue=asked.epilogue, fused=made.fused,
    )  # fmt: skip
    return out, trace, made, (a, b)


@pytest.mark.deep("1-sizes7-generic", "8-sizes7-generic")
@pytest.mark.parametrize("isa", [name for name, one in SETS.items() if not one.is_foreign])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1), (3, 40, 5), (33, 17, 64), (37, 100, 9), (29, 3, 70), (15, 2, 33),
        (33, 17, 2), (241, 40, 30),  # where rows of the last step are less than a block of 64 k
    ],
)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 8])
def test_the_kernel_stores_each_element_once(
    isa: str, sizes: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in pieces: the last step begins earlier, and what two steps have is stored by both."""
    m, n = sizes[:2]
    out, trace, made, (a, b) = interpreted(product(isa, *sizes, threads), monkeypatch)
    np.testing.assert_array_equal(out, a.astype(np.int32) @ b)
    stored = np.zeros(out.nbytes, np.int8)
    for access in trace:
        if access.array == "out":
            assert access.kind == "store"
            stored[access.offset : access.offset + access.size] += 1
    twice = -m % made.block_rows if made.shape.piece else 0
    steps = np.full(m, 1, np.int8)
    steps[m - made.block_rows :][:twice] = 2
    np.testing.assert_array_equal(stored.reshape(m, 4 * n), np.tile(steps[:, None], 4 * n))


@pytest.mark.deep("sizes0-s8")
@pytest.mark.parametrize(
    ("sizes", "output"), [((70, 280, 500), "s8"), ((150, 265, 450), "s32"), ((33, 300, 512), "s32")]
)
def test_panels_of_amx_stay_while_rows_pass(
    sizes: tuple[int, int, int], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With smaller caches: spans of K, steps and panels that are left over, items below each other;
    and the bits that vectors make."""
    small = {"L1d": 7 << 10, "L2": 1 << 17, "L3": 1 << 20}
    monkeypatch.setattr(host, "caches", lambda: small)
    steps = () if output == "s32" else ("bias", "residual")

    def finished(isa: str) -> tuple[np.ndarray, Plan, np.ndarray]:
        asked = product(isa, *sizes)._replace(output=output, post_ops=steps, a=Bytes(shared=True))
        out, _, made, (a, b) = interpreted(asked, monkeypatch)
        return out, made, a.astype(np.int32) @ b

    out, made, exact = finished("amx")
    assert made.shape.panels_stay
    assert made.shape.span
    np.testing.assert_array_equal(out, exact if output == "s32" else finished("avx512_vnni")[0])


def test_when_panels_stay_and_when_rows_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the caches of a machine that this one may not be."""
    monkeypatch.setattr(InstructionSet, "missing", lambda self: "")
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 48 << 10, "L2": 2 << 20, "L3": 32 << 20})
    get.cache_clear()

    def stays(*sizes: int, threads: int = 1) -> bool:
        return plan("amx", *sizes, threads=threads).shape.panels_stay

    def fused(*sizes: int, isa: str = "avx512_vnni") -> bool:
        signed = product(isa, *sizes)._replace(a=Bytes(True))  # which are not read where they lie
        return dispatch.plan(signed).fused

    assert stays(256, 4096, 4096)
    assert stays(197, 768, 3072)
    assert not stays(256, 4096, 4096, threads=2)
    assert not stays(1024, 4096, 4096)  # more rows than the second level holds
    assert not stays(32, 4096, 4096)  # one step
    assert not stays(197, 300, 3072)  # panels fit
    assert not stays(256, 4096, 2048)  # rows of a step fit
    assert not stays(20, 48, 50_000)  # all panels are one step
    assert not fused(4096, 4096, 2048)
    assert fused(4096, 1024, 2048)
    assert fused(700, 400, 5000)  # two items, each of which has few columns
    assert not fused(200, 400, 5000)  # rows are near
    assert not fused(700, 500, 5000)
    assert fused(512, 4096, 2048)  # rows are near
    assert fused(4096, 4096, 2048, isa="amx")
    get.cache_clear()


@pytest.mark.deep("sizes1-s8")
@pytest.mark.parametrize("output", ["s8", "f32"])
@pytest.mark.parametrize("sizes", [(19, 40, 9), (33, 70, 20), (5, 23, 64)])
def test_all_sets_finish_sums_alike(
    sizes: tuple[int, int, int], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, also where columns end within a vector."""

    def finished(isa: str) -> np.ndarray:
        steps = "bias", "residual"
        asked = product(isa, *sizes)._replace(output=output, post_ops=steps, a=Bytes(shared=True))
        return interpreted(asked, monkeypatch)[0]

    expected = finished("generic")
    assert len(np.unique(expected)) > 20
    for name, one in SETS.items():
        if not one.is_foreign:
            np.testing.assert_array_equal(finished(name), expected, err_msg=name)


def test_long_left_operands_are_served_in_chunks() -> None:
    """What is quantized at a time stays near a bound, unless K alone exceeds it."""
    name, k = active().name, 60_000

    def of(m: int, k: int) -> Plan:
        asked = product(name, m, 16, k)._replace(a=Quantized(), output="f32")
        return dispatch.plan(asked)

    made = of(5000, k)
    assert made.chunk_rows < 5000
    assert made.packed_bytes <= dispatch._WORKSPACE
    assert 1 <= of(5000, dispatch._WORKSPACE).chunk_rows <= LINE
    assert of(5000, 64).chunk_rows == 5000


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (1, 4096, 4096), (4096, 16, 512)])
def test_there_is_work_for_every_thread(sizes: tuple[int, int, int], count: int) -> None:
    made = plan(active().name, *sizes, count)
    assert len(list(items(made, made.chunk_rows, sizes[1]))) >= count


def test_one_thread_gets_no_more_items_than_its_cache_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 1 << 20, "L2": 1 << 30, "L3": 1 << 30})
    assert len(list(items(plan(active().name, 500, 500, 500), 500, 500))) == 1


def test_tiles_are_for_work_that_is_worth_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "SETUP", 1000)
    micro = next(kernel for kernel in micro_kernels() if kernel.name == "amx")
    for m, n, k in ((1, 16, 16), (6, 3216, 9), (351, 945, 8), (8, 300, 16), (1, 142, 104)):
        assert "and vectors" in micro.refuses(KernelQuery(m, n, k))
    for m, n, k in ((351, 945, 32), (128, 128, 128), (28, 25, 1143), (4, 64, 4096)):
        assert micro.refuses(KernelQuery(m, n, k)) == ""


def test_tiles_leave_few_columns_to_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "SETUP", 1000)
    micro = next(kernel for kernel in micro_kernels() if kernel.name == "amx")
    for m, n, k in ((400, 1, 1024), (400, 4, 1024), (12544, 8, 27)):
        query = KernelQuery(m, n, k)
        assert micro.refuses(query) == ""
        assert "and vectors" in micro.refuses(query._replace(in_place=True))
    for m, n, k in ((400, 16, 1024), (4000, 32, 64)):
        assert micro.refuses(KernelQuery(m, n, k, in_place=True)) == ""


def test_long_rows_meet_as_many_columns_as_there_are() -> None:
    """In vectors of which few lanes are zeros, and of rows that are few, packed if that is less."""
    micro = next(one for one in micro_kernels() if repr(one) == "vnni/avx512_vnni")
    for n, room in ((3, 4), (4, 4), (9, 10), (12, 12), (20, 20), (24, 24), (33, 36)):
        shape, rows = micro.shape(KernelQuery(43, n, 600, in_place=True))
        assert shape.in_place
        assert (shape.held, shape.panels) == (room, blocks(n, PANEL))
        assert rows * shape.column_vectors <= 24
    assert micro.shape(KernelQuery(5, 3, 2000, in_place=True))[0].in_place
    assert not micro.shape(KernelQuery(5, 15, 100, in_place=True))[0].in_place


def test_rows_are_read_again_where_packing_takes_longer() -> None:
    micro = next(one for one in micro_kernels() if repr(one) == "vnni/avx512_vnni")

    def shape(m: int, n: int, k: int, signed: bool = False) -> Shape:
        return micro.shape(KernelQuery(m, n, k, in_place=True, signed=signed))[0]

    for sizes in ((1478, 58, 13024), (3136, 64, 576), (784, 128, 64), (256, 256, 256)):
        assert shape(*sizes).in_place
        assert not shape(*sizes, signed=True).in_place  # to be made unsigned for each step
    assert (shape(49, 512, 4608).rows, shape(64, 256, 512).rows) == (7, 8)
    for sizes in ((9, 1000, 1000), (20, 1536, 384), (5, 60, 300), (500, 100, 16)):
        assert not shape(*sizes).in_place


def test_how_amx_cuts_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the caches of a machine that this one may not be."""
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 48 << 10, "L2": 2 << 20, "L3": 32 << 20})
    micro = next(kernel for kernel in micro_kernels() if kernel.name == "amx")

    def blocks_of(images: int) -> tuple[int, int]:
        shape, _ = micro.shape(KernelQuery(49 * images, 512, 4608, line=56))
        return shape.row_blocks, shape.panels

    assert blocks_of(1) == blocks_of(3) == (4, 1)  # panels come from afar once
    assert blocks_of(4) == blocks_of(16) == (2, 2)  # and stay near for most of the images
    image = KernelQuery(3136, 64, 576, line=56)
    assert micro.shape(image)[0].stays  # its windows have most bytes in common
    assert not micro.shape(image._replace(line=0))[0].stays
    assert not micro.shape(KernelQuery(784, 128, 1152, line=28))[0].stays


def test_how_many_threads_are_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "max_threads", lambda: 20)
    most = dispatch.threads_key(None)
    assert dispatch.thread_count(1, 1, 1, most) == 1
    assert dispatch.thread_count(64, 64, 64, most) == 1
    counts = [dispatch.thread_count(m, 256, 256, most) for m in range(1, 1000, 3)]
    assert counts == sorted(counts)
    assert set(counts) == {1, *range(8, 21)}
    assert dispatch.thread_count(4096, 4096, 4096, most) == 20
    # A kernel that takes less time needs fewer; work that waits for memory does not.
    assert dispatch.thread_count(300, 300, 300, most, per_cycle=512) == 1
    assert dispatch.thread_count(1, 4096, 4096, most, per_cycle=512) == 20


def test_a_wanted_number_of_threads_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "max_threads", lambda: 6)
    for wanted, size in combinations((1, 2, 6), (1, 4096)):
        key = dispatch.threads_key(wanted)
        assert dispatch.thread_count(size, size, size, key) == wanted
    for wanted in (0, -1):
        with pytest.raises(ValueError, match=f"of at least 1, got {wanted}"):
            dispatch.threads_key(wanted)


def test_products_are_kept_prepared() -> None:
    name = active().name
    first = prepare(product(name, 7, 7, 7))
    assert prepare(product(name, 7, 7, 7)) is first
    assert prepare(product(name, 7, 7, 7, 2)) is not first
    assert prepare.cache_info().maxsize == prepare_module.KEPT


def without(monkeypatch: pytest.MonkeyPatch, *sets: str) -> tuple[MicroKernel, ...]:
    """Take the kernels of these sets away; returns what is left."""
    left = tuple(micro for micro in dispatch.micro_kernels() if micro.isa.name not in sets)
    monkeypatch.setattr(dispatch, "micro_kernels", lambda: left)
    return left


@pytest.mark.parametrize("name", SETS)
def test_a_set_without_kernels_is_served_by_the_next(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Down the whole chain, one set after another; for sets that this machine lacks, too."""
    sets = chain(SETS[name])
    assert dispatch.consider(sets[0], KernelQuery(64, 64, 64))[-1].isa is sets[0]
    gone = []
    for upper, lower in pairwise(sets):
        gone.append(upper.name)
        without(monkeypatch, *gone)
        seen = dispatch.consider(sets[0], KernelQuery(64, 64, 64))
        assert [c.why for c in seen if c.isa is upper] == [f"there is no kernel for {upper.name}"]
        assert (seen[-1].isa, seen[-1].why) == (lower, "")
        assert seen[-1].micro
        assert seen[-1].micro.isa is lower
    without(monkeypatch, *SETS)
    with pytest.raises(RuntimeError, match=f"no kernel for {name} or what it falls back to"):
        dispatch.consider(sets[0], KernelQuery(64, 64, 64))


@pytest.mark.parametrize("name", SETS)
def test_a_kernel_that_refuses_says_why_and_does_not_serve(name: str) -> None:
    """Those for weights that are proven not to saturate come first, and only for such weights."""
    proven = dispatch.consider(SETS[name], KernelQuery(64, 64, 64, 0))
    unproven = dispatch.consider(SETS[name], KernelQuery(64, 64, 64))
    refused = [c for c in unproven if c.micro and c.why]
    assert all("16-bit sums could saturate" in c.why for c in refused)
    assert dispatch.wants_proof(name) is (proven[-1] != unproven[-1])
    assert (proven[-1].micro in [c.micro for c in refused]) is dispatch.wants_proof(name)


def test_the_next_set_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole product when the best set has lost its kernels."""
    left = without(monkeypatch, *(name for name in SETS if name != "generic"))
    rng = np.random.default_rng(1)
    a = rng.integers(0, 256, (19, 70)).astype(np.uint8)
    b = rng.integers(-128, 128, (70, 33)).astype(np.int8)
    packed, out = pack(b), np.zeros((19, 33), np.int32)
    prepared = prepare.__wrapped__(product(active().name, 19, 33, 70))
    prepared.run({"a": a, **dict(zip(RIGHT, packed.addresses, strict=True)), "out": out})
    np.testing.assert_array_equal(out, a.astype(np.int32) @ b)
    assert prepared.plan
    assert prepared.plan.micro in left


def test_spans_of_k_are_for_outputs_wider_than_what_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "caches", lambda: {"L1d": 48 << 10, "L2": 2 << 20, "L3": 1 << 30})
    for name, k in (("amx", 14336), ("vnni", 20000)):
        micro = next(kernel for kernel in micro_kernels() if kernel.name == name)
        assert micro.shape(KernelQuery(512, 4096, k))[0].span > 0
        for n, rows in ((16, 512), (46, 512), (4096, 32)):
            assert micro.shape(KernelQuery(rows, n, k))[0].span == 0


def test_short_products_claim_the_lines_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [product("amx", 783, 78, k)._replace(output="f32") for k in (8, 512, 513)]
    for claims in (True, False):
        monkeypatch.setattr(host, "claims_lines", lambda size, claims=claims: claims)
        assert [one.epilogue.prefetch_output for one in asked] == [claims, claims, False]
        assert not asked[0]._replace(streams=True).epilogue.prefetch_output
