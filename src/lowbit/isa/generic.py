"""Instructions that every machine has: LLVM's own operations on scalars and vectors.

They are the whole of the "generic" instruction set, and the ground that the others stand on.
Integer arithmetic wraps; float arithmetic is IEEE with no contraction, so that results do not
depend on the machine. Source: the LLVM language reference.
"""

from __future__ import annotations

import operator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.isa.instruction import Call, Instruction, instruction
from lowbit.isa.instruction_set import InstructionSet, register
from lowbit.isa.types import (
    Pointer,
    Scalar,
    Type,
    Vector,
    bf16,
    bit,
    element_of,
    f32,
    ir,
    s16,
    s32,
    s64,
    with_element,
)

if TYPE_CHECKING:
    from lowbit.isa.value import Value

GENERIC = register(
    InstructionSet(
        name="generic",
        features=(),
        fallback=None,
        vector_bytes=16,
        vector_registers=16,
        architecture=None,
    )
)


def _same(*types: Type) -> Type:
    if len(set(types)) != 1 or not isinstance(types[0], Scalar | Vector):
        raise TypeError(f"operands of one scalar or vector type expected, got {types}")
    return types[0]


def _numbers(*types: Type) -> Type:
    if element_of(_same(*types)).kind == "bf":
        raise TypeError(f"nothing computes with {types[0]}; convert it with .to(f32)")
    return types[0]


def _integers(*types: Type) -> Type:
    if element_of(_numbers(*types)).is_float:
        raise TypeError(f"integers expected, got {types[0]}")
    return types[0]


def _floats(*types: Type) -> Type:
    if not element_of(_same(*types)).is_float:
        raise TypeError(f"floats expected, got {types[0]}")
    return types[0]


def _float32s(*types: Type) -> Type:
    if element_of(_same(*types)) != f32:
        raise TypeError(f"float32 expected, got {types[0]}")
    return types[0]


def _compared(*types: Type) -> Type:
    return with_element(_numbers(*types), bit)


def _by_kind(integer: str, float_: str = "") -> Any:
    """The emission by methods of llvmlite's builder."""

    def emit(call: Call, a: ir.Value, b: ir.Value) -> Any:
        name = float_ if element_of(call.types[0]).is_float else integer
        return getattr(call.builder, name)(a, b)

    return emit


def _comparison(sign: str) -> Any:
    def emit(call: Call, a: ir.Value, b: ir.Value) -> Any:
        element, builder = element_of(call.types[0]), call.builder
        if element.is_float:
            return builder.fcmp_ordered(sign, a, b)
        return (builder.icmp_signed if element.kind == "s" else builder.icmp_unsigned)(sign, a, b)

    return emit


add = Instruction("add", _numbers, _by_kind("add", "fadd"), operator.add)
sub = Instruction("sub", _numbers, _by_kind("sub", "fsub"), operator.sub)
mul = Instruction("mul", _numbers, _by_kind("mul", "fmul"), operator.mul)
fdiv = Instruction("fdiv", _floats, _by_kind("", "fdiv"), np.divide)


def _divided(call: Call, a: ir.Value, b: ir.Value) -> Any:
    signed = element_of(call.types[0]).kind == "s"
    return (call.builder.sdiv if signed else call.builder.udiv)(a, b)


@instruction(_integers, _divided)
def div(a: Any, b: Any) -> Any:
    """The quotient towards 0. Not defined where b is 0, or where the type does not hold it."""
    floor = a // b
    up = (floor * b != a) & ((a < 0) != (b < 0))
    return floor + up


# Remainders are of non-negative integers: kernel texts take no others.
rem = Instruction("rem", _integers, _by_kind("srem"), operator.mod)
and_ = Instruction("and", _integers, _by_kind("and_"), operator.and_)
or_ = Instruction("or", _integers, _by_kind("or_"), operator.or_)
xor = Instruction("xor", _integers, _by_kind("xor"), operator.xor)
lt = Instruction("lt", _compared, _comparison("<"), operator.lt)
eq = Instruction("eq", _compared, _comparison("=="), operator.eq)


def _fma(call: Call, a: ir.Value, b: ir.Value, c: ir.Value) -> Any:
    type_ = call.types[0]
    suffix = f"v{type_.lanes}f32" if isinstance(type_, Vector) else "f32"
    return call.intrinsic(f"llvm.fma.{suffix}", a, b, c)


