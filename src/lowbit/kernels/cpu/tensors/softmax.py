"""Softmax and LogSoftmax over rows.

    t = scale · x + mask        softmax = e^(t − max t) / Σ e^(t − max t)
                                logarithm: (t − max t) − ln Σ e^(t − max t)

In float32; powers below e^-87 count as 0. A row in which all t are minus infinity becomes NaN, as
the formula and PyTorch have it (attention gives zeros there), and so does one that holds NaN or
plus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import maximum
from lowbit.isa.types import F32Pointer, Int, U8Pointer
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    dequantizing,
    load_vector,
    parameters_of,
)
from lowbit.kernels.cpu.shared.functions import decay, log
from lowbit.kernels.cpu.shared.packing import RowStore
from lowbit.kernels.cpu.tensors.rows import (
    LANES,
    RowsPlan,
    each_row,
    fold,
    plan_rows,
)

_TENSORS = ("f32", "bf16", "u8", "s8")


class SoftmaxForm(NamedTuple):
    """What is computed. It keys the code. x, out: formats. mask: whether one is added. logarithm:
    LogSoftmax."""

    x: str
    out: str
    mask: bool = False
    logarithm: bool = False


def plan_softmax(
    form: SoftmaxForm, rows: int, width: int, strides: Sequence[int] | None = None
) -> RowsPlan:
    """The words of `softmax`: all but its pointers.

    strides: from row to row of x, mask and out, in elements; None: x and out are dense, and all
    rows share one row of a mask. ValueError: a format is unknown.
    """
    for name in (form.x, form.out):
        if name not in _TENSORS:
            raise ValueError(f"{name!r} is no format; known: {', '.join(_TENSORS)}")
    x, mask, out = (width, 0, width) if strides is None else strides
    return plan_rows(rows, width, x_stride=x, mask_stride=mask, out_stride=out)


def softmax_parameters(
    scale: float = 1.0, x: tuple[float, int] | None = None, out: tuple[float, int] | None = None
) -> npt.NDArray[np.float32]:
    """The parameters of `softmax`: what x is multiplied by, and (scale, zero point) of x and of the
    output where they are of 8 bits."""
    last = [] if out is None else [np.float32(1) / np.float32(out[0]), out[1]]
    return np.array([scale, *(x or ()), *last], np.float32)


@kernel
def softmax(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    mask: F32Pointer,
    parameters: F32Pointer,
    scratch: F32Pointer,
    scratch_stride: Int,
    rows: Int,
    width: Int,
    item_rows: Int,
    x_stride: Int,
    mask_stride: Int,
    out_stride: Int,
    *,
    form: SoftmaxForm,
) -> None:
    """out[rows, width] = softmax(scale · x + mask) of each row, or its logarithm.

    parameters: of `softmax_parameters`. scratch: float32 [threads, scratch_stride], as planned. out
    may be x, of the same format and stride.
    """
    row = _Row(k, form, parameters, scratch + k.thread() * scratch_stride, width)
    source, target = x.cast(FORMATS[form.x]), out.cast(FORMATS[form.out])
    for number in each_row(k, rows, item_rows):
        with k.scope():
            most = row.fetch(source + number * x_stride, mask + number * mask_stride)
            row.store(target + number * out_stride, row.raise_powers(most))


class _Row:
    """What is done with one row, which waits in `scratch` from pass to pass."""

    def __init__(
        self, k: Builder, form: SoftmaxForm, parameters: Value, scratch: Value, width: Value
    ) -> None:
        self._k, self._form, self._scratch, self._width = k, form, scratch, width
        first = parameters_of(form.x)
        count = 1 + first + parameters_of(form.out)
        self._scale, *numbers = ((parameters + i).load().splat(LANES) for i in range(count))
        self._loaded = dequantizing(form.x, numbers[:first])
        self._store_row = RowStore(k, form.out, numbers[first:], LANES)

    def fetch(self, source: Value, mask: Value) -> Value:
        """Bring a row to scratch; the greatest of it, in every lane."""

        def take(at: Value, left: Value | None) -> Value:
            value = self._loaded(load_vector(source + at, LANES, left)) * self._scale
            if self._form.mask:
                value = value + load_vector(mask + at, LANES, left)
            (self._scratch + at).store(value)
            return value

        return fold(self._k, self._width, take, float("-inf"), maximum).splat(LANES)

    def raise_powers(self, most: Value) -> Value:
        """Replace the row by its powers, or for a logarithm by their exponents; their sum."""

        def take(at: Value, left: Value | None) -> Value:
            less = (self._scratch + at).load(LANES) - most
            power = decay(less)
            (self._scratch + at).store(less if self._form.logarithm else power)
            return power

        return fold(self._k, self._width, take)

    def store(self, target: Value, total: Value) -> None:
        """Divide by the sum, and store."""
        logarithm = self._form.logarithm
        last = (log(total) if logarithm else 1.0 / total).splat(LANES)

        def finished(at: Value, left: Value | None) -> Value:
            value = (self._scratch + at).load(LANES)
            return value - last if logarithm else value * last

        self._store_row(self._width, finished, target)
