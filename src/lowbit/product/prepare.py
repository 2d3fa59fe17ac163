"""From what is asked for to something that runs: one function, whoever asks.

Everything but addresses is decided, compiled and bound once; `prepare` keeps what it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.isa import host
from lowbit.jit.entry import word
from lowbit.jit.recognize import MOST_SCRATCH, Check, Fresh
from lowbit.jit.workspace import aligned_empty, workspace
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.groups import group_count
from lowbit.kernels.cpu.shared.layout import LINE, NIBBLE_FLIP, PANEL, PANEL_LINE, blocks
from lowbit.product.dispatch import Plan, plan
from lowbit.product.product import Product

# An array, its address, or None where it is not used.
Address = npt.NDArray[Any] | int | None
_ZEROS = {"s4": NIBBLE_FLIP << 4 | NIBBLE_FLIP}  # bytes of panels whose values are zeros
KEPT = 1 << 12  # how many products are kept prepared

_VARYING = (
    "a", "packed", "row_scale", "row_zero", "row_sum", "panels", "column_sum", "column_zero",
    "column_scale", "bias", "residual", "parameters", "out", "out_stride", "m", "private",
)  # fmt: skip


class PreparedProduct:
    """A product that runs on addresses. `plan` is None where there is nothing to compute.

    Outputs that lie on cache lines and are too large for the caches are written past them, by
    `streaming`, the same product prepared so.
    """

    small = False  # and in one thread: see `recognizer`

    def __init__(self, product: Product) -> None:
        self.product = product
        self.shape = product.m, product.n
        self.plan: Plan | None = None
        self.streaming: PreparedProduct | None = None
        self._nothing: tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]] | None = None
        if 0 in self.shape:
            return
        if not product.k:  # an empty sum is that of one zero, wherever it is read from
            product = product._replace(b=product.b._replace(k=1), a_strides=(0, 1))
            size = blocks(product.n, PANEL) * PANEL_LINE
            self._nothing = _filled(size, 0), _filled(size, _ZEROS.get(product.b.stored, 0))
        made = plan(product)
        self._bind(product, made)
        large = product.m * product.n * product.out_bytes > host.caches()["L2"]
        if large and not product.streams and self._nothing is None:
            self.streaming = prepare(product._replace(streams=True))
        self.small = (
            not large
            and self._nothing is None
            and made.threads == 1
            and len(self._chunks) == 1
            and self._scratch <= MOST_SCRATCH
        )

    def _bind(self, product: Product, plan: Plan) -> None:
        """Get the machine code, and give it what no call changes."""
        program = product_kernel.program(
            plan.isa,
            micro=plan.micro,
            shape=plan.shape,
            a_format=product.a,
            epilogue=product.epilogue,
            weight=product.b.stored,
            fused=plan.fused,
        )
        row_stride, stride = product.a_strides
        self._fixed = {
            "a_row_stride": row_stride,
            "a_stride": stride,
            "n": product.n,
            "k_size": product.k,
            "block_rows": plan.block_rows,
            "item_steps": plan.item_steps,
            "item_panels": plan.item_panels,
            "private_bytes": plan.private_bytes,
        }
        self._program, self.plan = program, plan
        self._call = program.bind(plan.threads, _VARYING, **self._fixed)
        # Of the scratch: packed rows, each thread's own, then zero points, sums, scales of rows.
        grouping = product.a.grouping
        entries = group_count(grouping, product.k) if grouping else 1
        self._private = plan.packed_bytes
        self.zero_at = self._private + plan.threads * plan.private_bytes
        self._sum = self.zero_at + 4 * plan.chunk_rows
        self.scale_at = self._sum + 4 * plan.chunk_rows * entries
        self._scratch = self.scale_at + 4 * plan.chunk_rows * entries
        self._makes_rows = product.a.made
        self._chunks = range(0, product.m, plan.chunk_rows)
        self._a_bytes = product.a.element.bytes * product.a_strides[0]
        self._out_bytes = product.out_bytes

    def run(
        self,
        a: Address,
        right: tuple[int, int, int, int],
        out: Address,
        out_stride: int,
        scale: Address = None,
        zero: Address = None,
        bias: Address = None,
        residual: Address = None,
        parameters: Address = None,
    ) -> None:
        """Compute. Operands that the product does not use are None.

        right: the addresses of panels, column sums, zero points and scales. out: rows, contiguous,
        `out_stride` elements apart. scale, zero: float32 and int32, one for each row, where they
        are given. bias: float32 for each column, padded to whole panels; residual: float32 [M, N],
        contiguous; parameters: float32, the numbers of post-operations and output.
        """
        if self.plan is None:
            return
        row_bytes = out_stride * self._out_bytes
        if self.streaming is not None and not (row_bytes % LINE or word(out) % LINE):
            self.streaming.run(a, right, out, out_stride, scale, zero, bias, residual, parameters)
            return
        panels: Address
        zeros: Address
        panels, sums, zeros, scales = right
        if self._nothing is not None:
            a, panels = self._nothing
            zeros = a
        memory, start = workspace.reserve(self._scratch)
        for first in self._chunks:
            rows = min(self._chunks.step, self.shape[0] - first)
            if self._makes_rows:
                scale, zero = start + self.scale_at, start + self.zero_at
            self._call(a, start, scale, zero, start + self._sum, panels, sums, zeros, scales, bias,
                       residual, parameters, out, out_stride, rows,
                       start + self._private)  # fmt: skip
            if rows < self.shape[0]:
                a, out = _moved(a, rows * self._a_bytes), _moved(out, rows * row_bytes)
                if not self.product.a.uniform:
                    scale, zero = _moved(scale, 4 * rows), _moved(zero, 4 * rows)
                residual = _moved(residual, 4 * rows * self.shape[1])
        del memory  # until here nothing else may use it

    def recognizer(
        self,
        right: tuple[int, int, int, int],
        checks: Sequence[Check],
        fresh: Fresh | None,
        out_stride: int,
        zero: Address = None,
        parameters: npt.NDArray[np.float32] | None = None,
    ) -> Callable[..., Any] | None:
        """What recognizes calls like one that was run, and runs them: see jit.recognize.

        Only for `small` products. right, out_stride, zero, parameters: as given to `run`. Numbers
        that are the scale and zero point of all rows belong at `scale_at` and `zero_at`.
        """
        panels, sums, zeros, scales = right
        words = dict(
            self._fixed, m=self.shape[0], out_stride=out_stride, panels=panels, column_sum=sums,
            column_zero=zeros, column_scale=scales, parameters=word(parameters),
        )  # fmt: skip
        scratch = {"packed": 0, "private": self._private, "row_sum": self._sum,
                   "row_scale": self.scale_at, "row_zero": self.zero_at}  # fmt: skip
        if zero is not None:
            words["row_zero"] = word(zero)
            del scratch["row_zero"]
        kept = parameters, zero
        return self._program.recognizer(words, scratch, self._scratch, checks, fresh, kept)

    def into(
        self,
        a: Address,
        right: tuple[int, int, int, int],
        out: npt.NDArray[Any],
        *operands: Address,
    ) -> None:
        """`run` into an array of any strides; operands as there, from `scale` on."""
        row, step = out.strides
        item = out.itemsize
        if row % item or (step != item and out.shape[1] > 1):  # the kernels take whole rows
            target = np.empty(out.shape, out.dtype)
            self.run(a, right, target, out.shape[1], *operands)
            out[...] = target
        else:
            self.run(a, right, out, row // item, *operands)


def _filled(size: int, value: int) -> npt.NDArray[np.uint8]:
    made = aligned_empty((size,), np.uint8)
    made.fill(value)
    return made


def _moved(address: Address, distance: int) -> Address:
    """The place `distance` bytes further; nowhere stays nowhere."""
    return None if address is None else word(address) + distance


@lru_cache(maxsize=KEPT)
def prepare(product: Product) -> PreparedProduct:
    """A product made ready to run: the one prepared before, or a new one.

    RuntimeError: the machine lacks the instruction set.
    """
    return PreparedProduct(product)