@instruction(_float32s, _fma)
def fma(a: Any, b: Any, c: Any) -> Any:
    """a·b + c of float32, rounded once: on machines that cannot fuse, a call of the C library's.

    The meaning rounds the sum in float64 to odd first, so that the second rounding, to float32,
    is the only one that counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums", 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.asarray(total).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    odd = bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)
    rounded = odd.view(np.float64).astype(np.float32)
    return rounded if rounded.ndim else rounded[()]


def _sqrt(call: Call, a: ir.Value) -> Any:
    type_ = call.types[0]
    element = f"f{element_of(type_).bits}"
    suffix = f"v{type_.lanes}{element}" if isinstance(type_, Vector) else element
    return call.intrinsic(f"llvm.sqrt.{suffix}", a)


@instruction(_floats, _sqrt)
def sqrt(a: Any) -> Any:
    """The square root, rounded once; NaN below zero."""
    return np.sqrt(a)


def constant_like(type_: Scalar | Vector, value: float) -> ir.Constant:
    """The number, of this type, in every lane."""
    element = element_of(type_)
    given = int(element.numpy.type(value).view(np.uint16)) if element == bf16 else value
    scalar = ir.Constant(element.llvm, given)
    return ir.Constant(type_.llvm, [scalar] * type_.lanes) if isinstance(type_, Vector) else scalar


def _shift_type(value: Type, count: int) -> Type:
    if not 0 <= count < element_of(_integers(value)).bits:
        raise TypeError(f"a {value} cannot be shifted by {count}")
    return value


def _shift_left(call: Call, value: Any, count: int) -> Any:
    return call.builder.shl(value, constant_like(call.types[0], count))


def _shift_right(call: Call, value: Any, count: int) -> Any:
    """Arithmetic for signed types, logical for unsigned ones."""
    signed = element_of(call.types[0]).kind == "s"
    shift = call.builder.ashr if signed else call.builder.lshr
    return shift(value, constant_like(call.types[0], count))


shl = Instruction("shl", _shift_type, _shift_left, operator.lshift)
shr = Instruction("shr", _shift_type, _shift_right, operator.rshift)


def _shift_right_each(call: Call, value: ir.Value, counts: ir.Value) -> Any:
    signed = element_of(call.types[0]).kind == "s"
    return (call.builder.ashr if signed else call.builder.lshr)(value, counts)


# Each lane by its own count, which must be from 0 to the type's bits − 1.
shl_each = Instruction("shl_each", _integers, _by_kind("shl"), operator.lshift)
shr_each = Instruction("shr_each", _integers, _shift_right_each, operator.rshift)


def _selected(condition: Type, a: Type, b: Type) -> Type:
    if isinstance(a, Pointer) and a == b and condition == bit:
        return a
    _same(a, b)
    if condition not in (bit, with_element(a, bit)):
        raise TypeError(f"a {condition} cannot select between {a}")
    return a


@instruction(_selected, lambda call, c, a, b: call.builder.select(c, a, b))
def select(condition: Any, a: Any, b: Any) -> Any:
    """Lane by lane, `a` where `condition` holds, else `b`; of pointers and scalars, one of them."""
    return np.where(condition, a, b) if np.ndim(condition) else a if condition else b


def minimum(a: Value, b: Value) -> Value:
    """The lesser of the two, lane by lane; `b` where a float lane of either is NaN."""
    return select(lt(a, b), a, b)


def maximum(a: Value, b: Value) -> Value:
    """The greater of the two, lane by lane; `b` where a float lane of either is NaN."""
    return select(lt(b, a), a, b)


@cache
def _mask(lanes: tuple[int, ...]) -> ir.Constant:
    """Which lanes a shuffle takes: one object for each choice, which is printed once."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))


