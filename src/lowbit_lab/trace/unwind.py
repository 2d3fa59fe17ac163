"""Who called the code that a sample was in, frame by frame.

Most code has rules for that, which compilers write down. What has none, such as MKL's kernels and
those that FBGEMM and oneDNN generate, is followed forward, from where it is to where it returns: on
that way it takes back from the stack what it put there, and says so by its instructions.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from iced_x86 import Decoder, FlowControl, Instruction, Mnemonic, OpKind, Register

from lowbit_lab.trace.cfi import FRAME, RETURN, SP, Place, Read, Rules, rules
from lowbit_lab.trace.sampler import Sample

_BP = 6
_MOST_FRAMES = 250
_MOST_INSTRUCTIONS = 30_000  # until the return, on one way or another
_LONGEST = 15  # bytes of an instruction
_BLOCK = 1 << 12
_WORD = 8
_STACK_REACH = 1 << 23  # bytes around a stack pointer that are mostly stack

_CALLS = (FlowControl.CALL, FlowControl.INDIRECT_CALL)
_ENDS = (FlowControl.INTERRUPT, FlowControl.EXCEPTION, FlowControl.INDIRECT_BRANCH)

_NUMBERS = {
    getattr(Register, name): number
    for number, name in enumerate(
        ("RAX", "RDX", "RCX", "RBX", "RSI", "RDI", "RBP", "RSP", *(f"R{n}" for n in range(8, 16)))
    )
}
_CALLEES = (3, 6, 12, 13, 14, 15)  # what a function must give back as it was


class Memory:
    """Of this process, read so that a bad address is a LookupError."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        self._blocks: dict[int, bytes] = {}

    def close(self) -> None:
        os.close(self._file)

    def read(self, address: int, size: int) -> bytes:
        try:
            data = os.pread(self._file, size, address)
        except (OSError, OverflowError):
            data = b""
        if len(data) < size:
            raise LookupError(f"no memory at {address:#x}")
        return data

    def code(self, address: int) -> bytes:
        """What may be an instruction there."""
        number = address // _BLOCK
        for one in (number, number + 1):
            if one not in self._blocks:
                try:
                    self._blocks[one] = self.read(one * _BLOCK, _BLOCK)
                except LookupError:
                    self._blocks[one] = b""
        at = address % _BLOCK
        return (self._blocks[number][at:] + self._blocks[number + 1][:_LONGEST])[:_LONGEST]


