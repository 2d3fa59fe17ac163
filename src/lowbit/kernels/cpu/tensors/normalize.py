"""LayerNorm and RMSNorm over rows.

    out = (x − mean) / √(variance + ε) · weight + bias

Two passes over a row that waits in the nearest cache: its mean, then the mean square of what is
left without it, in float32. RMSNorm leaves the mean where it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import sqrt
from lowbit.isa.types import F32Pointer, Int, U8Pointer, f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    dequantizing,
    load_vector,
    parameters_of,
    store_vector,
    storing,
)
from lowbit.kernels.cpu.tensors.rows import (
    LANES,
    RowsPlan,
    each_row,
    each_vector,
    fold,
    plan_rows,
)

_TENSORS = ("f32", "bf16", "u8", "s8")


class NormalizeForm(NamedTuple):
    """What is computed. It keys the code.

    x, out: formats. centred: LayerNorm, else RMSNorm. weight, bias: whether there is one, float32
    [width].
    """

    x: str
    out: str
    centred: bool = True
    weight: bool = True
    bias: bool = True


def plan_normalize(
    form: NormalizeForm, rows: int, width: int, strides: tuple[int, int] | None = None
) -> RowsPlan:
    """The words of `normalize`: all but its pointers.

    strides: from row to row of x and of out, in elements; None: both dense. ValueError: a format is
    unknown.
    """
    for name in (form.x, form.out):
        if name not in _TENSORS:
            raise ValueError(f"{name!r} is no format; known: {', '.join(_TENSORS)}")
    x, out = strides or (width, width)
    return plan_rows(rows, width, x_stride=x, out_stride=out)


def normalize_parameters(
    epsilon: float, x: tuple[float, int] | None = None, out: tuple[float, int] | None = None
) -> npt.NDArray[np.float32]:
    """The parameters of `normalize`: ε, and (scale, zero point) of whatever is of 8 bits.

    ValueError: ε is negative.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
    inverse = () if out is None else (np.float32(1) / np.float32(out[0]), out[1])
    return np.array([epsilon, *(x or ()), *inverse], np.float32)


@kernel
def normalize(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    weight: F32Pointer,
    bias: F32Pointer,
    parameters: F32Pointer,
    scratch: F32Pointer,
    scratch_stride: Int,
    rows: Int,
    width: Int,
    item_rows: Int,
    x_stride: Int,
    out_stride: Int,
    *,
    form: NormalizeForm,
) -> None:
    """out[rows, width], as the form says.

    parameters: of `normalize_parameters`. scratch: float32 [threads, scratch_stride], as planned.
    out may be x, of the same format and stride.
    """
    row = _Row(k, form, parameters, scratch + k.thread() * scratch_stride, width)
    source, target = x.cast(FORMATS[form.x]), out.cast(FORMATS[form.out])
    for number in each_row(k, rows, item_rows):
        with k.scope():
            mean, inverse = row.fetch(source + number * x_stride)
            row.finish(mean, inverse, (weight, bias), target + number * out_stride)


class _Row:
    """What is done with one row."""

    def __init__(
        self, k: Builder, form: NormalizeForm, parameters: Value, scratch: Value, width: Value
    ) -> None:
        self._k, self._form, self._scratch, self._width = k, form, scratch, width
        self._epsilon = parameters.load()
        x, out = parameters_of(form.x), parameters_of(form.out)
        numbers = [(parameters + (1 + i)).load().splat(LANES) for i in range(x + out)]
        self._x, self._out = dequantizing(form.x, numbers[:x]), storing(form.out, numbers[x:])

    def fetch(self, source: Value) -> tuple[Value, Value]:
        """Bring a row to scratch as float32; its mean, or 0, and the factor that normalizes it,
        in every lane."""
        k, width = self._k, self._width
        count = width.to(f32)

        def take(at: Value, left: Value | None) -> Value:
            value = self._x(load_vector(source + at, LANES, left))
            (self._scratch + at).store(value)
            return value if self._form.centred else value * value

        first = fold(k, width, take) / count
        if not self._form.centred:
            return k.zeros(f32, LANES), self._inverse(first)
        mean = first.splat(LANES)

        def square(at: Value, left: Value | None) -> Value:
            rest = (self._scratch + at).load(LANES) - mean
            return rest * rest

        return mean, self._inverse(fold(k, width, square) / count)

    def _inverse(self, square: Value) -> Value:
        return (1.0 / sqrt(square + self._epsilon)).splat(LANES)

    def finish(
        self, mean: Value, inverse: Value, affine: tuple[Value, Value], target: Value
    ) -> None:
        """Normalize the row in scratch, and store it."""

        def write(at: Value, left: Value | None, part: int) -> None:
            value = (self._scratch + at).load(LANES)
            if self._form.centred:
                value = value - mean
            value = value * inverse
            if self._form.weight:
                value = value * load_vector(affine[0] + at, LANES, left)
            if self._form.bias:
                value = value + load_vector(affine[1] + at, LANES, left)
            store_vector(self._out(value), target + at, left)

        each_vector(self._k, self._width, write)
