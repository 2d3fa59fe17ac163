"""Products of groups of rows, each with a matrix of its own: a mixture of experts."""

from __future__ import annotations

from lowbit.isa.generic import fma, maximum, minimum, select, store_head
from lowbit.isa.types import F32Pointer, Int, U8Pointer, Vector, f32, s32, s64
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.float.operand import Reader
from lowbit.kernels.cpu.shared.formats import load_vector

_ROWS, _VECTORS = 4, 2  # of a micro-tile


@kernel
def grouped_product(
    k: Builder,
    out: F32Pointer,
    x: F32Pointer,
    weight: F32Pointer,
    ends: U8Pointer,
    rows: Int,
    groups: Int,
    k_size: Int,
    n: Int,
    *,
    indices: str,
    weight_kind: str,
) -> None:
    """out[r] = x[r] · weight[g] for the rows r from ends[g - 1], or 0, to before ends[g].

    x: [rows, k_size]; weight: [groups, k_size, n], of `weight_kind`, "f32", "bf16" or "f16"; out:
    [rows, n]; contiguous. ends: of `indices`, "s32" or "s64", ascending. Rows
    behind the last end are 0. Sums run in the order of k.
    """
    lanes = k.isa.vector_bytes // 4
    width = lanes * _VECTORS
    found = ends.cast(s32 if indices == "s32" else s64)
    reader = None if weight_kind == "f32" else Reader(weight_kind, pair=False)
    matrices = weight if reader is None else reader.pointer(weight)
    zero = k.constant(0, s64)
    blocks = (n + (width - 1)) // width
    for item in k.parallel((groups + 1) * blocks):
        group, column = item // blocks, item % blocks * width
        before = (found + maximum(group - 1, zero)).load().to(s64)
        begin = minimum(maximum(select(group > 0, before, zero), zero), rows)
        last = (found + minimum(group, groups - 1)).load().to(s64)
        end = minimum(select(group < groups, last, rows), rows)
        depth = select(group < groups, k_size, zero)  # behind the last group nothing is added
        panel = matrices + (group * (k_size * n) + column)
        whole = begin + maximum(end - begin, zero) // _ROWS * _ROWS
        for step, first, stop in ((_ROWS, begin, whole), (1, whole, end)):
            for row in k.range(first, stop, step):
                tile = x + row * k_size, panel, out + (row * n + column)
                for _ in k.when(column + width < n + 1):
                    _tile(k, tile, reader, (depth, k_size, n), step, lanes, None)
                for _ in k.when(column + width > n):
                    _tile(k, tile, reader, (depth, k_size, n), step, lanes, n - column)


def _tile(
    k: Builder, tile: tuple[Value, Value, Value], reader: Reader | None,
    sizes: tuple[Value, Value, Value], rows: int, lanes: int, left: Value | None,
) -> None:  # fmt: skip
    """Some rows of two vectors, of which only `left` columns exist, if that is given. reader: of
    weights that are no float32."""
    (x, panel, out), (depth, k_size, n) = tile, sizes

    def columns(vector: int) -> Value | None:
        if left is None:
            return None
        zero = k.constant(0, s64)
        return minimum(maximum(left - vector * lanes, zero), k.constant(lanes, s64))

    with k.scope():
        sums = [[k.register(k.zeros(f32, lanes)) for _ in range(_VECTORS)] for _ in range(rows)]
        for at in k.range(0, depth):
            line = panel + at * n
            parts = [load_vector(line + v * lanes, lanes, columns(v)) for v in range(_VECTORS)]
            if reader is not None:
                parts = [reader.widened(part).bits(Vector(f32, lanes)) for part in parts]
            for number, row in enumerate(sums):
                factor = (x + (number * k_size + at)).load().splat(lanes)
                for part, total in zip(parts, row, strict=True):
                    total.value = fma(factor, part, total.value)
        for number, row in enumerate(sums):
            for v, total in enumerate(row):
                place = out + (number * n + v * lanes)
                if left is None:
                    place.store(total.value)
                else:
                    store_head(total.value, place, columns(v))
