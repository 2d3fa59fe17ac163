"""From what is asked for to something that runs: one function, whoever asks.

Everything but addresses is decided, compiled and bound once; `prepare` keeps what it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import verbose
from lowbit.jit.cached_call import MOST_SCRATCH, Check, Copied, Fresh
from lowbit.jit.entry import word
from lowbit.jit.kernel import Program
from lowbit.jit.workspace import aligned_empty, workspace
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.groups import group_count
from lowbit.kernels.cpu.shared.layout import LINE, NIBBLE_FLIP, PANEL, PANEL_LINE, blocks
from lowbit.product.describe import of_product, tell_integers
from lowbit.product.dispatch import Plan, outgrows_caches, plan
from lowbit.product.product import Product
from lowbit.weights.convolution import PackedDepthwise
from lowbit.weights.panels import PackedMatrix

# An array, its address, or None where it is not used.
Address = npt.NDArray[Any] | int | None
_ZEROS = {"s4": NIBBLE_FLIP << 4 | NIBBLE_FLIP}  # bytes of panels whose values are zeros
_KEEPS_GIL = 1 << 18  # multiply-adds, for which the GIL is not given back: a few microseconds
KEPT = 1 << 12  # how many products are kept prepared

VARYING = (
    "a", "packed", "row_scale", "row_zero", "row_sum", "panels", "column_sum", "column_zero",
    "column_scale", "bias", "residual", "parameters", "out", "out_stride", "m", "private",
    "windows", "first_row",
)  # fmt: skip


class PreparedProduct:
    """A product that runs on addresses. `plan` is None where there is nothing to compute.

    A launch of `program` takes the words `fixed`, by name, and those that `calls` gives.

    Outputs that lie on cache lines and are too large for the caches are written past them, by
    `streaming`, the same product prepared so.
    """

    small = False  # see `cached_call`
    scratch = 0  # bytes

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
        instruction_sets.get(product.isa)
        made = plan(product)
        self._bind(product, made)
        if not product.streams:
            tell_integers(product, made)
        large = outgrows_caches(product, made)
        if large and not product.streams and self._nothing is None:
            self.streaming = PreparedProduct(product._replace(streams=True))
        self.small = (
            not large
            and self._nothing is None
            and len(self._chunks) == 1
            and self.scratch <= MOST_SCRATCH
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
        self.fixed = {
            "a_row_stride": row_stride,
            "a_stride": stride,
            "n": product.n,
            "k_size": product.k,
            "residual_stride": product.residual_stride or product.n,
            "block_rows": plan.block_rows,
            "item_steps": plan.item_steps,
            "item_panels": plan.item_panels,
            "threads": plan.threads,
            "private_bytes": plan.private_bytes,
            "next_panels": 0,  # in networks, the weights of the product that comes next
            "next_bytes": 0,
        }
        self.program, self.plan = program, plan
        self._call = program.bind(plan.threads, VARYING, **self.fixed)
        # Of the scratch: packed rows, each thread's own, then zero points, sums, scales of rows.
        grouping = product.a.grouping
        entries = group_count(grouping, product.k) if grouping else 1
        self._private = plan.packed_bytes
        self.zero_at = self._private + plan.threads * plan.private_bytes
        self._sum = self.zero_at + 4 * plan.chunk_rows
        self.scale_at = self._sum + 4 * plan.chunk_rows * entries
        self.scratch = self.bias_at = self.scale_at + 4 * plan.chunk_rows * entries
        lines = blocks(product.n, PANEL) * blocks(product.k, LINE)
        self._panel_bytes = lines * (PANEL_LINE if product.b.stored == "s8" else PANEL_LINE // 2)
        self._makes_rows = product.a.made
        self._chunks = range(0, product.m, plan.chunk_rows)
        # A chunk's rows are found by their address, or, of windows, by their number.
        self._a_bytes = 0 if product.a.windows else product.a.element.bytes * product.a_strides[0]
        self._residual_bytes = product.residual_bytes
        self._out_bytes = product.out_bytes

    def run(
        self, a: Address, right: tuple[int, int, int, int], out: Address, out_stride: int,
        scale: Address = None, zero: Address = None, bias: Address = None, residual: Address = None,
        parameters: Address = None, windows: Address = None,
    ) -> None:  # fmt: skip
        """Compute. Operands that the product does not use are None.

        right: the addresses of panels, column sums, zero points and scales. out: rows, contiguous,
        `out_stride` elements apart. scale, zero: float32 and int32, one for each row, where they
        are given. bias: float32 for each column, padded to whole panels; residual: float32, or what
        its post-operation says, [M, N], contiguous; parameters: float32, the numbers of
        post-operations and output; windows: the table of rows that are windows.
        """
        if self.plan is None:
            return
        row_bytes = out_stride * self._out_bytes
        if self.streaming is not None and not (row_bytes % LINE or word(out) % LINE):
            self.streaming.run(a, right, out, out_stride, scale, zero, bias, residual, parameters,
                               windows)  # fmt: skip
            return
        memory, start = workspace.reserve(self.scratch)
        for words in self.calls(start, a, right, out, out_stride, scale, zero, bias, residual,
                                parameters, windows):  # fmt: skip
            self._call(*words)
        del memory  # until here nothing else may use it

    def calls(
        self,
        start: Any,
        a: Any,
        right: tuple[Any, Any, Any, Any],
        out: Any,
        out_stride: int,
        scale: Any = None,
        zero: Any = None,
        bias: Any = None,
        residual: Any = None,
        parameters: Any = None,
        windows: Any = None,
    ) -> Iterator[tuple[Any, ...]]:
        """What the program is given for `varying`, one launch after another.

        start: of `scratch` bytes at a multiple of 64; the rest as `run` takes it. An address may be
        any object that a distance in bytes can be added to.
        """
        if self.plan is None:
            return
        row_bytes = out_stride * self._out_bytes
        panels, sums, zeros, scales = right
        if self._nothing is not None:
            a, panels = self._nothing
            zeros = a
        for first in self._chunks:
            rows = min(self._chunks.step, self.shape[0] - first)
            if self._makes_rows:
                scale, zero = start + self.scale_at, start + self.zero_at
            yield (a, start, scale, zero, start + self._sum, panels, sums, zeros, scales, bias,
                   residual, parameters, out, out_stride, rows, start + self._private, windows,
                   first)  # fmt: skip
            if rows < self.shape[0]:
                a, out = moved(a, rows * self._a_bytes), moved(out, rows * row_bytes)
                if not self.product.a.uniform:
                    scale, zero = moved(scale, 4 * rows), moved(zero, 4 * rows)
                residual = moved(residual, rows * self._residual_bytes)

    def launches(self, start: Any, *operands: Any) -> Iterator[tuple[Program, dict[str, Any]]]:
        """`calls`, as the program and a word for each of its parameters; what comes next is this
        product again."""
        for words in self.calls(start, *operands):
            named = dict(zip(VARYING, words, strict=True))
            following = {"next_panels": named["panels"], "next_bytes": self._panel_bytes}
            yield self.program, self.fixed | named | following

    @property
    def with_lists(self) -> bool:
        """Whether split panels are read in place of the whole ones."""
        return self.plan is not None and self.plan.shape.summed > 0

    def right(self, b: PackedMatrix | PackedDepthwise) -> tuple[int, int, int, int]:
        """The addresses of what is read of b."""
        return b.addresses_for(None if self.plan is None else self.plan.shape)

    def cached_call(
        self, right: tuple[int, int, int, int], checks: Sequence[Check], fresh: Fresh | None,
        out_stride: int, zero: Address = None, parameters: npt.NDArray[np.float32] | None = None,
    ) -> Callable[..., Any] | None:  # fmt: skip
        """A function that knows calls like one that was run, and runs them: see jit.cached_call.

        Only for `small` products. right, out_stride, zero, parameters: as given to `run`. Numbers
        that are the scale and zero point of all rows belong at `scale_at` and `zero_at`, a bias
        that has to be padded at `bias_at`, behind the rest.
        """
        panels, sums, zeros, scales = right
        words = dict(
            self.fixed, m=self.shape[0], out_stride=out_stride, panels=panels, column_sum=sums,
            column_zero=zeros, column_scale=scales, parameters=word(parameters),
        )  # fmt: skip
        scratch = {"packed": 0, "private": self._private, "row_sum": self._sum,
                   "row_scale": self.scale_at, "row_zero": self.zero_at}  # fmt: skip
        if zero is not None:
            words["row_zero"] = word(zero)
            del scratch["row_zero"]
        size = self.scratch
        if any(isinstance(check, Copied) for check in checks):
            scratch["bias"] = self.bias_at
            size += 4 * PANEL * blocks(self.product.n, PANEL)
        kept = parameters, zero
        assert self.plan is not None
        count = self.plan.threads
        keeps_gil = count == 1 and self.shape[0] * self.shape[1] * self.product.k <= _KEEPS_GIL
        return self.program.cached_call(words, scratch, size, checks, fresh, kept, keeps_gil, count)

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


def moved(address: Any, distance: int) -> Any:
    """The place `distance` bytes further; nowhere stays nowhere."""
    if address is None:
        return None
    return (word(address) if isinstance(address, np.ndarray) else address) + distance


class _Told(PreparedProduct):
    """One that tells of its calls. None of them is recognized, since machine code would not."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self.small = False
        self._told = of_product(product, self.plan) if self.plan else "nothing to compute"

    def run(self, *given: Any, **named: Any) -> None:
        with verbose.told(self._told):
            super().run(*given, **named)


@lru_cache(maxsize=KEPT)
def prepare(product: Product) -> PreparedProduct:
    """A product made ready to run: the one prepared before, or a new one.

    RuntimeError: the machine lacks the instruction set.
    """
    return (_Told if verbose.LEVEL else PreparedProduct)(product)
