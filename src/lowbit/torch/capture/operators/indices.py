"""Operators that put in order, count, or read and write by indices."""

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

_INT64 = torch.int64


@converter("topk", "sort")
def first(
    b: Builder, *, x: Value, dim: int, k: Any = None, largest: bool = True,
    descending: bool = False, **_: Any,
) -> tuple[Value, ...]:  # fmt: skip
    """Sorted and stable even where PyTorch need not be."""
    shape, down = b.shape(x), descending if k is None else largest
    if not shape:
        return b.add("Identity", x), b.constant(np.zeros((), np.int64))
    count = shape[dim] if k is None else k
    return _several(b, "TopK", x, b.ints([count]), axis=dim, largest=int(down))


def _several(b: Builder, op: str, *inputs: Value, **attributes: Any) -> tuple[Value, Value]:
    """A node of two outputs."""
    name = b.add(op, *inputs, **attributes)
    second = b.unique(f"{name}.places")
    b.nodes[-1] = b.nodes[-1].replaced(outputs=(name, second))
    return name, second


@converter("kthvalue")
def kth_value(b: Builder, *, x: Value, k: Any, dim: int, keepdim: bool) -> tuple[Value, ...]:
    ordered = _several(b, "TopK", x, b.ints([k]), axis=dim, largest=0)
    last = b.ints([-1]) if keepdim else b.ints([-1], scalar=True)
    return tuple(b.add("Gather", one, last, axis=dim) for one in ordered)


@converter("histc")
def histogram(b: Builder, *, x: Value, bins: int, min: Any, max: Any) -> Value:
    """How many numbers lie in each of `bins` equal parts, as sums of what equals its number."""
    if min == max:
        raise NotImplementedError(
            "histc between the least and the greatest of its data is not translated: give it min "
            "and max"
        )
    number = b.out.dtype
    low, high, count, last = (b.number(one, number) for one in (min, max, bins, bins - 1))
    flat = b.add("Reshape", x, b.ints([-1, 1]))
    steps = b.add("Mul", b.add("Sub", flat, low), count)
    part = b.add("Floor", b.add("Div", steps, b.add("Sub", high, low)))
    part = b.add("Min", part, last)  # the greatest number is in the last
    equal = b.add("Equal", part, b.constant(np.arange(bins, dtype=np.float32)))
    inside = b.add("And", b.add("GreaterOrEqual", flat, low), b.add("LessOrEqual", flat, high))
    ones = b.add("Cast", b.add("And", equal, inside), to=numpy_name(number))
    return b.add("ReduceSum", ones, b.ints([0]), keepdims=0)


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
    return _by_several(b, x, [axis for axis, _ in given], [one for _, one in given])


def _by_several(b: Builder, x: Value, axes: Sequence[int], indices: Sequence[Value]) -> Value:
    """Elements by the indices of some axes, as one index into these axes joined. The axes of the
    indices come where the first of these was, if they were neighbours, else first."""
    sizes = b.shape(x)
    others = [axis for axis in range(len(sizes)) if axis not in axes]
    place, joined = b.ints([0], scalar=True), 1
    for axis, one in zip(axes, indices, strict=True):
        length = b.ints([sizes[axis]], scalar=True)
        positive = b.add("Mod", b.cast(one, torch.int64), length)
        place = b.add("Add", b.add("Mul", place, length), positive)
        joined = joined * sizes[axis]
    order = (*axes, *others)
    first = x if order == tuple(range(len(sizes))) else b.add("Transpose", x, perm=order)
    flat = b.add("Reshape", first, b.ints([joined, *(sizes[axis] for axis in others)]))
    made, before = b.add("Gather", flat, place, axis=0), axes[0]
    if not before or list(axes) != list(range(before, before + len(axes))):
        return made
    of_indices = len(b.out.shape) - len(others)
    moved = range(of_indices, of_indices + before)
    rest = range(of_indices + before, len(b.out.shape))
    return b.add("Transpose", made, perm=(*moved, *range(of_indices), *rest))


