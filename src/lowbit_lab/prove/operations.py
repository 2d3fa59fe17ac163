"""What single operations of a kernel's text mean: each makes a value of its operands', or None
where it is not known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import z3

from lowbit_lab.prove.ttir import NotProvedError, Op

Lane = tuple[Any, ...]


@dataclass(frozen=True)
class Value:
    """A scalar or a block: at(lane) is an integer of Z3, or a truth value. Of pointers it is the
    distance from the first element of the tensor `base`, in bytes, and `size` those of an element.
    """

    shape: tuple[int, ...]
    at: Callable[[Lane], Any]
    base: str | None = None
    size: int = 0


def is_truth(value: Value) -> bool:
    """Whether it is true or false, and no number."""
    return z3.is_bool(value.at(tuple(z3.IntVal(0) for _ in value.shape)))


def typed(type_: str) -> tuple[tuple[int, ...], str]:
    """The shape and the element of a type."""
    inner = type_.removeprefix("tensor<").removesuffix(">") if type_.startswith("tensor<") else ""
    if not inner:
        return (), type_
    dims = re.match(r"(?:\d+x)*", inner)
    assert dims is not None
    return tuple(map(int, dims[0].split("x")[:-1])), inner[dims.end() :].partition(", #")[0]


def scalar(expression: Any) -> Value:
    """A number of Python's or an expression of Z3's as a value."""
    made = z3.BoolVal(expression) if isinstance(expression, bool) else expression
    made = z3.IntVal(made) if isinstance(made, int) else made
    return Value((), lambda _: made)


def _divided(left: Any, right: Any) -> Any:
    """Division that cuts off; Z3's rounds down for divisors above 0."""
    up = z3.If(left >= 0, left / right, -(-left / right))
    down = z3.If(left >= 0, -(left / -right), -left / -right)
    return up if z3.is_int_value(right) and right.as_long() > 0 else z3.If(right > 0, up, down)


def _and(left: Any, right: Any) -> Any:
    if z3.is_bool(left):
        return z3.And(left, right)
    for one, mask in ((left, right), (right, left)):
        if z3.is_int_value(mask) and (mask.as_long() + 1) & mask.as_long() == 0:
            return one % (mask + 1)
    return None


def _shifted(left: Any, right: Any, up: bool) -> Any:
    if not z3.is_int_value(right):
        return None
    return left * 2 ** right.as_long() if up else left / 2 ** right.as_long()


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": _divided,
    "arith.remsi": lambda a, b: a - b * _divided(a, b),
    "arith.minsi": lambda a, b: z3.If(a < b, a, b),
    "arith.maxsi": lambda a, b: z3.If(a > b, a, b),
    "arith.andi": _and,
    "arith.ori": lambda a, b: z3.Or(a, b) if z3.is_bool(a) else None,
    "arith.xori": lambda a, b: z3.Xor(a, b) if z3.is_bool(a) else None,
    "arith.shli": lambda a, b: _shifted(a, b, True),
    "arith.shrsi": lambda a, b: _shifted(a, b, False),
}
OVERFLOWING = {"arith.addi", "arith.subi", "arith.muli", "arith.shli", "arith.trunci"}
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "slt": lambda a, b: a < b, "sle": lambda a, b: a <= b, "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
_UNSIGNED = {"ult": "slt", "ule": "sle", "ugt": "sgt", "uge": "sge"}


def _binary(op: Op, operands: list[Value]) -> Value | None:
    left, right = operands
    apply = _BINARY[op.name]
    zero = tuple(z3.IntVal(0) for _ in left.shape)
    if apply(left.at(zero), right.at(zero)) is None:
        return None
    return Value(left.shape, lambda lane: apply(left.at(lane), right.at(lane)))


def _compare(op: Op, operands: list[Value]) -> Value:
    left, right = operands
    how = op.text.split()[1].rstrip(",")
    apply = _COMPARED[_UNSIGNED.get(how, how)]
    wraps = 1 << int(re.findall(r"i(\d+)", op.types[-1])[-1])

    def at(lane: Lane) -> Any:
        both = left.at(lane), right.at(lane)
        if how in _UNSIGNED:
            both = tuple(z3.If(one < 0, one + wraps, one) for one in both)
        return apply(*both)

    return Value(left.shape, at)


def _constant(op: Op, operands: list[Value]) -> Value | None:
    found = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? ?(?::|$)", op.text)
    if found is None:
        return None
    shape, _ = typed(op.types[0]) if op.types else ((), "")
    made = z3.IntVal(int(found[1])) if found[1].lstrip("-").isdigit() else None
    made = z3.BoolVal(found[1] == "true") if made is None else made
    return Value(shape, lambda _: made)


