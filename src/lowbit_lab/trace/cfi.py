"""How to leave a function, as compilers write it down (DWARF 5, section 6.4; LSB's .eh_frame).

The rules are found by libgcc, which also knows those of code that was made at run time and
registered, such as llvmlite's.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

SP, RETURN = 7, 16  # DWARF's numbers on x86-64
FRAME = -1  # where the caller's stack begins
Read = Callable[[int, int], bytes]
"""So many bytes of memory at an address. LookupError where there are none."""


@dataclass(frozen=True)
class Place:
    """What a rule names: a register's value plus an offset, or the result of an expression; in
    memory: the word that lies there."""

    register: int = 0
    offset: int = 0
    expression: bytes = b""
    in_memory: bool = True

    def address(self, registers: Mapping[int, int], read: Read, pushed: int | None = None) -> int:
        """Of the word; the value itself if not `in_memory`. An expression begins with `pushed`."""
        if self.expression:
            return evaluate(self.expression, registers, read, pushed)
        return registers[self.register] + self.offset


@dataclass
class Rules:
    """Of one instruction: where the caller's stack begins (`frame`), and where its registers are
    kept, offsets being from there."""

    frame: Place = field(default_factory=Place)
    kept: dict[int, Place] = field(default_factory=dict[int, Place])


class _Bases(ctypes.Structure):
    _fields_ = (("text", ctypes.c_void_p), ("data", ctypes.c_void_p), ("start", ctypes.c_void_p))


@cache
def _find() -> Callable[..., int | None] | None:
    try:
        found = ctypes.CDLL("libgcc_s.so.1")._Unwind_Find_FDE
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return found


def _described(address: int) -> tuple[int, int] | None:
    """Where the description of the function at an address lies, and where the function starts."""
    find, bases = _find(), _Bases()
    entry = find(address, ctypes.byref(bases)) if find else None
    return (entry, bases.start or 0) if entry else None


class _Reader:
    """Numbers out of bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def plain(self, kind: str) -> int:
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.plain("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        start = self.at
        value, bits = self.unsigned(), 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def block(self) -> bytes:
        size = self.unsigned()
        self.at += size
        return self.data[self.at - size : self.at]

    def more(self) -> bool:
        return self.at < len(self.data)


@dataclass(frozen=True)
class _Function:
    """What is written down of a function: its place, factors, and the two programs."""

    start: int
    size: int
    code_factor: int
    data_factor: int
    common: bytes
    own: bytes


def _function(address: int, read: Read) -> _Function | None:
    found = _described(address)
    if found is None:
        return None
    entry, start = found
    data = _entry(entry, read)
    common_at = entry + 4 - struct.unpack_from("<i", data)[0]
    common = _Reader(_entry(common_at, read)[4:])
    common.plain("B")
    letters = common.data[common.at : common.data.index(b"\0", common.at)]
    common.at += len(letters) + 1
    code_factor, data_factor = common.unsigned(), common.signed()
    common.unsigned()  # the return address's register, 16
    width = 8
    if letters.startswith(b"z"):
        extra = _Reader(common.block())
        for letter in letters[1:].decode():
            if letter == "P":
                extra.at += {2: 2, 3: 4, 4: 8, 0: 8}[extra.plain("B") & 7]
            elif letter in "RL":
                encoding = extra.plain("B")
                if letter == "R":
                    width = {2: 2, 3: 4, 4: 8, 0: 8}[encoding & 7]
    own = _Reader(data[4 + width :])
    size = own.plain({2: "H", 4: "I", 8: "Q"}[width])
    if letters.startswith(b"z"):
        own.block()
    rest = own.data[own.at :]
    return _Function(start, size, code_factor, data_factor, common.data[common.at :], rest)


def _entry(address: int, read: Read) -> bytes:
    (length,) = struct.unpack("<I", read(address, 4))
    return read(address + 4, length)


def extent(address: int, read: Read) -> tuple[int, int] | None:
    """First address of the function at an address and the one behind it; None: not known."""
    one = _function(address, read)
    return (one.start, one.start + one.size) if one else None


def rules(address: int, read: Read) -> Rules | None:
    """Of the instruction at an address; None where nothing is written down."""
    one = _function(address, read)
    if one is None or not one.start <= address < one.start + one.size:
        return None
    program = _Program(one)
    program.run(one.common, None)
    program.begin = Rules(program.now.frame, dict(program.now.kept))
    program.run(one.own, address)
    return program.now


class _Program:
    """The instructions by which the rules of a function change from address to address."""

    def __init__(self, function: _Function) -> None:
        self.function = function
        self.now, self.begin = Rules(), Rules()
        self.at, self.remembered = function.start, list[Rules]()

    def run(self, program: bytes, until: int | None) -> None:
        """Up to the address `until`."""
        data = _Reader(program)
        while data.more():
            code = data.plain("B")
            high, low = code & 0xC0, code & 0x3F
            ahead: int | None = None
            if high == 0x40:
                ahead = low
            elif high == 0x80:
                self._offset(low, data.unsigned())
            elif high == 0xC0:
                self._restore(low)
            elif code in (2, 3, 4):
                ahead = data.plain({2: "B", 3: "H", 4: "I"}[code])
            else:
                self._other(code, data)
            if ahead is not None:
                self.at += ahead * self.function.code_factor
                if until is not None and self.at > until:
                    return

    def _offset(self, register: int, factored: int) -> None:
        self.now.kept[register] = Place(FRAME, factored * self.function.data_factor)

    def _restore(self, register: int) -> None:
        if register in self.begin.kept:
            self.now.kept[register] = self.begin.kept[register]
        else:
            self.now.kept.pop(register, None)

    def _other(self, code: int, data: _Reader) -> None:
        now, factor = self.now, self.function.data_factor
        if code == 0x01:
            self.at = data.plain("Q")
        elif code in (0x05, 0x11):
            self._offset(data.unsigned(), data.unsigned() if code == 0x05 else data.signed())
        elif code == 0x06:
            self._restore(data.unsigned())
        elif code in (0x07, 0x08):
            now.kept.pop(data.unsigned(), None)
        elif code == 0x09:
            register = data.unsigned()
            now.kept[register] = Place(data.unsigned(), in_memory=False)
        elif code == 0x0A:
            self.remembered.append(Rules(now.frame, dict(now.kept)))
        elif code == 0x0B:
            self.now = self.remembered.pop()
        elif code in (0x0C, 0x12):
            register = data.unsigned()
            offset = data.unsigned() if code == 0x0C else data.signed() * factor
            now.frame = Place(register, offset)
        elif code == 0x0D:
            now.frame = Place(data.unsigned(), now.frame.offset)
        elif code in (0x0E, 0x13):
            offset = data.unsigned() if code == 0x0E else data.signed() * factor
            now.frame = Place(now.frame.register, offset)
        elif code == 0x0F:
            now.frame = Place(expression=data.block())
        elif code in (0x10, 0x16):
            register = data.unsigned()
            now.kept[register] = Place(expression=data.block(), in_memory=code == 0x10)
        elif code in (0x14, 0x15):
            register = data.unsigned()
            offset = (data.unsigned() if code == 0x14 else data.signed()) * factor
            now.kept[register] = Place(FRAME, offset, in_memory=False)
        elif code == 0x2E:
            data.unsigned()
        elif code != 0x00:
            raise LookupError(f"call frame instruction {code:#x} is not known")


_BINARY: dict[int, Callable[[int, int], int]] = {
    0x1A: operator.and_, 0x1C: operator.sub, 0x1E: operator.mul, 0x21: operator.or_,
    0x22: operator.add, 0x24: operator.lshift, 0x25: operator.rshift, 0x2A: operator.ge,
    0x2D: operator.lt,
}  # fmt: skip
_CONSTANTS = dict(zip(range(0x08, 0x10), "BbHhIiQq", strict=True))


def evaluate(
    expression: bytes, registers: Mapping[int, int], read: Read, pushed: int | None
) -> int:
    """A DWARF expression, as far as compilers use them here. LookupError for any other."""
    data, stack = _Reader(expression), [] if pushed is None else [pushed]
    while data.more():
        code = data.plain("B")
        if 0x70 <= code < 0x90:
            stack.append(registers[code - 0x70] + data.signed())
        elif 0x30 <= code < 0x50:
            stack.append(code - 0x30)
        elif code in _CONSTANTS:
            stack.append(data.plain(_CONSTANTS[code]))
        elif code == 0x06:
            stack.append(int.from_bytes(read(stack.pop(), 8), "little"))
        elif code == 0x12:
            stack.append(stack[-1])
        elif code == 0x23:
            stack.append(stack.pop() + data.unsigned())
        elif code in _BINARY:
            right, left = stack.pop(), stack.pop()
            stack.append(_BINARY[code](left, right) & (1 << 64) - 1)
        else:
            raise LookupError(f"DWARF operation {code:#x} is not known")
    return stack[-1]
