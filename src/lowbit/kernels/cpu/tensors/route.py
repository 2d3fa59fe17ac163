"""Rows in the order of the experts that they are sent to, and back."""

from __future__ import annotations

from lowbit.isa.generic import fma, load_head, store_head
from lowbit.isa.types import F32Pointer, Int, S64Pointer, s64
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel

_VECTORS = 4  # of a row that are summed together


@kernel
def route(
    k: Builder,
    rows: S64Pointer,
    places: S64Pointer,
    ends: S64Pointer,
    experts: S64Pointer,
    count: Int,
    each: Int,
    groups: Int,
) -> None:
    """Sort pairs of a row and an expert by the expert, stably, by counting.

    experts: [count], from 0 to before `groups`; pair i is of row i // each. places[i]: where pair i
    went; rows: [count], of the pairs in order; ends: [groups], where those of an expert end.
    """
    for _ in k.parallel(k.index(1)):
        for group in k.range(0, groups):
            (ends + group).store(k.index(0))
        for pair in k.range(0, count):
            counted = ends + (experts + pair).load()
            counted.store(counted.load() + 1)
        total = k.register(k.constant(0, s64))
        for group in k.range(0, groups):
            found = (ends + group).load()
            (ends + group).store(total.value)
            total.value = total.value + found
        for pair in k.range(0, count):
            end = ends + (experts + pair).load()
            place = end.load()
            (places + pair).store(place)
            (rows + place).store(pair // each)
            end.store(place + 1)


@kernel
def routed_sum(
    k: Builder,
    out: F32Pointer,
    x: F32Pointer,
    places: S64Pointer,
    shares: F32Pointer,
    residual: F32Pointer,
    rows: Int,
    each: Int,
    width: Int,
) -> None:
    """out[r] = residual[r] + Σ_j shares[r, j] · x[places[r, j]], in the order of j.

    out, residual: [rows, width]; places, shares: [rows, each]; x: rows of `width`; contiguous.
    """
    lanes = k.isa.vector_bytes // 4
    step = _VECTORS * lanes
    whole = width // step * step
    for row in k.parallel(rows):
        begin, pairs = row * width, row * each
        for at in k.range(0, whole, step):
            starts = [at + i * lanes for i in range(_VECTORS)]
            with k.scope():
                sums = [k.register((residual + begin + one).load(lanes)) for one in starts]
                for pair in k.range(pairs, pairs + each):
                    line = x + (places + pair).load() * width
                    share = (shares + pair).load().splat(lanes)
                    for total, one in zip(sums, starts, strict=True):
                        total.value = fma(share, (line + one).load(lanes), total.value)
                for total, one in zip(sums, starts, strict=True):
                    (out + begin + one).store(total.value)
        for at in k.range(whole, width, lanes):
            with k.scope():
                total = k.register(load_head(residual + begin + at, width - at, lanes))
                for pair in k.range(pairs, pairs + each):
                    line = x + (places + pair).load() * width + at
                    share = (shares + pair).load().splat(lanes)
                    total.value = fma(share, load_head(line, width - at, lanes), total.value)
                store_head(total.value, out + begin + at, width - at)
