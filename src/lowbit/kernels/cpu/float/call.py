"""From a plan to calls of its program: offsets and strides are found once, addresses come later."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.jit.kernel import Program
from lowbit.kernels.cpu.float.dots import float_dots
from lowbit.kernels.cpu.float.plan import DotsPlan, FloatPlan, FloatRequest
from lowbit.kernels.cpu.float.product import float_product
from lowbit.kernels.cpu.shared.layout import LINE

Array = npt.NDArray[Any]

BYTES = {"float32": 4, "bfloat16": 2}
_SHORT = {"float32": "f32", "bfloat16": "bf16"}


class Layout(NamedTuple):
    """What a matrix is, but for its address: the name of its type, shape, strides in bytes."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def T(self) -> Layout:
        """The transposed matrix, which is the same memory."""
        return Layout(self.dtype, self.shape[::-1], self.strides[::-1])

    @property
    def steps(self) -> tuple[int, int]:
        """Strides in elements, where an axis of at most one element counts as contiguous."""
        size = BYTES[self.dtype]
        rows, columns = (
            s // size if n > 1 else 1 for s, n in zip(self.strides, self.shape, strict=True)
        )
        return rows, columns

    @property
    def span(self) -> tuple[int, int]:
        """The bytes from the first element's address to the lowest and behind the highest one."""
        if 0 in self.shape:
            return 0, 0
        reach = [s * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
        return low, high + BYTES[self.dtype]


# (addresses of a, b, c and out, then the bits of alpha and beta) -> None
Run = Callable[[int, int, int, int, int, int], None]


def _along(k_step: int, x_step: int, first: str) -> str:
    """Which axis is contiguous; `first` is asked first."""
    axes = [axis for axis, step in (("k", k_step), ("x", x_step)) if step == 1]
    return first if first in axes else "".join(axes)


# Of a, b, c (if it is read) and out.
Layouts = tuple[Layout, Layout, Layout | None, Layout]


def request_of(layouts: Layouts, isa: str, threads: int) -> FloatRequest:
    """What a plan is asked for."""
    a, b, _, out = layouts
    along = _along(a.steps[1], a.steps[0], "k"), _along(b.steps[0], b.steps[1], "x")
    (m, n), k = out.shape, a.shape[1]
    return FloatRequest(isa, m, n, k, _SHORT[a.dtype], *along, threads)


def dots_call(layouts: Layouts, plan: DotsPlan, request: FloatRequest) -> Run:
    """How to call `float_dots`."""
    a, b, c, out = layouts
    program = float_dots.program(
        plan.micro.isa,
        micro=plan.micro,
        rows=plan.rows,
        columns=plan.columns,
        kind=request.kind,
        out_kind=_SHORT[out.dtype],
    )
    c_step, reads_c = (c.steps[0], 1) if c else (0, 0)
    sizes = request.m, request.n, request.k, plan.item_groups
    a_step, b_step, out_step, threads = a.steps[0], b.steps[1], out.steps[0], request.threads

    def run(a: int, b: int, c: int, out: int, alpha: int, beta: int) -> None:
        program(threads, a, a_step, b, b_step, c, c_step, out, out_step, *sizes, alpha, beta,
                reads_c)  # fmt: skip

    return run


class _Step(NamedTuple):
    """One call of `float_product`: where its part of each operand begins, in bytes; its sizes;
    whether it begins and ends the sums."""

    program: Program
    a: int
    b: int
    c: int
    partial: int
    out: int
    sizes: tuple[int, ...]
    first: int
    last: int


def _steps(layouts: Layouts, plan: FloatPlan) -> list[_Step]:
    """The calls that make up a product."""
    a, b, c, out = layouts
    (m, k), n = a.shape, b.shape[1]
    element, steps = BYTES[out.dtype], []
    for column in range(0, n, plan.chunk_columns):
        columns = min(plan.chunk_columns, n - column)
        program = float_product.program(
            plan.micro.isa,
            micro=plan.micro,
            shape=plan.shape(columns),
            left=plan.left,
            right=plan.right,
            out_kind=_SHORT[out.dtype],
        )
        for row, depth in product(range(0, m, plan.chunk_rows), range(0, k, plan.chunk_depth)):
            rows, deep = min(plan.chunk_rows, m - row), min(plan.chunk_depth, k - depth)
            step = _Step(
                program=program,
                a=row * a.strides[0] + depth * a.strides[1],
                b=depth * b.strides[0] + column * b.strides[1],
                c=row * c.strides[0] + column * 4 if c else 0,
                partial=(row * n + column) * 4,
                out=row * out.strides[0] + column * element,
                sizes=(rows, columns, deep, plan.k_block, plan.item_blocks, plan.item_panels),
                first=int(depth == 0),
                last=int(depth + plan.chunk_depth >= k),
            )
            steps.append(step)
    return steps


def product_call(
    layouts: Layouts, plan: FloatPlan, reserve: Callable[[int], tuple[Array, int]]
) -> Run:
    """How to call `float_product`; `reserve` gives scratch of so many bytes and its address."""
    a, b, c, out = layouts
    (m, k), n = a.shape, b.shape[1]
    steps, threads = _steps(layouts, plan), plan.request.threads
    several = out.dtype == "bfloat16" and k > min(plan.k_block, plan.chunk_depth)
    packed_b = -(-plan.packed_a // LINE) * LINE
    scratch = packed_b + plan.packed_b
    a_steps, b_steps = a.steps, b.steps[::-1]
    c_step, reads_c = (c.steps[0], 1) if c else (0, 0)
    out_step = out.steps[0]

    def run(a: int, b: int, c: int, out: int, alpha: int, beta: int) -> None:
        packed, address = reserve(scratch)
        # Sums that are not final stay in float32: in the output, if that is what it is.
        sums = np.empty((m, n), np.float32) if several else None
        for step in steps:
            target = out + step.out
            partial = (target, out_step) if sums is None else (sums.ctypes.data + step.partial, n)
            step.program(
                threads, a + step.a, *a_steps, b + step.b, *b_steps, packed, address + packed_b,
                c + step.c, c_step, *partial, target, out_step,
                *step.sizes, alpha, beta, reads_c, step.first, step.last,
            )  # fmt: skip

    return run
