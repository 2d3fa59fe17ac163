"""LayerNorm and RMSNorm over rows, with a sum before it and quantization behind it.

    total = x + y                         if there is a y
    out = (total − mean) / √(variance + ε) · weight + bias

Two passes over a row that waits in the nearest cache: its mean, then the mean square of what is
left without it, in float32. RMSNorm leaves the mean where it is.

What a dynamically quantized product wants is made here as well: rows of bytes with a scale and a
zero point of their own, bit for bit what numerics.quantize_rows makes of the normalized rows. The
product takes them as bytes whose scales and zero points are given per row (rows/bytes.py, not
`shared`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import sqrt
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import LeftOperand, Row, RowFacts
from lowbit.kernels.cpu.rows.quantized import quantize
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    Convert,
    dequantizing,
    load_vector,
    parameters_of,
    store_vector,
    storing,
)
from lowbit.kernels.cpu.shared.layout import LINE
from lowbit.kernels.cpu.tensors.rows import (
    LANES,
    RowsPlan,
    each_row,
    each_vector,
    fold,
    padded,
    plan_rows,
)

# Outputs that are rows of uint8 with scales of their own, and whether these are symmetric.
ROWS = {"rows": False, "symmetric_rows": True}
_TENSORS = ("f32", "bf16", "u8", "s8")


class NormalizeForm(NamedTuple):
    """What is computed. It keys the code.

    x, y, total: formats; y and total "" where there is none. `total` is x + y, or x, written in
    its format, and what is normalized is what was written. out: a format, or one of `ROWS`.
    centred: LayerNorm, else RMSNorm. weight, bias: whether there is one, float32 [width].
    """

    x: str
    out: str
    y: str = ""
    total: str = ""
    centred: bool = True
    weight: bool = True
    bias: bool = True


def plan_normalize(
    form: NormalizeForm, rows: int, width: int, strides: Sequence[int] | None = None
) -> RowsPlan:
    """The words of `normalize`: all but its pointers.

    strides: from row to row of x, y, total and out, in elements; None: all dense, but for rows of
    bytes with scales of their own, which begin at multiples of 64. ValueError: a format is unknown.
    """
    for name in (form.x, form.y or "f32", form.total or "f32"):
        if name not in _TENSORS:
            raise ValueError(f"{name!r} is no format; known: {', '.join(_TENSORS)}")
    if form.out not in (*_TENSORS, *ROWS):
        raise ValueError(f"{form.out!r} is no output; known: {', '.join((*_TENSORS, *ROWS))}")
    lines = padded(width, LINE)
    dense = (width, width, width, lines if form.out in ROWS else width)
    x, y, total, out = dense if strides is None else strides
    if form.out in ROWS and out < lines:
        raise ValueError(f"rows of {form.out} are filled up to {lines} bytes, not {out}")
    return plan_rows(rows, width, x_stride=x, y_stride=y, total_stride=total, out_stride=out)


def normalize_parameters(
    epsilon: float,
    x: tuple[float, int] | None = None,
    y: tuple[float, int] | None = None,
    total: tuple[float, int] | None = None,
    out: tuple[float, int] | None = None,
) -> npt.NDArray[np.float32]:
    """The parameters of `normalize`: ε, and (scale, zero point) of whatever is of 8 bits.

    ValueError: ε is negative.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
    numbers = [epsilon, *(x or ()), *(y or ())]
    for target in (total, out):
        if target is not None:
            numbers += [np.float32(1) / np.float32(target[0]), target[1]]
            numbers += target if target is total else ()
    return np.array(numbers, np.float32)


