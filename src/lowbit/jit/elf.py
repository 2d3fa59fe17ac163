"""Object files for x86-64 put into memory without LLVM, whose library is slow to load.

LLVM's code for a JIT follows the large code model: a function reaches what lies outside of it by
64-bit distances from the global offset table, which holds the addresses of other libraries'
functions.

Source: System V Application Binary Interface; its AMD64 supplement, 4.4.
"""

from __future__ import annotations

import ctypes
import struct

from lowbit.isa.host import executable, process

_X86_64 = 62
_SYMBOLS, _RELOCATIONS, _UNWINDING, _ZEROS = 2, 4, 0x70000001, 8  # kinds of sections
_WRITABLE, _IN_MEMORY = 1, 2  # flags of sections
_ABSOLUTE = 0xFFF1  # in place of a symbol's section
_TABLE = b"_GLOBAL_OFFSET_TABLE_"
_TABLE_ENTRY = 27

# What a relocation of each type writes, of S, the symbol's address, A, the addend, P, the address
# that is written to, T, the table's address, and E, the address of the symbol's entry in the table.
_VALUES = {
    1: lambda S, A, P, T, E: S + A,
    24: lambda S, A, P, T, E: S + A - P,
    25: lambda S, A, P, T, E: S + A - T,
    _TABLE_ENTRY: lambda S, A, P, T, E: E + A - T,
    29: lambda S, A, P, T, E: T + A - P,
}


class Unknown(Exception):
    """An object file for another machine, or one that needs more than is known here."""


class ObjectFile:
    """What is needed of an object file: where its sections come to lie in one piece of memory, and
    what is then written into them. Unknown: see there."""

    def __init__(self, code: bytes) -> None:
        if code[:6] != b"\x7fELF\x02\x01" or code[18] != _X86_64:
            raise Unknown("no ELF file of 64 bits for x86-64")
        (at,), (count,) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<H", code, 60)
        sections = [struct.unpack_from("<2I4Q2I2Q", code, at + 64 * n) for n in range(count)]
        self._bytes: list[tuple[int, bytes]] = []  # with their offsets in memory
        self._offsets: dict[int, int] = {}  # of sections
        self._zeros: dict[int, int] = {}  # the same, of writable ones, which follow on a page
        self._symbols: list[tuple[bytes, int, int]] = []  # name, section, offset there
        self._relocations: list[tuple[int, int, int, int]] = []  # place, type, symbol, addend
        self.size = self.writable = 0
        for number, (_, kind, flags, _, offset, size, link, _, align, _) in enumerate(sections):
            content = code[offset : offset + size]
            if kind == _SYMBOLS:
                names = code[sections[link][4] :]
                for name, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", content):
                    self._symbols.append((names[name : names.index(0, name)], section, value))
            elif flags & _WRITABLE and kind == _ZEROS:
                self._zeros[number] = self.writable = -(-self.writable // align) * align
                self.writable += size
            elif flags & _WRITABLE:
                raise Unknown("data that may be written and is not zero at first")
            elif flags & _IN_MEMORY and kind != _UNWINDING:
                self._offsets[number] = self.size = -(-self.size // align) * align
                self._bytes.append((self.size, content))
                self.size += size
        for _, kind, _, _, offset, size, _, target, _, _ in sections:
            if kind == _RELOCATIONS and target in self._offsets:
                content = code[offset : offset + size]
                for place, type_, symbol, addend in struct.iter_unpack("<QIIq", content):
                    if type_ not in _VALUES:
                        raise Unknown(f"a relocation of type {type_}")
                    self._relocations.append((self._offsets[target] + place, type_, symbol, addend))
        self._table = self.size = -(-self.size // 8) * 8
        entries = {symbol for _, type_, symbol, _ in self._relocations if type_ == _TABLE_ENTRY}
        self._entries = {symbol: self.size + 8 * n for n, symbol in enumerate(sorted(entries))}
        self.size += 8 * len(entries)

    def placed(self, name: str) -> int:
        """The address of the function `name`, once all is in memory, for as long as the process
        lives. ValueError: there is none, or a function that it calls is nowhere."""
        wanted = name.encode()
        for symbol in self._symbols:
            if symbol[0] == wanted and symbol[1] in self._offsets:
                return self._address(symbol, executable(self.size, self._written, self.writable), 0)
        raise ValueError(f"the object file holds no function {name!r}")

    def _written(self, base: int, zeros: int) -> bytes:
        """What lies at `base`, with the zeros at `zeros`."""
        memory = bytearray(self.size)
        for offset, content in self._bytes:
            memory[offset : offset + len(content)] = content
        for symbol, entry in self._entries.items():
            struct.pack_into("<Q", memory, entry, self._address(self._symbols[symbol], base, zeros))
        table = base + self._table
        for place, type_, symbol, addend in self._relocations:
            address = self._address(self._symbols[symbol], base, zeros)
            entry = base + self._entries.get(symbol, 0)
            value = _VALUES[type_](address, addend, base + place, table, entry)
            struct.pack_into("<Q", memory, place, value & 0xFFFF_FFFF_FFFF_FFFF)
        return bytes(memory)

    def _address(self, symbol: tuple[bytes, int, int], base: int, zeros: int) -> int:
        name, section, value = symbol
        if section in self._offsets:
            return base + self._offsets[section] + value
        if section in self._zeros:
            return zeros + self._zeros[section] + value
        if section == _ABSOLUTE:
            return value
        if name == _TABLE:
            return base + self._table
        return ctypes.addressof(ctypes.c_char.in_dll(process(), name.decode()))
