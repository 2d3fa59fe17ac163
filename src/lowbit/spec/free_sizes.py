"""Which numbers of a specification's annotations stand for sizes that may be others.

`def spec(x: Float32[Tensor, "90 100"], y: Float32[Tensor, "90"]) -> Float32[Tensor, "90 100"]` says
nothing of other sizes, but its body does: it runs with 91 rows of x and y, and returns 91.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lowbit.spec.operation import Operation

Axis = tuple[str, int]
"""A tensor's name and one of its axes."""


@dataclass(frozen=True)
class Extent:
    """A number of the annotations, and the axes of the inputs and the result that have it together.
    free: whether it may be another one."""

    number: int
    axes: tuple[Axis, ...]
    free: bool


def extents(operation: Operation) -> list[Extent]:
    """The extents of an operation whose dimensions are all numbers, as its inputs mention them.

    The reference is run with one number changed at a time, on the fewest axes that let it run. A
    number is fixed where no choice of axes does, and wherever an axis of the result has it that
    follows no input; all are, where the reference does not run with all of them changed.
    """
    given = _numbers(operation)
    found = list[Extent]()
    for number in dict.fromkeys(given.values()):
        alike = [axis for axis, size in given.items() if size == number]
        found += _free(operation, alike, number) if number > 1 else []
    result = operation.result
    follows = {axis for extent in found for axis in extent.axes}
    fixed = {int(n) for i, n in enumerate(result.dims) if (result.name, i) not in follows}
    kept = [extent for extent in found if extent.number not in fixed]
    larger = {axis: one.number + n for n, one in enumerate(kept, 2) for axis in one.axes}
    if _shape(operation, {**given, **larger}) is None:
        kept = []
    taken = {axis for extent in kept for axis in extent.axes}
    kept += [Extent(size, (axis,), False) for axis, size in given.items() if axis not in taken]
    order = list(given)
    return sorted(kept, key=lambda extent: order.index(extent.axes[0]))


def named(operation: Operation, names: Mapping[str, Extent]) -> Operation:
    """The operation with names for these extents; the annotated numbers are its exercise."""
    of = {axis: name for name, extent in names.items() for axis in extent.axes}
    stated = tuple(
        replace(one, dims=tuple(of.get((one.name, i), dim) for i, dim in enumerate(one.dims)))
        for one in operation.stated
    )
    exercise = {name: extent.number for name, extent in names.items()}
    return replace(operation, stated=stated, exercise=exercise)


def _numbers(operation: Operation) -> dict[Axis, int]:
    return {(t.name, i): int(dim) for t in operation.inputs for i, dim in enumerate(t.dims)}


def _free(operation: Operation, axes: list[Axis], number: int) -> Iterator[Extent]:
    """The fewest of these axes, all of one number, that may have another together; and so on."""
    taken = set[Axis]()
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            if taken.isdisjoint(some):
                follows = _changed(operation, some, number)
                if follows is not None:
                    taken.update(some)
                    yield Extent(number, (*some, *follows), True)


def _changed(operation: Operation, axes: Iterable[Axis], number: int) -> list[Axis] | None:
    """The axes of the result that change with these; None if the reference does not run, or if
    they change otherwise."""
    larger, result = number + 1, operation.result
    shape = _shape(operation, {**_numbers(operation), **dict.fromkeys(axes, larger)})
    stated = [int(dim) for dim in result.dims]
    if shape is None or len(shape) != len(stated):
        return None
    pairs = list(zip(shape, stated, strict=True))
    changed = [i for i, (now, before) in enumerate(pairs) if now != before]
    if any(pairs[i] != (larger, number) for i in changed):
        return None
    return [(result.name, i) for i in changed]


def _shape(operation: Operation, sizes: Mapping[Axis, int]) -> tuple[int, ...] | None:
    """The shape of the result for inputs of these sizes; None if the reference does not run."""
    shapes = {t.name: [sizes[t.name, i] for i in range(len(t.dims))] for t in operation.inputs}
    kinds = {t.name: np.float64 if t.is_float else np.int64 for t in operation.inputs}
    try:
        return np.shape(operation(**{n: np.ones(s, kinds[n]) for n, s in shapes.items()}))
    except Exception:  # somebody's own function, at sizes that it may not be for
        return None
