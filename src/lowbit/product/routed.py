"""Products of groups of rows with parts of one packed matrix, made ready to run."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.jit.launch import Launch, Word
from lowbit.kernels.cpu.integer.routed import routed_product
from lowbit.kernels.cpu.shared.layout import PANEL, PANEL_LINE, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import NIBBLES
from lowbit.product.describe import of_product
from lowbit.product.dispatch import Plan, consider, thread_count
from lowbit.product.prepare import KEPT, RIGHT, Scratch
from lowbit.product.prepared import Prepared, identity
from lowbit.product.product import Product
from lowbit.weights.panels import PackedMatrix

_ITEMS = 4  # for each thread, so that all end at about the same time


@lru_cache(maxsize=KEPT)
def prepare_routed(product: Product, rows: int, experts: int) -> Prepared:
    """product: what an expert multiplies as a rule; rows: of all experts together, at least one.

    Operands: a, float32 [rows, K]; ends, int64 [experts]; those of RIGHT, of all experts side by
    side; out, float32 [rows, N].
    """
    made, chunk = _plan(product, rows, experts), product.m * experts
    where = Scratch.of(product, made)
    words: dict[str, Word] = {
        **identity("a", "ends", *RIGHT, "out"), "experts": experts, "n": product.n,
        "k_size": product.k, "block_rows": made.block_rows, "item_panels": made.item_panels,
        "private_bytes": made.private_bytes, **where.words,
    }  # fmt: skip
    program = routed_product.program(
        made.isa, micro=made.micro, shape=made.shape, a_format=product.a,
        epilogue=product.epilogue, weight=product.b.stored,
    )  # fmt: skip

    def right(b: PackedMatrix) -> dict[str, int]:
        return dict(zip(RIGHT, b.addresses, strict=True))

    text = f"{of_product(product, made)} of {experts} experts, {chunk} rows"
    return Prepared(product, (rows, product.n), [Launch(program, words)], made.threads,
                    where.end, text, made, weight=right)  # fmt: skip


def _plan(product: Product, rows: int, experts: int) -> Plan:
    """As `dispatch.plan`, with rows that are packed before, in whole steps of each expert."""
    query = product.query
    isa, micro, _ = consider(instruction_sets.named(product.isa), query)[-1]
    assert micro is not None
    threads = thread_count(rows, product.n, product.k, product.threads, micro.per_cycle)
    shape, block_rows = micro.shape(query._replace(alone=threads == 1))
    shape = replace(shape, span=0, ring=0, panels_stay=False)
    wide, unpacks = product.n // PANEL, product.b.stored in NIBBLES and not shape.nibbles
    near = host.caches()["L2"] // 2 // (padded_k(product.k) * PANEL)
    several = blocks(threads * _ITEMS, min(rows, experts)) if threads > 1 else 1
    across = max(several, blocks(wide, max(1, near)))
    item_panels = min(wide, blocks(blocks(wide, across), shape.panels) * shape.panels)
    step_rows = block_rows // product.a.digits * shape.row_blocks
    steps = rows // step_rows + experts
    private = item_panels * query.k_blocks * PANEL_LINE if unpacks else 0
    private += micro.scratch_bytes(shape, query.k_blocks)
    return Plan(
        isa=isa, micro=micro, shape=shape, fused=False, chunk_rows=rows, block_rows=block_rows,
        item_steps=blocks(product.m, step_rows), item_panels=item_panels,
        packed_bytes=steps * step_rows * product.row_bytes, private_bytes=private,
        threads=threads, alone=threads == 1,
    )  # fmt: skip
