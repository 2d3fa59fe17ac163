# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""z_b = x_b y_b, by programs that stay: one for each multiprocessor, taking blocks of z in turn."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.descriptors import (
    aligned,
    aligned_like,
    describable,
    described,
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
    too_much_shared,
)


@dataclass(frozen=True)
class MatmulConfig(Config, rows=LEAST_DOT, columns=LEAST_DOT, depth=LEAST_DOT, num_warps=1):
    """Blocks of z are [rows, columns]; a step along the summed axis is `depth` long."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    flat: bool = True

    def misfit(self, element_size: int) -> str | None:
        held = element_size * self.depth * (self.rows + self.columns) * self.num_stages
        return too_much_shared(held)


# By bytes of an element.
TABLE: Table[MatmulConfig] = {
    90: {
        2: MatmulConfig(128, 256, 64, 8, 3),
        4: MatmulConfig(64, 128, 16, 8, 3, flat=False),
    },
}
_FALLBACK = {2: MatmulConfig(128, 128, 32, 8, 3), 4: MatmulConfig(64, 128, 16, 8, 3, flat=False)}


@choosing("bmm")
def matmul_choice(gpu: Gpu, itemsize: int) -> Choice[MatmulConfig]:
    """For any sizes."""
    what, fallback = f"elements of {itemsize} bytes", _FALLBACK[itemsize]
    return from_table("batched_matmul_kernel", TABLE, gpu, itemsize, what, fallback)


# Blocks of rows that are gone through before the next block of columns, so that programs that run
# at the same time share operands.
TOGETHER = tl.constexpr(8)


@triton.jit
def batched_matmul_kernel(
    x, y, z, batches, rows, columns, terms,
    X_TURNED: tl.constexpr, Y_TURNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """x [batches, rows, terms] and y [batches, terms, columns], each with its last two axes the
    other way round in memory if TURNED."""
    if X_TURNED:
        x = tiles_of(x, (batches, terms, rows), (1, DEPTH, ROWS))
    else:
        x = tiles_of(x, (batches, rows, terms), (1, ROWS, DEPTH))
    if Y_TURNED:
        y = tiles_of(y, (batches, columns, terms), (1, COLUMNS, DEPTH))
    else:
        y = tiles_of(y, (batches, terms, columns), (1, DEPTH, COLUMNS))
    z = tiles_of(z, (batches, rows, columns), (1, ROWS, COLUMNS))
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for place in tl.range(
        tl.program_id(0), batches * down * across, tl.num_programs(0), flatten=FLAT
    ):
        batch, inner = place // (down * across), place % (down * across)
        first = inner // (TOGETHER * across) * TOGETHER
        height = tl.minimum(down - first, TOGETHER)
        row = (first + inner % (TOGETHER * across) % height) * ROWS
        column = inner % (TOGETHER * across) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for term in range(0, terms, DEPTH):
            if X_TURNED:
                a = x.load([batch, term, row]).reshape(DEPTH, ROWS).T
            else:
                a = x.load([batch, row, term]).reshape(ROWS, DEPTH)
            if Y_TURNED:
                b = y.load([batch, column, term]).reshape(COLUMNS, DEPTH).T
            else:
                b = y.load([batch, term, column]).reshape(DEPTH, COLUMNS)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        z.store([batch, row, column], total.to(z.dtype).reshape(1, ROWS, COLUMNS))


def _operand(x: Tensor) -> tuple[Tensor, bool]:
    """The matrices as rows that begin at multiples of 16 bytes, and whether those are columns."""
    turned = not describable(x) and describable(x.mT)
    return aligned(x.mT if turned else x), turned


def batched_matmul(x: Tensor, y: Tensor, tf32: bool, config: MatmulConfig | None = None) -> Tensor:
    """[batches, rows, columns], contiguous, in the dtype of both operands; summed in float32.

    x: [batches, rows, terms]; y: [batches, terms, columns]; of 16 bits, or float32, which is
    rounded to TF32 if tf32. Matrices whose rows, or columns, do not begin at multiples of 16
    bytes are copied. ValueError if `config` does not fit.
    """
    batches, rows, terms = x.shape
    columns = y.shape[2]
    gpu = gpu_of(x.device)
    config = config or matmul_choice(gpu, x.element_size()).config
    config.require(x.element_size())
    if 0 in (x.numel(), y.numel()):
        return x.new_zeros((batches, rows, columns))
    (x, x_turned), (y, y_turned) = _operand(x), _operand(y)
    z = aligned_like(x, batches, rows, columns)
    x_block = (config.depth, config.rows) if x_turned else (config.rows, config.depth)
    y_block = (config.columns, config.depth) if y_turned else (config.depth, config.columns)
    arguments = {
        "x": described(x, (1, *x_block)),
        "y": described(y, (1, *y_block)),
        "z": described(z, (1, config.rows, config.columns)),
        "batches": batches,
        "rows": rows,
        "columns": columns,
        "terms": terms,
        "X_TURNED": x_turned,
        "Y_TURNED": y_turned,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "PRECISION": "tf32" if tf32 else "ieee",
        "FLAT": config.flat,
    }
    blocks = batches * triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns)
    programs = min(blocks, gpu.multiprocessors)
    launch(batched_matmul_kernel, (programs,), arguments, **config.options)
    return z.contiguous()
