"""What the public functions ask for: from facts about their arguments to prepared products.

Everything about a call but its numbers (shapes, strides, types, post-operations, threads) is a key;
behind it stands a call: checked, prepared, with its output specified.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.kernels.cpu.convolution import winograd_tiles
from lowbit.kernels.cpu.rows.digits import Digits, Quantized, SignedBytes
from lowbit.kernels.cpu.rows.input_format import Bytes, InputFormat
from lowbit.kernels.cpu.rows.shifted import Shifted, ShiftedImage
from lowbit.kernels.cpu.rows.windows import Lowered, Windows
from lowbit.kernels.cpu.shared.epilogue import OCTET
from lowbit.kernels.cpu.shared.groups import Grouping
from lowbit.kernels.cpu.shared.layout import FLIP, LINE, NIBBLE_FLIP, PANEL, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import PanelFormat, SplitFormat
from lowbit.numerics import longest_sum
from lowbit.product.arguments import check_bytes, check_inner, check_k, check_matrix
from lowbit.product.dispatch import consider, wants_proof, wants_split
from lowbit.product.output import OutputSpec
from lowbit.product.prepare import KEPT, prepare
from lowbit.product.prepared import Prepared
from lowbit.product.product import Convolution, Product
from lowbit.product.routed import prepare_routed
from lowbit.weights.convolution import PackedConvolution, PackedDepthwise
from lowbit.weights.panels import PackedMatrix

# By what panels hold: k of a group whose sums int32 surely holds.
_MOST_IN_GROUP = {"u4": longest_sum("int8", "uint4"), "u8": longest_sum("int8", "uint8")}
_LEAST_PIECE = 16  # bytes of an image that are copied at once
_DIGITS = {"float32": 3, "bfloat16": 2}  # that are as good as the type

Left = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]
"""What a left operand [M, K] is: its shape, strides in bytes, and dtype."""

Call = tuple[Prepared, OutputSpec]


def _steps(left: Left) -> tuple[int, int]:
    """Strides in elements, where an axis of one element counts as contiguous."""
    shape, strides, dtype = left
    row, step = (s // dtype.itemsize if n > 1 else 1 for s, n in zip(strides, shape, strict=True))
    return row, step


def _call(
    left: Left, a: InputFormat, b: PanelFormat, threads: int, isa: str | None, output: OutputSpec,
    out_stride: int = 0, moderate: bool = False,
) -> Call:  # fmt: skip
    return prepare(_product(left, a, b, threads, isa, output, out_stride, moderate)), output


def _product(
    left: Left, a: InputFormat, b: PanelFormat, threads: int, isa: str | None, output: OutputSpec,
    out_stride: int, moderate: bool,
) -> Product:  # fmt: skip
    name = instruction_sets.active(isa).name
    return Product(left[0][0], a, _steps(left), b, name, threads, output.post_ops, output.out,
                   out_stride=out_stride, moderate=moderate and output.moderate)  # fmt: skip


@lru_cache(maxsize=KEPT)
def routed(
    rows: int, b: PanelFormat, experts: int, threads: int, isa: str | None, activations: str
) -> Prepared:
    """The product of float32 rows, each with one of `experts` parts of b's columns.

    ValueError: b has no such parts of whole panels; `activations` as in `floats`."""
    if b.n % (experts * PANEL):
        raise ValueError(f"{experts} experts of {b.n / experts:g} columns are no whole panels")
    each = b._replace(n=b.n // experts)
    left = (blocks(rows, experts), b.k), (4 * b.k, 4), np.dtype(np.float32)
    a = float_rows(activations, "float32", b)
    product = _product(left, a, each, threads, isa, _FLOATS, 0, False)
    return prepare_routed(product, rows, experts)


def panel_format(b: PackedMatrix | PackedDepthwise, isa: str | None) -> PanelFormat:
    """What b is, with what is proven about its values where that can matter."""
    if wants_split(isa):
        return b.split_format
    return b.proven_format if wants_proof(isa) else b.format


def group_format(weight: PackedConvolution, isa: str | None) -> PanelFormat:
    """The form of the matrix of each group, with what is proven about the values of all.
    TypeError: it is no packed convolution."""
    if not isinstance(weight, PackedConvolution):
        raise TypeError(f"weight must be from lowbit.pack_convolution, got {type(weight).__name__}")
    return common_format([panel_format(matrix, isa) for matrix in weight.matrices])


def common_format(formats: list[PanelFormat]) -> PanelFormat:
    """What is true of all."""
    most = max(one.largest_pair for one in formats)
    return formats[0]._replace(largest_pair=most, split=_common([one.split for one in formats]),
                               moderate=all(one.moderate for one in formats))  # fmt: skip


def bounded(weight: PackedConvolution, isa: str | None) -> bool:
    """`PackedConvolution.bounded`, where that can matter."""
    return _wants_bounds(isa) and weight.bounded


@cache
def _wants_bounds(isa: str | None) -> bool:
    """Whether knowing how large sums get could get a convolution on this set a faster kernel."""
    return winograd_tiles.may_serve(instruction_sets.active(isa))


def _common(forms: list[SplitFormat | None]) -> SplitFormat | None:
    """How all are split, if one kernel can read them."""
    known = [form for form in forms if form is not None]
    if len({(form.summed, form.chunk, form.corrections > 0) for form in known}) != 1:
        return None
    most = max(form.corrections for form in known)
    return known[0]._replace(corrections=most) if len(known) == len(forms) else None


_FLOATS = OutputSpec("f32", np.dtype(np.float32))
_SUMS = OutputSpec("s32", np.dtype(np.int32))


@lru_cache(maxsize=KEPT)
def integers(
    left: Left, b: PanelFormat, threads: int, isa: str | None, out_stride: int = 0
) -> Prepared:
    """The exact product of bytes. `out_stride`: as in `Product`."""
    return _call(left, _bytes(left, b, False, True, False), b, threads, isa, _SUMS, out_stride)[0]


def _bytes(left: Left, b: PanelFormat, shifted: bool, uniform: bool, centred: bool) -> Bytes:
    """Rows of bytes that go with b. `shifted`, `centred`: a zero point is taken from a's, from b's
    values first; `uniform`: scale and zero point are the same for all rows of a."""
    shape, _, dtype = left
    check_matrix(shape, "a")
    check_bytes(dtype, "a")
    check_inner(shape, (b.k, b.n))
    if b.group_size:
        raise ValueError(
            f"b has groups of {b.group_size} k, which only products of floats can take: "
            "lowbit.linear_dynamic or lowbit.linear_weight_only"
        )
    check_k(b.k, dtype.name, b.dtype, (shifted, centred))
    return Bytes(dtype == np.int8, shifted, _steps(left)[1] == 1, uniform)


@lru_cache(maxsize=KEPT, typed=True)  # 7 is a zero point, 7.0 none
def scaled(
    left: Left, b: PanelFormat, threads: int, isa: str | None, shifted: bool, uniform: bool,
    moderate: bool, out_stride: int, *output: Any,
) -> Call:  # fmt: skip
    """The product of quantized bytes. `shifted`: zero points of a are given; `uniform`: scale
    and zero point are the same for all rows; `moderate`: that scale is; `out_stride`: as in
    `Product`; `output`: as `OutputSpec.of` takes it."""
    rows = _bytes(left, b, shifted, uniform, b.centred)
    return _call(left, rows, b, threads, isa, OutputSpec.of(*output), out_stride, moderate)


@lru_cache(maxsize=KEPT)
def floats(
    left: Left, b: PanelFormat, threads: int, isa: str | None, activations: str, out_stride: int,
    *output: Any,
) -> Call:  # fmt: skip
    """The product of floats, contiguous along K; `activations` as `float_rows` takes them,
    `out_stride` as in `Product`, `output` as `OutputSpec.of` does."""
    shape, _, dtype = left
    check_matrix(shape, "x")
    check_inner(shape, (b.k, b.n), "x")
    spec = OutputSpec.of(*output)
    rows = float_rows(activations, dtype.name, b)
    return _call(left, rows, b, threads, isa, spec, out_stride)


@lru_cache(maxsize=KEPT)
def maxima(
    rows: int, b: PanelFormat, threads: int, isa: str | None, biased: bool, masked: bool = False
) -> Prepared:
    """The greatest of each 8 columns of what `floats` gives of "dynamic" rows, contiguous; with a
    mask, given as the residual, of those columns that it admits."""
    kind = "max8_masked" if masked else "max8"
    output = OutputSpec(kind, np.dtype(np.float32), ("bias",) if biased else ())
    left = (rows, b.k), (4 * b.k, 4), np.dtype(np.float32)
    rows_of = float_rows("dynamic", "float32", b)
    out_stride = blocks(b.n, PANEL) * (PANEL // OCTET)
    return _call(left, rows_of, b, threads, isa, output, out_stride)[0]


def float_rows(activations: str, dtype: str, b: PanelFormat) -> InputFormat:
    """What floats become on their way to the kernel.

    activations: "dynamic", which are quantized row by row; "symmetric", the same with a fixed zero
    point; "grouped", with a scale for each group that b has; or "float", as good as their `dtype`,
    "float32" or "bfloat16", for which b has groups.
    ValueError: they do not go with b, or a sum could leave int32.
    """
    if activations not in ("dynamic", "symmetric", "grouped", "float"):
        raise ValueError(
            f"activations must be 'dynamic', 'symmetric', 'grouped' or 'float', got {activations!r}"
        )
    symmetric = activations == "symmetric"
    if not b.group_size:
        if activations in ("float", "grouped"):
            raise ValueError(
                f"activations {activations!r} need a weight with groups, not {b.dtype}"
            )
        check_k(b.k, "uint8", b.dtype, (True, b.centred))
        return Quantized(symmetric)
    size = min(b.group_size, padded_k(max(b.k, 1)))
    most, flip = _MOST_IN_GROUP[b.stored], FLIP if b.stored == "u8" else NIBBLE_FLIP
    if size > most:
        raise ValueError(
            f"sums over groups of {size} k could overflow int32; at most {most} cannot: "
            "quantize b with a smaller group_size"
        )
    digits = _DIGITS[dtype] if activations == "float" else 1
    own = activations == "grouped"
    grouping = Grouping(size, digits, b.zero_points, flip, b.halves, own)
    if activations in ("float", "grouped"):
        return Digits(grouping, dtype == "bfloat16")
    return SignedBytes(grouping, symmetric)


def convolved(c: Convolution) -> Product:
    """The product that one group of a convolution is."""
    each = c.channels // c.groups
    if c.geometry.plain:
        rows: InputFormat = Bytes(c.signed, c.shifted, shared=True)
        row_bytes = c.channels
    else:
        room = 0 if each % LINE == 0 else 1 << (c.b.k + LINE - 1).bit_length()
        rows = Windows(c.signed, c.shifted, room)
        row_bytes = math.prod(c.geometry.size) * c.channels
    product = Product(c.batch * c.geometry.pixels, rows, (row_bytes, 1), c.b, c.isa, c.threads,
                      c.post_ops, c.output, out_stride=c.outputs, residual_stride=c.outputs,
                      moderate=c.moderate)  # fmt: skip
    return _in_strips(c, product) if product.m else product


def _in_strips(c: Convolution, product: Product) -> Product:
    """The same with rows that are made in strips, if images and kernel are such, and those of as
    many lines of the output as have a line of the image in common stay in the nearer caches."""
    image = c.geometry.strips(c.channels // c.groups, c.channels)
    micro = consider(instruction_sets.named(c.isa), product.query)[-1].micro
    if image is None or micro is None or not micro.shortest_line:
        return product
    if image.length < micro.shortest_line and isinstance(image, ShiftedImage) and micro.leaves_gaps:
        image = image.flat() or image
    if image.length < micro.shortest_line:
        return product
    if image.strip(blocks(image.reach, image.skip), 0) > host.caches()["L2"] // 2:
        return product
    if isinstance(image, ShiftedImage):
        return product._replace(a=Shifted(c.signed, c.shifted), image=image)
    piece = min(max(_LEAST_PIECE, 1 << (image.slot - 1).bit_length()), LINE)
    rows = Lowered(c.signed, c.shifted, piece, image.slot > piece)
    return product._replace(a=rows, image=image)
