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
    return x if same_shape(before, after) else b.reshape(x, before, after)


@converter("permute")
def permute(b: Builder, *, x: Value, dims: Sequence[int]) -> Value:
    axes = len(dims)
    return b.add("Transpose", x, perm=tuple(axis % axes for axis in dims))


@converter("transpose", "t")
def transpose(b: Builder, *, x: Value, dim0: int = 0, dim1: int = 1, **_: Any) -> Value:
    order = list(range(len(b.shape(x))))
    if len(order) < 2:
        return x
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return b.add("Transpose", x, perm=tuple(order))


@converter("expand")
def expand(b: Builder, *, x: Value, **_: Any) -> Value:
    before, after = b.shape(x), list(b.out.shape)
    if same_shape(before, after):
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


@converter("cat")
def cat(b: Builder, *, tensors: Sequence[Value], dim: int) -> Value:
    given = [b.cast(one, b.out.dtype) for one in tensors if tuple(b.shape(one)) != (0,)]
    return b.add("Concat", *given, axis=dim) if len(given) > 1 else given[0]


@converter("split", "split_with_sizes", "unbind")
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
    if same_shape(b.shape(x), b.out.shape):
        return x
    limits = [b.ints([0 if start is None else start]), b.ints([_END if end is None else end])]
    return b.add("Slice", x, *limits, b.ints([dim]), b.ints([step]))


_END = 2**63 - 1


@converter("select")
def select(b: Builder, *, x: Value, dim: int, index: Any) -> Value:
    return b.add("Gather", x, b.ints([index], scalar=True), axis=dim)


@converter("embedding")
def embedding(b: Builder, *, weight: Value, indices: Value, **_: Any) -> Value:
    return b.add("Gather", weight, indices, axis=0)


@converter("index_select")
def index_select(b: Builder, *, x: Value, dim: int, index: Value) -> Value:
    return b.add("Gather", x, index, axis=dim)


@converter("slice_scatter")
def slice_scatter(
    b: Builder, *, x: Value, src: Value, dim: int, start: Any, end: Any, step: int
) -> Value:
    """x with a part of it written anew: what comes before, that, and what comes after."""
    axis, sizes = dim % len(b.shape(x)), b.shape(x)
    if same_size(sizes[axis], b.shape(src)[axis]):
        return b.cast(src, b.out.dtype)
    if step != 1 or isinstance(sizes[axis], torch.SymInt):
        raise NotImplementedError(
            "writing every so many elements, or parts of the batch, is not translated: use "
            "torch.cat or torch.where"
        )
    first, last, _ = slice(start, end).indices(int(sizes[axis]))
    return _with_part(b, x, b.cast(src, b.out.dtype), axis, first, max(first, last))


@converter("select_scatter")
def select_scatter(b: Builder, *, x: Value, src: Value, dim: int, index: int) -> Value:
    axis, sizes = dim % len(b.shape(x)), b.shape(x)
    if isinstance(sizes[axis], torch.SymInt):
        raise NotImplementedError("writing one sample of the batch is not translated")
    at = index % int(sizes[axis])
    part = b.add("Unsqueeze", b.cast(src, b.out.dtype), b.ints([axis]))
    return _with_part(b, x, part, axis, at, at + 1)


def _with_part(b: Builder, x: Value, part: Value, axis: int, first: int, last: int) -> Value:
    """x with what lies between two places of an axis written anew."""
    ends = [(0, first)] if first else []
    ends += [(last, _END)] if last < b.shape(x)[axis] else []
    kept = [
        b.add("Slice", x, b.ints([begin]), b.ints([end]), b.ints([axis])) for begin, end in ends
    ]
    kept.insert(int(first > 0), part)
    return b.add("Concat", *kept, axis=axis)


@converter("copy")
def copy(b: Builder, *, x: Value, src: Value, **_: Any) -> Value:
    src = b.cast(src, b.out.dtype)
    same = len(b.shape(src)) == len(b.out.shape) and all(
        same_size(*pair) for pair in zip(b.shape(src), b.out.shape, strict=True)
    )
    return src if same else b.add("Expand", src, b.ints(b.out.shape))


@converter("flip")
def flip(b: Builder, *, x: Value, dims: Sequence[int]) -> Value:
    count = len(dims)
    first, last, step = ([one] * count for one in (-1, -_END, -1))
    return b.add("Slice", x, b.ints(first), b.ints(last), b.ints(dims), b.ints(step))


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
    made = b.add("Gather", x, places, axis=axis)
    order = [*range(axis + 1), *range(axis + 2, rank + 1), axis + 1]
    return b.add("Transpose", made, perm=tuple(order))


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
    return b.add("Gather", b.add("Reshape", x, b.ints([-1])), b.constant(places), axis=0)


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
    moved = b.add("Transpose", x, perm=(*rest, *pair))
    flat = b.add("Reshape", moved, b.ints([*sizes[:-2], rows * columns]))
    return b.add("Gather", flat, b.constant(places.copy()), axis=-1)


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
def var(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **how: Any) -> Value:
    return _variance(b, x, dim, keepdim, **how)