@kernel
def normalize(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    y: U8Pointer,
    total: U8Pointer,
    weight: F32Pointer,
    bias: F32Pointer,
    row_scale: F32Pointer,
    row_zero: S32Pointer,
    parameters: F32Pointer,
    scratch: F32Pointer,
    scratch_stride: Int,
    rows: Int,
    width: Int,
    item_rows: Int,
    x_stride: Int,
    y_stride: Int,
    total_stride: Int,
    out_stride: Int,
    *,
    form: NormalizeForm,
) -> None:
    """out[rows, width], as the form says; row_scale, row_zero [rows] for an output of `ROWS`.

    parameters: of `normalize_parameters`. scratch: float32 [threads, scratch_stride], as planned.
    total may be x or y, and out may be x, of the same format and stride.
    """
    numbers = _Numbers(parameters)
    epsilon = numbers.scalar()
    row = _Row(k, form, numbers, scratch + k.thread() * scratch_stride, width, epsilon)
    places = [p.cast(FORMATS[f]) for p, f in ((x, form.x), (y, form.y or "f32"))]
    sums = total.cast(FORMATS[form.total or "f32"])
    target = out.cast(FORMATS.get(form.out, FORMATS["u8"]))
    for number in each_row(k, rows, item_rows):
        with k.scope():
            sources = places[0] + number * x_stride, places[1] + number * y_stride
            mean, inverse = row.fetch(sources, sums + number * total_stride)
            end = target + number * out_stride
            if form.out not in ROWS:
                row.finish(mean, inverse, (weight, bias), end, row.stored)
                continue
            row.finish(mean, inverse, (weight, bias), row.scratch, lambda value: value)
            zero = k.index(0)
            whole = LeftOperand(row.scratch, zero, k.index(1), width, row_zero, row_zero, zero)
            facts = RowFacts(row_scale + number, row_zero + number, None)
            quantize(k, ROWS[form.out], Row(whole, zero, end, k.index(LINE)), facts)


class _Numbers:
    """The parameters, one after another."""

    def __init__(self, parameters: Value) -> None:
        self._at = parameters

    def scalar(self) -> Value:
        self._at, value = self._at + 1, self._at.load()
        return value

    def of(self, name: str) -> Iterator[Value]:
        """Those of a format, in every lane."""
        for _ in range(parameters_of(name) if name in FORMATS else 0):
            yield self.scalar().splat(LANES)


class _Row:
    """What is done with one row."""

    def __init__(
        self,
        k: Builder,
        form: NormalizeForm,
        numbers: _Numbers,
        scratch: Value,
        width: Value,
        epsilon: Value,
    ) -> None:
        self._k, self._form, self._width, self._epsilon = k, form, width, epsilon
        self.scratch = scratch
        self._x = dequantizing(form.x, list(numbers.of(form.x)))
        self._y = dequantizing(form.y, list(numbers.of(form.y))) if form.y else None
        self._total: tuple[Convert, Convert] | None = None
        if form.total:
            to = storing(form.total, list(numbers.of(form.total)))
            self._total = to, dequantizing(form.total, list(numbers.of(form.total)))
        self.stored: Convert = lambda value: value
        if form.out not in ROWS:
            self.stored = storing(form.out, list(numbers.of(form.out)))

    def fetch(self, sources: tuple[Value, Value], total: Value) -> tuple[Value, Value]:
        """Bring a row to scratch as float32; its mean, or 0, and the factor that normalizes it,
        in every lane."""
        k, width = self._k, self._width
        count = width.to(f32)

        def take(at: Value, left: Value | None) -> Value:
            value = self._x(load_vector(sources[0] + at, LANES, left))
            if self._y is not None:
                value = value + self._y(load_vector(sources[1] + at, LANES, left))
            if self._total is not None:
                kept = self._total[0](value)
                store_vector(kept, total + at, left)
                value = self._total[1](kept)
            (self.scratch + at).store(value)
            return value if self._form.centred else value * value

        first = fold(k, width, take) / count
        if not self._form.centred:
            return k.zeros(f32, LANES), self._inverse(first)
        mean = first.splat(LANES)

        def square(at: Value, left: Value | None) -> Value:
            rest = (self.scratch + at).load(LANES) - mean
            return rest * rest

        return mean, self._inverse(fold(k, width, square) / count)

    def _inverse(self, square: Value) -> Value:
        return (1.0 / sqrt(square + self._epsilon)).splat(LANES)

    def finish(
        self,
        mean: Value,
        inverse: Value,
        affine: tuple[Value, Value],
        target: Value,
        convert: Convert,
    ) -> None:
        """Normalize the row in scratch, and store it."""

        def write(at: Value, left: Value | None, part: int) -> None:
            value = (self.scratch + at).load(LANES)
            if self._form.centred:
                value = value - mean
            value = value * inverse
            if self._form.weight:
                value = value * load_vector(affine[0] + at, LANES, left)
            if self._form.bias:
                value = value + load_vector(affine[1] + at, LANES, left)
            store_vector(convert(value), target + at, left)

        each_vector(self._k, self._width, write)
