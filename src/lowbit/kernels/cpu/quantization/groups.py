"""Scales, zero points and integers of groups of float32: numerics.quantize, where floats lie.

As many groups as a vector has lanes are taken together. They are read once, into memory of this
thread in which each lane is a group, and everything is found there.
"""

from __future__ import annotations

from lowbit.isa.generic import load_head, maximum, minimum, store_head
from lowbit.isa.types import (
    F32Pointer,
    Int,
    S32Pointer,
    S64Pointer,
    U8Pointer,
    Vector,
    f32,
    s32,
    u8,
)
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.quantization.search import Groups, Search, parameters, steps
from lowbit.kernels.cpu.rows.input_format import across
from lowbit.kernels.cpu.shared.formats import load_vector, store_vector, transposed
from lowbit.kernels.cpu.tensors.loops import by_vectors
from lowbit.numerics import IntFormat
from lowbit.numerics.ranges import PARTS, TURN

MOST = 1 << 15  # elements of a group: what the search's bounds are made for
_INFINITY = 0x7F800000  # the bits of
_LANES = 16  # of the widest vectors


def scratch_floats(size: int) -> int:
    """What a thread needs for groups of so many elements."""
    return 2 * -(-size // TURN) * TURN * _LANES


@kernel
def quantize_groups(
    k: Builder,
    x: F32Pointer,
    group_stride: Int,
    stride: Int,
    groups: Int,
    size: Int,
    scale: F32Pointer,
    zero: S32Pointer,
    values: U8Pointer,
    scratch: F32Pointer,
    thread_floats: Int,
    plan: S64Pointer,
    plan_count: Int,
    bad: S32Pointer,
    *,
    fmt: IntFormat,
    symmetric: bool,
    searched: bool,
    along: str,
) -> None:
    """scale, zero [groups] and values, of x [groups, size], both with the same strides.

    `along` names the axis whose stride is 1, "groups" or "elements". With `searched` the range is
    that of least squared error, else from the least to the greatest element. Where an element is
    not finite, bad[0] becomes 1, and its group's results mean nothing. plan: `leaves` of size,
    s64 [plan_count, 2], for a search that is not symmetric. scratch: of each thread thread_floats.
    """
    lanes = k.isa.vector_bytes // f32.bytes
    own = scratch + k.thread() * thread_floats
    for block in k.parallel((groups + (lanes - 1)) // lanes):
        first = block * lanes
        count = minimum(groups - first, k.index(lanes))
        read = _Read(k, own, size, count, lanes)
        with k.scope():
            low, high, greatest = read.run(x + first * group_stride, group_stride, stride, along)
        for _ in k.when(greatest > _INFINITY - 1):
            bad.store(k.constant(1, s32))
        found, zeros = parameters(k, low, high, fmt, symmetric)
        if searched:
            units = own + (size + (TURN - 1)) // TURN * TURN * lanes
            for at in k.range(0, read.whole_parts):
                (units + at * lanes).store((own + at * lanes).load(lanes) / found)
            known = Groups(k, own, units, size, found, zeros, low / found, high / found)
            found, zeros = Search(known, fmt, symmetric).run(plan, plan_count)
        store_head(found, scale + first, count)
        store_head(zeros.to(s32), zero + first, count)
        corner = values + first * group_stride
        if along == "groups":
            for at in k.range(0, size):
                made = _bytes_of((own + at * lanes).load(lanes), found, zeros, fmt)
                _store(k, made, corner + at * stride, count)
        else:
            for group in k.range(0, count):
                s, z = (scale + (first + group)).load(), (zero + (first + group)).load()
                offset = group * group_stride
                _write_row(k, x + first * group_stride + offset, corner + offset, size,
                           (s.splat(lanes), z.to(f32).splat(lanes)), fmt)  # fmt: skip


class _Read:
    """`count` groups of `size` elements, brought to `own`, a vector of them for each element;
    behind the last are zeros, up to a multiple of `PARTS`."""

    def __init__(self, k: Builder, own: Value, size: Value, count: Value, lanes: int) -> None:
        self._k, self._own, self._size, self._count, self._lanes = k, own, size, count, lanes

    @property
    def whole_parts(self) -> Value:
        return (self._size + (PARTS - 1)) // PARTS * PARTS

    def run(
        self, corner: Value, group_stride: Value, stride: Value, along: str
    ) -> tuple[Value, Value, Value]:
        """The least and the greatest element of each, or 0; the bits of the greatest |x| of all."""
        k, lanes = self._k, self._lanes
        self._low, self._high = (k.register(k.zeros(f32, lanes)) for _ in range(2))
        self._bits = k.register(k.zeros(s32, lanes))
        if along == "groups":
            self._columns(corner, stride)
        else:
            self._rows(corner, group_stride)
        return self._low.value, self._high.value, across(self._bits.value, maximum)

    def _put(self, at: Value, vector: Value) -> None:
        (self._own + at * self._lanes).store(vector)
        self._low.value = minimum(vector, self._low.value)
        self._high.value = maximum(vector, self._high.value)
        bits = vector.bits(Vector(s32, self._lanes)) & (2**31 - 1)
        self._bits.value = maximum(bits, self._bits.value)

    def _columns(self, corner: Value, stride: Value) -> None:
        """From where groups are neighbours."""
        k, lanes = self._k, self._lanes
        for at in k.range(0, self._size):
            for _ in k.when(self._count.equals(lanes)):
                self._put(at, (corner + at * stride).load(lanes))
            for _ in k.when(self._count < lanes):
                self._put(at, load_head(corner + at * stride, self._count, lanes))
        for at in k.range(self._size, self.whole_parts):
            self._put(at, k.zeros(f32, lanes))

    def _rows(self, corner: Value, stride: Value) -> None:
        """As many elements of as many groups, moved across the diagonal; the last group stands for
        those that do not exist."""
        lanes, size = self._lanes, self._size
        last = self._count - 1
        rows = [corner + minimum(self._k.index(i), last) * stride for i in range(lanes)]
        whole = size // lanes * lanes
        for at in self._k.range(0, whole, lanes):
            for lane, vector in enumerate(transposed([(row + at).load(lanes) for row in rows])):
                self._put(at + lane, vector)
        for _ in self._k.when(whole < size):
            loaded = [load_head(row + whole, size - whole, lanes) for row in rows]
            for lane, vector in enumerate(transposed(loaded)):
                self._put(whole + lane, vector)


def _bytes_of(x: Value, scale: Value, zero: Value, fmt: IntFormat) -> Value:
    """The integers of a vector, u8."""
    return (steps(x, scale, zero, fmt).to(s32) + zero.to(s32)).to(u8)


def _store(k: Builder, made: Value, target: Value, count: Value) -> None:
    """As many lanes as there are; not all machines mask bytes."""
    lanes = made.lanes
    for _ in k.when(count > lanes - 1):
        target.store(made)
    for _ in k.when(count < lanes):
        store_head(made, target, count)


def _write_row(
    k: Builder, source: Value, target: Value, size: Value, how: tuple[Value, Value], fmt: IntFormat
) -> None:
    """The integers of one group, by its scale and zero point in every lane."""
    lanes = how[0].lanes

    def some(at: Value, lanes: int, together: int, left: Value | None) -> None:
        made = _bytes_of(load_vector(source + at, lanes, left), *how, fmt)
        store_vector(made, target + at, left)

    by_vectors(k, size, lanes, 1, some)
