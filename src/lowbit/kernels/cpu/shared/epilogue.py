"""What happens to accumulators before they are stored, in registers.

With stored values a' (u8) and b' (s8) and their zero points, the accumulators hold Σ a'·b', and

    Σ (a' − za)·(b' − zb)  =  Σ a'·b'  −  za·(Σ b' − K·zb)  −  zb·Σ a'

The bracket is folded into the packed operand's column sums; Σ a' is made while a is packed. All
of this wraps modulo 2^32, so it is exact whenever the result fits in 32 bits. (Jacob et al.,
"Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
2018, section 2.3.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lowbit.isa.generic import extract, load_head, maximum, minimum, shuffle, store_head, stream
from lowbit.isa.types import Scalar, bf16, f32, s8, s32, u8
from lowbit.jit.builder import Builder
from lowbit.jit.value import Value
from lowbit.kernels.cpu.shared.functions import FUNCTIONS, canonical, clamp, rounded
from lowbit.kernels.cpu.shared.layout import LINE
from lowbit.numerics.float32 import float32_number

# (row, vector of accumulators) -> None: finishes and stores part of one row of the output.
Store = Callable[[Value, Value], None]


@dataclass(frozen=True)
class Clamp:
    """A step that bounds values: at least `low`, at most `high`, numbers within float32.

    TypeError, ValueError: they are no such numbers, or in the wrong order.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            number = float32_number(getattr(self, name), f"{name} of Clamp")
            object.__setattr__(self, name, number)
        if not self.low <= self.high:
            raise ValueError(f"{self} has its bounds in the wrong order, or NaN among them")


# "bias" and "residual" add an operand, the others are functions of one number.
STEPS = ("bias", "residual", *FUNCTIONS)
Step = str | Clamp
_PARAMETERS = {"clamp": 2, "u8": 2, "s8": 2}  # numbers that a step or an output is given


