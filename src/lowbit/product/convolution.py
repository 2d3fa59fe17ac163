"""A convolution as products: windows of images times a packed weight, prepared by `prepare`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit.launch import Launch, Place
from lowbit.kernels.cpu.convolution import winograd_tiles
from lowbit.kernels.cpu.convolution.depthwise import depthwise
from lowbit.kernels.cpu.convolution.winograd import winograd
from lowbit.kernels.cpu.convolution.winograd_tiles import TILE
from lowbit.kernels.cpu.rows.windows import Windows
from lowbit.kernels.cpu.shared.epilogue import OUTPUTS, Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks
from lowbit.product.describe import of_convolution, tell_miss, tell_plan
from lowbit.product.dispatch import thread_count
from lowbit.product.geometry import line_table, window_table
from lowbit.product.prepare import KEPT, RIGHT, prepare
from lowbit.product.prepared import SCRATCH, Operand, Prepared, identity, shifted
from lowbit.product.product import Convolution, Product
from lowbit.product.requests import common_format, convolved, group_format
from lowbit.weights.convolution import PackedConvolution


def _grouped(c: Convolution) -> Prepared:
    """One product for each group of channels."""
    asked = convolved(c)
    one, windows = prepare(asked), windows_of(c, asked)
    item = 4 if "residual" in c.post_ops else 1
    # How far the operands of a group lie from those of the one before, in bytes.
    apart = {
        "a": c.channels // c.groups,
        "out": c.b.n * OUTPUTS[c.output].bytes,
        "bias": 4 * PANEL * blocks(c.b.n, PANEL),
        "residual": c.b.n * item,
    }

    def weight(packed: PackedConvolution) -> Mapping[str, Operand]:
        matrices = (one.weight(matrix) for matrix in packed.matrices)
        return {
            f"{name} {group}": address
            for group, parts in enumerate(matrices)
            for name, address in parts.items()
        }

    def grouped(one: Prepared) -> Prepared:
        launches = [
            shifted(
                launch,
                {name: group * distance for name, distance in apart.items()},
                {name: f"{name} {group}" for name in RIGHT},
            )
            for group in range(c.groups)
            for launch in one.launches
        ]
        constants = {**one.constants, "windows": windows}
        return replace(one, request=c, shape=c.shape, launches=launches, constants=constants,
                       weight=weight, streaming=None, little=False)  # fmt: skip

    made = grouped(one)
    if one.streaming and (c.groups == 1 or not apart["out"] % LINE):
        made.streaming = grouped(one.streaming)
    return made


def windows_of(c: Convolution, product: Product) -> npt.NDArray[np.int32] | None:
    """What the kernel reads of where windows lie; `product`: of one group."""
    if product.image:
        return np.array(product.image.table(), np.int32)
    if product.a.windows and 0 not in c.shape:
        return window_table(c.geometry, c.channels // c.groups, c.channels)
    return None


_ITEMS_PER_THREAD = 4
_PLACES = {
    **identity("row_scale", "row_zero", "bias", "residual", "parameters", "out", "windows",
               "column_sum", "column_scale"),
    "x": Place("a"),
    "weights": Place("panels"),
}  # fmt: skip


def _epilogue(c: Convolution, images: Windows) -> Epilogue:
    """What follows the sums of a kernel of its own."""
    return Epilogue(a_zero=images.zero_points, post_ops=c.post_ops, out=c.output, uniform=True,
                    moderate=c.moderate and c.b.moderate)  # fmt: skip


def _right(weight: PackedConvolution) -> dict[str, Operand]:
    """What is read of a weight of one matrix, or of one for all channels."""
    (matrix,) = weight.matrices
    return dict(zip(RIGHT, matrix.addresses, strict=True))


def _depthwise(c: Convolution) -> Prepared:
    """Each channel is a group."""
    if 0 in c.shape:
        return Prepared(c, c.shape)
    over, images = c.geometry, Windows(c.signed, c.shifted)
    program = depthwise.program(
        instruction_sets.get(c.isa), format=images, window=over.window,
        epilogue=_epilogue(c, images), repeated=c.b.n > 1,
    )  # fmt: skip
    m = c.batch * math.prod(over.output[:-1])
    count = thread_count(c.batch * over.pixels, c.outputs, over.taps, c.threads)
    items = count * _ITEMS_PER_THREAD if count > 1 else 1
    words = {
        "image_stride": math.prod(over.size) * c.channels,
        "m": m,
        "n": c.outputs,
        "multiplier": c.b.n,
        "item_lines": max(1, blocks(m, items)),
    }
    text = of_convolution(c, "depthwise", count)
    tell_plan(text)
    constants = {"windows": line_table(over, c.channels)}
    launches = [Launch(program, {**words, **_PLACES})]
    return Prepared(c, c.shape, launches, count, text=text, constants=constants, weight=_right)


def _winograd(c: Convolution) -> Prepared:
    """Windows of 3 x 3, in a quarter of the products."""
    isa, over, query = instruction_sets.get(c.isa), c.geometry, _words_query(c)
    (height, width), (down, across) = over.size, over.output
    images, cut = Windows(c.signed, c.shifted), winograd_tiles.cut(isa, query)
    count, panels = min(query.threads, cut.items), winograd_tiles.panels_of(isa)
    program = winograd.program(
        isa, format=images, epilogue=_epilogue(c, images), lanes=cut.lanes, rows=cut.rows,
        ends=(down % TILE, across % TILE),
    )  # fmt: skip
    words = {
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
    places = {**_PLACES, "private": Place(SCRATCH)}
    del places["windows"]
    text = of_convolution(c, "winograd", count)
    tell_plan(text)

    def weight(packed: PackedConvolution) -> Mapping[str, Operand]:
        return {**_right(packed), "panels": packed.words(panels, count)}

    # All threads of a network enter each of its steps, also those that find no item.
    scratch = query.threads * cut.private_bytes
    launches = [Launch(program, {**words, **places})]
    return Prepared(c, c.shape, launches, count, scratch, text, cut, weight=weight)


def _kind(c: Convolution) -> Callable[[Convolution], Prepared]:
    """What serves a convolution; why it is no faster kernel is logged."""
    if c.depthwise:
        return _depthwise
    query = _words_query(c)
    why = winograd_tiles.refuses(instruction_sets.named(c.isa), query)
    if not why:
        return _winograd
    tell_miss(of_convolution(c, "product", query.threads), "winograd", why)
    return _grouped


def _words_query(c: Convolution) -> winograd_tiles.Query:
    """What Winograd's algorithm is asked."""
    over = c.geometry
    apart = {*over.stride, *over.dilation, *over.spread}
    plain = over.mode == "constant" and c.groups == 1 and apart == {1} and 0 not in c.shape
    threads = thread_count(c.batch * over.pixels, c.outputs, c.b.k, c.threads)
    return winograd_tiles.Query(
        over.kernel, plain and min(*over.before, *over.after) >= 0, c.channels, c.outputs, c.batch,
        math.prod(over.size) * c.channels, over.output, c.bounded, threads,
    )  # fmt: skip


def with_weight(c: Convolution, weight: PackedConvolution) -> Convolution:
    """A convolution, of any `b`, by this weight, with what is proven about its values where that
    decides which kernel serves: to look at them takes longer than to compute."""
    plain = common_format([one.format for one in weight.matrices])
    small = c._replace(b=plain, bounded=True)
    refused = winograd_tiles.refuses(instruction_sets.named(c.isa), _words_query(small))
    if not refused and weight.bounded:
        return small
    return c._replace(b=group_format(weight, c.isa))


@lru_cache(maxsize=KEPT)
def prepare_convolution(convolution: Convolution) -> Prepared:
    """A convolution made ready to run: the one prepared before, or a new one.

    Its operands are those of a product, but that row_scale and row_zero are one for all images (of
    int8, 128 more than their zero point), bias is as `weight.biased` makes it, and residual is of
    the output's shape.

    RuntimeError: the machine lacks the instruction set. ValueError: images are too large.
    """
    return _kind(convolution)(convolution)
