"""What kernels share that pass over a row several times: loops, sums, and where a row waits.

Vectors have 16 lanes on every instruction set, and each operation rounds as it does elsewhere, so
that the sums of all lanes, and with them every bit of the result, are the same everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.isa.generic import fma, maximum, minimum, select, sqrt, store_head
from lowbit.isa.types import F32Pointer, Int, U8Pointer, f32
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder, item_size
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    TENSORS,
    Affine,
    RowStore,
    check_formats,
    dequantizing,
    load_vector,
    parameters_of,
    to_store,
)
from lowbit.kernels.cpu.shared.functions import decay, log
from lowbit.kernels.cpu.shared.layout import blocks

LANES = 16
_PARTS = 3  # partial sums: fewer would wait for themselves, more not fit 16 registers
_LEAST, _MOST = 1024, 8192  # elements of an item, about

# (where a vector begins, how many of its lanes exist, None: all, number of the partial sum)
Body = Callable[[Value, Value | None, int], None]


class RowsPlan(NamedTuple):
    """words: the kernel's integers, by name. scratch_bytes: that each thread needs."""

    words: Mapping[str, int]
    scratch_bytes: int


def plan_rows(rows: int, width: int, **strides: int) -> RowsPlan:
    """How rows are cut into items; and a row of float32 for each thread."""
    item_rows = max(1, item_size(rows * width, _LEAST, _MOST) // max(width, 1))
    scratch = blocks(width, LANES) * LANES
    words = {"rows": rows, "width": width, "item_rows": item_rows, "scratch_stride": scratch}
    return RowsPlan({**words, **strides}, scratch * f32.bytes)


def each_row(k: Builder, rows: Value, item_rows: Value) -> Iterator[Value]:
    """A parallel region over rows, some to an item."""
    for at in each_rows(k, rows, item_rows, 1):
        yield from at


def each_rows(k: Builder, rows: Value, item_rows: Value, together: int) -> Iterator[list[Value]]:
    """The same over so many rows at a time, which do not wait for each other, and single ones."""
    for item in k.parallel((rows + (item_rows - 1)) // item_rows):
        first, last = item * item_rows, minimum(item * item_rows + item_rows, rows)
        whole = (last - first) // together * together + first
        for at in k.range(first, whole, together):
            yield [at + i for i in range(together)]
        for at in k.range(whole, last) if together > 1 else ():
            yield [at]


def each_vector(k: Builder, width: Value, body: Body) -> None:
    """Emit a loop over a row's vectors."""
    turn = LANES * _PARTS
    several, whole = width // turn * turn, width // LANES * LANES
    for at in k.range(0, several, turn):
        for part in range(_PARTS):
            body(at + part * LANES, None, part)
    for at in k.range(several, whole, LANES):
        body(at, None, 0)
    for _ in k.when(whole < width):
        body(whole, width - whole, 0)


def fold(
    k: Builder,
    width: Value,
    vector: Callable[[Value, Value | None], Value],
    initial: float = 0.0,
    combine: Callable[[Value, Value], Value] = operator.add,
) -> Value:
    """What `vector` makes of a row, vector by vector, combined into one scalar."""
    return fold_rows(k, width, [vector], initial, combine)[0]


def fold_rows(
    k: Builder,
    width: Value,
    vectors: Sequence[Callable[[Value, Value | None], Value]],
    initial: float = 0.0,
    combine: Callable[[Value, Value], Value] = operator.add,
    take_in: Callable[[Value, Value], Value] | None = None,
) -> list[Value]:
    """The same for several rows at a time. `take_in`: how a partial result takes in a vector, if
    not by `combine`."""
    start = k.constant(initial, f32).splat(LANES)
    with k.scope():
        parts = [[k.register(start) for _ in range(_PARTS)] for _ in vectors]

        def take(at: Value, left: Value | None, part: int) -> None:
            for vector, of_row in zip(vectors, parts, strict=True):
                value = vector(at, left)
                if left is not None:
                    # There are no constants that differ from lane to lane, so memory makes the
                    # blend.
                    blend = k.local(f32, LANES)
                    blend.store(start)
                    store_head(value, blend, left)
                    value = blend.load(LANES)
                of_row[part].value = (take_in or combine)(value, of_row[part].value)

        each_vector(k, width, take)
        totals = [reduce(combine, (part.value for part in of_row)) for of_row in parts]
    return [across(total, combine) for total in totals]


# Softmax and LogSoftmax over rows.
#
#     t = scale · x + mask        softmax = e^(t − max t) / Σ e^(t − max t)
#                                 logarithm: (t − max t) − ln Σ e^(t − max t)
#
# In float32; powers below e^-87 count as 0. A row in which all t are minus infinity becomes NaN, as
# the formula and PyTorch have it (attention gives zeros there), and so does one that holds NaN or
# plus infinity.


def _parameters(number: float, x: Affine | None, out: Affine | None) -> npt.NDArray[np.float32]:
    """A number, scale and zero point of x, and 1 / scale and zero point of the output, as far as
    these are of 8 bits."""
    return np.array([number, *(x or ()), *to_store(out)], np.float32)


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
    check_formats((form.x, form.out), TENSORS)
    x, mask, out = (width, 0, width) if strides is None else strides
    return plan_rows(rows, width, x_stride=x, mask_stride=mask, out_stride=out)


def softmax_parameters(
    scale: float = 1.0, x: Affine | None = None, out: Affine | None = None
) -> npt.NDArray[np.float32]:
    """The parameters of `softmax`: what x is multiplied by, and (scale, zero point) of x and of the
    output where they are of 8 bits."""
    return _parameters(scale, x, out)


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


# LayerNorm and RMSNorm over rows.
#
#     out = (x − mean) / √(variance + ε) · weight + bias
#
# Two passes over a row, or two, in the nearest cache: its mean, then the mean square of what is
# left without it, in float32. RMSNorm leaves the mean where it is. A row whose squares overflow is
# scaled, and passed over again.

_TOGETHER = 2  # rows whose sums are made at a time, where one vector register holds 16 lanes
_WIDE = 64  # bytes of such a register
_SCALED = 2.0**-96  # by which rows are multiplied whose squares overflow

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
    check_formats((form.x, form.out), TENSORS)
    x, out = strides or (width, width)
    words, scratch_bytes = plan_rows(rows, width, x_stride=x, out_stride=out)
    return RowsPlan(words, _TOGETHER * scratch_bytes)


def normalize_parameters(
    epsilon: float, x: Affine | None = None, out: Affine | None = None
) -> npt.NDArray[np.float32]:
    """The parameters of `normalize`: ε, and (scale, zero point) of whatever is of 8 bits.

    ValueError: ε is negative.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}")
    return _parameters(epsilon, x, out)


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
            for number, row in zip(numbers, waiting, strict=True):
                rows_of.finish(row, (weight, bias), target + number * out_stride)


class Waiting(NamedTuple):
    """A row that was read: where it is, its mean, or 0, and the factor that normalizes it."""

    place: Value
    mean: Value
    factor: Value


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

    def fetch(self, sources: list[Value], apart: Value) -> list[Waiting]:
        """Bring rows near, so far apart."""
        scratch = [self._scratch + apart * i for i in range(len(sources))]
        copied = self._form.x != "f32"
        places = scratch if copied else sources
        taken = [
            self._taking(source, place if copied else None)
            for source, place in zip(sources, places, strict=True)
        ]
        rows = self._measured(taken, places, self._epsilon)
        triples = zip(rows, sources, scratch, strict=True)
        return [self._without_overflow(row, source, near) for row, source, near in triples]

    def _taking(self, source: Value, place: Value | None, factor: float = 1.0) -> Vectors:
        """How a row is read, times a factor, and left in a place, if there is one."""

        def take(at: Value, left: Value | None) -> Value:
            value = self._x(load_vector(source + at, LANES, left))
            value = value if factor == 1 else value * factor
            if place is not None:
                (place + at).store(value)
            return value

        return take

    def _measured(self, taken: list[Vectors], places: list[Value], epsilon: Value) -> list[Waiting]:
        """Of rows, by how they are read and where they wait then."""
        k, width = self._k, self._width
        count = width.to(f32)

        def without(place: Value, mean: Value) -> Vectors:
            return lambda at, left: load_vector(place + at, LANES, left) - mean

        def square(value: Value, total: Value) -> Value:
            return fma(value, value, total)

        means = [k.constant(0.0, f32)] * len(places)
        if self._form.centred:
            means = [total / count for total in fold_rows(k, width, taken)]
            vectors = [mean.splat(LANES) for mean in means]
            taken = [without(place, mean) for place, mean in zip(places, vectors, strict=True)]
        squares = fold_rows(k, width, taken, take_in=square)
        factors = [1.0 / sqrt(total / count + epsilon) for total in squares]
        return [Waiting(*row) for row in zip(places, means, factors, strict=True)]

    def _without_overflow(self, row: Waiting, source: Value, scratch: Value) -> Waiting:
        """The same of a row whose squares are beyond float32: scaled, it waits in scratch. ε
        vanishes beside it."""
        k = self._k
        registers = [k.register(value) for value in row]
        unusable = select(row.factor > 0.0, k.index(0), k.index(1)) > 0  # for NaN, too
        for _ in k.when(unusable):
            taken = self._taking(source, scratch, _SCALED)
            (scaled,) = self._measured([taken], [scratch], k.constant(0.0, f32))
            for register, value in zip(registers, scaled, strict=True):
                register.value = value
        return Waiting(*(register.value for register in registers))

    def finish(self, row: Waiting, affine: tuple[Value, Value], target: Value) -> None:
        """Normalize a row that waits, and store it."""
        form, mean, factor = self._form, row.mean.splat(LANES), row.factor.splat(LANES)

        def normalized(at: Value, left: Value | None) -> Value:
            value = load_vector(row.place + at, LANES, left)
            value = (value - mean if form.centred else value) * factor
            weight, bias = (
                load_vector(one + at, LANES, left) if there else None
                for one, there in zip(affine, (form.weight, form.bias), strict=True)
            )
            if weight is not None:
                return value * weight if bias is None else fma(value, weight, bias)
            return value if bias is None else value + bias

        self._store_row(self._width, normalized, target)
