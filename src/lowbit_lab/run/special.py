"""What a kernel may make of special numbers: where a result is not judged, and where it is strange.

A right kernel may leave out what the reference multiplies by zero, multiply by the zeros of a mask,
and add up in another order. So infinities may end as anything where the reference ends as NaN; a
NaN has to come out where the result depends on the number in its place; and numbers that are too
large for the reference in float32 are for a kernel too. In an order a NaN has no place: of several
elements `tl.max` takes the largest number (propagate_nan is NONE by default), NumPy the NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lowbit.spec import SPECIAL, Array, Case, Expected, Operation

# What no function of a number takes for the same: an even one, a ReLU, a limit.
_IN_PLACE_OF_NAN = (1.0, 100.0, -100.0)
# Numbers that a choice of the largest, of the smallest, or of either without signs leaves out.
_LEFT_OUT = ((-3.0, -4.0), (3.0, 4.0), (1e-3, 2e-3))
_DRAWS = 8


class Forgiven(NamedTuple):
    """Of each element: whether it may be anything; whether to be off is worth a warning, since it
    is the outcome of a choice among several elements, of which a NaN was one."""

    free: Array
    chosen: Array


def forgiven(case: Case, inputs: Mapping[str, Array], expected: Expected) -> Forgiven | None:
    """What is not judged where the data is special; None if all is."""
    operation, exact = case.operation, case.exact(inputs)
    if case.fill not in (*SPECIAL, "huge") or operation.special:
        return None
    floats = _floats(operation)
    free, chosen = np.isnan(expected.reference), np.zeros(expected.reference.shape, bool)
    if case.fill == "nan":
        some = [~_depends(operation, exact, names) for names in (floats, *([n] for n in floats))]
        free &= np.logical_or.reduce(some)
        choosing = [name for name in floats if _chooses(operation, name)]
        others = [name for name in floats if name not in choosing]
        settled = {**exact, **_filled(exact, choosing, 1.0)}
        chosen = ~some[0] & ~_depends(operation, settled, others) if choosing else chosen
    elif case.fill in ("largest", "huge") and all(t.dtype != "float64" for t in operation.inputs):
        narrow = {n: a.astype(np.float32) if n in floats else a for n, a in exact.items()}
        got = _reference(operation, narrow).astype(np.float64)
        free |= expected.wrong(got) | ~np.isfinite(got)
        # Integers that were multiplied have made it float64 again; and where rounding may lead
        # beyond float32, partial sums in another order overflow.
        free |= np.abs(expected.reference) + expected.budget > np.finfo(np.float32).max
    return Forgiven(free, chosen)


def leaked(case: Case, inputs: Mapping[str, Array], strange: Array) -> Array:
    """Which of these elements have NaN or infinity from an element that they do not depend on,
    whatever the other floats are."""
    operation, exact = case.operation, case.exact(inputs)
    if case.fill not in ("nan", "inf", "neg_inf") or not strange.any():
        return np.zeros(strange.shape, bool)
    own, floats = np.zeros(strange.shape, bool), _floats(operation)
    for seed in range(_DRAWS):
        drawn = replace(case, fill="normal")
        other = drawn.exact(drawn.inputs(seed))
        moved = {
            t.name: np.where(np.isfinite(exact[t.name]), other[t.name], np.nan)
            if t.is_float
            else other[t.name]
            for t in operation.inputs
            if t.is_float or t.dtype == "bool"
        }
        given = {**exact, **moved}
        own |= np.isnan(_reference(operation, given)) | _depends(operation, given, floats)
    return strange & ~own


def _floats(operation: Operation) -> list[str]:
    return [tensor.name for tensor in operation.inputs if tensor.is_float]


def _reference(operation: Operation, given: Mapping[str, Any]) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(operation(**given))


def _with(
    operation: Operation, exact: Mapping[str, Any], names: Sequence[str], number: float
) -> Array:
    """The reference with a number in the place of each NaN of these inputs."""
    return _reference(operation, {**exact, **_filled(exact, names, number)})


def _filled(exact: Mapping[str, Any], names: Sequence[str], number: float) -> dict[str, Array]:
    """These inputs with a number in the place of each NaN."""
    return {n: np.where(np.isnan(exact[n]), number, exact[n]) for n in names}


def _depends(operation: Operation, exact: Mapping[str, Any], names: Sequence[str]) -> Array:
    """Whether an element of the reference is another one if the NaN of these inputs are numbers."""
    first, *others = (_with(operation, exact, names, number) for number in _IN_PLACE_OF_NAN)
    return np.logical_or.reduce([first != other for other in others])


@lru_cache(64)  # several cases of an operation ask
def _chooses(operation: Operation, name: str) -> bool:
    """Whether results are choices among several elements of this input by their order, as a
    maximum, a sort and the scale of a quantized row are: some numbers in the place of one do not
    count, others do, and where they do not, the result follows the other elements."""
    sizes = operation.exercise or operation.fitted(dict.fromkeys(operation.names, 40))
    case = Case(operation, sizes, "nan")
    exact = case.exact(case.inputs())
    exact = {**exact, **_filled(exact, [n for n in _floats(operation) if n != name], 1.0)}
    moved = {**exact, name: exact[name] * (1 + 2.0**-10)}
    same: list[Array] = []
    follows: list[Array] = []
    for pair in _LEFT_OUT:
        first, second = (_with(operation, exact, [name], number) for number in pair)
        same.append(first == second)
        follows.append(same[-1] & (_with(operation, moved, [name], pair[0]) != first))
    counts = ~np.logical_and.reduce(same)
    return bool((np.logical_or.reduce(follows) & counts).any())
