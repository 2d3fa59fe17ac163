"""What happens to accumulators before they are stored, in registers.

With stored values a' (u8) and b' (s8) and their zero points, the accumulators hold Σ a'·b', and

    Σ (a' − za)·(b' − zb)  =  Σ a'·b'  −  za·(Σ b' − K·zb)  −  zb·Σ a'

The bracket is folded into the packed operand's column sums; Σ a' is made while a is packed. All
of this wraps modulo 2^32, so it is exact whenever the result fits in 32 bits. (Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
2018, section 2.3.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

from lowbit.isa.generic import (
    extract,
    fma,
    maximum,
    prefetch_write,
    select,
    shuffle,
    store_head,
    stream,
)
from lowbit.isa.types import Scalar, f32, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.formats import (
    FORMATS,
    FOUR,
    LIMITS,
    Convert,
    bfloat16_pair,
    in_turn,
    packs,
    parameters_of,
    quantized,
    storing,
)
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD
from lowbit.kernels.cpu.shared.post_op import WAITING, Apply, Columns, Operands, post_ops


def store_left(k: Builder, value: Value, at: Value, left: Value) -> None:
    """Store the first `left` lanes, none if that is less than 1, all if it is more than those.

    Registers of 512 bits come with masks. Without, LLVM stores bytes one by one, and the masked
    store of dwords takes a Zen 3 core 12 cycles and more; so halves are stored, as the bits of
    `left` say.
    """
    lanes = value.lanes
    half = lanes // 2
    for _ in k.when(left > lanes - 1):
        at.store(value)
    if k.isa.vector_bytes == LINE:
        for _ in k.when(left < lanes):
            store_head(value, at, left)
        return
    with k.scope():
        for _ in k.when((left > 0) & (left < lanes)):
            rest, place = k.register(value), at
            while half:
                for _ in k.when((left & half) > 0):
                    now = rest.value
                    place.store(shuffle(now, now, tuple(range(half))))
                    rest.value = shuffle(now, now, tuple((i + half) % lanes for i in range(lanes)))
                place = place + (left & half)
                half //= 2


# What the output can be, and the type that is stored.
MAXIMA = ("max8", "max8_masked")
OUTPUTS: dict[str, Scalar] = {**FORMATS, **dict.fromkeys(MAXIMA, f32)}
OCTET = 8  # columns that share one maximum
# Of the vectors that wait: what zero points take from sums, what sums are multiplied by, the bias.
_SHIFT, _FACTOR, _BIAS = range(WAITING)
_LARGE = 2.0**96  # a scale by which no sum of 32 bits leaves float32

# (row, vector of accumulators) -> None: finishes and stores part of one row of the output.
Store = Callable[[Value, Value], None]
# Rows of the output, each with vectors of accumulators that are neighbours -> None.
StoreRows = Callable[[list[tuple[Value, list[Value]]]], None]


class Epilogue(NamedTuple):
    """What the epilogue does. It keys the code.

    `a_zero`, `b_zero`: the left operand has zero points per row, the right one per column;
    `uniform`: scales and zero points of all rows are the first. With the output "s32" nothing else
    happens. Otherwise sums become float32, are multiplied by their row's, then by their column's
    scale, go through `post_ops` in order, by name, and are stored as `out`: "f32", "bf16",
    quantized to "u8" or "s8", or as "max8", the greatest float32 of each 8 columns, two for a
    panel, where columns that do not exist count as −∞; or "max8_masked", where those do too whose
    byte, in place of a residual, is 0. `streams`: past the caches, for outputs that
    these could not hold; the output's rows then begin at multiples of a cache line, 64 bytes.
    `prefetch_output`: with a line, the one is fetched that the next step writes in its row.

    `scales`: "both" of them, for sums of integers. "row": sums are float32 and hold the scales of
    the right operand, as do its column sums, float32 too. "none": sums are the product itself.
    `moderate`: the scales of rows, columns and a quantized output all are (numerics.float32).
    Where they are not, the scale of a row above 2^96 comes after its column's, so that a result
    that float32 holds is never infinite on its way.

    If `finite`, a sum with its scales is a finite number, to which nothing else is done; so it need
    not be seen to that NaN is the same bits everywhere. If `folds`, what the scales of sums make
    together is found once for some columns. That a sum is multiplied and a bias that comes first is
    added is one operation then, rounded once. If `steps`, sums become steps of a quantized output
    at once, by the inverse of its scale, and bias and bounds are in steps.
    """

    a_zero: bool = False
    b_zero: bool = False
    post_ops: tuple[str, ...] = ()
    out: str = "s32"
    streams: bool = False
    scales: str = "both"
    uniform: bool = False
    moderate: bool = False
    prefetch_output: bool = False

    @property
    def one_factor(self) -> bool:
        """Whether the scales of a column's sums are one, which float32 holds."""
        return self.moderate and self.uniform and self.scales == "both"

    @property
    def finite(self) -> bool:
        return self.one_factor and self.out == "f32" and not self.post_ops

    @property
    def folds(self) -> bool:
        return self.one_factor and self.out in (*LIMITS, "f32", "bf16")

    @property
    def steps(self) -> bool:
        proportional = (post_ops.get(name).proportional for name in self.post_ops)
        return self.folds and self.out in LIMITS and all(proportional)

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added where sums are multiplied."""
        return self.folds and self.post_ops[:1] == ("bias",)


def columns(
    k: Builder, epilogue: Epilogue, at: Operands, column: Value, lanes: int, rows: int = 1
) -> Store:
    """Load what belongs to `lanes` columns from `column` on; return how to store a row of them; or
    `rows` rows of all columns, of which there are lanes / rows."""
    left = at.columns - column if rows == 1 else k.index(lanes)
    place = Columns(k, at, column, lanes, left, rows=rows)
    finish, numbers = _finishing(epilogue, place)
    convert = _converting(epilogue, numbers)
    target = at.out.cast(OUTPUTS[epilogue.out])
    write = _writing(epilogue, lanes)

    def store(row: Value, accumulators: Value) -> None:
        value = finish(row, accumulators)
        if epilogue.out in MAXIMA:
            mask = at.residual.cast(u8) + column if epilogue.out != "max8" else None
            with k.scope():
                _store_maxima(k, value, lanes, target + row * at.out_stride, column, left, mask)
            return
        value = convert(value)
        start = target + (row * at.out_stride + column)
        if rows > 1:
            _store_rows(place, value, start)
            return
        for _ in k.when(left > lanes - 1):
            write(value, start)
        for _ in k.when(left < lanes):
            store_left(k, value, start, left)

    return store


@dataclass(frozen=True)
class Output:
    """How the sums of a product are stored, by panel."""

    k: Builder
    epilogue: Epilogue
    operands: Operands

    def __call__(self, panel: Value, at: int, lanes: int, rows: int = 1) -> Store:
        """The accumulators of `lanes` columns of a panel from the one at `at` on; or of `rows` rows
        of all columns."""
        column = panel * PANEL + at
        return columns(self.k, self.epilogue, self.operands, column, lanes, rows)

    def begun(self) -> tuple[Output, Callable[[Value, int, int], Value | None]]:
        """For sums that begin with what zero points take from them, if that is the same for all
        rows: how they are stored, and what they begin with, by panel, offset and lanes; None: 0."""
        k, epilogue = self.k, self.epilogue
        if not (epilogue.a_zero and epilogue.uniform) or epilogue.scales == "row":
            return self, lambda panel, offset, lanes: None

        def first(panel: Value, offset: int, lanes: int) -> Value:
            column = panel * PANEL + offset
            place = Columns(k, self.operands, column, lanes, k.index(lanes))
            return k.zeros(s32, lanes) - _shift(place, s32)

        return replace(self, epilogue=epilogue._replace(a_zero=False)), first

    def together(self, vectors: int, lanes: int) -> int:
        """How many rows are best stored at once, of so many vectors each, by `whole`."""
        return max(1, FOUR // vectors) if self._packs(lanes) else 1

    def _packs(self, lanes: int) -> bool:
        """Whether vectors of the output become bytes together."""
        return self.epilogue.out in LIMITS and packs(self.k, lanes)

    def _pairs(
        self, lanes: int, two: list[tuple[Value, int, Value]], left: list[Value | None]
    ) -> bool:
        """Whether two vectors, of a row and a number each, become bfloat16 together."""
        (row, i, _), (next_row, j, _) = two
        whole = row is next_row and left[i] is None and left[j] is None
        return whole and self.epilogue.out == "bf16" and packs(self.k, lanes)

    def make(self, panel: Value, vectors: int, lanes: int, waiting: Value) -> None:
        """Make once what `whole` wants of so many vectors of columns from a panel on."""
        for i in range(vectors):
            column, each = panel * PANEL + i * lanes, self.k.index(lanes)
            place = Columns(self.k, self.operands, column, lanes, each)
            waiting_there = waiting + i * WAITING * lanes
            _finishing(self.epilogue, replace(place, waiting=waiting_there, making=True))

    def whole(
        self, panel: Value, vectors: int, lanes: int, ends: bool = False,
        waiting: Value | None = None,
    ) -> StoreRows:  # fmt: skip
        """The accumulators of so many neighbouring vectors of columns from a panel on, all of which
        exist; if `ends`, but for columns of the last panel. `waiting`: what `make` made."""
        k, epilogue, at = self.k, self.epilogue, self.operands
        starts = [panel * PANEL + i * lanes for i in range(vectors)]
        if epilogue.out in MAXIMA:
            return _one_by_one([columns(k, epilogue, at, start, lanes) for start in starts])
        exist = vectors - PANEL // lanes if ends else vectors
        left = [at.columns - start if i >= exist else None for i, start in enumerate(starts)]
        places = [
            Columns(k, at, start, lanes, k.index(lanes) if end is None else end,
                    waiting=None if waiting is None else waiting + i * WAITING * lanes)
            for i, (start, end) in enumerate(zip(starts, left, strict=True))
        ]  # fmt: skip
        found = [_finishing(epilogue, place) for place in places]
        convert = _converting(epilogue, found[0][1])
        write, target = _writing(epilogue, lanes), at.out.cast(OUTPUTS[epilogue.out])
        prefetched = epilogue.prefetch_output and not ends  # behind which is no step of the row

        def finished(row: Value, which: int, value: Value) -> tuple[Value, Value]:
            place = target + (row * at.out_stride + starts[which])
            return place, found[which][0](row, value)

        def put(value: Value, place: Value, which: int) -> None:
            end = left[which]
            write(value, place) if end is None else store_left(k, value, place, end)

        def claim(place: Value, which: int) -> None:
            if prefetched and which * lanes * OUTPUTS[epilogue.out].bytes % LINE == 0:
                prefetch_write(place + vectors * lanes)

        def store(rows: list[tuple[Value, list[Value]]]) -> None:
            every = [(row, i, value) for row, values in rows for i, value in enumerate(values)]
            while len(every) > 1 and self._packs(lanes):
                some, every = every[:FOUR], every[FOUR:]
                places, values = zip(*(finished(*one) for one in some), strict=True)
                filled = [*values, *values[-1:] * (FOUR - len(values))]
                packed = in_turn(quantized(k, epilogue.out, filled, *found[0][1]))
                runs = [(id(row), left[which] is None) for row, which, _ in some]
                for _, of_row in groupby(range(len(some)), runs.__getitem__):
                    first, *more = of_row
                    several = range(first * lanes, (first + 1 + len(more)) * lanes)
                    bytes_of = shuffle(packed, packed, tuple(several))
                    put(bytes_of, places[first].cast(u8), some[first][1])
            while len(every) > 1 and self._pairs(lanes, every[:2], left):
                (row, i, value), following, *every = every
                place, value = finished(row, i, value)
                place.store(bfloat16_pair(value, finished(*following)[1]))
                claim(place, i)
            for row, i, value in every:
                place, value = finished(row, i, value)
                put(convert(value), place, i)
                claim(place, i)

        return store


def _one_by_one(stores: list[Store]) -> StoreRows:
    def store(rows: list[tuple[Value, list[Value]]]) -> None:
        for row, values in rows:
            for one, value in zip(stores, values, strict=True):
                one(row, value)

    return store


def _writing(epilogue: Epilogue, lanes: int) -> Callable[[Value, Value], object]:
    """How a vector of the output gets to its place: past the caches, if it is a whole line."""
    if epilogue.streams and OUTPUTS[epilogue.out].bytes * lanes == LINE:
        return stream
    return lambda value, place: place.store(value)


def _store_rows(at: Columns, value: Value, start: Value) -> None:
    """Store several rows of all columns: at once where no gap is between them."""
    stride, each = at.operands.out_stride, at.each
    for _ in at.k.when(stride.equals(each)):
        start.store(value)
    for _ in at.k.when((stride < each) | (stride > each)):
        for row in range(at.rows):
            lanes = tuple(range(row * each, row * each + each))
            (start + stride * row).store(shuffle(value, value, lanes))


def _finishing(epilogue: Epilogue, place: Columns) -> tuple[Apply, list[Any]]:
    """Load what belongs to some columns; return what becomes of sums before the conversion to the
    output's type, and the numbers of that type; the inverse of its scale is None, if in values."""
    at = place.operands
    every = [post_ops.get(name) for name in epilogue.post_ops]
    counts = [one.parameters for one in every]
    counts.append(parameters_of(epilogue.out) if epilogue.out in LIMITS else 0)
    ends = [0, *accumulate(counts)]
    given = [(at.parameters + i).load().splat(place.lanes) for i in range(ends[-1])]
    *numbers, last = (given[first:end] for first, end in pairwise(ends))
    if epilogue.steps:
        place, last = replace(place, factor=last[0]), [None, last[1]]
    applied = [_correcting(epilogue, place), _scaling(epilogue, place)]
    for which, (one, some) in enumerate(zip(every, numbers, strict=True)):
        if which or not epilogue.adds_bias:
            applied.append(one.begin(replace(place, numbers=some)))

    def finish(row: Value, accumulators: Value) -> Value:
        value = accumulators
        for apply in applied:
            value = apply(row, value)
        return value

    return finish, last