def _splat(call: Call, value: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = call.builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return call.builder.shuffle_vector(first, undefined, _mask((0,) * lanes))


@instruction(lambda value, lanes: Vector(element_of(value), lanes), _splat)
def splat(a: Any, lanes: int) -> Any:
    """A vector with the scalar in every lane."""
    return np.full(lanes, a)


def _shuffle_type(a: Type, b: Type, lanes: tuple[int, ...]) -> Type:
    _same(a, b)
    return Vector(element_of(a), len(lanes))


def _shuffle(call: Call, a: ir.Value, b: ir.Value, lanes: tuple[int, ...]) -> Any:
    return call.builder.shuffle_vector(a, b, _mask(lanes))


@instruction(_shuffle_type, _shuffle)
def shuffle(a: Any, b: Any, lanes: tuple[int, ...]) -> Any:
    """The named lanes of `a` followed by `b`."""
    return np.concatenate([a, b])[list(lanes)]


@instruction(
    lambda value, lane: element_of(value),
    lambda call, v, lane: call.builder.extract_element(v, ir.Constant(ir.IntType(32), lane)),
)
def extract(a: Any, lane: int) -> Any:
    """The scalar in one lane."""
    return a[lane]


# Memory. The meanings are given an address of the interpreter, which checks every access.


def _loaded(pointer: Pointer, lanes: int) -> Type:
    return Vector(pointer.element, lanes) if lanes else pointer.element


def _load(call: Call, pointer: ir.Value, lanes: int) -> Any:
    return call.builder.load(pointer, align=1, typ=call.result.llvm)


@instruction(_loaded, _load)
def load(address: Any, lanes: int) -> Any:
    """`lanes` elements from the pointer on, as a vector; one scalar if `lanes` is 0."""
    values = address.load(max(lanes, 1))
    return values if lanes else values[0]


def _stored(value: Type, pointer: Pointer) -> None:
    if element_of(value) != pointer.element:
        raise TypeError(f"a {value} cannot be stored through a pointer to {pointer.element}")


@instruction(_stored, lambda call, v, p: call.builder.store(v, p, align=1))
def store(value: Any, address: Any) -> None:
    """Write all lanes of the value from the pointer on."""
    address.store(np.atleast_1d(value))


def _prefetch(call: Call, pointer: ir.Value, locality: int = 3, write: int = 0) -> None:
    how = (ir.Constant(ir.IntType(32), n) for n in (write, locality, 1))
    call.intrinsic("llvm.prefetch.p0", pointer, *how)


def _anywhere(pointer: Type) -> None:
    if not isinstance(pointer, Pointer):
        raise TypeError(f"a pointer is expected, got {pointer}")


@instruction(_anywhere, _prefetch)
def prefetch(address: Any) -> None:
    """A hint that the cache line there will be read. It need not exist: nothing is accessed."""


@instruction(_anywhere, partial(_prefetch, locality=2))
def prefetch_far(address: Any) -> None:
    """`prefetch` into the second-level cache, but not the first."""


@instruction(_anywhere, partial(_prefetch, write=1))
def prefetch_write(address: Any) -> None:
    """A hint that the cache line there will be written, so that no other core should hold it."""


def _stream(call: Call, value: ir.Value, pointer: ir.Value) -> None:
    kind = call.types[0]
    stored = call.builder.store(value, pointer, align=kind.bytes)
    one = ir.Constant(ir.IntType(32), 1)
    stored.set_metadata("nontemporal", call.builder.module.add_metadata([one]))


@instruction(_stored, _stream)
def stream(value: Any, address: Any) -> None:
    """As `store`, past the caches; the address must be a multiple of the value's size."""
    values = np.atleast_1d(value)
    if address.offset % values.nbytes:
        raise RuntimeError(f"stream of {values.nbytes} bytes to byte {address.offset}")
    address.store(values)


def _head_mask(call: Call, lanes: int, count: ir.Value) -> Any:
    """One bit for each of the first `count` lanes."""
    lane_type = ir.IntType(32)
    numbers = ir.Constant(ir.VectorType(lane_type, lanes), list(range(lanes)))
    limit = _splat(call, call.builder.trunc(count, lane_type), lanes)
    return call.builder.icmp_signed("<", numbers, limit)


def _suffix(vector: Vector) -> str:
    element = vector.element
    return f"v{vector.lanes}{'f' if element.is_float else 'i'}{element.bits}.p0"


def _check_count(count: Type) -> None:
    if count != s64:
        raise TypeError(f"the count must be an s64, got {count}")


def _load_head_type(pointer: Pointer, count: Type, lanes: int) -> Type:
    _check_count(count)
    return Vector(pointer.element, lanes)


def _load_head(call: Call, pointer: ir.Value, count: ir.Value, lanes: int) -> Any:
    vector = call.result
    mask = _head_mask(call, lanes, count)
    one = ir.Constant(ir.IntType(32), 1)
    zeros = ir.Constant(vector.llvm, None)
    return call.intrinsic(f"llvm.masked.load.{_suffix(vector)}", pointer, one, mask, zeros)


@instruction(_load_head_type, _load_head)
def load_head(address: Any, count: int, lanes: int) -> Any:
    """The first `count` lanes from memory, zeros in the others, whose memory is not touched."""
    values = np.zeros(lanes, address.dtype)
    count = min(max(int(count), 0), lanes)
    if count:
        values[:count] = address.load(count)
    return values


def _store_head_type(value: Vector, pointer: Pointer, count: Type) -> None:
    _stored(value, pointer)
    _check_count(count)


def _store_head(call: Call, value: ir.Value, pointer: ir.Value, count: ir.Value) -> Any:
    vector = call.types[0]
    mask = _head_mask(call, vector.lanes, count)
    one = ir.Constant(ir.IntType(32), 1)
    call.intrinsic(f"llvm.masked.store.{_suffix(vector)}", value, pointer, one, mask)


@instruction(_store_head_type, _store_head)
def store_head(value: Any, address: Any, count: int) -> None:
    """Write the first `count` lanes; the memory of the others is not touched."""
    count = min(max(int(count), 0), len(value))
    if count:
        address.store(value[:count])


# Arithmetic across lanes.


def _madd_type(a: Type, b: Type) -> Type:
    if a != b or not isinstance(a, Vector) or a.element != s16 or a.lanes % 2:
        raise TypeError(f"two vectors of an even number of s16 expected, got {a} and {b}")
    return Vector(s32, a.lanes // 2)


def _madd(call: Call, a: ir.Value, b: ir.Value) -> Any:
    """Written so that LLVM recognises the pair sum (pmaddwd on x86, smull/smlal on AArch64)."""
    builder, lanes = call.builder, call.types[0].lanes
    wide = ir.VectorType(ir.IntType(32), lanes)
    product = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even = _shuffle(call, product, product, tuple(range(0, lanes, 2)))
    odd = _shuffle(call, product, product, tuple(range(1, lanes, 2)))
    return builder.add(even, odd)


@instruction(_madd_type, _madd)
def madd16(a: Any, b: Any) -> Any:
    """out[i] = a[2i]·b[2i] + a[2i+1]·b[2i+1] in 32 bits, which wraps only if all four are -2^15."""
    product = a.astype(np.int32) * b.astype(np.int32)
    return product[0::2] + product[1::2]


def _add_saturated(call: Call, a: ir.Value, b: ir.Value) -> Any:
    vector = call.types[0]
    kind = f"v{vector.lanes}i{vector.element.bits}"
    return call.intrinsic(f"llvm.{vector.element.kind}add.sat.{kind}", a, b)


@instruction(_integers, _add_saturated)
def add_saturated(a: Any, b: Any) -> Any:
    """Lane by lane, where a sum that the type does not hold becomes the nearest that it holds."""
    limits = np.iinfo(a.dtype)
    return np.clip(a.astype(object) + b.astype(object), limits.min, limits.max).astype(a.dtype)


def _reduce_add(call: Call, a: ir.Value) -> Any:
    vector = call.types[0]
    return call.intrinsic(f"llvm.vector.reduce.add.v{vector.lanes}i{vector.element.bits}", a)


@instruction(lambda value: element_of(_integers(value)), _reduce_add)
def reduce_add(a: Any) -> Any:
    """The sum of all lanes, which wraps."""
    return np.add.reduce(a, dtype=a.dtype)


def _truths(type_: Type) -> Type:
    if not isinstance(type_, Vector) or type_.element != bit:
        raise TypeError(f"a vector of conditions expected, got {type_}")
    return bit


def _any(call: Call, a: ir.Value) -> Any:
    return call.intrinsic(f"llvm.vector.reduce.or.v{call.types[0].lanes}i1", a)


any_ = Instruction("any", _truths, _any, np.any)  # whether a condition holds in some lane
