"""Operators that move elements, choose some, or say what there is of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lowbit.torch.capture.builder import Builder, Value, converter, numpy_name, same_size


@converter(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
    "_reshape_alias",
)  # fmt: skip
def reshape(b: Builder, *, x: Value, **_: Any) -> Value:
    before, after = b.shape(x), b.out.shape
    return x if tuple(before) == tuple(after) else b.reshape(x, before, after)


@converter("permute")
def permute(b: Builder, *, x: Value, dims: Sequence[int]) -> Value:
    axes = len(dims)
    return b.add("Transpose", x, perm=tuple(axis % axes for axis in dims))


@converter("transpose", "t", "numpy_T", "swapaxes")
def transpose(b: Builder, *, x: Value, dim0: int = 0, dim1: int = 1, **_: Any) -> Value:
    order = list(range(len(b.shape(x))))
    if len(order) < 2:
        return x
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return b.add("Transpose", x, perm=tuple(order))


@converter("expand", "expand_as")
def expand(b: Builder, *, x: Value, **_: Any) -> Value:
    before, after = b.shape(x), list(b.out.shape)
    if tuple(before) == tuple(after):
        return x
    for axis, size in enumerate(before, len(after) - len(before)):
        if isinstance(size, torch.SymInt):  # an axis that stays as long as it is
            after[axis] = 1
    return b.add("Expand", x, b.ints(after))


@converter("repeat")
def repeat(b: Builder, *, x: Value, repeats: Sequence[int]) -> Value:
    before = b.shape(x)
    if len(repeats) > len(before):
        x = b.reshape(x, (), (*[1] * (len(repeats) - len(before)), *before))
    return b.add("Tile", x, b.ints(repeats))


@converter("cat", "concat")
def cat(b: Builder, *, tensors: Sequence[Value], dim: int) -> Value:
    given = [b.cast(one, b.out.dtype) for one in tensors if tuple(b.shape(one)) != (0,)]
    return b.add("Concat", *given, axis=dim) if len(given) > 1 else given[0]


@converter("stack")
def stack(b: Builder, *, tensors: Sequence[Value], dim: int) -> Value:
    axis = dim % len(b.out.shape)
    return b.add("Concat", *[b.add("Unsqueeze", one, b.ints([axis])) for one in tensors], axis=axis)


@converter("split", "split_with_sizes", "chunk", "unsafe_chunk", "unbind", "tensor_split")
def split(b: Builder, *, x: Value, dim: int, **_: Any) -> tuple[Value, ...]:
    axis = dim % len(b.shape(x))
    if b.operator == "unbind":
        return tuple(
            b.add("Gather", x, b.ints([index], scalar=True), axis=axis)
            for index in range(len(b.out))
        )
    return b.split(x, [one.shape[axis] for one in b.out], axis)


@converter("slice")
def slice_(b: Builder, *, x: Value, dim: int, start: Any, end: Any, step: int) -> Value:
    if tuple(b.shape(x)) == tuple(b.out.shape):
        return x
    limits = [b.ints([0 if start is None else start]), b.ints([_END if end is None else end])]
    return b.add("Slice", x, *limits, b.ints([dim]), b.ints([step]))


_END = 2**63 - 1


@converter("select")
def select(b: Builder, *, x: Value, dim: int, index: Any) -> Value:
    return b.add("Gather", x, b.ints([index], scalar=True), axis=dim)


@converter("narrow")
def narrow(b: Builder, *, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(b, x=x, dim=dim, start=start, end=start + length, step=1)


@converter("embedding")
def embedding(b: Builder, *, weight: Value, indices: Value, **_: Any) -> Value:
    return b.add("Gather", weight, indices, axis=0)


@converter("index_select")
def index_select(b: Builder, *, x: Value, dim: int, index: Value) -> Value:
    return b.add("Gather", x, index, axis=dim)


@converter("index")
def index(b: Builder, *, x: Value, indices: Sequence[Value | None]) -> Value:
    given = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if len(given) == 1 and b.dtype(given[0][1]) is not torch.bool:
        axis, one = given[0]
        return b.add("Gather", x, one, axis=axis)
    if any(b.dtype(one) is torch.bool for _, one in given):
        raise NotImplementedError(
            "an index by booleans makes a result whose size depends on the data: use torch.where"
        )
    if [axis for axis, _ in given] != list(range(len(given))):
        raise NotImplementedError(
            "an index by tensors that leaves the first axis is not translated"
        )
    return _by_several(b, x, [one for _, one in given])


def _by_several(b: Builder, x: Value, indices: Sequence[Value]) -> Value:
    """Elements by the indices of the first axes, as one index into these axes joined."""
    sizes, place = b.shape(x), b.ints([0], scalar=True)
    for size, one in zip(sizes, indices, strict=False):
        length = b.ints([size], scalar=True)
        positive = b.add("Mod", b.cast(one, torch.int64), length)
        place = b.add("Add", b.add("Mul", place, length), positive)
    joined = b.add("Reshape", x, b.ints([-1, *sizes[len(indices) :]]))
    return b.add("Gather", joined, place, axis=0)


@converter("gather")
def gather(b: Builder, *, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Along `dim`; of the other axes, the first elements, as many as there are indices."""
    have, wanted = b.shape(x), b.shape(index)
    for axis in range(len(have)):
        if axis != dim % len(have) and not same_size(have[axis], wanted[axis]):
            ends = b.ints([wanted[axis]])
            x = b.add("Slice", x, b.ints([0]), ends, b.ints([axis]))
    return b.add("GatherElements", x, index, axis=dim)


