"""Reductions and scans of Triton's interpreter, by whole slices.

The interpreter calls a function that combines two elements for each element, and finds the place of
a maximum by functions of NumPy that stop where all are NaN. Here neighbours are combined, all pairs
of a block at once, in the order of the elements, as often as it takes to leave one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lowbit.spec import Array


def replacements(interpreter: Any, standard: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace: of which class, by which name. standard: triton.language.standard."""
    reduce, scan = interpreter.ReduceOps, interpreter.ScanOps
    places = [getattr(standard, f"_arg{end}_combine_tie_break_{tie}") for end, tie in _PLACES]
    known = reduce.apply_impl

    def apply(ops: Any, blocks: Any) -> Any:
        values = blocks[0].handle.data
        of_nan = values.dtype.kind == "f" and np.isnan(values).any()
        if of_nan and any(ops.combine_fn is one for one in places):
            return _reduced(ops, blocks)
        return known(ops, blocks)

    yield reduce, "generic_reduce", _reduced
    yield reduce, "apply_impl", apply
    yield scan, "generic_scan", _scanned


_PLACES = [(end, tie) for end in ("min", "max") for tie in ("left", "fast")]


def _reduced(ops: Any, blocks: Any) -> list[Any]:
    """What stands for ReduceOps.generic_reduce."""
    flat, axis = ops.unravel(blocks, ops.axis)
    dtypes = [one.dtype for one in blocks]
    held = [np.moveaxis(one.handle.data, axis, 0) for one in flat]
    while len(held[0]) > 1:  # a power of two
        held = _combined(ops, dtypes, [a[::2] for a in held], [a[1::2] for a in held])
    shape = list(blocks[0].handle.data.shape)
    kept = [1] * len(shape) if ops.axis is None else [*shape[:axis], 1, *shape[axis + 1 :]]
    results = [np.reshape(a[0], kept) if ops.keep_dims else a[0] for a in held]
    return [ops.to_tensor(a, dtype) for a, dtype in zip(results, dtypes, strict=True)]


def _scanned(ops: Any, blocks: Any) -> list[Any]:
    """What stands for ScanOps.generic_scan: from twice as far each time (Hillis and Steele)."""
    dtypes = [one.dtype for one in blocks]
    held = [np.moveaxis(one.handle.data, ops.axis, 0) for one in blocks]
    step = 1
    while step < len(held[0]):
        # The first have all of theirs, and take part so that a block has as many as it may have.
        made = _combined(ops, dtypes, [np.roll(a, step, 0) for a in held], held)
        held = [np.concatenate([a[:step], b[step:]]) for a, b in zip(held, made, strict=True)]
        step *= 2
    results = [np.ascontiguousarray(np.moveaxis(a, 0, ops.axis)) for a in held]
    return [ops.to_tensor(a, dtype) for a, dtype in zip(results, dtypes, strict=True)]


def _combined(
    ops: Any, dtypes: Sequence[Any], left: Sequence[Array], right: Sequence[Array]
) -> list[Array]:
    """The function of a reduction or scan, of many pairs at once."""
    blocks = [
        ops.to_tensor(np.ascontiguousarray(a), dtype)
        for side in (left, right)
        for a, dtype in zip(side, dtypes, strict=True)
    ]
    made = ops.combine_fn.fn(*blocks)
    made = made if isinstance(made, tuple) else (made,)
    values = (getattr(getattr(one, "handle", None), "data", one) for one in made)
    return [
        np.broadcast_to(np.asarray(value), a.shape).astype(a.dtype)
        for value, a in zip(values, left, strict=True)
    ]
