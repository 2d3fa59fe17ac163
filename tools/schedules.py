"""How products are cut, and why: the table of docs/layout.md, by `python tools/schedules.py`.

A row is a product that shows a rule. What becomes of it is asked of `product.dispatch`, for a core
of 48 KiB and 2 MiB whatever machine this is; numbers in the reasons are the code's own.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

from lowbit.isa import host
from lowbit.kernels.cpu.integer import in_place, micro_kernel, vectors
from lowbit.kernels.cpu.rows.digits import Quantized
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD
from lowbit.kernels.cpu.shared.panel_format import PanelFormat
from lowbit.product import dispatch
from lowbit.product.dispatch import Plan
from lowbit.product.product import Product

CACHES = {"L1d": 48 << 10, "L2": 2 << 20, "L3": 32 << 20}
VNNI, AMX = "avx512_vnni", "amx"
ROWS = {"u8": Bytes(), "s8": Bytes(signed=True), "f32": Quantized()}
WEIGHTS = {"s8": "int8", "u4": "uint4"}


class Rule(NamedTuple):
    """A product MxK:KxN of these dtypes, which shows when it is cut as it is."""

    isa: str
    shape: str
    dtypes: str
    reason: str
    threads: int = 1

    @property
    def product(self) -> Product:
        (m, k), (_, n) = (map(int, one.split("x")) for one in self.shape.split(":"))
        rows, weight, _ = self.dtypes.split(":")
        panels = PanelFormat(k, n, WEIGHTS[weight])
        return Product(m, ROWS[rows], (k, 1), panels, self.isa, self.threads)


def rules() -> tuple[Rule, ...]:
    few = f"{micro_kernel._FEW_ROWS} rows"
    return (
        Rule(VNNI, "512x768:768x768", "u8:s8:s32",
             f"Unsigned rows, {in_place.ROWS} or more and K above {vectors._FEW_QUADS * QUAD}, are "
             "read from cache for each step; packing would write them to memory once more."),
        Rule(VNNI, "400x1024:1024x1", "u8:s8:s32",
             "Few columns: vectors with more k of each column multiply no padding. The cycles of "
             "products, loads and sums decide how many k."),
        Rule(VNNI, "43x2018:2018x9", "u8:s8:s32", "The same."),
        Rule(VNNI, "300x4096:4096x4096", "s8:s8:s32",
             "Signed rows become unsigned while they are packed, once for each item where items "
             f"are {dispatch._FUSED_COLUMNS} columns wide."),
        Rule(VNNI, "2048x2048:2048x4096", "s8:s8:s32",
             "Rows that exceed the second level would be packed more than "
             f"{dispatch._PACKED_AGAIN} times."),
        Rule(VNNI, "512x14336:14336x4096", "s8:s8:s32",
             f"Half of the second level holds fewer than {micro_kernel._FEWEST_COLUMNS} columns of "
             f"the whole K, and there are more than {few}: sums wait in memory for the next "
             "block."),
        Rule(VNNI, "32x14336:14336x4096", "s8:s8:s32",
             f"{few} or fewer need each panel once or twice."),
        Rule(VNNI, "197x768:768x3072", "f32:s8:f32",
             "Quantizing floats twice takes longer than a barrier."),
        Rule(VNNI, "20000x4096:4096x4096", "f32:s8:f32",
             f"Packed rows take {dispatch._WORKSPACE >> 20} MiB at most."),
        Rule(VNNI, "16x4096:4096x4096", "u8:u4:s32",
             "Nibbles become bytes in the registers that multiply them."),
        Rule(VNNI, "13067x256:256x2308", "u8:s8:s32",
             f"Outputs of more than 4 times the second level, with K from "
             f"{dispatch._SHORTEST_STREAMED} on, would evict operands."),
        Rule(AMX, "256x256:256x256", "u8:s8:s32",
             "Rows of bytes are packed as fast as they are copied."),
        Rule(AMX, "43x2018:2018x9", "u8:s8:s32",
             "One step has all columns, so packed rows would be read once."),
        Rule(AMX, "256x4096:4096x4096", "u8:s8:s32",
             "A step's rows are at least twice the first-level cache, all rows fit into the second "
             f"level, and panels do not. On one thread, from {LINE + 1} rows on."),
        Rule(AMX, "512x14336:14336x4096", "u8:s8:s32",
             "A long K: lines are packed in the course of their first products."),
        Rule(AMX, "512x512:512x512", "u8:u4:s32", "Panels become bytes once for an item."),
        Rule(AMX, "64x1024:1024x512", "u8:s8:s32",
             f"Below {dispatch._ALONE:,} cycles one thread; of more, one for each "
             f"{dispatch._CYCLES_FOR_THREAD:,}.", -16),
        Rule(VNNI, "64x1024:1024x1024", "u8:s8:s32", "The same.", -16),
    )  # fmt: skip


def schedule(product: Product, plan: Plan) -> str:
    """What is done, in words."""
    shape, parts = plan.shape, list[str]()
    if shape.in_place:
        long = f", {shape.piece} bytes at once" if shape.piece > QUAD else ""
        parts.append(f"A not packed{long}")
    else:
        parts.append("A packed step by step" if plan.fused else "A packed before")
    if plan.chunk_rows < product.m:
        parts.append(f"chunks of {plan.chunk_rows:,} rows")
    if shape.span:
        parts.append(f"K blocks of {shape.span * LINE:,}")
    if shape.ring:
        parts.append(f"a ring of {shape.ring} blocks of lines")
    if shape.panels_stay:
        parts.append(f"{shape.panels} panels stationary")
    if product.b.stored != "s8":
        parts.append("nibbles unpacked " + ("in registers" if shape.nibbles else "before"))
    if dispatch.outgrows_caches(product, plan):
        parts.append("streaming stores")
    if product.threads < 0:
        parts.append(f"{plan.threads} of {-product.threads} threads")
    parts.append(f"steps of {plan.block_rows * shape.row_blocks} × {shape.panels * PANEL}")
    return "; ".join(parts)


def table() -> str:
    """Markdown: set, product and dtypes, schedule, why."""
    lines = ["| on | product | how | why |", "|---|---|---|---|"]
    with patch.object(host, "caches", lambda: CACHES):
        for rule in rules():
            how = schedule(rule.product, dispatch.plan(rule.product))
            asked = f"`{rule.shape} --dtype {rule.dtypes}`"
            lines.append(f"| {rule.isa} | {asked} | {how} | {rule.reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
