"""A convolution as products: windows of images times a packed weight, prepared by `prepare`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import verbose
from lowbit.jit.kernel import Program
from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.convolution.depthwise import depthwise
from lowbit.kernels.cpu.convolution.winograd import cut as winograd_cut
from lowbit.kernels.cpu.convolution.winograd.arithmetic import TILE
from lowbit.kernels.cpu.convolution.winograd.winograd import winograd
from lowbit.kernels.cpu.rows.windows import Windows
from lowbit.kernels.cpu.shared.epilogue import OUTPUTS, Epilogue
from lowbit.kernels.cpu.shared.layout import blocks
from lowbit.product.describe import of_convolution, tell_miss, tell_plan
from lowbit.product.dispatch import thread_count
from lowbit.product.geometry import line_table, window_table
from lowbit.product.prepare import KEPT, moved, prepare
from lowbit.product.product import Convolution, Product
from lowbit.product.requests import common_format, convolved, group_format
from lowbit.weights.convolution import PackedConvolution


class PreparedConvolution(Protocol):
    """A convolution that runs on addresses."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        ...

    @property
    def scratch(self) -> int:
        """Bytes that a launch needs."""
        ...

    def run(self, weight: PackedConvolution, at: Operands) -> None:
        """Compute."""
        ...

    def launches(
        self, weight: PackedConvolution, at: Operands, start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        """What computes it, one program after another, with a word for each parameter.

        Addresses may be any objects that a distance in bytes can be added to; start: of scratch.
        """
        ...


class Operands(NamedTuple):
    """Addresses. Those that the convolution does not use are None.

    scale, zero: float32 [1] and int32 [1], of the images; of int8, 128 more than their zero point.
    bias: as `weight.biased` makes it; residual: of the output's shape; parameters: as
    `PreparedProduct.run` takes them.
    """

    x: Any
    out: Any
    scale: Any = None
    zero: Any = None
    bias: Any = None
    residual: Any = None
    parameters: Any = None


class _Grouped:
    """One product for each group of channels."""

    def __init__(self, c: Convolution) -> None:
        self.shape, self._outputs = c.shape, c.outputs
        self.product = prepare(convolved(c))
        self.scratch = self.product.scratch
        self.windows = windows_of(c, self.product.product)
        each = c.channels // c.groups
        residual = 4 if "residual" in c.post_ops else 1
        # How far the operands of a group lie from those of the one before, in bytes.
        self._steps = each, c.b.n * OUTPUTS[c.output].bytes, c.b.n * residual

    def run(self, weight: PackedConvolution, at: Operands) -> None:
        for operands in self._groups(weight, at):
            self.product.run(*operands)

    def launches(
        self, weight: PackedConvolution, at: Operands, start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        for operands in self._groups(weight, at):
            yield from self.product.launches(start, *operands)

    def _groups(self, weight: PackedConvolution, at: Operands) -> Iterator[tuple[Any, ...]]:
        """What `product` runs on, one group after another."""
        x_step, out_step, residual_step = self._steps
        for group, matrix in enumerate(weight.matrices):
            yield (
                moved(at.x, group * x_step), self.product.right(matrix),
                moved(at.out, group * out_step), self._outputs, at.scale, at.zero,
                moved(at.bias, group * 4 * len(matrix.column_sums)),
                moved(at.residual, group * residual_step), at.parameters, self.windows,
            )  # fmt: skip


def windows_of(c: Convolution, product: Product) -> npt.NDArray[np.int32] | None:
    """What the kernel reads of where windows lie; `product`: of one group."""
    if product.image:
        return np.array(product.image.table(), np.int32)
    if product.a.windows and 0 not in c.shape:
        return window_table(c.geometry, c.channels // c.groups, c.channels)
    return None


_VARYING = ("x", "windows", "weights", "row_scale", "row_zero", "column_sum", "column_scale",
            "bias", "residual", "parameters", "out")  # fmt: skip
_ITEMS_PER_THREAD = 4


def _epilogue(c: Convolution, images: Windows) -> Epilogue:
    """What follows the sums of a kernel of its own."""
    return Epilogue(a_zero=images.zero_points, post_ops=c.post_ops, out=c.output, uniform=True,
                    moderate=c.moderate and c.b.moderate)  # fmt: skip


class _Depthwise:
    """Each channel is a group."""

    scratch = 0

    def __init__(self, c: Convolution) -> None:
        self.shape, over = c.shape, c.geometry
        self.windows = None if 0 in self.shape else line_table(over, c.channels)
        images = Windows(c.signed, c.shifted)
        self._program = depthwise.program(
            instruction_sets.get(c.isa), format=images, window=over.window,
            epilogue=_epilogue(c, images), repeated=c.b.n > 1,
        )  # fmt: skip
        m = c.batch * math.prod(over.output[:-1])
        count = thread_count(c.batch * over.pixels, c.outputs, over.taps, c.threads)
        items = count * _ITEMS_PER_THREAD if count > 1 else 1
        self._fixed = {
            "image_stride": math.prod(over.size) * c.channels,
            "m": m,
            "n": c.outputs,
            "multiplier": c.b.n,
            "item_lines": max(1, blocks(m, items)),
        }
        self._call = self._program.bind(count, _VARYING, **self._fixed)
        tell_plan(told := of_convolution(c, "depthwise", count))
        if verbose.LEVEL:
            self._call = verbose.telling(self._call, told)

    def run(self, weight: PackedConvolution, at: Operands) -> None:
        for words in self._words(weight, at):
            self._call(*words)

    def launches(
        self, weight: PackedConvolution, at: Operands, start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        for words in self._words(weight, at):
            yield self._program, self._fixed | dict(zip(_VARYING, words, strict=True))

    def _words(self, weight: PackedConvolution, at: Operands) -> Iterator[tuple[Any, ...]]:
        """What the program is given: once, or never where there is nothing to compute."""
        if self.windows is not None:
            (matrix,) = weight.matrices
            panels, sums, _, scales = matrix.addresses
            yield (at.x, self.windows, panels, at.scale, at.zero, sums, scales, at.bias,
                   at.residual, at.parameters, at.out)  # fmt: skip


class _Winograd:
    """Windows of 3 x 3, in a quarter of the products."""

    def __init__(self, c: Convolution) -> None:
        isa, over, query = instruction_sets.get(c.isa), c.geometry, _words_query(c)
        self.shape, (height, width) = c.shape, over.size
        images, (down, across) = Windows(c.signed, c.shifted), over.output
        cut = winograd_cut.cut(isa, query)
        count = min(query.threads, cut.items)
        self._program = winograd.program(
            isa, format=images, epilogue=_epilogue(c, images), lanes=cut.lanes, rows=cut.rows,
            ends=(down % TILE, across % TILE),
        )  # fmt: skip
        self._fixed = {
            "image_stride": height * width * c.channels,
            "m": c.batch,
            "n": c.outputs,
            "channels": c.channels,
            "height": height,
            "width": width,
            "above": over.before[0],
            "left": over.before[1],
            "out_height": down,
            "out_width": across,
            "item_tiles": cut.item_tiles,
            "item_panels": cut.item_panels,
            "ahead": int(cut.ahead),
            "private_bytes": cut.private_bytes,
        }
        # All threads of a network enter each of its steps, also those that find no item.
        self.scratch = query.threads * cut.private_bytes
        self._panels, self._threads = winograd_cut.panels_of(isa), count
        self._call = self._program.bind(count, _WORDS, **self._fixed)
        tell_plan(told := of_convolution(c, "winograd", count))
        if verbose.LEVEL:
            self._call = verbose.telling(self._call, told)

    def run(self, weight: PackedConvolution, at: Operands) -> None:
        memory, start = workspace.reserve(self.scratch)
        self._call(*self._words(weight, at, start))
        del memory  # until here nothing else may use it

    def launches(
        self, weight: PackedConvolution, at: Operands, start: Any
    ) -> Iterator[tuple[Program, dict[str, Any]]]:
        words = self._words(weight, at, start)
        yield self._program, self._fixed | dict(zip(_WORDS, words, strict=True))

    def _words(self, weight: PackedConvolution, at: Operands, start: Any) -> tuple[Any, ...]:
        """What the program is given."""
        (matrix,) = weight.matrices
        _, sums, _, scales = matrix.addresses
        words = weight.words(self._panels, self._threads)
        return (at.x, words, at.scale, at.zero, sums, scales, at.bias, at.residual, at.parameters,
                at.out, start)  # fmt: skip


_WORDS = ("x", "weights", "row_scale", "row_zero", "column_sum", "column_scale", "bias", "residual",
          "parameters", "out", "private")  # fmt: skip


def _kind(c: Convolution) -> Callable[[Convolution], PreparedConvolution]:
    """What serves a convolution; why it is no faster kernel is logged."""
    if c.depthwise:
        return _Depthwise
    query = _words_query(c)
    why = winograd_cut.refuses(instruction_sets.named(c.isa), query)
    if not why:
        return _Winograd
    tell_miss(of_convolution(c, "product", query.threads), "winograd", why)
    return _Grouped


def _words_query(c: Convolution) -> winograd_cut.Query:
    """What Winograd's algorithm is asked."""
    over = c.geometry
    apart = {*over.stride, *over.dilation, *over.spread}
    plain = over.mode == "constant" and c.groups == 1 and apart == {1} and 0 not in c.shape
    threads = thread_count(c.batch * over.pixels, c.outputs, c.b.k, c.threads)
    return winograd_cut.Query(
        over.kernel, plain and min(*over.before, *over.after) >= 0, c.channels, c.outputs, c.batch,
        math.prod(over.size) * c.channels, over.output, c.bounded, threads,
    )  # fmt: skip


def with_weight(c: Convolution, weight: PackedConvolution) -> Convolution:
    """A convolution, of any `b`, by this weight, with what is proven about its values where that
    decides which kernel serves: to look at them takes longer than to compute."""
    plain = common_format([one.format for one in weight.matrices])
    small = c._replace(b=plain, bounded=True)
    refused = winograd_cut.refuses(instruction_sets.named(c.isa), _words_query(small))
    if not refused and weight.bounded:
        return small
    return c._replace(b=group_format(weight, c.isa))


@lru_cache(maxsize=KEPT)
def prepare_convolution(convolution: Convolution) -> PreparedConvolution:
    """A convolution made ready to run: the one prepared before, or a new one.

    RuntimeError: the machine lacks the instruction set. ValueError: images are too large.
    """
    return _kind(convolution)(convolution)
