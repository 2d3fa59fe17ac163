"""From a product of integers to something that runs: one function, whoever asks.

Everything but addresses is decided, compiled and bound once; `prepare` keeps what it has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit.cached_call import MOST_SCRATCH
from lowbit.jit.launch import Launch, Place, Word
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.groups import group_count
from lowbit.kernels.cpu.shared.layout import LINE, NIBBLE_FLIP, PANEL, PANEL_LINE, blocks
from lowbit.kernels.cpu.shared.panel_format import NIBBLES, PanelFormat
from lowbit.product.describe import of_product, tell_plan
from lowbit.product.dispatch import Plan, consider, outgrows_caches, plan
from lowbit.product.prepared import SCRATCH, Chunks, Operand, Prepared, identity, shifted
from lowbit.product.product import Product
from lowbit.weights.convolution import PackedDepthwise
from lowbit.weights.panels import PackedMatrix

_ZEROS = {"s4": NIBBLE_FLIP << 4 | NIBBLE_FLIP}  # bytes of panels whose values are zeros
_KEEPS_GIL = 1 << 18  # multiply-adds, for which the GIL is not given back: a few microseconds
KEPT = 1 << 12  # how many products are kept prepared

RIGHT = ("panels", "column_sum", "column_zero", "column_scale")
"""What a kernel reads of a packed right operand, in the order of `PackedMatrix.addresses`."""


@lru_cache(maxsize=KEPT)
def prepare(product: Product) -> Prepared:
    """A product made ready to run: the one prepared before, or a new one.

    Its operands: a; those of RIGHT; row_scale and row_zero, float32 and int32, one for each row,
    where they are given; bias, float32 for each column, padded to whole panels; residual, float32,
    or what its post-operation says, [M, N]; parameters, float32, the numbers of post-operations and
    output; windows, the table of rows that are windows; out.

    RuntimeError: the machine lacks the instruction set.
    """
    shape = product.m, product.n
    if 0 in shape:
        return Prepared(product, shape)
    constants: dict[str, Operand] = {}
    if not product.k:  # an empty sum is that of one zero, wherever it is read from
        product = product._replace(b=product.b._replace(k=1), a_strides=(0, 1))
        size = blocks(product.n, PANEL) * PANEL_LINE
        zeros, panels = _filled(size, 0), _filled(size, _ZEROS.get(product.b.stored, 0))
        constants = {"a": zeros, "panels": panels, "column_zero": zeros}
    instruction_sets.get(product.isa)
    made = plan(product)
    where = Scratch.of(product, made)
    launches = _launches(product, made, where)
    text = of_product(product, made)
    if not product.streams:
        tell_plan(text, lambda: consider(instruction_sets.get(product.isa), product.query))
    large, streaming = outgrows_caches(product, made), None
    lines = not product.out_row * product.out_bytes % LINE
    if large and not product.streams and not constants and lines:
        streaming = prepare(product._replace(streams=True))

    def right(b: PackedMatrix | PackedDepthwise) -> Mapping[str, Operand]:
        return dict(zip(RIGHT, b.addresses_for(made.shape), strict=True))

    return Prepared(
        product,
        shape,
        launches,
        made.threads,
        where.end,
        text,
        made,
        constants,
        right,
        spare={"row_scale": where.scale, "row_zero": where.zero, "bias": where.end},
        spare_bytes=4 * PANEL * blocks(product.n, PANEL),
        streaming=streaming,
        little=not (large or constants or len(launches) > 1 or where.end > MOST_SCRATCH),
        keeps_gil=made.threads == 1 and product.m * product.n * product.k <= _KEEPS_GIL,
    )


class Scratch(NamedTuple):
    """Offsets: of packed rows, each thread's own, then zero points, sums, scales of rows."""

    packed: int
    private: int
    zero: int
    sums: int
    scale: int
    end: int

    @classmethod
    def of(cls, product: Product, plan: Plan) -> Scratch:
        grouping = product.a.grouping
        entries = group_count(grouping, product.k) if grouping else 1
        private = plan.packed_bytes
        zero = private + plan.threads * plan.private_bytes
        sums = zero + 4 * plan.chunk_rows
        scale = sums + 4 * plan.chunk_rows * entries
        return cls(0, private, zero, sums, scale, scale + 4 * plan.chunk_rows * entries)

    @property
    def words(self) -> dict[str, Word]:
        """What a kernel is told of them."""
        names = "packed", "private", "row_zero", "row_sum", "row_scale"
        return {name: Place(SCRATCH, at) for name, at in zip(names, self, strict=False)}


def _launches(product: Product, plan: Plan, where: Scratch) -> Chunks:
    """The machine code, what no call changes, and where its operands are: of as many rows at a time
    as have room in the scratch."""
    program = product_kernel.program(
        plan.isa,
        micro=plan.micro,
        shape=plan.shape,
        a_format=product.a,
        epilogue=product.epilogue,
        weight=product.b.stored,
        fused=plan.fused,
    )
    (row_stride, stride), chunk = product.a_strides, plan.chunk_rows
    words: dict[str, Word] = {
        "a_row_stride": row_stride,
        "a_stride": stride,
        "n": product.n,
        "k_size": product.k,
        "residual_stride": product.residual_stride or product.n,
        "out_stride": product.out_row,
        "block_rows": plan.block_rows,
        "item_steps": plan.item_steps,
        "item_panels": plan.item_panels,
        "threads": plan.threads,
        "private_bytes": plan.private_bytes,
    }
    words |= identity("a", *RIGHT, "bias", "residual", "parameters", "out", "windows", "next_bytes")
    words |= {
        "next_panels": Place("panels"),  # of no bytes; in networks, what comes next
        **where.words,
    }
    words |= {} if product.a.made else identity("row_scale", "row_zero")
    each = {
        # A chunk's rows are found by their address, or, of windows, by their number.
        "a": 0 if product.a.windows else product.a.element.bytes * row_stride,
        "out": product.out_bytes * product.out_row,
        "residual": product.residual_bytes,
        "row_scale": 0 if product.a.uniform else 4,
        "row_zero": 0 if product.a.uniform else 4,
    }

    def make(first: int) -> Launch:
        own = {"m": min(chunk, product.m - first), "first_row": first}
        distances = {name: first * size for name, size in each.items()}
        return shifted(Launch(program, {**words, **own}), distances)

    return Chunks(range(0, product.m, chunk), make)


def panel_bytes(b: PanelFormat) -> int:
    """Of all panels of a right operand."""
    lines = blocks(b.n, PANEL) * blocks(b.k, LINE)
    return lines * (PANEL_LINE // 2 if b.stored in NIBBLES else PANEL_LINE)


def _filled(size: int, value: int) -> npt.NDArray[np.uint8]:
    made = aligned_empty((size,), np.uint8)
    made.fill(value)
    return made
