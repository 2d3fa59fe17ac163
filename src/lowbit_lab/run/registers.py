"""The registers and tiles of a lowbit kernel, as its interpreter goes through the text."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.tiles import TileState
from lowbit.isa.types import Vector
from lowbit.isa.value import Register as Variable
from lowbit.isa.value import Value
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.trace import Block, Place, Recorder, Register, block


class RegisterWatch:
    """Tells a recorder which variables and tiles there are, and what they hold."""

    def __init__(self, memory: Memory, recorder: Recorder, isa: InstructionSet) -> None:
        self._memory, self._recorder, self._isa = memory, recorder, isa
        self._live: list[int] = []
        self._tiles: dict[int, int] = {}
        self._loads: dict[int, int | None] = {}  # the event that each tile was loaded by
        self._names: dict[Place, tuple[list[str], bool]] = {}
        recorder.machine = isa

    def variable(self, initial: Value) -> Variable:
        """A new variable of the text, named as its line names it."""
        place = self._memory.here()
        size = initial.type.bytes if isinstance(initial.type, Vector) else 0
        slots = -(-size // self._isa.vector_bytes)
        number = self._add(Register(self._name(place), str(initial.type), slots, place))
        self._live.append(number)
        return _WatchedVariable(initial, self, number)

    def assigned(self, number: int, value: Value) -> None:
        """A variable holds another value; for a vector that is a step of the program."""
        is_step = isinstance(value.type, Vector)
        if is_step:
            name = self._recorder.registers[number].name
            self._memory.computed("assignment", name, (), block(value.payload))
        self._recorder.change(number, np.asarray(value.payload), later=not is_step)

    @contextmanager
    def body(self) -> Iterator[None]:
        """The variables made inside are gone after it."""
        live = len(self._live)
        yield
        for number in self._live[live:]:
            self._recorder.change(number, None, later=True)
        del self._live[live:]

    @contextmanager
    def instruction(self, name: str, tiles: Mapping[int, TileState]) -> Iterator[None]:
        """One instruction; the accesses that it makes are one, and tiles may change by it."""
        first = len(self._recorder.events)
        before = {number: (state.data, state.rows) for number, state in tiles.items()}
        yield
        self._recorder.join(first, self._memory.program)
        changed = [n for n, state in tiles.items() if _differs(state, *before[n])]
        touches = len(self._recorder.events) > first
        if tiles and not touches:
            read = {n: state for n, state in tiles.items() if n not in changed and state.rows}
            operands = [Block(s.view(), "uint8", self._loads.get(n)) for n, s in read.items()]
            self._memory.computed("instruction", name, operands)
        for number in changed:
            state = tiles[number]
            self._loads[number] = first if touches else None
            self._recorder.change(self._tile(number), state.view() if state.rows else None)

    def _name(self, place: Place | None) -> str:
        """As the text calls it: x, or x[2] for the third that one statement makes."""
        if place is None:
            return "register"
        if place not in self._names:
            self._names[place] = _assigned_at(place)
        names, several = self._names[place]
        alike = sum(self._recorder.registers[one].place == place for one in self._live)
        if len(names) > 1:
            return names[alike % len(names)]
        return f"{names[0]}[{alike}]" if several else names[0]

    def _tile(self, number: int) -> int:
        if number not in self._tiles:
            self._tiles[number] = self._add(Register(f"tile {number}", "tile", 0, None))
        return self._tiles[number]

    def _add(self, register: Register) -> int:
        self._recorder.registers.append(register)
        return len(self._recorder.registers) - 1


class _WatchedVariable(Variable):
    def __init__(self, initial: Value, watch: RegisterWatch, number: int) -> None:
        self._watch, self._number = watch, number
        super().__init__(initial)

    def _put(self, new: Value) -> None:
        super()._put(new)
        self._watch.assigned(self._number, new)


def _differs(state: TileState, data: np.ndarray, rows: int) -> bool:
    """Whether a tile was written, with whatever values, or given another shape."""
    return state.data is not data or state.rows != rows


def _assigned_at(place: Place) -> tuple[list[str], bool]:
    """The names that the statement around a line assigns to, and whether it makes several values
    of one name."""
    found = place.around(ast.Assign, ast.AnnAssign, ast.Return)
    if found is None or isinstance(found, ast.Return):
        return ["register"], found is not None
    target = found.targets[0] if isinstance(found, ast.Assign) else found.target
    names = [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
    return names or ["register"], not isinstance(found.value, ast.Call)
