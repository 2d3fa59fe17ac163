"""What the operations of a kernel's text mean as expressions of Z3: of the program's number, of
lanes, and of how often a loop has gone round.

A block of lanes is a function of a lane's place. What is not known (a loaded value, a float's sign)
is an unknown of Z3's, about which nothing is assumed: what is proved holds whatever it is. Integers
are those of mathematics.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import z3

from lowbit.lab.prove.ttir import NotProvedError, Op, Region, Text
from lowbit.lab.run.trace import Place

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


@dataclass(frozen=True)
class Access:
    """A load, store or atomic operation. path: under which conditions it is reached."""

    kind: str
    pointer: Value
    mask: Value | None
    path: tuple[Any, ...]
    place: Place | None


class Meaning:
    """The accesses of a kernel.

    programs, grid: the three numbers of a program, and how many there are, as Z3's. unknowns: the
    names of what is not known, each with the reason.
    """

    def __init__(self, text: Text, arguments: dict[str, Any], grid: Sequence[Any]) -> None:
        self.accesses: list[Access] = []
        self.unknowns: dict[str, str] = {}
        self._narrow: dict[int, int] = {}
        self.programs = [z3.Int(f"program_{axis}") for axis in "xyz"]
        self.grid = grid
        self._values: dict[str, Value] = {}
        self._count = itertools.count()
        for value, name in text.parameters.items():
            given = arguments[name]
            self._values[value] = given if isinstance(given, Value) else _scalar(given)
        self._run(text.body, ())

    def fresh(self, shape: tuple[int, ...], why: str, truth: bool = False) -> Value:
        """Something of which nothing is known."""
        name = f"unknown_{next(self._count)}"
        self.unknowns[name] = why
        sorts = [*[z3.IntSort()] * len(shape), z3.BoolSort() if truth else z3.IntSort()]
        if not shape:
            made = z3.Bool(name) if truth else z3.Int(name)
            return Value((), lambda _: made)
        function = z3.Function(name, *sorts)
        return Value(shape, lambda lane: function(*lane))

    def narrow_in(self, expressions: Sequence[Any]) -> Iterator[tuple[Any, int]]:
        """What has been computed in so many bits for these expressions."""
        for one in _parts(expressions):
            if one.get_id() in self._narrow:
                yield one, self._narrow[one.get_id()]

    def _run(self, region: Region, path: tuple[Any, ...]) -> Op | None:
        """Go through a region; returns what ends it."""
        for op in region.ops:
            if op.name in ("scf.yield", "scf.condition", "tt.return"):
                return op
            self._one(op, path)
        return None

    def _one(self, op: Op, path: tuple[Any, ...]) -> None:
        special = {"scf.for": self._for, "scf.if": self._if, "scf.while": self._while}
        if op.name in special:
            special[op.name](op, path)
            return
        operands = [self._values[name] for name in op.operands if name in self._values]
        if op.name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas"):
            self._access(op, operands, path)
        elif any(one.base for one in operands) and op.name not in _OF_POINTERS:
            raise NotProvedError(f"an address goes through {op}")
        meaning = _MEANINGS.get(op.name)
        made = None
        if meaning is not None and len(operands) == len(op.operands) and len(op.results) == 1:
            made = meaning(self, op, operands)
        if made is not None:
            self._values[op.results[0]] = self._kept(made, op)
        else:
            for name, type_ in zip(op.results, op.types, strict=False):
                shape, element = _typed(type_)
                truth = element in ("i1", "!tt.ptr<i1>") or op.name.startswith("arith.cmp")
                self._values[name] = self.fresh(shape, f"{op}", truth)

    def _kept(self, made: Value, op: Op) -> Value:
        """The same, computed once for each lane, and in how many bits."""
        known = dict[tuple[int, ...], Any]()
        element = _typed(op.types[-1])[1] if op.types else ""
        bits = int(element[1:]) if op.name in _OVERFLOWING and element[1:].isdigit() else 0

        def at(lane: Lane) -> Any:
            key = tuple(one.get_id() for one in lane)
            if key not in known:
                known[key] = found, _ = made.at(lane), lane  # what is kept keeps its number
                if bits:
                    number = found.get_id()
                    self._narrow[number] = min(bits, self._narrow.get(number, bits))
            return known[key][0]

        return replace(made, at=at)

    def _access(self, op: Op, operands: list[Value], path: tuple[Any, ...]) -> None:
        masks = {"tt.load": 1, "tt.store": 2, "tt.atomic_rmw": 2}
        place = masks.get(op.name, len(operands))
        mask = operands[place] if place < len(operands) else None
        if operands[0].base is None:
            raise NotProvedError(f"{op} goes through an address of unknown origin")
        kind = "load" if op.name == "tt.load" else "store"
        self.accesses.append(Access(kind, operands[0], mask, path, op.place))

    def _if(self, op: Op, path: tuple[Any, ...]) -> None:
        condition = self._values[op.operands[0]].at(())
        ends = [
            self._run(region, (*path, holds))
            for region, holds in zip(op.regions, (condition, z3.Not(condition)), strict=False)
        ]
        if not op.results:
            return
        then, other = ([self._values[name] for name in end.operands] for end in ends if end)
        for name, one, two in zip(op.results, then, other, strict=True):
            if one.base != two.base:
                raise NotProvedError(f"an address is of one tensor or of another after {op}")
            self._values[name] = _chosen(condition, one, two)

    def _while(self, op: Op, path: tuple[Any, ...]) -> None:
        """Of what it carries nothing is known but that its condition held."""
        before, after = op.regions
        for name, start in re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", op.text):
            begun = self._values[start]
            if begun.base is not None:
                raise NotProvedError(f"an address is carried through {op}")
            self._values[name] = self.fresh(begun.shape, f"what {op} carries", _truth(begun))
        end = self._run(before, path)
        assert end is not None
        condition, *passed = (self._values[name] for name in end.operands)
        for name, value in zip(after.arguments, passed, strict=True):
            self._values[name] = value
        self._run(after, (*path, condition.at(())))
        for name, type_ in zip(op.results, op.types, strict=False):
            shape, element = _typed(type_)
            self._values[name] = self.fresh(shape, f"the result of {op}", element == "i1")

    def _for(self, op: Op, path: tuple[Any, ...]) -> None:
        """What a round adds to is known in each round: start + round · step."""
        bounds = re.search(r"(%\S+) = (%\S+) to (%\S+) step (%\S+)", op.text)
        assert bounds is not None
        index, *names = bounds.groups()
        low, high, step = (self._values[name].at(()) for name in names)
        carried = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", op.text.partition("iter_args")[2])
        body = op.regions[0]
        turn = z3.Int(f"round_{next(self._count)}")
        self._values[index] = _scalar(low + turn * step)
        varying = _varying(body, {index, *(name for name, _ in carried)})
        ends = body.ops[-1].operands if carried else ()
        steps = [
            _steps(body, name, end, varying) for (name, _), end in zip(carried, ends, strict=True)
        ]
        started = [self._values[start] for _, start in carried]
        bound = dict[str, Value]()

        def after(begun: Value, added: list[tuple[str, Op]] | None, rounds: Any) -> Value:
            if added is not None:
                return _added(begun, added, rounds, bound)
            if begun.base is not None:
                raise NotProvedError(f"an address changes from round to round in {op}")
            return self.fresh(begun.shape, f"what {op} carries", _truth(begun))

        for (name, _), begun, added in zip(carried, started, steps, strict=True):
            self._values[name] = after(begun, added, turn)
        self._run(body, (*path, turn >= 0, low + turn * step < high))
        bound.update({name: self._values[name] for added in steps for name, _ in added or ()})
        rounds = z3.If(high > low, (high - low + step - 1) / step, z3.IntVal(0))
        for name, begun, added in zip(op.results, started, steps, strict=True):
            self._values[name] = after(begun, added, rounds)


def _added(
    start: Value, added: list[tuple[str, Op]], rounds: Any, bound: dict[str, Value]
) -> Value:
    """What is left after so many rounds; added: the names of what each round adds, and how; bound:
    their values, by the time that somebody asks."""

    def at(lane: Lane) -> Any:
        total = start.at(lane)
        for name, op in added:
            scale = start.size if op.name == "tt.addptr" else 1
            sign = -1 if op.name == "arith.subi" else 1
            total = total + sign * scale * rounds * bound[name].at(lane)
        return total

    return replace(start, at=at)


def _parts(expressions: Sequence[Any]) -> Iterator[Any]:
    """All that expressions are made of, each once."""
    seen, waiting = set[int](), [one for one in expressions if z3.is_expr(one)]
    while waiting:
        one = waiting.pop()
        if one.get_id() not in seen:
            seen.add(one.get_id())
            waiting += one.children()
            yield one


def names_in(expressions: Sequence[Any]) -> Iterator[str]:
    """The names of what occurs in expressions."""
    for one in _parts(expressions):
        if one.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            yield one.decl().name()


def _truth(value: Value) -> bool:
    return z3.is_bool(value.at(tuple(z3.IntVal(0) for _ in value.shape)))


def _varying(body: Region, names: set[str]) -> set[str]:
    """What may change from round to round: what follows from these, and what is loaded."""
    for op in body.ops:
        if op.regions or op.name.startswith(("tt.load", "tt.atomic")) or names & {*op.operands}:
            names = names | {*op.results}
    return names


def _steps(body: Region, name: str, end: str, varying: set[str]) -> list[tuple[str, Op]] | None:
    """What is added to a carried value in a round; None if that is no sum, or changes."""
    makers = {result: op for op in body.ops for result in op.results}
    found = list[tuple[str, Op]]()
    while end != name:
        op = makers.get(end)
        if op is None or op.name not in ("arith.addi", "arith.subi", "tt.addptr"):
            return None
        left, right = op.operands
        if left in varying and right not in varying:
            end, added = left, right
        elif op.name == "arith.addi" and right in varying and left not in varying:
            end, added = right, left
        else:
            return None
        found.append((added, op))
    return found


def _typed(type_: str) -> tuple[tuple[int, ...], str]:
    """The shape and the element of a type."""
    inner = type_.removeprefix("tensor<").removesuffix(">") if type_.startswith("tensor<") else ""
    if not inner:
        return (), type_
    dims = re.match(r"(?:\d+x)*", inner)
    assert dims is not None
    return tuple(map(int, dims[0].split("x")[:-1])), inner[dims.end() :].partition(", #")[0]


def _scalar(expression: Any) -> Value:
    made = z3.BoolVal(expression) if isinstance(expression, bool) else expression
    made = z3.IntVal(made) if isinstance(made, int) else made
    return Value((), lambda _: made)


def _chosen(condition: Any, one: Value, two: Value) -> Value:
    return replace(one, at=lambda lane: z3.If(condition, one.at(lane), two.at(lane)))


# The operations. Each gets its operands and gives a value, or None where it is not known.


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
_OVERFLOWING = {"arith.addi", "arith.subi", "arith.muli", "arith.shli", "arith.trunci"}
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "slt": lambda a, b: a < b, "sle": lambda a, b: a <= b, "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
_UNSIGNED = {"ult": "slt", "ule": "sle", "ugt": "sgt", "uge": "sge"}


def _binary(meaning: Meaning, op: Op, operands: list[Value]) -> Value | None:
    left, right = operands
    apply = _BINARY[op.name]
    zero = tuple(z3.IntVal(0) for _ in left.shape)
    if apply(left.at(zero), right.at(zero)) is None:
        return None
    return Value(left.shape, lambda lane: apply(left.at(lane), right.at(lane)))


def _compare(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
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


def _constant(meaning: Meaning, op: Op, operands: list[Value]) -> Value | None:
    found = re.match(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? ?(?::|$)", op.text)
    if found is None:
        return None
    shape, _ = _typed(op.types[0]) if op.types else ((), "")
    made = z3.IntVal(int(found[1])) if found[1].lstrip("-").isdigit() else None
    made = z3.BoolVal(found[1] == "true") if made is None else made
    return Value(shape, lambda _: made)


def _range(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    start = op.number("start")
    return Value((op.number("end") - start,), lambda lane: start + lane[0])


def _splat(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    (value,), lanes = operands, (z3.IntVal(0),) * len(operands[0].shape)
    return replace(value, shape=_typed(op.types[0])[0], at=lambda _: value.at(lanes))


def _expanded(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    (value,), axis = operands, op.number("axis")
    return replace(
        value,
        shape=_typed(op.types[0])[0],
        at=lambda lane: value.at((*lane[:axis], *lane[axis + 1 :])),
    )


def _broadcast(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    (value,) = operands

    def at(lane: Lane) -> Any:
        return value.at(
            tuple(z3.IntVal(0) if n == 1 else i for n, i in zip(value.shape, lane, strict=True))
        )

    return replace(value, shape=_typed(op.types[0])[0], at=at)


def _transposed(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
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


def _reshaped(meaning: Meaning, op: Op, operands: list[Value]) -> Value | None:
    (value,), shape = operands, _typed(op.types[0])[0]
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


def _moved(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    pointer, offset = operands
    size = pointer.size
    return replace(pointer, at=lambda lane: pointer.at(lane) + size * offset.at(lane))


def _program(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    return _scalar(meaning.programs["xyz".index(op.text.split()[1])])


def _programs(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    return _scalar(meaning.grid["xyz".index(op.text.split()[1])])


def _selected(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    condition, one, two = operands
    if one.base != two.base:
        raise NotProvedError(f"an address is of one tensor or of another in {op}")

    def at(lane: Lane) -> Any:
        return z3.If(condition.at(lane if condition.shape else ()), one.at(lane), two.at(lane))

    return replace(one, at=at)


def _widened(meaning: Meaning, op: Op, operands: list[Value]) -> Value:
    (value,), signed = operands, op.name == "arith.extsi"
    wraps = 1 << int(re.findall(r"i(\d+)", op.text)[0])
    if _truth(value):
        one = -1 if signed else 1
        return replace(value, at=lambda lane: z3.If(value.at(lane), one, 0))
    if signed:
        return value
    return replace(
        value, at=lambda lane: z3.If(value.at(lane) < 0, value.at(lane) + wraps, value.at(lane))
    )


def _narrowed(meaning: Meaning, op: Op, operands: list[Value]) -> Value | None:
    return None if _typed(op.types[0])[1] == "i1" else operands[0]


def _cast(meaning: Meaning, op: Op, operands: list[Value]) -> Value | None:
    (value,) = operands
    if value.base is None:
        return None
    return replace(value, size=size_of(_typed(op.types[0])[1]))


def size_of(element: str) -> int:
    """The bytes of what a pointer leads to."""
    bits = re.search(r"ptr<(?:i|f|bf)(\d+)", element)
    assert bits is not None
    return max(1, int(bits[1]) // 8)


_MEANINGS: dict[str, Callable[[Meaning, Op, list[Value]], Value | None]] = {
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
    "tt.get_program_id": _program,
    "tt.get_num_programs": _programs,
}
_OF_POINTERS = {
    "tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.addptr", "tt.splat", "tt.bitcast",
    "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "arith.select", "tt.unsplat",
}  # fmt: skip
