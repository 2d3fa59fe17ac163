"""What PTX instructions compute, on vectors of all threads of a block."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Compute = Callable[..., Array]


def dtype_of(suffix: str) -> np.dtype[Any]:
    """The dtype of a type suffix: "s32", "b64", "f32", "pred". KeyError for another."""
    return _TYPES[suffix]


_TYPES = {
    **{f"{letter}{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64) for letter in "bu"},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
    "pred": np.dtype(bool),
}


def _divide(a: Array, b: Array) -> Array:
    """Division that rounds to zero."""
    if a.dtype.kind == "f":
        return a / b
    b = np.where(b == 0, 1, b).astype(a.dtype)
    whole = a // b
    if a.dtype.kind == "i":
        whole = whole + ((a - whole * b != 0) & ((a < 0) != (b < 0)))
    return whole.astype(a.dtype)


def _high(a: Array, b: Array) -> Array:
    """The upper half of a product."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return (a.astype(wide) * b.astype(wide) >> bits).astype(a.dtype)
    exact = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array([x & (2**64 - 1) for x in exact], np.uint64).view(a.dtype)


def _wide(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def _shift(a: Array, by: Array, left: bool) -> Array:
    """Shifts of so many bits and more leave nothing but the sign."""
    bits = a.dtype.itemsize * 8
    count = np.minimum(by.astype(np.uint64), bits - 1).astype(a.dtype)
    moved = a << count if left else a >> count
    gone = by.astype(np.uint64) >= bits
    if not left and a.dtype.kind == "i":
        return moved
    return np.where(gone, 0, moved).astype(a.dtype)


def _extract(a: Array, start: Array, length: Array) -> Array:
    """bfe: bits of a field, with its sign if the type has one."""
    bits = a.dtype.itemsize * 8
    start, length = start.astype(np.int64) & 255, length.astype(np.int64) & 255
    mask = np.where(length >= 64, -1, (np.int64(1) << np.minimum(length, 63)) - 1).astype(np.uint64)
    plain = _shift(a.view(f"u{bits // 8}"), start, False).astype(np.uint64) & mask
    if a.dtype.kind == "i":
        end = np.clip(start + length - 1, 0, bits - 1)
        sign = _shift(a.view(f"u{bits // 8}"), end, False).astype(np.uint64) & np.uint64(1)
        plain = np.where((sign == 1) & (length > 0), plain | ~mask, plain)
    return plain.astype(f"u{bits // 8}").view(a.dtype)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: each byte one of eight, or its sign repeated."""
    both = np.stack([(source >> (8 * i)) & 0xFF for source in (a, b) for i in range(4)])
    lanes, out = np.arange(a.size), np.zeros_like(a)
    for i in range(4):
        choice = (selector >> (4 * i)) & 0xF
        byte = both[choice & 7, lanes]
        byte = np.where(choice & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        out |= byte.astype(a.dtype) << np.uint32(8 * i)
    return out


def _reverse(a: Array) -> Array:
    """brev: the bits in the other order."""
    octets = a[:, None].view(np.uint8)[:, ::-1]
    turned = np.packbits(np.unpackbits(octets, axis=1, bitorder="little"), axis=1)
    return turned.view(a.dtype).reshape(-1)


def _insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: b with its bits from `start` on those of a."""
    width = _shift(np.full_like(a, -1 & (2 ** (8 * a.itemsize) - 1)), length, True)
    mask = _shift(~width, start, True)
    return (b & ~mask) | (_shift(a, start, True) & mask)


def _first_bit(a: Array) -> Array:
    """bfind: the number of the highest bit that is not as the sign, -1 without one."""
    plain = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    return np.array([int(x).bit_length() - 1 for x in plain], np.int64).astype(np.uint32)


def _first_shift(a: Array) -> Array:
    """bfind.shiftamt: how far left that bit has to be shifted to be the highest."""
    found = _first_bit(a)
    none = np.uint32(2**32 - 1)
    return np.where(found == none, none, np.uint32(a.itemsize * 8 - 1) - found)


def funnel(a: Array, b: Array, by: Array, left: bool, wrap: bool) -> Array:
    """shf: 32 bits of b and a side by side, shifted by as many as the last five bits say (wrap), or
    at most 32 (clamp)."""
    count = (by & 31 if wrap else np.minimum(by, 32)).astype(np.uint64)
    both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    moved = both << count >> np.uint64(32) if left else both >> count
    return moved.astype(np.uint32)


def _logic(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: any function of three bits, by its table."""
    out, number = np.zeros_like(a), int(table[0])
    for i in range(8):
        if number >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _dot4(a: Array, b: Array, c: Array, a_kind: str, b_kind: str) -> Array:
    left, right = (
        x.view(np.int8 if kind.startswith("s") else np.uint8).reshape(-1, 4).astype(np.int64)
        for x, kind in ((a, a_kind), (b, b_kind))
    )
    return ((left * right).sum(axis=1) + c.view(np.int32)).astype(np.int32).view(c.dtype)


def dot_product(opcode: str, a: Array, b: Array, c: Array) -> Array:
    """dp4a: four products of bytes and a sum of 32 bits."""
    *_, a_kind, b_kind = opcode.split(".")
    return _dot4(a, b, c, a_kind, b_kind)


_popcount = np.vectorize(lambda x: int(x).bit_count(), otypes=[np.uint32])


def _leading(a: Array) -> Array:
    bits = a.dtype.itemsize * 8
    return np.array([bits - int(x).bit_length() for x in a], np.uint32)


COMPUTE: dict[str, Compute] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mul.hi": _high,
    "mul.wide": _wide,
    "mad": lambda a, b, c: a * b + c,
    "mad.wide": lambda a, b, c: _wide(a, b) + c,
    "mad.hi": lambda a, b, c: _high(a, b) + c,
    "div": _divide,
    "rem": lambda a, b: a - _divide(a, b) * b,
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "abs": np.abs,
    "neg": lambda a: -a if a.dtype.kind != "u" else (~a + a.dtype.type(1)),
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": np.invert,
    "shl": lambda a, by: _shift(a, by, True),
    "shr": lambda a, by: _shift(a, by, False),
    "selp": lambda a, b, p: np.where(p, a, b),
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "popc": _popcount, "clz": _leading, "bfe": _extract, "bfi": _insert, "bfind": _first_bit,
    "bfind.shiftamt": _first_shift, "brev": _reverse,
    "cnot": lambda a: (a == 0).astype(a.dtype),
    "sad": lambda a, b, c: c + np.where(a > b, a - b, b - a).astype(c.dtype),
    "inc": lambda a, most: np.where(a >= most, 0, a + 1).astype(a.dtype),
    "dec": lambda a, most: np.where((a == 0) | (a > most), most, a - 1).astype(a.dtype),
    "copysign": lambda a, b: np.copysign(b, a),
    "prmt": _permute, "lop3": _logic,
}  # fmt: skip
"""By the opcode without its type: functions of operands of that type."""

COMPARE: dict[str, Compute] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "equ": lambda a, b: ~(a < b) & ~(a > b),
    "neu": lambda a, b: (a < b) | (a > b) | np.isnan(a) | np.isnan(b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
}  # fmt: skip
"""Comparisons; those that end in u hold for NaN too."""


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once in float32: a product of two fits into float64."""
    if a.dtype == np.float64:
        return np.array([_fma(*one) for one in zip(a, b, c, strict=True)])
    return (a.astype(np.float64) * b + c).astype(a.dtype)


# Python 3.13 has math.fma; before, the product is rounded on its own.
_fma: Callable[[float, float, float], float] = getattr(math, "fma", lambda a, b, c: a * b + c)

_ROUND: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil,
    "rz": np.trunc, "rn": np.rint, "rm": np.floor, "rp": np.ceil,
}  # fmt: skip


def convert(a: Array, to: np.dtype[Any], modifiers: list[str]) -> Array:
    """cvt: another type of the same value; floats that become integers saturate."""
    if a.dtype.kind == "f":
        for name in modifiers:
            # Of a float to a float only the forms that end in i round to an integer.
            if name in _ROUND and (to.kind != "f" or name.endswith("i")):
                a = _ROUND[name](a)
        if to.kind != "f":
            info = np.iinfo(to)
            whole = np.nan_to_num(a.astype(np.float64), nan=0.0)
            inside = np.clip(whole, float(info.min), float(np.nextafter(float(info.max), 0)))
            made = inside.astype(to)
            return np.where(whole >= float(info.max), info.max, made).astype(to)
    if "sat" in modifiers and to.kind == "f":
        a = np.clip(a, 0, 1)
    elif "sat" in modifiers:
        info = np.iinfo(to)
        a = np.clip(a.astype(np.int64), info.min, info.max)
    return a.astype(to)


# What threads of a warp compute together: shuffles, votes, matches and reductions.

WARP = 32

_REDUCE: dict[str, Callable[[Array], Any]] = {
    "add": np.sum, "min": np.min, "max": np.max, "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
}  # fmt: skip
_VOTES: dict[str, Callable[[Array], bool]] = {
    "all": lambda held: bool(held.all()),
    "any": lambda held: bool(held.any()),
    "uni": lambda held: bool(held.all() or not held.any()),
}


def lane_masks(lanes: int) -> dict[str, Array]:
    """The special registers lanemask_eq, _lt and so on of each thread."""
    lane = np.arange(lanes, dtype=np.uint64) % WARP
    own = np.uint64(1) << lane
    below, every = own - np.uint64(1), np.uint64(2**WARP - 1)
    masks = {"eq": own, "lt": below, "le": below | own, "ge": every - below}
    masks["gt"] = masks["ge"] - own
    return {f"lanemask_{name}": held.astype(np.uint32) for name, held in masks.items()}


def shuffle(modes: Sequence[str], values: Array, by: Array, control: Array) -> tuple[Array, Array]:
    """shfl.sync: what another thread of the warp has, its own where that is out of reach; and
    whether it is within."""
    mode = next(m for m in modes if m in ("up", "down", "bfly", "idx"))
    number = np.arange(len(values))
    lane = number % WARP
    by, control = by.astype(np.int64), control.astype(np.int64)
    segment, clamp = (control >> 8) & 31, control & 31
    low, high = lane & segment, (lane & segment) | (clamp & ~segment)
    source = {
        "up": lane - by,
        "down": lane + by,
        "bfly": lane ^ by,
        "idx": low | (by & ~segment),
    }[mode]
    good = source >= high if mode == "up" else source <= high
    whole = number // WARP * WARP + np.where(good, source, lane)
    return values[np.minimum(whole, len(values) - 1)], good


def _warps(active: Array) -> list[Array]:
    """The threads that take part, of each warp."""
    numbers = np.flatnonzero(active)
    return [numbers[numbers // WARP == warp] for warp in np.unique(numbers // WARP)]


def _bits(threads: Array) -> int:
    """A mask of these threads of a warp."""
    return int(np.bitwise_or.reduce(np.uint64(1) << (threads % WARP).astype(np.uint64), initial=0))


def vote(modes: Sequence[str], held: Array, active: Array) -> Array:
    """vote.sync and, of all threads that run, activemask: a mask of those for which a predicate
    holds, or whether it does for all, any, or all alike."""
    mode = next(m for m in modes if m in (*_VOTES, "ballot"))
    found = np.zeros(len(held), np.uint32 if mode == "ballot" else bool)
    for threads in _warps(active):
        inside = held[threads]
        found[threads] = _bits(threads[inside]) if mode == "ballot" else _VOTES[mode](inside)
    return found


def match(values: Array, active: Array, every: bool) -> tuple[Array, Array]:
    """match.sync: a mask of the threads that have the same value, or if `every`, of all threads
    where all have it and else of none; and whether all have it."""
    masks, same = np.zeros(len(values), np.uint32), np.zeros(len(values), bool)
    for threads in _warps(active):
        groups = np.unique(values[threads])
        same[threads] = len(groups) == 1
        for value in groups:
            alike = threads[values[threads] == value]
            masks[alike] = _bits(alike) if not every or len(groups) == 1 else 0
    return masks, same


def reduce(modes: Sequence[str], values: Array, active: Array) -> Array:
    """redux.sync: the sum, least, largest, and so on, of a warp."""
    combine = _REDUCE[next(m for m in modes if m in _REDUCE)]
    found = np.zeros_like(values)
    for threads in _warps(active):
        found[threads] = combine(values[threads]).astype(values.dtype)
    return found


def barrier(mode: str, held: Array, active: Array) -> Array:
    """bar.red: of all threads of a block, how many a predicate holds for (popc), or whether for all
    (and) or any (or)."""
    count = int(held[active].sum())
    if mode == "popc":
        return np.full(len(held), count, np.uint32)
    return np.full(len(held), count == int(active.sum()) if mode == "and" else count > 0)
