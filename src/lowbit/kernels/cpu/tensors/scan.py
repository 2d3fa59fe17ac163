"""Running sums of each row."""

from __future__ import annotations

from lowbit.isa.types import Int, U8Pointer, f32, s32, s64
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel

ELEMENTS = {"f32": f32, "s32": s32, "s64": s64}


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

    exclusive: without x[r, i]; reverse: of x[r, i:]. What the rounding of a float32 sum takes away
    is added to the next number (Kahan 1965, doi:10.1145/363707.363723).
    """
    element = ELEMENTS[format]
    source, target = x.cast(element), out.cast(element)
    for row in k.parallel(rows):
        total, lost = (k.register(k.constant(0, element)) for _ in range(2))
        for number in k.range(0, count):
            at = row * count + (count - 1 - number if reverse else number)
            given = (source + at).load()
            if exclusive:
                (target + at).store(total.value)
            if format == "f32":
                given = given - lost.value
                new = total.value + given
                lost.value = (new - total.value) - given
                total.value = new
            else:
                total.value = total.value + given
            if not exclusive:
                (target + at).store(total.value)