@converter("index_put")
def index_put(
    b: Builder, *, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    values = b.cast(values, b.out.dtype)
    found = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if any(b.dtype(one) is torch.bool for _, one in found):
        if len(indices) > 1:
            raise NotImplementedError(
                "an index by booleans and by others is not translated: use torch.where"
            )
        return _by_mask(b, x, found[0][1], values, accumulate)
    return _written(b, x, [axis for axis, _ in found], [one for _, one in found], values,
                    "add" if accumulate else "none")  # fmt: skip


def _by_mask(b: Builder, x: Value, mask: Value, values: Value, accumulate: bool) -> Value:
    """values, one after another, where the mask, of the first axes of x, says so."""
    sizes, covered = b.shape(x), len(b.shape(mask))
    rest = sizes[covered:]
    wide = mask
    if rest:
        wide = b.add("Unsqueeze", mask, b.ints(list(range(covered, len(sizes)))))
    rows = b.shape(values)[: len(b.shape(values)) - len(rest)]
    if math.prod(b.shape(values)) != 1 and rows and math.prod(rows) != 1:
        values = _taken_in_turn(b, mask, values, sizes)
    return b.add("Where", wide, b.add("Add", x, values) if accumulate else values, x)


def _taken_in_turn(b: Builder, mask: Value, rows: Value, shape: Sequence[Any]) -> Value:
    """For every element of the mask the row whose turn it is."""
    counts = b.add("Cast", b.add("Reshape", mask, b.ints([-1])), to="int64")
    turn = b.add("Sub", b.add("CumSum", counts, b.ints([0], scalar=True)), b.number(1, _INT64))
    last = b.number(b.shape(rows)[0] - 1, _INT64)
    turn = b.add("Max", b.add("Min", turn, last), b.number(0, _INT64))
    return b.add("Reshape", b.add("Gather", rows, turn, axis=0), b.ints(shape))


@converter("masked_scatter")
def masked_scatter(b: Builder, *, x: Value, mask: Value, source: Value) -> Value:
    shape = b.out.shape
    x, mask = (_expanded(b, one, b.shape(one), shape) for one in (x, mask))
    flat = b.add("Reshape", source, b.ints([-1]))
    b.fakes[flat] = b.fakes[source].reshape(-1)
    return b.add("Where", mask, _taken_in_turn(b, mask, flat, shape), x)


def _expanded(b: Builder, x: Value, before: Sequence[Any], after: Sequence[Any]) -> Value:
    return x if same_shape(before, after) else b.add("Expand", x, b.ints(after))


def _broadcast(*shapes: Sequence[Any]) -> list[Any]:
    """The shape that all broadcast to; a size that a run chooses is not 1."""
    rank = max(map(len, shapes))
    columns = zip(*((*[1] * (rank - len(one)), *one) for one in shapes), strict=True)
    return [next((n for n in sizes if isinstance(n, torch.SymInt) or n != 1), 1)
            for sizes in columns]  # fmt: skip


def _written(
    b: Builder, x: Value, axes: Sequence[int], indices: Sequence[Value], values: Value,
    reduction: str,
) -> Value:  # fmt: skip
    """x with values at the indices of some axes, which are broadcast. In `values` the axes of the
    indices stand where the first of these is, if they are neighbours, else first."""
    sizes = b.shape(x)
    of_indices = _broadcast(*(b.shape(one) for one in indices))
    others = [axis for axis in range(len(sizes)) if axis not in axes]
    neighbours = list(axes) == list(range(axes[0], axes[0] + len(axes)))
    before = axes[0] if neighbours else 0
    rest = [sizes[axis] for axis in others]
    whole = [*rest[:before], *of_indices, *rest[before:]]
    values = _expanded(b, values, b.shape(values), whole)
    if before and of_indices:
        count = len(of_indices)
        order = *range(before, before + count), *range(before), *range(before + count, len(whole))
        values = b.add("Transpose", values, perm=order)
    each = [
        b.add("Unsqueeze", _expanded(b, b.cast(one, _INT64), b.shape(one), of_indices),
              b.ints([-1]))
        for one in indices
    ]  # fmt: skip
    places = b.add("Concat", *each, axis=-1) if len(each) > 1 else each[0]
    order = [*axes, *others]
    if order == sorted(order):
        return b.add("ScatterND", x, places, values, reduction=reduction)
    made = b.add("ScatterND", b.add("Transpose", x, perm=tuple(order)), places, values,
                 reduction=reduction)  # fmt: skip
    return b.add("Transpose", made, perm=tuple(order.index(axis) for axis in range(len(order))))


_REDUCTIONS = {"sum": "add", "add": "add", "prod": "mul", "multiply": "mul", "amax": "max",
               "amin": "min", "mean": "add"}  # fmt: skip


@converter("scatter", "scatter_add", "scatter_reduce")
def scatter(
    b: Builder, *, x: Value, dim: int, index: Value, src: Value | None = None, value: Any = None,
    reduce: str | None = None, include_self: bool = True,
) -> Value:  # fmt: skip
    """At its indices along `dim` of its own place: the first updates, as many as indices."""
    dtype, wanted = b.out.dtype, b.shape(index)
    sizes = b.shape(x) or [1]
    update = b.add("Expand", b.number(value, dtype), b.ints(wanted)) if src is None else (
        _first_of(b, b.cast(src, dtype), b.shape(src), wanted)
    )  # fmt: skip
    if not wanted:  # each of one element
        x, index, update = (b.add("Reshape", one, b.ints([1])) for one in (x, index, update))

    def filled(number: float, shape: Sequence[Any]) -> Value:
        return b.add("Expand", b.number(number, dtype), b.ints(shape))

    def written(x: Value, update: Value, reduction: str) -> Value:
        return b.add("ScatterElements", x, index, update, axis=dim, reduction=reduction)

    reduction = "add" if b.operator == "scatter_add" else _REDUCTIONS.get(reduce or "", "none")
    if not include_self:  # what is written to begins with what changes nothing
        x = written(x, filled(_neutral(reduction, dtype), wanted or [1]), "none")
    made = written(x, update, reduction)
    if reduce == "mean":
        counts = filled(1, sizes)
        if not include_self:
            counts = written(counts, filled(0, wanted or [1]), "none")
        counts = b.add("Max", written(counts, filled(1, wanted or [1]), "add"), b.number(1, dtype))
        if not dtype.is_floating_point:  # rounded down
            made = b.add("Sub", made, b.add("Mod", made, counts))
        made = b.add("Div", made, counts)
    return made if wanted else b.add("Reshape", made, b.ints(b.out.shape))


def _neutral(reduction: str, dtype: torch.dtype) -> float:
    """What a reduction leaves other numbers as they are with."""
    if reduction in ("none", "add", "mul"):
        return float(reduction == "mul")
    if dtype.is_floating_point:
        return math.inf if reduction == "min" else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if reduction == "min" else limits.min


def _first_of(b: Builder, x: Value, sizes: Sequence[Any], wanted: Sequence[Any]) -> Value:
    """The first elements of each axis, so many."""
    for axis, (have, want) in enumerate(zip(sizes, wanted, strict=True)):
        if not same_size(have, want):
            x = b.add("Slice", x, b.ints([0]), b.ints([want]), b.ints([axis]))
    return x


_SUM, _MEAN, _GREATEST = range(3)


@converter("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    b: Builder, *, weight: Value, indices: Value, offsets: Value, mode: int,
    per_sample_weights: Value | None, include_last_offset: bool, padding_idx: int | None = None,
    **_: Any,
) -> tuple[Value, ...]:  # fmt: skip
    """Sums, means or maxima of rows, from one offset to the next. The rows of `padding_idx` are
    added to a bag behind the others."""
    bags, width = b.out[0].shape
    rows = b.add("Gather", weight, indices, axis=0)
    if per_sample_weights:
        rows = b.add("Mul", rows, b.add("Unsqueeze", per_sample_weights, b.ints([1])))
    if include_last_offset:
        offsets = b.add("Slice", offsets, b.ints([0]), b.ints([bags]), b.ints([0]))
    zero, one = (b.ints([number], scalar=True) for number in (0, 1))
    places = b.add("Range", zero, b.ints([b.shape(indices)[0]], scalar=True), one)
    begun = b.add("LessOrEqual", b.add("Cast", offsets, to="int64"),
                  b.add("Unsqueeze", places, b.ints([1])))  # fmt: skip
    bag = b.add("ReduceSum", b.add("Cast", begun, to="int64"), b.ints([1]), keepdims=0)
    bag = b.add("Sub", bag, one)
    if padding_idx is not None and padding_idx >= 0:
        padding = b.add("Equal", b.add("Cast", indices, to="int64"), b.ints([padding_idx]))
        bag = b.add("Where", padding, b.ints([bags], scalar=True), bag)
    bag = b.add("Unsqueeze", bag, b.ints([1]))

    def gathered(rows: Value, start: float, width: Any, reduction: str) -> Value:
        empty = b.add("Expand", b.number(start, b.out[0].dtype), b.ints([bags + 1, width]))
        made = b.add("ScatterND", empty, bag, rows, reduction=reduction)
        return b.add("Slice", made, b.ints([0]), b.ints([bags]), b.ints([0]))

    number = b.number(1, b.out[0].dtype)
    ones = b.add("Expand", number, b.ints([b.shape(indices)[0], 1]))
    counts = gathered(ones, 0, 1, "add")
    made = gathered(rows, -math.inf if mode == _GREATEST else 0, width,
                    "max" if mode == _GREATEST else "add")  # fmt: skip
    if mode == _MEAN:
        made = b.add("Div", made, b.add("Max", counts, number))
    elif mode == _GREATEST:  # an empty bag is 0
        zeros = b.number(0, b.out[0].dtype)
        made = b.add("Where", b.add("Equal", counts, zeros), zeros, made)
    return (made,)


@converter("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(
    b: Builder, *, input: Value, grid: Value, interpolation_mode: int, padding_mode: int,
    align_corners: bool,
) -> Value:  # fmt: skip
    return b.add(
        "GridSample", input, grid, mode=("linear", "nearest", "cubic")[interpolation_mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )  # fmt: skip