def _shift(place: Columns, kind: Scalar) -> Value:
    """What a zero point that all rows share takes from the sums of some columns."""
    at = place.operands
    zero = at.row_zero.load().to(kind).splat(place.lanes)
    return zero * place.of_columns(at.column_sum.cast(kind))


def _correcting(epilogue: Epilogue, place: Columns) -> Apply:
    """What zero points take from sums."""
    at = place.operands
    kind = f32 if epilogue.scales == "row" else s32
    shared = None
    if epilogue.a_zero and epilogue.uniform:
        shared = place.once(_SHIFT, kind, lambda: _shift(place, kind))
    own = epilogue.a_zero and not epilogue.uniform
    column_sum = place.of_columns(at.column_sum.cast(kind)) if own else None
    column_zero = place.of_columns(at.column_zero) if epilogue.b_zero else None

    def correct(row: Value, value: Value) -> Value:
        if shared is not None:
            value = value - shared
        if column_sum is not None:
            value = value - place.of_rows(at.row_zero, row).to(kind) * column_sum
        if column_zero is not None:
            value = value - place.of_rows(at.row_sum, row) * column_zero
        return value

    return correct


def _scaling(epilogue: Epilogue, place: Columns) -> Apply:
    """What scales make of sums; where they fold, a bias that is first is added too."""
    at = place.operands
    scales = "none" if epilogue.out == "s32" else epilogue.scales
    uniform = epilogue.uniform and scales != "none"
    first = at.row_scale.load().splat(place.lanes) if uniform else None
    column_scale = place.of_columns(at.column_scale) if scales == "both" else None
    if epilogue.folds:
        assert first is not None
        assert column_scale is not None
        factor = place.once(_FACTOR, f32, lambda: place.scaled(column_scale) * first)
        if not epilogue.adds_bias:
            return lambda row, value: value.to(f32) * factor
        bias = place.once(_BIAS, f32, lambda: place.scaled(place.of_columns(at.bias)))
        return lambda row, value: fma(value.to(f32), factor, bias)

    def scale(row: Value, value: Value) -> Value:
        if scales == "none":
            return value
        row_scale = place.of_rows(at.row_scale, row) if first is None else first
        if column_scale is None:
            return value.to(f32) * row_scale
        if epilogue.moderate and uniform:
            return value.to(f32) * row_scale * column_scale
        # A sum of 32 bits times a large scale can overflow though the other scale makes it small.
        large = row_scale > _LARGE
        value = value.to(f32) * select(large, column_scale, row_scale)
        return value * select(large, row_scale, column_scale)

    return scale