@converter("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
           "replication_pad1d", "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(
    b: Builder, *, x: Value, mode: str = "constant", value: float | None = 0, pad: Any = (),
    padding: Any = (),
) -> Value:  # fmt: skip
    given, axes = list(pad or padding), len(b.shape(x))
    before, after = [0] * axes, [0] * axes
    for index, (low, high) in enumerate(zip(given[::2], given[1::2], strict=True)):
        before[axes - 1 - index], after[axes - 1 - index] = low, high
    mode = {
        "circular": "wrap", "reflection": "reflect", "replication": "edge", "replicate": "edge",
    }.get(
        b.operator.partition("_")[0] if "_pad" in b.operator else mode, mode
    )  # fmt: skip
    fill = [b.number(value or 0, b.out.dtype)] if mode == "constant" else []
    return b.add("Pad", x, b.ints([*before, *after]), *fill, mode=mode)


@converter("mean", "sum", "amax", "amin", "prod")
def reduce(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    op = {"mean": "Mean", "sum": "Sum", "amax": "Max", "amin": "Min", "prod": "Prod"}[b.operator]
    axes = (dim,) if isinstance(dim, int) else dim
    before = b.shape(x)
    x = b.cast(x, b.out.dtype)
    if op == "Mean" and len(before) > 3 and axes and _is_image(axes, len(before)):
        pooled = b.add("GlobalAveragePool", x)
        return pooled if keepdim else b.add("Flatten", pooled, axis=1)
    return b.add(f"Reduce{op}", x, *([b.ints(axes)] if axes else []), keepdims=int(keepdim))


def _is_image(axes: Sequence[int], rank: int) -> bool:
    """Whether these are all axes but the batch's and the channels'."""
    return sorted(axis % rank for axis in axes) == list(range(2, rank))


@converter("cumsum")
def cumulative_sum(b: Builder, *, x: Value, dim: int, **_: Any) -> Value:
    """Of booleans and of narrow integers in int64."""
    return b.add("CumSum", b.cast(x, b.out.dtype), b.ints([dim], scalar=True))


@converter("max", "min")
def extreme(b: Builder, *, x: Value, dim: int | None = None, keepdim: bool = False,
            other: Value | None = None) -> Any:  # fmt: skip
    word = b.operator.capitalize()
    if other is not None:
        return b.add(word, x, other)
    if dim is None:
        return b.add(f"Reduce{word}", x, keepdims=0)
    made = b.add(f"Reduce{word}", x, b.ints([dim]), keepdims=int(keepdim))
    return made, b.add(f"Arg{word}", x, axis=dim, keepdims=int(keepdim))


@converter("argmax", "argmin")
def argument(b: Builder, *, x: Value, dim: int | None, keepdim: bool) -> Value:
    if dim is None:
        x, dim = b.add("Reshape", x, b.ints([-1])), 0
    op = "ArgMax" if b.operator == "argmax" else "ArgMin"
    return b.add(op, x, axis=dim, keepdims=int(keepdim))


@converter("var")
def var(b: Builder, *, x: Value, dim: Any = None, correction: float | None = None,
        unbiased: bool = True, keepdim: bool = False) -> Value:  # fmt: skip
    axes = [dim] if isinstance(dim, int) else dim or range(len(b.shape(x)))
    count = math.prod(b.shape(x)[axis] for axis in axes)
    if isinstance(count, torch.SymInt):
        raise NotImplementedError("a variance over the batch is not translated")
    less = correction if correction is not None else float(unbiased)
    off = b.add("Sub", x, b.add("ReduceMean", x, b.ints(list(axes)), keepdims=1))
    square = b.add("Mul", off, off)
    total = b.add("ReduceSum", square, b.ints(list(axes)), keepdims=int(keepdim))
    return b.add("Div", total, b.number(count - less, b.out.dtype))


@converter("linalg_vector_norm", "norm")
def norm(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, ord: Any = 2,
         p: Any = None, **_: Any) -> Value:  # fmt: skip
    power = ord if p is None else p
    op = {1: "ReduceL1", 2: "ReduceL2"}.get(power)
    if op is None:
        raise NotImplementedError(f"a norm of order {power} is not translated")
    axes = [dim] if isinstance(dim, int) else dim
    return b.add(op, x, *([b.ints(axes)] if axes else []), keepdims=int(keepdim))


@converter("tril", "triu")
def triangle(b: Builder, *, x: Value, diagonal: int) -> Value:
    return b.add("Trilu", x, b.ints([diagonal], scalar=True), upper=int(b.operator == "triu"))


@converter("arange", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros",
           "new_ones", "new_full", "scalar_tensor", "empty_like", "new_empty", "empty")  # fmt: skip
def filled(
    b: Builder, *, start: Any = 0, end: Any = None, step: Any = 1, fill_value: Any = None, **_: Any
) -> Value:
    if b.operator == "arange":
        limits = [b.ints([one], scalar=True) for one in (start, end, step)]
        made = b.add("Range", *limits)
        return (
            made if b.out.dtype is torch.int64 else b.add("Cast", made, to=numpy_name(b.out.dtype))
        )
    value = float("ones" in b.operator) if fill_value is None else fill_value
    return b.add("Expand", b.number(value, b.out.dtype), b.ints(b.out.shape))


@converter("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(b: Builder, *, input: Value = "", x: Value = "", **_: Any) -> Value:
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resized(b, input or x, mode="nearest", **how)


@converter("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def upsample_linear(
    b: Builder, *, align_corners: bool, input: Value = "", x: Value = "", **_: Any
) -> Value:
    how = "align_corners" if align_corners else "half_pixel"
    return _resized(b, input or x, mode="linear", coordinate_transformation_mode=how)


def _resized(b: Builder, x: Value, **how: str) -> Value:
    sizes = list(zip(b.shape(x)[2:], b.out.shape[2:], strict=True))
    if any(isinstance(size, torch.SymInt) for pair in sizes for size in pair):
        raise NotImplementedError(f"{b.operator} to a size that is not fixed is not translated")
    wanted = b.ints([after for _, after in sizes])
    return b.add("Resize", x, "", "", wanted, axes=tuple(range(2, 2 + len(sizes))), **how)


@converter("pixel_shuffle")
def pixel_shuffle(b: Builder, *, x: Value, upscale_factor: int) -> Value:
    return b.add("DepthToSpace", x, blocksize=upscale_factor, mode="CRD")


@converter("pixel_unshuffle")
def pixel_unshuffle(b: Builder, *, x: Value, downscale_factor: int) -> Value:
    """ONNX's SpaceToDepth puts the channel last among the three."""
    n = downscale_factor
    *_, channels, height, width = (int(size) for size in b.shape(x)[-3:])
    cut = b.add("Reshape", x, b.ints([-1, channels, height // n, n, width // n, n]))
    moved = b.add("Transpose", cut, perm=(0, 1, 3, 5, 2, 4))
    return b.add("Reshape", moved, b.ints([-1, channels * n * n, height // n, width // n]))


@converter("channel_shuffle")
def channel_shuffle(b: Builder, *, x: Value, groups: int) -> Value:
    channels, *rest = (int(size) for size in b.shape(x)[1:])
    cut = b.add("Reshape", x, b.ints([-1, groups, channels // groups, int(np.prod(rest))]))
    return b.add(
        "Reshape", b.add("Transpose", cut, perm=(0, 2, 1, 3)), b.ints([-1, channels, *rest])
    )
