"""Vectors of which only the first lanes are stored."""

from __future__ import annotations

from lowbit.isa.generic import shuffle, store_head
from lowbit.isa.types import Vector
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.kernels.cpu.shared.layout import LINE


def store_left(k: Builder, value: Value, at: Value, left: Value) -> None:
    """Store the first `left` lanes, none if that is less than 1, all if it is more than those.

    Registers of 512 bits come with masks. Without, LLVM stores bytes one by one, and the masked
    store of dwords takes a Zen 3 core 12 cycles and more; so halves are stored, as the bits of
    `left` say.
    """
    assert isinstance(value.type, Vector)
    lanes = value.type.lanes
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
