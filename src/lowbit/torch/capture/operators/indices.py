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
        return b.same(x), b.constant(np.zeros((), np.int64))
    count = shape[dim] if k is None else k
    return _several(b, "TopK", x, b.ints([count]), axis=dim, largest=int(down))


def _several(b: Builder, op: str, *inputs: Value, **attributes: Any) -> tuple[Value, Value]:
    """A node of two outputs."""
    name = b.op(op, *inputs, **attributes)
    second = b.unique(f"{name}.places")
    b.nodes[-1] = b.nodes[-1].replaced(outputs=(name, second))
    return name, second


@converter("kthvalue")
def kth_value(b: Builder, *, x: Value, k: Any, dim: int, keepdim: bool) -> tuple[Value, ...]:
    ordered = _several(b, "TopK", x, b.ints([k]), axis=dim, largest=0)
    last = b.ints([-1]) if keepdim else b.ints([-1], scalar=True)
    return tuple(b.gather(one, last, dim) for one in ordered)


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
    flat = b.reshape(x, [-1, 1])
    steps = b.mul(b.sub(flat, low), count)
    part = b.floor(b.div(steps, b.sub(high, low)))
    part = b.minimum(part, last)  # the greatest number is in the last
    equal = b.equal(part, b.constant(np.arange(bins, dtype=np.float32)))
    inside = b.op("And", b.op("GreaterOrEqual", flat, low), b.op("LessOrEqual", flat, high))
    ones = b.cast(b.op("And", equal, inside), numpy_name(number))
    return b.reduce("sum", ones, [0], keepdims=False)


@converter("index")
def index(b: Builder, *, x: Value, indices: Sequence[Value | None]) -> Value:
    given = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if len(given) == 1 and b.dtype(given[0][1]) is not torch.bool:
        axis, one = given[0]
        return b.gather(x, one, axis)
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
        positive = b.mod(b.to(one, torch.int64), length)
        place = b.add(b.mul(place, length), positive)
        joined = joined * sizes[axis]
    order = (*axes, *others)
    first = x if order == tuple(range(len(sizes))) else b.transpose(x, order)
    flat = b.reshape(first, [joined, *(sizes[axis] for axis in others)])
    made, before = b.gather(flat, place), axes[0]
    if not before or list(axes) != list(range(before, before + len(axes))):
        return made
    of_indices = len(b.out.shape) - len(others)
    moved = range(of_indices, of_indices + before)
    rest = range(of_indices + before, len(b.out.shape))
    return b.transpose(made, (*moved, *range(of_indices), *rest))


@converter("index_put")
def index_put(
    b: Builder, *, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool
) -> Value:
    values = b.to(values, b.out.dtype)
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
        wide = b.unsqueeze(mask, list(range(covered, len(sizes))))
    rows = b.shape(values)[: len(b.shape(values)) - len(rest)]
    if math.prod(b.shape(values)) != 1 and rows and math.prod(rows) != 1:
        values = _taken_in_turn(b, mask, values, sizes)
    return b.where(wide, b.add(x, values) if accumulate else values, x)


def _taken_in_turn(b: Builder, mask: Value, rows: Value, shape: Sequence[Any]) -> Value:
    """For every element of the mask the row whose turn it is."""
    counts = b.cast(b.reshape(mask, [-1]), "int64")
    turn = b.sub(b.cumsum(counts, 0), b.number(1, _INT64))
    last = b.number(b.shape(rows)[0] - 1, _INT64)
    turn = b.maximum(b.minimum(turn, last), b.number(0, _INT64))
    return b.reshape(b.gather(rows, turn), shape)


@converter("masked_scatter")
def masked_scatter(b: Builder, *, x: Value, mask: Value, source: Value) -> Value:
    shape = b.out.shape
    x, mask = (_expanded(b, one, b.shape(one), shape) for one in (x, mask))
    flat = b.reshape(source, [-1])
    b.fakes[flat] = b.fakes[source].reshape(-1)
    return b.where(mask, _taken_in_turn(b, mask, flat, shape), x)


