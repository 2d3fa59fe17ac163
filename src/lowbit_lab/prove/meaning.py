"""What the operations of a kernel's text mean as expressions of Z3: of the program's number, of
lanes, and of how often a loop has gone round.

A block of lanes is a function of a lane's place. What is not known (a loaded value, a float's sign)
is an unknown of Z3's, about which nothing is assumed: what is proved holds whatever it is. Integers
are those of mathematics.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import z3

from lowbit_lab.prove.operations import (
    MEANINGS,
    OF_POINTERS,
    OVERFLOWING,
    Lane,
    Value,
    is_truth,
    scalar,
    typed,
)
from lowbit_lab.prove.ttir import NotProvedError, Op, Region, Text
from lowbit_lab.run.trace import Place

_NAMES = re.compile(r"%[\w$.#-]+")


@dataclass(frozen=True)
class Access:
    """A load, store or atomic operation. path: under which conditions it is reached."""

    kind: str
    pointer: Value
    mask: Value | None
    path: tuple[Any, ...]
    place: Place | None


@dataclass(frozen=True)
class Descriptor:
    """What tl.make_tensor_descriptor makes: nothing outside of its shape is touched."""

    pointer: Value
    shape: tuple[Value, ...]
    strides: tuple[Value, ...]
    block: tuple[int, ...]

    def access(self, kind: str, corner: Sequence[Value], path: tuple[Any, ...], op: Op) -> Access:
        """A load or a store of the block at a corner."""

        def places(lane: Lane) -> list[Any]:
            return [one.at(()) + place for one, place in zip(corner, lane, strict=True)]

        def at(lane: Lane) -> Any:
            moved = zip(places(lane), self.strides, strict=True)
            steps = [place * step.at(()) for place, step in moved]
            return self.pointer.at(()) + self.pointer.size * sum(steps)

        def inside(lane: Lane) -> Any:
            several = zip(places(lane), self.shape, strict=True)
            return z3.And(*(z3.And(place >= 0, place < n.at(())) for place, n in several))

        pointer = replace(self.pointer, shape=self.block, at=at)
        return Access(kind, pointer, Value(self.block, inside), path, op.place)


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
        self._descriptors: dict[str, Descriptor] = {}
        self._count = itertools.count()
        for value, name in text.parameters.items():
            given = arguments[name]
            self._values[value] = given if isinstance(given, Value) else scalar(given)
        self._blocks(text.body)

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

    def _blocks(self, body: Region) -> None:
        """Go through a function: a block is reached from those before it that branch to it."""
        path: tuple[Any, ...] = ()
        ways: dict[str, list[tuple[Any, list[Value]]]] = {}
        for op in body.ops:
            if op.name == "block":
                label = op.text.partition("(")[0]
                if label not in ways:
                    raise NotProvedError(f"its blocks are in an order that is not understood: {op}")
                first, *others = ways[label]
                made = first[1]
                for holds, values in others:
                    made = [_joined(op, holds, *two) for two in zip(values, made, strict=True)]
                self._values.update(zip(op.results, made, strict=True))
                path = (z3.Or(*(holds for holds, _ in ways.pop(label))),)
            elif op.name in ("cf.br", "cf.cond_br"):
                targets = re.findall(r"\^(\w+)(?:\(([^:)]*) :[^)]*\))?", op.text)
                holds = [self._values[op.operands[0]].at(())] if len(targets) == 2 else []
                ends = [*holds, *map(z3.Not, holds)] or [z3.BoolVal(True)]
                for (label, names), end in zip(targets, ends, strict=True):
                    values = [self._values[name] for name in _NAMES.findall(names)]
                    ways.setdefault(label, []).append((z3.And(*path, end), values))
            elif op.name != "tt.return":
                self._one(op, path)
        if ways:
            raise NotProvedError("it goes back to a block")

    def _run(self, region: Region, path: tuple[Any, ...]) -> Op | None:
        """Go through a region; returns what ends it."""
        for op in region.ops:
            if op.name in ("scf.yield", "scf.condition"):
                return op
            self._one(op, path)
        return None

    def _one(self, op: Op, path: tuple[Any, ...]) -> None:
        special = {"scf.for": self._for, "scf.if": self._if, "scf.while": self._while}
        if op.name in special:
            special[op.name](op, path)
            return
        if op.name == "tt.make_tensor_descriptor" or self._descriptors.keys() & {*op.operands}:
            self._describe(op, path)
            return
        operands = [self._values[name] for name in op.operands if name in self._values]
        if op.name in ("tt.load", "tt.store", "tt.atomic_rmw", "tt.atomic_cas"):
            self._access(op, operands, path)
        elif any(one.base for one in operands) and op.name not in OF_POINTERS:
            raise NotProvedError(f"an address goes through {op}")
        elif op.regions and op.name not in ("tt.reduce", "tt.scan"):
            raise NotProvedError(f"what is inside of {op} is not understood")
        meaning = MEANINGS.get(op.name)
        made = self._of_grid(op)
        if meaning is not None and len(operands) == len(op.operands) and len(op.results) == 1:
            made = meaning(op, operands)
        if made is not None:
            self._values[op.results[0]] = self._kept(made, op)
        else:
            self._unknown(op)

    def _unknown(self, op: Op) -> None:
        for name, type_ in zip(op.results, op.types, strict=False):
            shape, element = typed(type_)
            truth = element in ("i1", "!tt.ptr<i1>") or op.name.startswith("arith.cmp")
            self._values[name] = self.fresh(shape, f"{op}", truth)

    def _describe(self, op: Op, path: tuple[Any, ...]) -> None:
        """A descriptor is made, or a block is loaded or stored through it."""
        lists = [
            tuple(self._values[name] for name in _NAMES.findall(one))
            for one in re.findall(r"\[([^\]]*)\]", op.text)
        ]
        if op.name == "tt.make_tensor_descriptor":
            dims = re.findall(r"<((?:\d+x)+)", op.text)[-1].split("x")[:-1]
            pointer = self._values[op.operands[0]]
            made = Descriptor(pointer, lists[0], lists[1], tuple(map(int, dims)))
            self._descriptors[op.results[0]] = made
        elif op.name in ("tt.descriptor_load", "tt.descriptor_store"):
            kind = op.name.removeprefix("tt.descriptor_")
            descriptor = self._descriptors[op.operands[0]]
            self.accesses.append(descriptor.access(kind, lists[0], path, op))
            self._unknown(op)
        else:
            raise NotProvedError(f"an address goes through {op}")

    def _of_grid(self, op: Op) -> Value | None:
        of = {"tt.get_program_id": self.programs, "tt.get_num_programs": self.grid}.get(op.name)
        return None if of is None else scalar(of["xyz".index(op.text.split()[1])])

    def _kept(self, made: Value, op: Op) -> Value:
        """The same, computed once for each lane, and in how many bits."""
        known = dict[tuple[int, ...], Any]()
        element = typed(op.types[-1])[1] if op.types else ""
        bits = int(element[1:]) if op.name in OVERFLOWING and element[1:].isdigit() else 0

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
            self._values[name] = _joined(op, condition, one, two)

    def _while(self, op: Op, path: tuple[Any, ...]) -> None:
        """Of what it carries nothing is known but that its condition held."""
        before, after = op.regions
        for name, start in re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", op.text):
            begun = self._values[start]
            if begun.base is not None:
                raise NotProvedError(f"an address is carried through {op}")
            self._values[name] = self.fresh(begun.shape, f"what {op} carries", is_truth(begun))
        end = self._run(before, path)
        assert end is not None
        condition, *passed = (self._values[name] for name in end.operands)
        for name, value in zip(after.arguments, passed, strict=True):
            self._values[name] = value
        self._run(after, (*path, condition.at(())))
        for name, type_ in zip(op.results, op.types, strict=False):
            shape, element = typed(type_)
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
        self._values[index] = scalar(low + turn * step)
        varying = _varying(body, {index, *(name for name, _ in carried)})
        ends = body.ops[-1].operands if carried else ()
        steps = [
            _steps(body, name, end, varying) for (name, _), end in zip(carried, ends, strict=True)
        ]
        started = [self._values[start] for _, start in carried]
        bound = dict[str, Value]()

        def after(begun: Value, added: list[tuple[str, Op]] | None, rounds: Any) -> Value:
            if added:
                return self._kept(_added(begun, added, rounds, bound), added[0][1])
            if added is not None:
                return begun
            if begun.base is not None:
                raise NotProvedError(f"an address changes from round to round in {op}")
            return self.fresh(begun.shape, f"what {op} carries", is_truth(begun))

        for (name, _), begun, added in zip(carried, started, steps, strict=True):
            self._values[name] = after(begun, added, turn)
        self._run(body, (*path, turn >= 0, low + turn * step < high))
        bound.update({name: self._values[name] for added in steps for name, _ in added or ()})
        rounds = z3.If(high > low, (high - low + step - 1) / step, z3.IntVal(0))
        for name, begun, added in zip(op.results, started, steps, strict=True):
            self._values[name] = after(begun, added, rounds)


def _joined(op: Op, condition: Any, one: Value, two: Value) -> Value:
    """One value or the other."""
    if one.base != two.base:
        raise NotProvedError(f"an address is of one tensor or of another after {op}")
    return replace(one, at=lambda lane: z3.If(condition, one.at(lane), two.at(lane)))


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
