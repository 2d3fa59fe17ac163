"""Convolutions of one to three dimensions, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, given, operators, real
from lowbit.graph.operators.post_ops import finished
from lowbit.graph.operators.windows import Sizes, listed, pads, seen_through, windows
from lowbit.product.geometry import Geometry


def convolved(x: Array, weight: Array, over: Geometry, groups: int) -> Array:
    """float64 [N, O, *out] of x [N, C, *image] and weight [O, C/groups, *kernel]."""
    n, channels = x.shape[:2]
    filters = weight.reshape(groups, weight.shape[0] // groups, -1).astype(np.float64)
    out_size, rank = over.output, len(over.size)
    made = np.empty((n, weight.shape[0], prod(out_size)), np.float64)
    for image, out in zip(x, made, strict=True):  # one after another: windows take much room
        view = seen_through(over, image[None].astype(np.float64), 0)[0]
        view = view.reshape(groups, channels // groups, *out_size, *over.kernel)
        rows = np.moveaxis(view, range(2, 2 + rank), range(2 + rank, 2 + 2 * rank))
        columns = rows.reshape(groups, -1, prod(out_size))
        out[:] = np.matmul(filters, columns).reshape(out.shape)
    return made.reshape(n, weight.shape[0], *out_size)


def convolution_windows(node: Node, x: Sizes, weight: Sizes) -> tuple[Geometry, int]:
    """The windows of a Conv, and its groups. ValueError: the shapes do not fit."""
    groups = node.get("group", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"expected [N, C, *image] and [O, C/g, *kernel], got {x} and {weight}")
    if x[1] != weight[1] * groups or weight[0] % groups:
        raise ValueError(f"x {x} and weight {weight} in {groups} groups do not fit together")
    if tuple(node.get("kernel_shape") or weight[2:]) != tuple(weight[2:]):
        raise ValueError(f"kernel_shape {node.get('kernel_shape')} is not that of weight {weight}")
    return windows(node, x[2:], weight[2:]), groups


def _check_bias(bias: Array | Tensor | None, channels: int) -> None:
    """ValueError: there is a bias, and not of one number a channel."""
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"expected a bias of shape ({channels},), got {bias.shape}")


def _bias(bias: Array | None, channels: int, rank: int) -> Array:
    """A bias in a shape that broadcasts."""
    _check_bias(bias, channels)
    return np.zeros(()) if bias is None else bias.reshape(channels, *(1,) * rank)


class Conv(Operator):
    """x [N, C, *image], weight [O, C/group, *kernel], bias [O], residual as the output."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, weight = given(inputs, 2)
        bias, residual = (*inputs, None, None)[2:4]
        over, groups = convolution_windows(node, x.shape, weight.shape)
        made = convolved(x, weight, over, groups) + _bias(bias, weight.shape[0], x.ndim - 2)
        return (finished(node, made, x.dtype, residual),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, weight = given(tensors, 2)
        over, _ = convolution_windows(node, x.sizes, weight.sizes)
        _check_bias((*tensors, None)[2], weight.sizes[0])
        return (Tensor(real(x).name, (x.sizes[0], weight.sizes[0], *over.output)),)


class ConvTranspose(Operator):
    """x [N, C, *image], weight [C, O/group, *kernel], bias [O], residual as the output."""

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        x, weight = given(inputs, 2)
        bias, residual = (*inputs, None, None)[2:4]
        over, groups = transposed_windows(node, x.shape, weight.shape)
        n, channels, image = x.shape[0], weight.shape[1] * groups, x.shape[2:]
        filters = weight.reshape(groups, weight.shape[0] // groups, -1).astype(np.float64)
        pixels = x.reshape(n, groups, x.shape[1] // groups, -1).astype(np.float64)
        parts = np.matmul(filters.transpose(0, 2, 1), pixels)
        parts = parts.reshape(n, channels, *over.kernel, *image)
        made = np.zeros((n, channels, *_whole(over)))
        for at in product(*(range(k) for k in over.kernel)):
            where = (
                slice(k * d, k * d + (size - 1) * s + 1, s)
                for k, d, s, size in zip(at, over.dilation, over.stride, image, strict=True)
            )
            made[(slice(None), slice(None), *where)] += parts[(slice(None), slice(None), *at)]
        cut = (slice(b, b + size) for b, size in zip(over.before, over.size, strict=True))
        made = made[(slice(None), slice(None), *cut)] + _bias(bias, channels, len(image))
        return (finished(node, made, x.dtype, residual),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, weight = given(tensors, 2)
        over, groups = transposed_windows(node, x.sizes, weight.sizes)
        _check_bias((*tensors, None)[2], weight.sizes[1] * groups)
        return (Tensor(real(x).name, (x.sizes[0], weight.sizes[1] * groups, *over.size)),)


def _whole(over: Geometry) -> Sizes:
    """The size of the sum of all windows, before its ends are cut."""
    sizes = zip(over.size, over.before, over.after, strict=True)
    return tuple(b + n + max(a, 0) for n, b, a in sizes)


def transposed_windows(node: Node, x: Sizes, weight: Sizes) -> tuple[Geometry, int]:
    """The convolution that a ConvTranspose turns around, and groups: `size` is that of the output,
    `output` that of x. Padding is what is cut from the sum of all windows."""
    groups = node.get("group", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"expected [N, C, *image] and [C, O/g, *kernel], got {x} and {weight}")
    if x[1] != weight[0] or x[1] % groups:
        raise ValueError(f"x {x} and weight {weight} in {groups} groups do not fit together")
    kernel, image, rank = weight[2:], x[2:], len(x) - 2
    strides, dilations = listed(node, "strides", 1, rank), listed(node, "dilations", 1, rank)
    windows = tuple(
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip(image, strides, kernel, dilations, strict=True)
    )
    auto, out = node.get("auto_pad", "NOTSET"), node.get("output_shape")
    if auto in ("SAME_UPPER", "SAME_LOWER") and out is None:
        out = tuple(n * s for n, s in zip(image, strides, strict=True))
    more = tuple(node.get("output_padding") or (0,) * rank)
    if out is not None:  # which can be more than there is
        more = tuple(max(m, o - w) for m, w, o in zip(more, windows, out, strict=True))
    whole = tuple(w + m for w, m in zip(windows, more, strict=True))
    if out is None:
        before, after = ((0,) * rank,) * 2 if auto == "VALID" else pads(node, rank)
    else:
        total = [max(0, w - o) for w, o in zip(whole, out, strict=True)]
        less, greater = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        before, after = (less, greater) if auto == "SAME_UPPER" else (greater, less)
    out = tuple(w - b - a for w, b, a in zip(whole, before, after, strict=True))
    if min(out) < 1:
        raise ValueError(f"the padding leaves nothing of {whole}")
    after = tuple(a - m for a, m in zip(after, more, strict=True))
    return Geometry(out, kernel, strides, dilations, before, after), groups


operators.add("Conv", Conv())
operators.add("ConvTranspose", ConvTranspose())