def _expanded(b: Builder, x: Value, before: Sequence[Any], after: Sequence[Any]) -> Value:
    return x if same_shape(before, after) else b.expand(x, after)


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
        values = b.transpose(values, order)
    each = [
        b.unsqueeze(_expanded(b, b.to(one, _INT64), b.shape(one), of_indices), [-1])
        for one in indices
    ]  # fmt: skip
    places = b.concat(each, -1)
    order = [*axes, *others]
    if order == sorted(order):
        return b.op("ScatterND", x, places, values, reduction=reduction)
    made = b.op("ScatterND", b.transpose(x, order), places, values,
                 reduction=reduction)  # fmt: skip
    return b.transpose(made, [order.index(axis) for axis in range(len(order))])


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
    update = b.expand(b.number(value, dtype), wanted) if src is None else (
        _first_of(b, b.to(src, dtype), b.shape(src), wanted)
    )  # fmt: skip
    if not wanted:  # each of one element
        x, index, update = (b.reshape(one, [1]) for one in (x, index, update))

    def filled(number: float, shape: Sequence[Any]) -> Value:
        return b.expand(b.number(number, dtype), shape)

    def written(x: Value, update: Value, reduction: str) -> Value:
        return b.op("ScatterElements", x, index, update, axis=dim, reduction=reduction)

    reduction = "add" if b.operator == "scatter_add" else _REDUCTIONS.get(reduce or "", "none")
    if not include_self:  # what is written to begins with what changes nothing
        x = written(x, filled(_neutral(reduction, dtype), wanted or [1]), "none")
    made = written(x, update, reduction)
    if reduce == "mean":
        counts = filled(1, sizes)
        if not include_self:
            counts = written(counts, filled(0, wanted or [1]), "none")
        counts = b.maximum(written(counts, filled(1, wanted or [1]), "add"), b.number(1, dtype))
        rounded_down = not dtype.is_floating_point
        made = b.op("FloorDiv", made, counts) if rounded_down else b.div(made, counts)
    return made if wanted else b.reshape(made, b.out.shape)


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
            x = b.slice(x, axis, 0, want)
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
    rows = b.gather(weight, indices)
    if per_sample_weights:
        rows = b.mul(rows, b.unsqueeze(per_sample_weights, [1]))
    if include_last_offset:
        offsets = b.slice(offsets, 0, 0, bags)
    zero, one = (b.ints([number], scalar=True) for number in (0, 1))
    places = b.arange(zero, b.ints([b.shape(indices)[0]], scalar=True), one)
    begun = b.op("LessOrEqual", b.cast(offsets, "int64"),
                  b.unsqueeze(places, [1]))  # fmt: skip
    bag = b.reduce("sum", b.cast(begun, "int64"), [1], keepdims=False)
    bag = b.sub(bag, one)
    if padding_idx is not None and padding_idx >= 0:
        padding = b.equal(b.cast(indices, "int64"), b.ints([padding_idx]))
        bag = b.where(padding, b.ints([bags], scalar=True), bag)
    bag = b.unsqueeze(bag, [1])

    def gathered(rows: Value, start: float, width: Any, reduction: str) -> Value:
        empty = b.expand(b.number(start, b.out[0].dtype), [bags + 1, width])
        made = b.op("ScatterND", empty, bag, rows, reduction=reduction)
        return b.slice(made, 0, 0, bags)

    number = b.number(1, b.out[0].dtype)
    ones = b.expand(number, [b.shape(indices)[0], 1])
    counts = gathered(ones, 0, 1, "add")
    made = gathered(rows, -math.inf if mode == _GREATEST else 0, width,
                    "max" if mode == _GREATEST else "add")  # fmt: skip
    if mode == _MEAN:
        made = b.div(made, b.maximum(counts, number))
    elif mode == _GREATEST:  # an empty bag is 0
        zeros = b.number(0, b.out[0].dtype)
        made = b.where(b.equal(counts, zeros), zeros, made)
    return (made,)


@converter("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(
    b: Builder, *, input: Value, grid: Value, interpolation_mode: int, padding_mode: int,
    align_corners: bool,
) -> Value:  # fmt: skip
    return b.op("GridSample", input, grid, mode=("linear", "nearest", "cubic")[interpolation_mode],
        padding_mode=("zeros", "border", "reflection")[padding_mode],
        align_corners=int(align_corners),
    )  # fmt: skip
