"""Convolutions of one to three dimensions, in float64, rounded once.

Images lie with channels last, and so do the outputs.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np

from lowbit.graph.graph import Constant, Node, Tensor
from lowbit.graph.lower import Lowering, channels_last, strides_of
from lowbit.graph.lowering.elementwise import compute, plain
from lowbit.graph.lowering.products import (
    Epilogue,
    as_float32,
    ended,
    finished,
    float_products,
    float_weight,
    floats,
    gemm,
    row_parameters,
    weight_of,
)
from lowbit.graph.operator import Array, Operator, Sizes, Weight, operators
from lowbit.graph.operators.windows import (
    convolution_windows,
    put_back,
    seen_through,
    taps_of,
    transposed_windows,
)
from lowbit.graph.step import View
from lowbit.kernels.cpu.tensors.loops import DIMENSIONS
from lowbit.numerics import QTensor
from lowbit.numerics.float32 import moderate
from lowbit.product.convolution import prepare_convolution, with_weight
from lowbit.product.geometry import Geometry
from lowbit.product.output import OutputSpec
from lowbit.product.product import Convolution
from lowbit.weights.convolution import pack_convolution, refusal


def convolved(x: Array, weight: Array, over: Geometry, groups: int) -> Array:
    """float64 [N, O, *out] of x [N, C, *image] and weight [O, C/groups, *kernel]."""
    n, channels = x.shape[:2]
    filters = weight.reshape(groups, weight.shape[0] // groups, -1).astype(np.float64)
    out_size, rank = over.output, len(over.size)
    made = np.empty((n, weight.shape[0], math.prod(out_size)), np.float64)
    for image, out in zip(x, made, strict=True):  # one after another: windows take much room
        view = seen_through(over, image[None].astype(np.float64), 0)[0]
        view = view.reshape(groups, channels // groups, *out_size, *over.kernel)
        rows = np.moveaxis(view, range(2, 2 + rank), range(2 + rank, 2 + 2 * rank))
        columns = rows.reshape(groups, -1, math.prod(out_size))
        out[:] = np.matmul(filters, columns).reshape(out.shape)
    return made.reshape(n, weight.shape[0], *out_size)


def _check_bias(bias: Sizes | None, channels: int) -> None:
    """ValueError: there is a bias, and not of one number a channel."""
    if bias is not None and tuple(bias) != (channels,):
        raise ValueError(f"expected a bias of shape ({channels},), got {bias}")


def _bias(bias: Array | None, channels: int, rank: int) -> Array:
    """A bias in a shape that broadcasts."""
    _check_bias(bias if bias is None else bias.shape, channels)
    return np.zeros(()) if bias is None else bias.reshape(channels, *(1,) * rank)


def _convolution(
    node: Node, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None
) -> Array:
    """x [N, C, *image], weight [O, C/group, *kernel], bias [O], residual as the output."""
    over, groups = convolution_windows(node, x.shape, weight.shape)
    made = convolved(x, weight, over, groups) + _bias(bias, weight.shape[0], x.ndim - 2)
    return finished(node, made, x.dtype, residual)


def convolution_sizes(
    node: Node, x: Sizes, weight: Sizes, bias: Sizes | None = None, residual: Sizes | None = None
) -> Sizes:
    over, _ = convolution_windows(node, x, weight)
    _check_bias(bias, weight[0])
    return x[0], weight[0], *over.output


def _transposed(
    node: Node, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None
) -> Array:
    """x [N, C, *image], weight [C, O/group, *kernel], bias [O], residual as the output."""
    over, groups = transposed_windows(node, x.shape, weight.shape)
    n, channels, image = x.shape[0], weight.shape[1] * groups, x.shape[2:]
    filters = weight.reshape(groups, weight.shape[0] // groups, -1).astype(np.float64)
    pixels = x.reshape(n, groups, x.shape[1] // groups, -1).astype(np.float64)
    parts = np.matmul(filters.transpose(0, 2, 1), pixels)
    parts = parts.reshape(n, channels, *over.kernel, *image)
    made = put_back(over, parts) + _bias(bias, channels, len(image))
    return finished(node, made, x.dtype, residual)


def _transposed_sizes(
    node: Node, x: Sizes, weight: Sizes, bias: Sizes | None = None, residual: Sizes | None = None
) -> Sizes:
    over, groups = transposed_windows(node, x, weight)
    _check_bias(bias, weight[1] * groups)
    return x[0], weight[1] * groups, *over.size


def _lower(transposed: bool, lowering: Lowering, node: Node) -> None:
    weight = lowering.graph.constants.get(node.inputs[1])
    x = lowering.view(node.inputs[0])
    how = {"groups": node.get("group", 1), "transposed": transposed}
    if (
        not isinstance(weight, QTensor)
        or weight.format.name != "int8"
        or x.tensor.scale is None
        or refusal(weight, **how)
    ):  # it stands for floats
        (_float_transposed if transposed else _float_convolution)(lowering, node)
        return
    rank = len(x.shape)
    order = channels_last(rank)
    x = plain(lowering, x, order)
    where, groups = _geometry(node, x.shape, weight.shape, transposed)
    packed = lowering.packed(weight, pack_convolution, **how)
    epilogue = Epilogue(lowering, node, order)
    spec = OutputSpec.of(*epilogue.spec)
    asked = Convolution(
        x.shape[0], where, x.shape[1], groups, x.tensor.dtype == "int8", x.tensor.zero_point != 0,
        packed.matrices[0].format, lowering.isa.name, lowering.threads, spec.post_ops, spec.out,
        moderate(x.tensor.scale) and spec.moderate,
    )  # fmt: skip
    prepared = prepare_convolution(with_weight(asked, packed))
    lowering.kept.append(prepared)
    rows = row_parameters(lowering, x.tensor)
    bias = None if epilogue.bias is None else packed.biased(epilogue.bias)
    epilogue.launch(prepared, packed, x, rows, bias, spec)


def _geometry(node: Node, image: Sizes, weight: Sizes, transposed: bool) -> tuple[Geometry, int]:
    """What a convolution asks for, and its groups."""
    if not transposed:
        return convolution_windows(node, image, weight)
    over, groups = transposed_windows(node, image, weight)
    return over.turned(image[2:]), groups


def _of_windows(constant: Constant, groups: int) -> tuple[np.ndarray, ...]:
    """Of a convolution, [taps · channels, outputs] for each group."""
    each = np.split(floats(constant), groups)
    return tuple(np.ascontiguousarray(np.moveaxis(w, 1, -1).reshape(len(w), -1).T) for w in each)


def _float_convolution(lowering: Lowering, node: Node) -> None:
    """Windows are brought to memory, as rows; then it is a product."""
    x, weight = lowering.view(node.inputs[0]), weight_of(lowering, node)
    rank, outputs = len(x.shape), weight.shape[0]
    over, groups = convolution_windows(node, x.shape, weight.shape)
    x = as_float32(lowering, x, channels_last(rank))
    if groups == x.shape[1] == outputs:
        _depthwise(lowering, node, x, float_weight(lowering, node), over)
        return
    each, made = x.shape[1] // groups, outputs // groups
    parts = []
    matrices = lowering.packed(weight, _of_windows, groups=groups)
    for group, matrix in enumerate(matrices):
        rows = _windows(lowering, x, over, group * each, each)
        parts.append((rows, matrix, group * made, outputs))
    float_products(lowering, node, channels_last(rank), parts)


def _depthwise(lowering: Lowering, node: Node, x: View, weight: np.ndarray, over: Geometry) -> None:
    """Of every channel by itself: tap by tap, all channels at once."""
    order = channels_last(len(x.shape))
    padded = _padded(lowering, x, over)
    steps, ones = padded.strides[2:], (1,) * len(over.size)
    out = lowering.output(node.outputs[0], order)
    total = lowering.fresh(Tensor("float32", out.shape), order)
    strides = [stride * step for stride, step in zip(over.stride, steps, strict=True)]
    for number, (tap, at) in enumerate(taps_of(over, steps)):
        part = padded.part(out.shape, (*padded.strides[:2], *strides), at)
        factor = lowering.known_view(weight[(slice(None), 0, *tap)].reshape(-1, *ones))
        inputs = [part, factor, total] if number else [part, factor]
        compute(lowering, total, inputs, (0, 1, "mul", 2, "add") if number else (0, 1, "mul"))
    ended(lowering, node, total, out, bias_left=True)


def _windows(lowering: Lowering, x: View, over: Geometry, first: int, channels: int) -> View:
    """Rows [batch · pixels, taps · channels] of some channels of images that lie channels last."""
    batch, whole = x.shape[:2]
    size, taps = x.shape[2:], math.prod(over.kernel)
    pixels, out = over.pixels, over.output
    ones = all(n == 1 for n in (*over.kernel, *over.stride))
    if ones and not any((*over.before, *over.after)):
        return x.part((batch * pixels, channels), (whole, 1), first)
    padded = _padded(lowering, x, over)
    extents = padded.shape[2:]
    steps = strides_of((batch, *extents, whole))
    rows = lowering.fresh(Tensor("float32", (batch * pixels, taps * channels)))
    moved = [stride * step for stride, step in zip(over.stride, steps[1:-1], strict=True)]
    apart = [dilation * step for dilation, step in zip(over.dilation, steps[1:-1], strict=True)]
    whole_strides = strides_of((batch, *out, *over.kernel, channels))
    # As many axes of the windows in one step as its loops have room for.
    single = max(2 * len(size) + 2 - DIMENSIONS, 0)
    shape = (batch, *out, *over.kernel[single:], channels)
    first_axis = 1 + len(size)
    for tap in product(*map(range, over.kernel[:single])):
        at = sum(t * step for t, step in zip(tap, apart, strict=False))
        to = sum(t * s for t, s in zip(tap, whole_strides[first_axis:], strict=False))
        source = padded.part(shape, (steps[0], *moved, *apart[single:], 1), first + at)
        strides = (*whole_strides[:first_axis], *whole_strides[first_axis + single :])
        compute(lowering, rows.part(shape, strides, to), [source], (0,))
    return rows


def _padded(lowering: Lowering, x: View, over: Geometry) -> View:
    """Images with zeros around them, as far as windows reach."""
    reach = [
        max(size + before, (out - 1) * stride + (kernel - 1) * dilation + 1)
        for size, before, out, stride, kernel, dilation in zip(
            x.shape[2:], over.before, over.output, over.stride, over.kernel, over.dilation,
            strict=True,
        )
    ]  # fmt: skip
    if tuple(reach) == x.shape[2:]:
        return x
    order = channels_last(len(x.shape))
    target = lowering.fresh(Tensor("float32", (*x.shape[:2], *reach)), order)
    compute(lowering, target, [lowering.known_view(np.zeros(1, np.float32))], (0,))
    distance = sum(b * s for b, s in zip(over.before, target.strides[2:], strict=True))
    compute(lowering, target.part(x.shape, target.strides, distance), [x], (0,))
    return target


def _float_transposed(lowering: Lowering, node: Node) -> None:
    """One product makes what each pixel adds to its surroundings; taps are then summed where they
    belong, in memory as large as all of it, of which the output is a part."""
    view, weight = lowering.view(node.inputs[0]), float_weight(lowering, node)
    over, groups = transposed_windows(node, view.shape, weight.shape)
    rank, batch = len(view.shape), view.shape[0]
    order, each = channels_last(rank), weight.shape[1]
    x = as_float32(lowering, view, order)
    size, count, taps = x.shape[2:], math.prod(x.shape[2:]), math.prod(over.kernel)
    channels, whole = each * groups, [
        max((n - 1) * s + (k - 1) * d + 1, b + o)
        for n, s, k, d, b, o in zip(
            size, over.stride, over.kernel, over.dilation, over.before, over.size, strict=True
        )
    ]  # fmt: skip
    made = lowering.fresh(Tensor("float32", (batch, channels, *whole)), order)
    zero = lowering.known_view(np.zeros(1, np.float32))
    apart = over.kernel == over.stride and not any(d > 1 for d in over.dilation)
    if not apart or math.prod(whole) != count * taps:
        compute(lowering, made, [zero], (0,))
    width = x.shape[1] // groups
    for group in range(groups):
        matrix = weight[group * width : (group + 1) * width]
        matrix = np.ascontiguousarray(np.moveaxis(matrix, 1, -1).reshape(width, -1))
        rows = x.part((batch * count, width), (x.shape[1], 1), group * width)
        parts = lowering.fresh(Tensor("float32", (batch * count, taps * each)))
        gemm(lowering, rows, lowering.known_view(matrix), parts)
        inner, steps = strides_of((batch, *size, taps * each)), made.strides[2:]
        moved = [s * step for s, step in zip(over.stride, steps, strict=True)]
        for number, (_, at) in enumerate(taps_of(over, steps)):
            one = parts.part((batch, *size, each), inner, number * each)
            target = made.part(one.shape, (made.strides[0], *moved, 1), at + group * each)
            compute(lowering, target, *(([one], (0,)) if apart else ([target, one], (0, 1, "add"))))
    distance = sum(b * s for b, s in zip(over.before, made.strides[2:], strict=True))
    shape = lowering.graph.tensors[node.outputs[0]].sizes
    cut = made.part(shape, made.strides, distance)
    ended(lowering, node, cut, lowering.output(node.outputs[0], order), bias_left=True)


def _rows(node: Node, x: Array, weight: Sizes) -> Array | None:
    """The windows of an image, of all channels; None in groups."""
    if node.get("group", 1) != 1:
        return None
    over, _ = convolution_windows(node, x.shape, weight)
    view = seen_through(over, x, 0)  # [batch, channels, *out, *kernel]
    rows = np.moveaxis(view, 1, 1 + len(over.size))
    return rows.reshape(-1, int(np.prod(weight[1:])))


operators.add("Conv", Operator(
    meaning=_convolution, shape=convolution_sizes, lowering=partial(_lower, False),
    weight=Weight(rows=_rows), samples="alone",
    multiply_adds=lambda node, x, weight, *others: math.prod(others[-1]) * math.prod(weight[1:]),
))  # fmt: skip
operators.add("ConvTranspose", Operator(
    meaning=_transposed, shape=_transposed_sizes, lowering=partial(_lower, True),
    weight=Weight(outputs=1),
    multiply_adds=lambda node, x, weight, *others: math.prod(x) * math.prod(weight[1:]),
))  # fmt: skip
