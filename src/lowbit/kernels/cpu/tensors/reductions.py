"""Sums, means and maxima: of an axis, of windows, and up to each number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lowbit.isa.generic import fma, maximum, minimum, sqrt
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
    Scalar,
    U8Pointer,
    Vector,
    element_of,
    f32,
    f64,
    s32,
    s64,
    u64,
    with_element,
)
from lowbit.isa.value import Register, Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    LIMITS,
    WHOLE,
    Convert,
    dequantizing,
    load_vector,
    parameters_of,
    store_vector,
    storing,
)
from lowbit.kernels.cpu.shared.functions import not_finite, rarely, rounded
from lowbit.kernels.cpu.shared.post_op import keeping_nan
from lowbit.kernels.cpu.tensors.indexing import ELEMENTS
from lowbit.kernels.cpu.tensors.integers import quotient
from lowbit.kernels.cpu.tensors.loops import TOGETHER, by_vectors

# What sums, means and maxima have in common, wherever the numbers come from.


class Reduction(NamedTuple):
    """What is made of many numbers. It keys the code.

    kind: "sum", "mean", "max", of integers "prod", or, of floats, "norm", the root of the sum of
    squares. format, out: of input and output. requantized: whether maxima of integers are
    converted; if not, input and output have one format, scale and zero point, and what is stored is
    compared. Sums of 8-bit integers are exact, in 32 bits. Integers that stand for themselves, of
    `WHOLE`, are computed as such, in a single format, and wrap; a mean has no fraction, and is of a
    sum in 64 bits. Where a sum of floats leaves float32, it is made in float64.
    """

    kind: str
    format: str
    out: str
    requantized: bool = False

    @property
    def whole(self) -> bool:
        return self.format in WHOLE

    @property
    def converted(self) -> bool:
        if self.whole:
            return False
        return self.kind != "max" or self.requantized

    @property
    def computed(self) -> Scalar:
        """What is computed with."""
        if self.whole:
            kind = WHOLE[self.format]
            wide = u64 if kind.kind == "u" else s64
            return wide if self.kind == "mean" else kind
        if self.format not in LIMITS:
            return f32
        return FORMATS[self.format] if self.kind == "max" else s32

    def pointers(self, x: Value, out: Value) -> tuple[Value, Value]:
        """To input and output."""
        kinds = FORMATS | WHOLE
        return x.cast(kinds[self.format]), out.cast(kinds[self.out])


# Makes a loop over numbers: scalars, or vectors of so many columns.
Numbers = Callable[[], Iterator[Value]]
_LEAST_SQUARES = 2.0**-100  # a sum of squares below which some were not normal


class Reducer:
    """A reduction in a kernel.

    parameters: scale and zero point of an input of integers, 1 / scale and zero point of an 8-bit
    output; nothing where maxima are not converted. lanes: of what is finished; 0 for scalars.
    """

    def __init__(self, k: Builder, reduction: Reduction, parameters: Value, lanes: int) -> None:
        self._k, self._reduction, self._lanes = k, reduction, lanes
        numbers: list[Value] = []
        counts = [parameters_of(name) for name in (reduction.format, reduction.out)]
        for i in range(sum(counts) if reduction.converted else 0):
            number = (parameters + i).load()
            numbers.append(number.splat(lanes) if lanes else number)
        self._given = numbers[: counts[0]]
        self._stored: Convert = lambda value: value.to((FORMATS | WHOLE)[reduction.out])
        if reduction.converted:
            self._stored = storing(reduction.out, numbers[counts[0] :])

    @property
    def _floats(self) -> bool:
        """Whether float32 is summed."""
        return self._reduction.kind != "max" and self._reduction.computed == f32

    def start(self, lanes: int) -> Value:
        """What changes nothing."""
        kind = self._reduction.computed
        start = {"max": float("-inf"), "prod": 1.0}.get(self._reduction.kind, 0.0)
        if not kind.is_float:
            least = -(2 ** (kind.bits - 1)) if kind.kind == "s" else 0
            start = least if self._reduction.kind == "max" else int(start)
        return self._k.constant(start, Vector(kind, lanes) if lanes else kind)

    def loaded(self, value: Value) -> Value:
        return value.to(self._reduction.computed)

    def combine(self, a: Value, b: Value) -> Value:
        """The sum, the product, or the greater of both: NaN if one is."""
        if self._reduction.kind == "prod":
            return a * b
        if self._reduction.kind != "max":
            return a + b
        greater = maximum(a, b)
        return keeping_nan(a, greater) if element_of(a.type) == f32 else greater

    def include(self, total: Value, number: Value) -> Value:
        """What becomes of the others and one more number."""
        if self._reduction.kind == "norm":
            return fma(number, number, total)
        return self.combine(total, number)

    def take(self, values: Sequence[Register], source: Value, left: Value | None = None) -> None:
        """Combine vectors with what lies from `source` on, of which the first `left` exist."""
        for register in values:
            lanes = register.value.lanes
            read = self.loaded(load_vector(source, lanes, left))
            register.value = self.include(register.value, read)
            source = source + lanes

    def finish(
        self, value: Value, count: Value, divisor: Value | None, numbers: Numbers | None = None
    ) -> Value:
        """What is stored, of `count` numbers; a mean is their sum over `divisor`. Both s32.
        numbers: all of them, from which a sum that left float32 on its way is made again."""
        if self._reduction.kind == "max":
            if self._reduction.requantized:
                value = dequantizing(self._reduction.format, self._given)(value)
            return self._stored(value)
        if self._given:
            scale, zero = self._given
            value = (value - self._every(count) * rounded(zero)).to(f32) * scale
        made = self._from_sum(value, divisor)
        if numbers is not None and self._floats:
            lost = not_finite(value)
            if self._reduction.kind == "norm":
                lost = lost | (value < _LEAST_SQUARES)
            (made,) = rarely(lost, [made], lambda: [self._in_float64(made, divisor, numbers)])
        return self._stored(made)

    def _from_sum(self, value: Value, divisor: Value | None) -> Value:
        """The result, of a sum."""
        if self._reduction.kind == "norm":
            return sqrt(value)
        if self._reduction.kind == "mean" and divisor is not None:
            numbers = self._every(divisor).to(element_of(value.type))
            return quotient(value, numbers) if self._reduction.whole else value / numbers
        return value

    def _in_float64(self, like: Value, divisor: Value | None, numbers: Numbers) -> Value:
        total = self._k.register(self._k.constant(0.0, with_element(like.type, f64)))
        for number in numbers():
            wide = self.loaded(number).to(f64)
            term = wide * wide if self._reduction.kind == "norm" else wide
            total.value = total.value + term
        return self._from_sum(total.value, divisor).to(f32)

    def _every(self, number: Value) -> Value:
        return number.splat(self._lanes) if self._lanes else number


# Sums, means and maxima of tensors [outer, count, inner] over the axis in the middle.

_LANES, _VECTORS = 16, 2  # of a row: the same partial sums on every instruction set
_WIDE_LANES = 8  # of 64 bits: sums of integers do not depend on it
_SHORT = 64  # numbers of a column that are added one after another; then their sums are
_ROW_BLOCK, _COLUMN_BLOCK = 16, 256  # of an item


@kernel
def reduce_rows(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    parameters: F32Pointer,
    rows: Int,
    count: Int,
    *,
    reduction: Reduction,
) -> None:
    """out[r] = the reduction of x[r, :count], contiguous. parameters: as in `Reducer`.

    A row's numbers are added in 32 parts, of every 32nd number each, then the parts, halved again
    and again, then what a part of 32 is not filled by.
    """
    reducer = Reducer(k, reduction, parameters, 0)
    source, target = reduction.pointers(x, out)
    lanes = _WIDE_LANES if reduction.computed.bytes > 4 else _LANES
    width = lanes * _VECTORS
    whole = count // width * width
    for item in k.parallel((rows + (_ROW_BLOCK - 1)) // _ROW_BLOCK):
        for row in k.range(item * _ROW_BLOCK, minimum((item + 1) * _ROW_BLOCK, rows)):
            start = source + row * count
            with k.scope():
                parts = [k.register(reducer.start(lanes)) for _ in range(_VECTORS)]
                for at in k.range(0, whole, width):
                    reducer.take(parts, start + at)
                first, second = parts
                both = reducer.combine(first.value, second.value)
                total = k.register(across(both, reducer.combine))
                for at in k.range(whole, count):
                    total.value = reducer.include(total.value, reducer.loaded((start + at).load()))

                def numbers(start: Value = start) -> Iterator[Value]:
                    for at in k.range(0, count):
                        yield (start + at).load()

                many = count.to(s32)
                (target + row).store(reducer.finish(total.value, many, many, numbers))


@kernel
def reduce_columns(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    parameters: F32Pointer,
    outer: Int,
    count: Int,
    inner: Int,
    *,
    reduction: Reduction,
) -> None:
    """out[o, i] = the reduction of x[o, :count, i], contiguous. parameters: as in `Reducer`.

    A column's numbers are added 64 at a time, and then these sums.
    """
    lanes = k.isa.vector_bytes // max(4, reduction.computed.bytes)
    reducer = Reducer(k, reduction, parameters, lanes)
    source, target = reduction.pointers(x, out)
    blocks = (inner + (_COLUMN_BLOCK - 1)) // _COLUMN_BLOCK
    many = count.to(s32)
    for item in k.parallel(outer * blocks):
        image, begin = item // blocks, item % blocks * _COLUMN_BLOCK
        corner, place = source + image * count * inner + begin, target + image * inner + begin

        def some(
            at: Value,
            lanes: int,
            together: int,
            left: Value | None,
            corner: Value = corner,
            place: Value = place,
        ) -> None:
            with k.scope():
                totals = [k.register(reducer.start(lanes)) for _ in range(together)]
                parts = [k.register(reducer.start(lanes)) for _ in range(together)]
                for first in k.range(0, count, _SHORT):
                    for part in parts:
                        part.value = reducer.start(lanes)
                    for row in k.range(first, minimum(first + _SHORT, count)):
                        reducer.take(parts, corner + row * inner + at, left)
                    for total, part in zip(totals, parts, strict=True):
                        total.value = reducer.combine(total.value, part.value)
                for number, total in enumerate(totals):
                    first = at + number * lanes

                    def numbers(first: Value = first) -> Iterator[Value]:
                        for row in k.range(0, count):
                            yield load_vector(corner + row * inner + first, lanes, left)

                    made = reducer.finish(total.value, many, many, numbers)
                    store_vector(made, place + first, left)

        by_vectors(k, minimum(inner - begin, k.index(_COLUMN_BLOCK)), lanes, TOGETHER, some)


# Maxima and means over windows of tensors [batch, pixels, channels].

_NUMBERS = 32768  # that an item reads, about


def pool_block(taps: int, channels: int) -> int:
    """How many pixels of the output an item should have."""
    return max(1, _NUMBERS // max(1, taps * channels))


@kernel
def pool(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    places: S32Pointer,
    divisors: S32Pointer,
    parameters: F32Pointer,
    batch: Int,
    x_pixels: Int,
    pixels: Int,
    taps: Int,
    channels: Int,
    x_stride: Int,
    out_stride: Int,
    block: Int,
    *,
    reduction: Reduction,
) -> None:
    """out[b, p] = the reduction of x[b, places[p, t]] over the taps t, channel by channel.

    places: int32 [pixels, taps], negative where a tap does not count; divisors: int32 [pixels], of
    means. x, out: [batch, x_pixels or pixels, channels], pixels
    `x_stride` and `out_stride` elements apart, channels contiguous. parameters: as in `Reducer`.
    block: the pixels of an item. Without taps that count a maximum is the least number, a sum 0.
    """
    one_byte = reduction.computed.bytes == 1 and not reduction.requantized
    lanes = k.isa.vector_bytes // (1 if one_byte else max(4, reduction.computed.bytes))
    reducer = Reducer(k, reduction, parameters, lanes)
    source, target = reduction.pointers(x, out)
    blocks = (pixels + (block - 1)) // block
    for item in k.parallel(batch * blocks):
        image, begin = item // blocks, item % blocks * block
        corner = source + image * x_pixels * x_stride
        for pixel in k.range(begin, minimum(begin + block, pixels)):
            window, place = places + pixel * taps, target + (image * pixels + pixel) * out_stride
            divisor = (divisors + pixel).load() if reduction.kind == "mean" else None

            def some(
                at: Value,
                lanes: int,
                count: int,
                left: Value | None,
                corner: Value = corner,
                window: Value = window,
                place: Value = place,
                divisor: Value | None = divisor,
            ) -> None:
                with k.scope():
                    values = [k.register(reducer.start(lanes)) for _ in range(count)]
                    taken = k.register(k.constant(0, s32))
                    for tap in k.range(0, taps):
                        where = (window + tap).load().to(s64)
                        for _ in k.when(where > -1):
                            taken.value = taken.value + 1
                            reducer.take(values, corner + where * x_stride + at, left)
                    for number, value in enumerate(values):
                        made = reducer.finish(value.value, taken.value, divisor)
                        store_vector(made, place + at + number * lanes, left)

            by_vectors(k, channels, lanes, TOGETHER, some, one_byte)


# Running sums of each row.


@kernel
def running_sums(
    k: Builder,
    out: U8Pointer,
    x: U8Pointer,
    rows: Int,
    count: Int,
    *,
    format: str,
    exclusive: bool,
    reverse: bool,
) -> None:
    """out[r, i] = the sum of x[r, :i + 1], both [rows, count] of one of `ELEMENTS`, contiguous.

    exclusive: without x[r, i]; reverse: of x[r, i:]. float32 is summed in float64: a sum that
    overflows does not spoil later ones, and each is rounded once.
    """
    element = ELEMENTS[format]
    wide = f64 if format == "f32" else element
    source, target = x.cast(element), out.cast(element)
    for row in k.parallel(rows):
        total = k.register(k.constant(0, wide))
        for number in k.range(0, count):
            at = row * count + (count - 1 - number if reverse else number)
            given = (source + at).load()
            if exclusive:
                (target + at).store(total.value.to(element))
            total.value = total.value + given.to(wide)
            if not exclusive:
                (target + at).store(total.value.to(element))