def _converting(epilogue: Epilogue, numbers: list[Any]) -> Convert:
    if epilogue.out == "s32" or epilogue.out in MAXIMA or epilogue.finite:
        return lambda value: value.to(OUTPUTS[epilogue.out])
    return storing(epilogue.out, numbers)


def packable(epilogue: Epilogue) -> bool:
    """Whether `interleaved` serves."""
    operands = {post_ops.get(name).operand for name in epilogue.post_ops}
    return epilogue.out in LIMITS and "residual" not in operands


def interleaved(
    k: Builder, epilogue: Epilogue, at: Operands, column: Value, lanes: int
) -> Callable[[Value, list[Value]], None]:
    """What `columns` is, for four vectors of sums whose columns lie as unpacking leaves them: of
    each 16 columns, vector q has the four from 4q on. They are packed to bytes in order."""
    places = [
        Columns(k, at, column + q * QUAD, lanes, k.index(lanes), fours=True) for q in range(QUAD)
    ]
    found = [_finishing(epilogue, place) for place in places]
    target, left = at.out.cast(u8), at.columns - column

    def store(row: Value, sums: list[Value]) -> None:
        finished = [finish(row, v) for (finish, _), v in zip(found, sums, strict=True)]
        values = quantized(k, epilogue.out, finished, *found[0][1])
        start = target + (row * at.out_stride + column)
        store_left(k, values, start, left)

    return store