def structure_of(steps: tuple[Step, ...]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """What is code of some steps, their names, and what is not: their numbers."""
    names = tuple("clamp" if isinstance(step, Clamp) else step for step in steps)
    bounds = (step for step in steps if isinstance(step, Clamp))
    return names, tuple(bound for step in bounds for bound in (step.low, step.high))


# What the output can be, and the type that is stored.
OUTPUTS: dict[str, Scalar] = {"s32": s32, "f32": f32, "bf16": bf16, "u8": u8, "s8": s8, "max8": f32}
MAX_GROUP = 8  # columns that share one maximum


class Epilogue(NamedTuple):
    """What the epilogue does. It keys the code.

    `a_zero`, `b_zero`: the left operand has zero points per row, the right one per column. With
    the output "s32" nothing else happens. Otherwise sums become float32, are multiplied by their
    row's, then by their column's scale, go through `steps` in order, named as in STEPS or
    "clamp", whose bounds are numbers of the call, and are stored as `out`:
    "f32", "bf16", quantized to "u8" or "s8", or as "max8", the greatest float32 of each 8 columns,
    two for a panel, where columns that do not exist count as −∞. `streams`: past the caches, for
    outputs that these could not hold; the output's rows then begin at multiples of a cache line,
    64 bytes.

    `scales`: "both" of them, for sums of integers. "row": sums are float32 and hold the scales of
    the right operand, as do its column sums, float32 too. "none": sums are the product itself.
    """

    a_zero: bool = False
    b_zero: bool = False
    steps: tuple[str, ...] = ()
    out: str = "s32"
    streams: bool = False
    scales: str = "both"


@dataclass(frozen=True)
class Operands:
    """Where the epilogue's operands are: one entry a row, or one a column (padded to a panel).

    `residual` has the output's shape. `parameters` are float32 numbers: the bounds of each
    "clamp", step by step; then, of a quantized output, the inverse of its scale and its zero point.
    """

    row_zero: Value
    row_sum: Value
    row_scale: Value
    column_sum: Value
    column_zero: Value
    column_scale: Value
    bias: Value
    residual: Value
    residual_stride: Value
    parameters: Value
    out: Value
    out_stride: Value
    columns: Value


def columns(k: Builder, epilogue: Epilogue, at: Operands, column: Value, lanes: int) -> Store:
    """Load what belongs to `lanes` columns from `column` on; return how to store a row of them."""
    scales = "none" if epilogue.out == "s32" else epilogue.scales
    kind = f32 if epilogue.scales == "row" else s32
    column_sum = (at.column_sum.cast(kind) + column).load(lanes) if epilogue.a_zero else None
    column_zero = (at.column_zero + column).load(lanes) if epilogue.b_zero else None
    column_scale = (at.column_scale + column).load(lanes) if scales == "both" else None
    bias = (at.bias + column).load(lanes) if "bias" in epilogue.steps else None
    *numbers, for_out = _parameters(epilogue, at, lanes)
    convert = _conversion(epilogue.out, for_out)
    left = at.columns - column
    target = at.out.cast(OUTPUTS[epilogue.out])

    def step(row: Value, value: Value, what: str, given: list[Value]) -> Value:
        if what == "clamp":
            return clamp(value, *given)
        if what == "bias":
            assert bias is not None
            return value + bias
        if what == "residual":
            place = at.residual + (row * at.residual_stride + column)
            return value + load_head(place, left, lanes)
        return FUNCTIONS[what](value)

    def store(row: Value, accumulators: Value) -> None:
        value = accumulators
        if column_sum is not None:
            value = value - (at.row_zero + row).load().to(kind).splat(lanes) * column_sum
        if column_zero is not None:
            value = value - (at.row_sum + row).load().splat(lanes) * column_zero
        if scales != "none":
            value = value.to(f32) * (at.row_scale + row).load().splat(lanes)
        if column_scale is not None:
            value = value * column_scale
        for what, given in zip(epilogue.steps, numbers, strict=True):
            value = step(row, value, what, given)
        if epilogue.out == "max8":
            with k.scope():
                _store_maxima(k, value, lanes, target + row * at.out_stride, column, left)
            return
        value = convert(value)
        place = target + (row * at.out_stride + column)
        whole_line = OUTPUTS[epilogue.out].bytes * lanes == LINE
        for _ in k.when(left > lanes - 1):
            if epilogue.streams and whole_line:
                stream(value, place)
            else:
                place.store(value)
        for _ in k.when(left < lanes):
            store_head(value, place, left)

    return store


def _store_maxima(
    k: Builder, value: Value, lanes: int, out: Value, column: Value, left: Value
) -> None:
    """Store the greatest number of each 8 lanes, of which the first `left` count.

    Of fewer lanes than 8, the later ones add to what the earlier ones, stored before, left.
    """
    counted = k.register(value)
    for _ in k.when(left < lanes):
        # There are no constants that differ from lane to lane, so memory makes the blend.
        blend = k.local(f32, lanes)
        blend.store(k.constant(float("-inf"), f32).splat(lanes))
        store_head(value, blend, left)
        counted.value = blend.load(lanes)
    together = min(lanes, MAX_GROUP)
    greatest, half = counted.value, together // 2
    while half:
        turned = shuffle(greatest, greatest, tuple(lane ^ half for lane in range(lanes)))
        greatest, half = maximum(greatest, turned), half // 2
    place = out + column // MAX_GROUP
    for group in range(lanes // together):
        best = k.register(extract(greatest, group * together))
        if lanes < MAX_GROUP:
            for _ in k.when(column % MAX_GROUP > 0):
                best.value = maximum(best.value, place.load())
        (place + group).store(best.value)


def _parameters(epilogue: Epilogue, at: Operands, lanes: int) -> list[list[Value]]:
    """The numbers that each step is given, and in the end the output."""
    found, place = [], at.parameters
    for what in (*epilogue.steps, epilogue.out):
        count = _PARAMETERS.get(what, 0)
        found.append([(place + i).load().splat(lanes) for i in range(count)])
        place = place + count
    return found


def _conversion(out: str, given: list[Value]) -> Callable[[Value], Value]:
    """From float32 to what is stored. Quantizing clamps first, so that rounding cannot leave."""
    if out == "bf16":
        return lambda value: value.to(bf16)
    if out == "f32":
        return canonical
    if out not in ("u8", "s8"):
        return lambda value: value
    inverse, zero = given
    least, greatest = (limit - zero for limit in ((0.0, 255.0) if out == "u8" else (-128.0, 127.0)))
    whole_zero = rounded(zero)

    def quantized(value: Value) -> Value:
        steps = minimum(maximum(value * inverse, least), greatest)
        return (rounded(steps) + whole_zero).to(OUTPUTS[out])

    return quantized
