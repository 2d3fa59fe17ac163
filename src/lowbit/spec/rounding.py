"""References as float32 would compute them: each intermediate result is rounded to 24 bits.

How far that is from the reference shows what no change of the inputs does: terms that cancel on the
way (1 + erf(x) where erf is near -1, the logarithm of a sum minus its largest term).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.spec.dtypes import Array

# Bits of a float64's mantissa that float32 does not have.
_LOST = 29
_HALF, _KEPT = (1 << _LOST - 1) - 1, ~((1 << _LOST) - 1)


def to_24_bits(values: Array) -> Array:
    """Float64 rounded to the 24 bits of a float32's mantissa, half to even; of any magnitude, so
    that nothing overflows which a kernel may compute in another order."""
    bits = np.ascontiguousarray(values).view(np.int64)
    rounded = (bits + _HALF + (bits >> _LOST & 1)) & _KEPT
    return np.where(np.isfinite(values), rounded.view(np.float64).reshape(values.shape), values)


TF32_UNIT = 2.0**-11
"""The unit roundoff of TF32, in which tensor cores multiply float32: ten bits of mantissa."""

_LOST_IN_TF32 = 13


def to_tf32(values: Array) -> Array:
    """Float32 rounded to TF32, half away from zero (PTX ISA, cvt.rna.tf32.f32)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    lost = np.uint32((1 << _LOST_IN_TF32) - 1)
    rounded = (bits + np.uint32(1 << _LOST_IN_TF32 - 1)) & ~lost
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


class Rounded(np.ndarray):
    """An array of which every result of NumPy's functions is a Rounded again, and rounded if it is
    of float64."""

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **named: Any
    ) -> Any:
        if out:
            named["out"] = tuple(map(_bare, out))
        named = {name: _bare(value) for name, value in named.items()}
        made = getattr(ufunc, method)(*map(_bare, inputs), **named)
        if not out:
            return _each(made)
        for held in named["out"]:
            if isinstance(held, np.ndarray) and held.dtype == np.float64:
                held[...] = to_24_bits(held)
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _each(super().__array_function__(func, types, args, kwargs))


def rounded(values: Array) -> Rounded:
    """Float64, rounded, and whatever is made of it too."""
    return to_24_bits(values).view(Rounded)


def _bare(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Rounded) else value


def _each(made: Any) -> Any:
    if isinstance(made, (tuple, list)):
        return type(made)(map(_each, made)) if type(made) in (tuple, list) else made
    if not isinstance(made, (np.ndarray, np.generic)):
        return made
    array = np.asarray(made)
    if array.dtype == object and all(type(one) is float for one in array.flat):
        # So np.vectorize computes, and makes numbers of them later.
        return to_24_bits(array.astype(np.float64)).astype(object).view(Rounded)
    return rounded(array) if array.dtype == np.float64 else array.view(Rounded)
