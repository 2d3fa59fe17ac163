"""Maxima and means over windows of tensors [batch, pixels, channels]."""

from __future__ import annotations

from lowbit.isa.generic import minimum
from lowbit.isa.types import F32Pointer, Int, S32Pointer, U8Pointer, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import FORMATS, store_vector
from lowbit.kernels.cpu.tensors.loops import by_vectors
from lowbit.kernels.cpu.tensors.reduction import Reducer, Reduction

_TOGETHER = 4  # vectors of channels that pass the taps together
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
    lanes = k.isa.vector_bytes // (1 if one_byte else 4)
    reducer = Reducer(k, reduction, parameters, lanes)
    source, target = x.cast(FORMATS[reduction.format]), out.cast(FORMATS[reduction.out])
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

            by_vectors(k, channels, lanes, _TOGETHER, some, one_byte)
