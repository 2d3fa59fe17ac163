"""LayerNorm and RMSNorm over rows.

    out = (x − mean) / √(variance + ε) · weight + bias

Two passes over a row, or two, in the nearest cache: its mean, then the mean square of what is
left without it, in float32. RMSNorm leaves the mean where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import fma, sqrt
from lowbit.isa.types import F32Pointer, Int, U8Pointer, f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    dequantizing,
    load_vector,
    parameters_of,
)
from lowbit.kernels.cpu.shared.packing import RowStore
from lowbit.kernels.cpu.tensors.rows import (
    LANES,
    RowsPlan,
    each_rows,
    fold_rows,
    plan_rows,
)

_TENSORS = ("f32", "bf16", "u8", "s8")
_TOGETHER = 2  # rows whose sums are made at a time, where one vector register holds 16 lanes
_WIDE = 64  # bytes of such a register

Vectors = Callable[[Value, Value | None], Value]  # of a row, by place and by what is left there


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
    words, scratch_bytes = plan_rows(rows, width, x_stride=x, out_stride=out)
    return RowsPlan(words, _TOGETHER * scratch_bytes)


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

    parameters: of `normalize_parameters`. scratch: float32 [threads, 2, scratch_stride], as
    planned. out may be x, of the same format and stride.
    """
    rows_of = _Rows(k, form, parameters, scratch + k.thread() * (scratch_stride * _TOGETHER), width)
    source, target = x.cast(FORMATS[form.x]), out.cast(FORMATS[form.out])
    together = _TOGETHER if k.isa.vector_bytes == _WIDE else 1
    for numbers in each_rows(k, rows, item_rows, together):
        with k.scope():
            waiting = rows_of.fetch(
                [source + number * x_stride for number in numbers], scratch_stride
            )
            for number, (place, mean, inverse) in zip(numbers, waiting, strict=True):
                rows_of.finish(place, mean, inverse, (weight, bias), target + number * out_stride)


class _Rows:
    """What is done with rows. They wait where they are, or as float32 in scratch."""

    def __init__(
        self, k: Builder, form: NormalizeForm, parameters: Value, scratch: Value, width: Value
    ) -> None:
        self._k, self._form, self._scratch, self._width = k, form, scratch, width
        self._epsilon = parameters.load()
        x, out = parameters_of(form.x), parameters_of(form.out)
        numbers = [(parameters + (1 + i)).load().splat(LANES) for i in range(x + out)]
        self._x = dequantizing(form.x, numbers[:x])
        self._store_row = RowStore(k, form.out, numbers[x:], LANES)

    def fetch(self, sources: list[Value], apart: Value) -> list[tuple[Value, Value, Value]]:
        """Bring rows near, so far apart; of each where it waits, its mean, or 0, and the factor
        that normalizes it, in every lane."""
        k, width, form = self._k, self._width, self._form
        count = width.to(f32)
        scratch = [self._scratch + apart * i for i in range(len(sources))]
        places = sources if form.x == "f32" else scratch

        def taking(source: Value, place: Value) -> Vectors:
            def take(at: Value, left: Value | None) -> Value:
                value = self._x(load_vector(source + at, LANES, left))
                if form.x != "f32":
                    (place + at).store(value)
                return value

            return take

        def without(place: Value, mean: Value) -> Vectors:
            return lambda at, left: load_vector(place + at, LANES, left) - mean

        def square(value: Value, total: Value) -> Value:
            return fma(value, value, total)

        taken = [taking(source, place) for source, place in zip(sources, places, strict=True)]
        means = [k.zeros(f32, LANES)] * len(sources)
        if form.centred:
            means = [(sum_ / count).splat(LANES) for sum_ in fold_rows(k, width, taken)]
            taken = [without(place, mean) for place, mean in zip(places, means, strict=True)]
        squares = fold_rows(k, width, taken, take_in=square)
        inverses = [(1.0 / sqrt(one / count + self._epsilon)).splat(LANES) for one in squares]
        return list(zip(places, means, inverses, strict=True))

    def finish(
        self, place: Value, mean: Value, inverse: Value, affine: tuple[Value, Value], target: Value
    ) -> None:
        """Normalize a row that waits, and store it."""
        form = self._form

        def normalized(at: Value, left: Value | None) -> Value:
            value = load_vector(place + at, LANES, left)
            value = (value - mean if form.centred else value) * inverse
            weight, bias = (
                load_vector(one + at, LANES, left) if there else None
                for one, there in zip(affine, (form.weight, form.bias), strict=True)
            )
            if weight is not None:
                return value * weight if bias is None else fma(value, weight, bias)
            return value if bias is None else value + bias

        self._store_row(self._width, normalized, target)
