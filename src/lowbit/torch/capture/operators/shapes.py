"""Operators that move elements, choose some, or say what there is of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lowbit.torch.capture.builder import (
    Builder,
    Value,
    converter,
    numpy_name,
    same_shape,
    same_size,
)


@converter("view", "_unsafe_view", "squeeze", "unsqueeze", "_reshape_alias")
def reshape(b: Builder, *, x: Value, dim: Any = None, **_: Any) -> Value:
    before, after = b.shape(x), b.out.shape
    if b.operator == "squeeze":  # an axis that a run makes 1 long would go too
        axes = range(len(before)) if dim is None else [dim] if isinstance(dim, int) else dim
        for axis in axes:
            b.not_one(before[axis])
    return x if same_shape(before, after) else b.in_shape(x, before, after)


@converter("permute")
def permute(b: Builder, *, x: Value, dims: Sequence[int]) -> Value:
    axes = len(dims)
    return b.transpose(x, [axis % axes for axis in dims])


@converter("transpose", "t")
def transpose(b: Builder, *, x: Value, dim0: int = 0, dim1: int = 1, **_: Any) -> Value:
    order = list(range(len(b.shape(x))))
    if len(order) < 2:
        return x
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return b.transpose(x, order)


@converter("expand")
def expand(b: Builder, *, x: Value, **_: Any) -> Value:
    before, after = b.shape(x), list(b.out.shape)
    if same_shape(before, after):
        return x
    for axis, size in enumerate(before, len(after) - len(before)):
        if isinstance(size, torch.SymInt):  # an axis that stays as long as it is
            after[axis] = 1
    return b.expand(x, after)


@converter("repeat")
def repeat(b: Builder, *, x: Value, repeats: Sequence[int]) -> Value:
    before = b.shape(x)
    if len(repeats) > len(before):
        x = b.in_shape(x, (), (*[1] * (len(repeats) - len(before)), *before))
    return b.op("Tile", x, b.ints(repeats))


@converter("cat")
def cat(b: Builder, *, tensors: Sequence[Value], dim: int) -> Value:
    given = [b.to(one, b.out.dtype) for one in tensors if tuple(b.shape(one)) != (0,)]
    return b.concat(given, dim)


@converter("split", "split_with_sizes", "unbind")
def split(b: Builder, *, x: Value, dim: int, **_: Any) -> tuple[Value, ...]:
    axis = dim % len(b.shape(x))
    if b.operator == "unbind":
        return tuple(b.gather(x, b.ints([index], scalar=True), axis) for index in range(len(b.out)))
    return b.split(x, [one.shape[axis] for one in b.out], axis)


@converter("slice")
def slice_(b: Builder, *, x: Value, dim: int, start: Any, end: Any, step: int) -> Value:
    if same_shape(b.shape(x), b.out.shape):
        return x
    return b.slice(x, dim, 0 if start is None else start, _END if end is None else end, step)


_END = 2**63 - 1


@converter("select")
def select(b: Builder, *, x: Value, dim: int, index: Any) -> Value:
    return b.gather(x, b.ints([index], scalar=True), dim)


@converter("embedding")
def embedding(b: Builder, *, weight: Value, indices: Value, **_: Any) -> Value:
    return b.gather(weight, indices)


@converter("index_select")
def index_select(b: Builder, *, x: Value, dim: int, index: Value) -> Value:
    return b.gather(x, index, dim)


@converter("slice_scatter")
def slice_scatter(
    b: Builder, *, x: Value, src: Value, dim: int, start: Any, end: Any, step: int
) -> Value:
    """x with a part of it written anew: what comes before, that, and what comes after."""
    axis, sizes = dim % len(b.shape(x)), b.shape(x)
    if same_size(sizes[axis], b.shape(src)[axis]):
        return b.to(src, b.out.dtype)
    if step != 1 or isinstance(sizes[axis], torch.SymInt):
        raise NotImplementedError(
            "writing every so many elements, or parts of the batch, is not translated: use "
            "torch.cat or torch.where"
        )
    first, last, _ = slice(start, end).indices(int(sizes[axis]))
    return _with_part(b, x, b.to(src, b.out.dtype), axis, first, max(first, last))


@converter("select_scatter")
def select_scatter(b: Builder, *, x: Value, src: Value, dim: int, index: int) -> Value:
    axis, sizes = dim % len(b.shape(x)), b.shape(x)
    if isinstance(sizes[axis], torch.SymInt):
        raise NotImplementedError("writing one sample of the batch is not translated")
    at = index % int(sizes[axis])
    part = b.unsqueeze(b.to(src, b.out.dtype), [axis])
    return _with_part(b, x, part, axis, at, at + 1)


def _with_part(b: Builder, x: Value, part: Value, axis: int, first: int, last: int) -> Value:
    """x with what lies between two places of an axis written anew."""
    ends = [(0, first)] if first else []
    ends += [(last, _END)] if last < b.shape(x)[axis] else []
    kept = [b.slice(x, axis, begin, end) for begin, end in ends]
    kept.insert(int(first > 0), part)
    return b.concat(kept, axis)


@converter("copy")
def copy(b: Builder, *, x: Value, src: Value, **_: Any) -> Value:
    src = b.to(src, b.out.dtype)
    same = len(b.shape(src)) == len(b.out.shape) and all(
        same_size(*pair) for pair in zip(b.shape(src), b.out.shape, strict=True)
    )
    return src if same else b.expand(src, b.out.shape)


@converter("flip")
def flip(b: Builder, *, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        x = b.slice(x, dim, -1, -_END, -1)
    return x


@converter("unfold")
def unfold(b: Builder, *, x: Value, dimension: int, size: int, step: int) -> Value:
    """Windows of an axis, as a last axis of their elements."""
    rank = len(b.shape(x))
    axis = dimension % rank
    length = b.shape(x)[axis]
    if isinstance(length, torch.SymInt):
        raise NotImplementedError("windows of the batch are not translated")
    begins = np.arange(0, int(length) - size + 1, step)
    places = b.constant(begins[:, None] + np.arange(size))
    made = b.gather(x, places, axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return b.transpose(made, order)


@converter("as_strided")
def as_strided(
    b: Builder, *, x: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> Value:
    """Elements by their places in memory, where x lies in C order and its sizes are fixed."""
    fixed = [isinstance(one, int) for one in (*b.shape(x), *size, *stride, storage_offset or 0)]
    if not all(fixed) or not b.fakes[x].is_contiguous():
        raise NotImplementedError(
            "as_strided of what is no contiguous tensor of fixed sizes is not translated: use "
            "unfold, or indices"
        )
    places = np.full((), (storage_offset or 0) - b.fakes[x].storage_offset(), np.int64)
    for count, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(count) * step
    return b.gather(b.reshape(x, [-1]), b.constant(places))


@converter("diagonal")
def diagonal(b: Builder, *, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    """Of two axes joined, elements that lie apart by one row and one column."""
    rank = len(b.shape(x))
    pair = dim1 % rank, dim2 % rank
    rest = [axis for axis in range(rank) if axis not in pair]
    sizes = [b.shape(x)[axis] for axis in (*rest, *pair)]
    rows, columns = sizes[-2:]
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt):
        raise NotImplementedError("the diagonal of axes that are not fixed is not translated")
    places = np.arange(rows * columns).reshape(rows, columns).diagonal(offset)
    moved = b.transpose(x, (*rest, *pair))
    flat = b.reshape(moved, [*sizes[:-2], rows * columns])
    return b.gather(flat, b.constant(places.copy()), -1)


@converter("gather")
def gather(b: Builder, *, x: Value, dim: int, index: Value, **_: Any) -> Value:
    """Along `dim`; of the other axes, the first elements, as many as there are indices."""
    have, wanted = b.shape(x), b.shape(index)
    for axis in range(len(have)):
        if axis != dim % len(have) and not same_size(have[axis], wanted[axis]):
            x = b.slice(x, axis, 0, wanted[axis])
    return b.op("GatherElements", x, index, axis=dim)


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
    return b.op("Pad", x, b.ints([*before, *after]), *fill, mode=mode)


@converter("mean", "sum", "amax", "amin", "prod")
def reduce(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    kind = b.operator.removeprefix("a")
    axes = (dim,) if isinstance(dim, int) else dim
    before = b.shape(x)
    x = b.to(x, b.out.dtype)
    if kind == "mean" and len(before) > 3 and axes and _is_image(axes, len(before)):
        pooled = b.reduce(kind, x, axes)  # which becomes a pool (passes/functions.py)
        return pooled if keepdim else b.op("Flatten", pooled, axis=1)
    return b.reduce(kind, x, axes, keepdim)


def _is_image(axes: Sequence[int], rank: int) -> bool:
    """Whether these are all axes but the batch's and the channels'."""
    return sorted(axis % rank for axis in axes) == list(range(2, rank))


@converter("cumsum")
def cumulative_sum(b: Builder, *, x: Value, dim: int, **_: Any) -> Value:
    """Of booleans and of narrow integers in int64."""
    return b.cumsum(b.to(x, b.out.dtype), dim)


@converter("max", "min")
def extreme(b: Builder, *, x: Value, dim: int | None = None, keepdim: bool = False,
            other: Value | None = None) -> Any:  # fmt: skip
    if other is not None:
        return (b.maximum if b.operator == "max" else b.minimum)(x, other)
    if dim is None:
        return b.reduce(b.operator, x, None, keepdims=False)
    place = b.op(f"Arg{b.operator.capitalize()}", x, axis=dim, keepdims=int(keepdim))
    return b.reduce(b.operator, x, [dim], keepdim), place


@converter("argmax", "argmin")
def argument(b: Builder, *, x: Value, dim: int | None, keepdim: bool) -> Value:
    if dim is None:
        x, dim = b.reshape(x, [-1]), 0
    return b.op(f"Arg{b.operator[3:].capitalize()}", x, axis=dim, keepdims=int(keepdim))


@converter("var")
def var(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **how: Any) -> Value:
    return _variance(b, x, dim, keepdim, **how)


def _variance(b: Builder, x: Value, dim: Any, keepdim: bool, correction: float | None = None,
              unbiased: bool = True) -> Value:  # fmt: skip
    axes = [dim] if isinstance(dim, int) else dim or range(len(b.shape(x)))
    count = math.prod(b.shape(x)[axis] for axis in axes)
    if isinstance(count, torch.SymInt):
        raise NotImplementedError("a variance over the batch is not translated")
    less = correction if correction is not None else float(unbiased)
    off = b.sub(x, b.reduce("mean", x, list(axes)))
    square = b.mul(off, off)
    return b.div(b.reduce("sum", square, list(axes), keepdim), b.number(count - less, b.dtype(x)))


@converter("var_mean")
def var_mean(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
    axes = [dim] if isinstance(dim, int) else list(dim or range(len(b.shape(x))))
    mean = b.reduce("mean", x, axes, keepdim)
    return _variance(b, x, dim, keepdim, **how), mean


@converter("any")
def any_(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    axes = (dim,) if isinstance(dim, int) else dim
    ones = b.cast(b.to(x, torch.bool), "int32")
    made = b.reduce("max", ones, axes, keepdim)
    return b.cast(made, numpy_name(b.out.dtype))


@converter("linalg_vector_norm", "norm")
def norm(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, ord: Any = 2,
         p: Any = None, **_: Any) -> Value:  # fmt: skip
    power = ord if p is None else p
    if power < 0:
        raise NotImplementedError(f"a norm of order {power} is not translated")
    axes = [dim] if isinstance(dim, int) else dim
    if not power:  # how many are not 0
        zero = b.equal(x, b.number(0, b.out.dtype))
        ones = b.cast(b.logical_not(zero), numpy_name(b.out.dtype))
        return b.reduce("sum", ones, axes, keepdim)
    if power in (1, 2):
        return b.reduce(f"l{power:.0f}", x, axes, keepdim)
    if math.isinf(power):
        return b.reduce("max", b.abs(x), axes, keepdim)
    number, root = (b.number(one, b.out.dtype) for one in (power, 1 / power))
    return b.power(b.reduce("sum", b.power(b.abs(x), number), axes, keepdim), root)


@converter("_cdist_forward")
def distances(b: Builder, *, x1: Value, x2: Value, p: float, **_: Any) -> Value:
    """Of all rows of x1 from all rows of x2."""
    left, right = b.unsqueeze(x1, [-2]), b.unsqueeze(x2, [-3])
    return norm(b, x=b.sub(left, right), dim=-1, p=p)


@converter("tril", "triu")
def triangle(b: Builder, *, x: Value, diagonal: int) -> Value:
    return b.op("Trilu", x, b.ints([diagonal], scalar=True), upper=int(b.operator == "triu"))


@converter("arange", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros",
           "new_ones", "new_full", "scalar_tensor", "empty_like", "new_empty", "empty",
           "empty_strided")  # fmt: skip
def filled(
    b: Builder, *, start: Any = 0, end: Any = None, step: Any = 1, fill_value: Any = None,
    s: Any = None, **_: Any,
) -> Value:  # fmt: skip
    if b.operator == "arange":
        limits = [b.ints([one], scalar=True) for one in (start, end, step)]
        made = b.arange(*limits)
        return made if b.out.dtype is torch.int64 else b.cast(made, numpy_name(b.out.dtype))
    value = next((one for one in (fill_value, s) if one is not None), float("ones" in b.operator))
    return b.expand(b.number(value, b.out.dtype), b.out.shape)


@converter("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
           "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
           )  # fmt: skip
def upsample_nearest(b: Builder, *, input: Value = "", x: Value = "", **given: Any) -> Value:
    """As a Resize where that chooses the pixels that PyTorch does, else by their numbers."""
    x, exact = input or x, "exact" in b.operator
    middle = np.float32(0.5 * exact)
    ratios = _ratios(b, x, given)
    same, places = True, []
    for (before, after), ratio in zip(_resized_sizes(b, x), ratios, strict=True):
        at = np.arange(after, dtype=np.float32) + middle
        chosen = np.minimum((at * np.float32(ratio)).astype(np.int64), before - 1)
        usual = np.minimum((at / np.float32(after / before)).astype(np.int64), before - 1)
        same = same and bool((chosen == usual).all())
        places.append(chosen)
    if not same:
        for axis, place in enumerate(places, 2):
            x = b.gather(x, b.constant(place), axis)
        return x
    if exact:
        return _resized(b, x, mode="nearest", nearest_mode="round_prefer_ceil")
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resized(b, x, mode="nearest", **how)


@converter("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
           "upsample_bicubic2d")  # fmt: skip
def upsample_smooth(
    b: Builder, *, align_corners: bool, input: Value = "", x: Value = "", **given: Any
) -> Value:
    x, mode = input or x, "cubic" if "cubic" in b.operator else "linear"
    if align_corners:
        return _resized(b, x, mode=mode, coordinate_transformation_mode="align_corners")
    sizes = _resized_sizes(b, x)
    ratios = _ratios(b, x, given)
    factors = None
    if any(ratio != before / after for (before, after), ratio in zip(sizes, ratios, strict=True)):
        factors = np.array([1 / ratio for ratio in ratios], np.float32)
        made = [int(n * float(factor)) for (n, _), factor in zip(sizes, factors, strict=True)]
        if made != [after for _, after in sizes]:
            raise NotImplementedError(
                f"{b.operator} from {[n for n, _ in sizes]} by {[1 / one for one in ratios]} is "
                "not translated: give sizes, or recompute_scale_factor=True"
            )
    return _resized(b, x, factors, mode=mode, coordinate_transformation_mode="half_pixel")


def _resized_sizes(b: Builder, x: Value) -> list[tuple[int, int]]:
    """Of each axis of an image, how long it is and becomes."""
    sizes = list(zip(b.shape(x)[2:], b.out.shape[2:], strict=True))
    if any(isinstance(size, torch.SymInt) for pair in sizes for size in pair):
        raise NotImplementedError(f"{b.operator} to a size that is not fixed is not translated")
    return sizes


def _ratios(b: Builder, x: Value, given: dict[str, Any]) -> list[float]:
    """How far the pixels of a result lie apart: the inverse of a factor, if one is given."""
    sizes = _resized_sizes(b, x)
    names = "scales_d", "scales_h", "scales_w"
    factors = given.get("scale_factors") or [given.get(name) for name in names[-len(sizes) :]]
    if given.get("scales"):
        factors = [given["scales"]]
    return [
        1 / factor if factor else before / after
        for (before, after), factor in zip(sizes, factors, strict=True)
    ]


def _resized(b: Builder, x: Value, factors: Any = None, **how: str) -> Value:
    sizes = _resized_sizes(b, x)
    by = ["", b.ints([after for _, after in sizes])]
    if factors is not None:
        by = [b.constant(factors)]
    return b.op("Resize", x, "", *by, axes=tuple(range(2, 2 + len(sizes))), **how)