def _variance(b: Builder, x: Value, dim: Any, keepdim: bool, correction: float | None = None,
              unbiased: bool = True) -> Value:  # fmt: skip
    axes = [dim] if isinstance(dim, int) else dim or range(len(b.shape(x)))
    count = math.prod(b.shape(x)[axis] for axis in axes)
    if isinstance(count, torch.SymInt):
        raise NotImplementedError("a variance over the batch is not translated")
    less = correction if correction is not None else float(unbiased)
    off = b.add("Sub", x, b.add("ReduceMean", x, b.ints(list(axes)), keepdims=1))
    square = b.add("Mul", off, off)
    total = b.add("ReduceSum", square, b.ints(list(axes)), keepdims=int(keepdim))
    return b.add("Div", total, b.number(count - less, b.dtype(x)))


@converter("var_mean")
def var_mean(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, **how: Any) -> Any:
    axes = [dim] if isinstance(dim, int) else list(dim or range(len(b.shape(x))))
    mean = b.add("ReduceMean", x, b.ints(axes), keepdims=int(keepdim))
    return _variance(b, x, dim, keepdim, **how), mean


@converter("any")
def any_(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    axes = (dim,) if isinstance(dim, int) else dim
    ones = b.add("Cast", b.cast(x, torch.bool), to="int32")
    made = b.add("ReduceMax", ones, *([b.ints(axes)] if axes else []), keepdims=int(keepdim))
    return b.add("Cast", made, to="bool")


@converter("linalg_vector_norm", "norm")
def norm(b: Builder, *, x: Value, dim: Any = None, keepdim: bool = False, ord: Any = 2,
         p: Any = None, **_: Any) -> Value:  # fmt: skip
    power = ord if p is None else p
    if power < 0:
        raise NotImplementedError(f"a norm of order {power} is not translated")
    axes = [dim] if isinstance(dim, int) else dim

    def reduced(op: str, x: Value) -> Value:
        return b.add(op, x, *([b.ints(axes)] if axes else []), keepdims=int(keepdim))

    if not power:  # how many are not 0
        zero = b.add("Equal", x, b.number(0, b.out.dtype))
        return reduced("ReduceSum", b.add("Cast", b.add("Not", zero), to=numpy_name(b.out.dtype)))
    if power in (1, 2):
        return reduced("ReduceL1" if power == 1 else "ReduceL2", x)
    if math.isinf(power):
        return reduced("ReduceMax", b.add("Abs", x))
    number, root = (b.number(one, b.out.dtype) for one in (power, 1 / power))
    return b.add("Pow", reduced("ReduceSum", b.add("Pow", b.add("Abs", x), number)), root)


@converter("_cdist_forward")
def distances(b: Builder, *, x1: Value, x2: Value, p: float, **_: Any) -> Value:
    """Of all rows of x1 from all rows of x2."""
    left, right = b.add("Unsqueeze", x1, b.ints([-2])), b.add("Unsqueeze", x2, b.ints([-3]))
    return norm(b, x=b.add("Sub", left, right), dim=-1, p=p)


@converter("tril", "triu")
def triangle(b: Builder, *, x: Value, diagonal: int) -> Value:
    return b.add("Trilu", x, b.ints([diagonal], scalar=True), upper=int(b.operator == "triu"))


@converter("arange", "full", "zeros", "ones", "full_like", "zeros_like", "ones_like", "new_zeros",
           "new_ones", "new_full", "scalar_tensor", "empty_like", "new_empty", "empty",
           "empty_strided")  # fmt: skip
def filled(
    b: Builder, *, start: Any = 0, end: Any = None, step: Any = 1, fill_value: Any = None,
    s: Any = None, **_: Any,
) -> Value:  # fmt: skip
    if b.operator == "arange":
        limits = [b.ints([one], scalar=True) for one in (start, end, step)]
        made = b.add("Range", *limits)
        return (
            made if b.out.dtype is torch.int64 else b.add("Cast", made, to=numpy_name(b.out.dtype))
        )
    value = next((one for one in (fill_value, s) if one is not None), float("ones" in b.operator))
    return b.add("Expand", b.number(value, b.out.dtype), b.ints(b.out.shape))


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
            x = b.add("Gather", x, b.constant(place), axis=axis)
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
    return b.add("Resize", x, "", *by, axes=tuple(range(2, 2 + len(sizes))), **how)