def _range(op: Op, operands: list[Value]) -> Value:
    start = op.number("start")
    return Value((op.number("end") - start,), lambda lane: start + lane[0])


def _splat(op: Op, operands: list[Value]) -> Value:
    (value,), lanes = operands, (z3.IntVal(0),) * len(operands[0].shape)
    return replace(value, shape=typed(op.types[0])[0], at=lambda _: value.at(lanes))


def _expanded(op: Op, operands: list[Value]) -> Value:
    (value,), axis = operands, op.number("axis")
    return replace(
        value,
        shape=typed(op.types[0])[0],
        at=lambda lane: value.at((*lane[:axis], *lane[axis + 1 :])),
    )


def _broadcast(op: Op, operands: list[Value]) -> Value:
    (value,) = operands

    def at(lane: Lane) -> Any:
        return value.at(
            tuple(z3.IntVal(0) if n == 1 else i for n, i in zip(value.shape, lane, strict=True))
        )

    return replace(value, shape=typed(op.types[0])[0], at=at)


def _transposed(op: Op, operands: list[Value]) -> Value:
    (value,) = operands
    found = re.search(r"order = array<i32: ([\d, ]+)>", op.text)
    assert found is not None
    order = [int(axis) for axis in found[1].split(",")]
    back = [order.index(axis) for axis in range(len(order))]
    return replace(
        value,
        shape=tuple(value.shape[axis] for axis in order),
        at=lambda lane: value.at(tuple(lane[axis] for axis in back)),
    )


def _reshaped(op: Op, operands: list[Value]) -> Value | None:
    (value,), shape = operands, typed(op.types[0])[0]
    if "allow_reorder" in op.text:
        return None

    def at(lane: Lane) -> Any:
        flat: Any = z3.IntVal(0)
        for size, place in zip(shape, lane, strict=True):
            flat = flat * size + place
        lanes = list[Any]()
        for axis, size in enumerate(value.shape):
            lanes.append(flat / prod(value.shape[axis + 1 :]) % size)
        return value.at(tuple(lanes))

    return replace(value, shape=shape, at=at)


def _moved(op: Op, operands: list[Value]) -> Value:
    pointer, offset = operands
    size = pointer.size
    return replace(pointer, at=lambda lane: pointer.at(lane) + size * offset.at(lane))


def _selected(op: Op, operands: list[Value]) -> Value:
    condition, one, two = operands
    if one.base != two.base:
        raise NotProvedError(f"an address is of one tensor or of another in {op}")

    def at(lane: Lane) -> Any:
        return z3.If(condition.at(lane if condition.shape else ()), one.at(lane), two.at(lane))

    return replace(one, at=at)


def _widened(op: Op, operands: list[Value]) -> Value:
    (value,), signed = operands, op.name == "arith.extsi"
    wraps = 1 << int(re.findall(r"i(\d+)", op.text)[0])
    if is_truth(value):
        one = -1 if signed else 1
        return replace(value, at=lambda lane: z3.If(value.at(lane), one, 0))
    if signed:
        return value
    return replace(
        value, at=lambda lane: z3.If(value.at(lane) < 0, value.at(lane) + wraps, value.at(lane))
    )


def _narrowed(op: Op, operands: list[Value]) -> Value | None:
    return None if typed(op.types[0])[1] == "i1" else operands[0]


def _cast(op: Op, operands: list[Value]) -> Value | None:
    (value,) = operands
    if value.base is None:
        return None
    return replace(value, size=size_of(typed(op.types[0])[1]))


def size_of(element: str) -> int:
    """The bytes of what a pointer leads to."""
    bits = re.search(r"ptr<(?:i|f|bf)(\d+)", element)
    assert bits is not None
    return max(1, int(bits[1]) // 8)


MEANINGS: dict[str, Callable[[Op, list[Value]], Value | None]] = {
    **dict.fromkeys(_BINARY, _binary),
    "arith.cmpi": _compare,
    "arith.constant": _constant,
    "arith.select": _selected,
    "arith.extsi": _widened,
    "arith.extui": _widened,
    "arith.trunci": _narrowed,
    "tt.make_range": _range,
    "tt.splat": _splat,
    "tt.unsplat": _splat,
    "tt.expand_dims": _expanded,
    "tt.broadcast": _broadcast,
    "tt.trans": _transposed,
    "tt.reshape": _reshaped,
    "tt.addptr": _moved,
    "tt.bitcast": _cast,
    "ttg.convert_layout": lambda _, operands: operands[0],
}
OF_POINTERS = {
    "tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.addptr", "tt.splat", "tt.bitcast",
    "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "arith.select", "tt.unsplat",
    "ttg.convert_layout",
}  # fmt: skip