def _store_maxima(
    k: Builder, value: Value, lanes: int, out: Value, column: Value, left: Value,
    mask: Value | None,
) -> None:  # fmt: skip
    """Store the greatest number of each 8 lanes, of which the first `left` count, and with a mask
    those whose byte is not 0.

    Of fewer lanes than 8, the later ones add to what the earlier ones, stored before, left.
    """
    if mask is not None:
        value = select(mask.load(lanes).to(s32) > 0, value, k.constant(float("-inf"), value.type))
    counted = k.register(value)
    for _ in k.when(left < lanes):
        # There are no constants that differ from lane to lane, so memory makes the blend.
        blend = k.local(f32, lanes)
        blend.store(k.constant(float("-inf"), f32).splat(lanes))
        store_head(value, blend, left)
        counted.value = blend.load(lanes)
    together = min(lanes, OCTET)
    greatest, half = counted.value, together // 2
    while half:
        turned = shuffle(greatest, greatest, tuple(lane ^ half for lane in range(lanes)))
        greatest, half = maximum(greatest, turned), half // 2
    place = out + column // OCTET
    for group in range(lanes // together):
        best = k.register(extract(greatest, group * together))
        if lanes < OCTET:
            for _ in k.when(column % OCTET > 0):
                best.value = maximum(best.value, place.load())
        (place + group).store(best.value)
