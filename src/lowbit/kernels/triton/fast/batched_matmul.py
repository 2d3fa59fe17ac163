"""z_b = x_b y_b, by programs that stay: one for each multiprocessor, taking blocks of z in turn."""

# Triton turns numbers into its own types, which its annotations do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.config import not_powers, options_of
from lowbit.kernels.triton.fast.descriptors import aligned, aligned_empty, describable, described
from lowbit.kernels.triton.fast.launch import compute_capability, launch, multiprocessors

_SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class MatmulConfig:
    """Blocks of z are [rows, columns]; a step along the summed axis is `depth` long.

    together: how many blocks of rows are gone through before the next block of columns, so that
    programs that run at the same time share operands. staggered: programs of a processor.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    together: int = 8
    staggered: int = 1
    flat: bool = True
    maxnreg: int | None = None

    def refusal(self, element_size: int) -> str | None:
        """Why it does not fit elements of so many bytes; None if it does."""
        if refusal := not_powers(self, "rows", "columns", "depth", "num_warps"):
            return refusal
        if min(self.rows, self.columns, self.depth) < 16:
            return "blocks have at least 16 rows, columns and terms, for the matrix units"
        held = element_size * self.depth * (self.rows + self.columns) * self.num_stages
        if held > _SHARED_BYTES:
            return f"its blocks take {held} bytes of shared memory, more than {_SHARED_BYTES}"
        return None


# By compute capability, then bytes of an element.
TABLE: dict[int, dict[int, MatmulConfig]] = {
    90: {
        2: MatmulConfig(128, 256, 64, 8, 3),
        4: MatmulConfig(64, 128, 16, 8, 3, flat=False),
    },
}
_FALLBACK = {2: MatmulConfig(128, 128, 32, 8, 3), 4: MatmulConfig(64, 128, 16, 8, 3, flat=False)}


def matmul_config(element_size: int, device: torch.device) -> MatmulConfig:
    """The configuration of the table for this GPU, else one that fits any."""
    return TABLE.get(compute_capability(device), _FALLBACK)[element_size]


@triton.jit
def _matrices(source, batches, rows, columns, batch_stride, stride, ROWS, COLUMNS):
    """A descriptor of [batches, rows, columns] in blocks [1, ROWS, COLUMNS]."""
    if isinstance(source, tl.tensor_descriptor):
        return source
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return tl.make_tensor_descriptor(
            source, [batches, rows, columns], [batch_stride, stride, 1], [1, ROWS, COLUMNS]
        )


@triton.jit
def batched_matmul_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    batches,
    rows,
    columns,
    terms,
    x_batch_stride,
    x_stride,
    y_batch_stride,
    y_stride,
    z_batch_stride,
    z_stride,
    X_TURNED: tl.constexpr,
    Y_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
    FLAT: tl.constexpr,
):
    """x [batches, rows, terms] and y [batches, terms, columns], each with its last two axes the
    other way round in memory if TURNED."""
    if X_TURNED:
        x = _matrices(x_ptr, batches, terms, rows, x_batch_stride, x_stride, DEPTH, ROWS)
    else:
        x = _matrices(x_ptr, batches, rows, terms, x_batch_stride, x_stride, ROWS, DEPTH)
    if Y_TURNED:
        y = _matrices(y_ptr, batches, columns, terms, y_batch_stride, y_stride, COLUMNS, DEPTH)
    else:
        y = _matrices(y_ptr, batches, terms, columns, y_batch_stride, y_stride, DEPTH, COLUMNS)
    z = _matrices(z_ptr, batches, rows, columns, z_batch_stride, z_stride, ROWS, COLUMNS)
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
    config = config or matmul_config(x.element_size(), x.device)
    if refusal := config.refusal(x.element_size()):
        raise ValueError(f"{config} does not fit {x.dtype}: {refusal}")
    if 0 in (x.numel(), y.numel()):
        return x.new_zeros((batches, rows, columns))
    (x, x_turned), (y, y_turned) = _operand(x), _operand(y)
    z = aligned_empty((batches, rows, columns), x.dtype, x.device)
    x_block = (config.depth, config.rows) if x_turned else (config.rows, config.depth)
    y_block = (config.columns, config.depth) if y_turned else (config.depth, config.columns)
    arguments = {
        "x_ptr": described(x, (1, *x_block)),
        "y_ptr": described(y, (1, *y_block)),
        "z_ptr": described(z, (1, config.rows, config.columns)),
        "batches": batches,
        "rows": rows,
        "columns": columns,
        "terms": terms,
        "x_batch_stride": x.stride(0),
        "x_stride": x.stride(1),
        "y_batch_stride": y.stride(0),
        "y_stride": y.stride(1),
        "z_batch_stride": z.stride(0),
        "z_stride": z.stride(1),
        "X_TURNED": x_turned,
        "Y_TURNED": y_turned,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "TOGETHER": config.together,
        "PRECISION": "tf32" if tf32 else "ieee",
        "FLAT": config.flat,
    }
    blocks = batches * triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns)
    programs = min(blocks, config.staggered * multiprocessors(x.device))
    launch(batched_matmul_kernel, (programs,), arguments, **options_of(config))
    return z.contiguous()