class Unwinder:
    """Callers of samples of this process."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rules = cache(lambda address: rules(address, memory.read))
        self._decoded = cache(self._decode)

    def frames(self, sample: Sample) -> list[int]:
        """The sampled address, then the address behind each call, the innermost first."""
        registers, read = dict(enumerate(sample.registers)), self._reader(sample)
        found = [sample.address]
        while len(found) < _MOST_FRAMES:
            at = registers[RETURN]
            try:
                one = self._rules(at if len(found) == 1 else at - 1)
                registers = _caller(one or self._forward(registers, read), registers, read)
            except LookupError:
                break
            if not registers[RETURN]:
                break
            found.append(registers[RETURN])
        return found

    def _reader(self, sample: Sample) -> Read:
        """Memory, the stack as it was when the sample was taken: it has changed since."""

        def read(address: int, size: int) -> bytes:
            offset = address - sample.registers[SP]
            if 0 <= offset <= len(sample.stack) - size:
                return sample.stack[offset : offset + size]
            if -_STACK_REACH < offset < _STACK_REACH:
                raise LookupError(f"{address:#x} lies outside of the stack that was kept")
            return self._memory.read(address, size)

        return read

    def _decode(self, address: int) -> Instruction | None:
        one = Decoder(64, self._memory.code(address), ip=address).decode()
        return None if one.is_invalid else one

    def _forward(self, registers: Mapping[int, int], read: Read) -> Rules:
        """Rules of code that has none. LookupError if no return is found that leads to a call."""
        start = registers[RETURN]
        waiting, seen = deque([_Way(start)]), {start}
        for _ in range(_MOST_INSTRUCTIONS):
            if not waiting:
                break
            way = waiting.popleft()
            one = self._decoded(way.at)
            if one is None:
                continue
            if one.flow_control == FlowControl.RETURN:
                if self._leads_to_call(way.rules(), registers, read):
                    return way.rules()
                continue
            for after in way.after(one):
                if after.at not in seen:
                    seen.add(after.at)
                    # Straight on first: a loop is left where its branch is not taken.
                    (waiting.appendleft if after.at == one.next_ip else waiting.append)(after)
        raise LookupError(f"no way back from {start:#x}")

    def _leads_to_call(self, rules: Rules, registers: Mapping[int, int], read: Read) -> bool:
        try:
            address = _caller(rules, registers, read)[RETURN]
        except LookupError:
            return False
        for size in range(2, 9):
            one = self._decoded(address - size) if address > size else None
            if one and one.len == size and one.flow_control in _CALLS:
                return True
        return False


def _caller(rules: Rules, registers: Mapping[int, int], read: Read) -> dict[int, int]:
    """Registers as they are in the caller. LookupError if there is none, or it is not known."""
    if RETURN not in rules.kept:
        raise LookupError("the outermost function")
    frame = rules.frame.address(registers, read)
    based = {**registers, FRAME: frame}
    found = {**registers, SP: frame}
    for register, place in rules.kept.items():
        address = place.address(based, read, frame)
        kept = int.from_bytes(read(address, _WORD), "little") if place.in_memory else address
        found[register] = kept
    return found


@dataclass(frozen=True)
class _Way:
    """From the start of a search to an instruction: the stack pointer is now what the register
    `base` was at the start, plus `offset`; `kept` is what was taken back."""

    at: int
    base: int = SP
    offset: int = 0
    kept: Mapping[int, Place] = field(default_factory=dict[int, Place])

    def rules(self) -> Rules:
        """At a return."""
        here = Place(self.base, self.offset)
        return Rules(Place(self.base, self.offset + _WORD), {**self.kept, RETURN: here})

    def after(self, one: Instruction) -> Iterator[_Way]:
        """The ways that go on behind an instruction."""
        way = self._moved(one)
        if way is None or one.flow_control in _ENDS:
            return
        if one.flow_control in (FlowControl.CONDITIONAL_BRANCH, FlowControl.UNCONDITIONAL_BRANCH):
            yield replace(way, at=one.near_branch_target)
        if one.flow_control != FlowControl.UNCONDITIONAL_BRANCH:
            yield replace(way, at=one.next_ip)

    def _moved(self, one: Instruction) -> _Way | None:
        """What an instruction does to the stack; None if that cannot be known."""
        kind = one.mnemonic
        target = _NUMBERS.get(one.op0_register) if one.op0_kind == OpKind.REGISTER else None
        if kind == Mnemonic.PUSH:
            return replace(self, offset=self.offset - _WORD)
        if kind == Mnemonic.POP:
            kept = {**self.kept, target: Place(self.base, self.offset)} if target else self.kept
            return replace(self, offset=self.offset + _WORD, kept=kept)
        if kind == Mnemonic.LEAVE:
            return replace(self._from(_BP, _WORD), kept={**self.kept, _BP: Place(_BP)})
        if target == SP:
            return self._set(one)
        if kind == Mnemonic.MOV and target in _CALLEES and one.op1_kind == OpKind.MEMORY:
            place = self._in_stack(one)
            return replace(self, kept={**self.kept, target: place}) if place else self
        return self

    def _set(self, instruction: Instruction) -> _Way | None:
        """The stack pointer is written."""
        kind = instruction.mnemonic
        if kind in (Mnemonic.ADD, Mnemonic.SUB) and instruction.op1_kind != OpKind.REGISTER:
            amount = _signed(instruction.immediate(1))
            return replace(self, offset=self.offset + (amount if kind == Mnemonic.ADD else -amount))
        if kind == Mnemonic.LEA:
            place = self._in_stack(instruction)
            return replace(self, base=place.register, offset=place.offset) if place else None
        if kind == Mnemonic.MOV and instruction.op1_kind == OpKind.REGISTER:
            source = _NUMBERS.get(instruction.op1_register)
            return None if source is None or source in self.kept else self._from(source, 0)
        return None

    def _from(self, base: int, offset: int) -> _Way:
        return replace(self, base=base, offset=offset)

    def _in_stack(self, one: Instruction) -> Place | None:
        """The memory operand, by registers as they were at the start."""
        base, offset = _NUMBERS.get(one.memory_base), _signed(one.memory_displacement)
        if base is None or one.memory_index != Register.NONE or base in self.kept:
            return None
        if base == SP:
            return Place(self.base, self.offset + offset)
        return Place(base, offset)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
