"""A process's map of code: which function and file an address belongs to."""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lowbit.registry.locks import cached_property
from lowbit_lab.trace.sampler import Mapping

GENERATED, NATIVE = "generated", "native"
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"),
     ("size", "<u8")]
)  # fmt: skip
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_SYMBOLS, _DYNAMIC_SYMBOLS, _LOADED, _EXECUTABLE = 2, 11, 1, 1


@dataclass(frozen=True)
class Function:
    """Where an address is: name is "" if nothing names it. start: of the function, or of what is
    known of it, offset: the same from the start of its file; library: the file's name, "" for code
    that was made at run time."""

    name: str
    library: str
    start: int
    offset: int

    @property
    def kind(self) -> str:
        return NATIVE if self.library else GENERATED

    @property
    def text(self) -> str:
        """The name, or the place in the file."""
        if self.name:
            return self.name
        return f"{self.library}+{self.offset:#x}" if self.library else "generated code"

    @property
    def short(self) -> str:
        """The same without a C++ function's parameters."""
        return short(self.name) if self.name and self.library else self.text


class CodeMap:
    """Looks addresses up. names: (start, size, name) of generated code; functions: extents that
    are known without a name."""

    def __init__(
        self,
        mappings: Sequence[Mapping],
        names: Sequence[tuple[int, int, str]] = (),
        functions: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._mappings = sorted(mappings, key=lambda one: one.start)
        self._named = list(self._known_extents(names, dict(functions)))
        self._extents = sorted(functions)
        self._files = cache(_File)

    def _known_extents(
        self, names: Sequence[tuple[int, int, str]], functions: dict[int, int]
    ) -> Iterator[tuple[int, int, str]]:
        """Start, end and name: one whose size nobody tells goes to the next, or to the end."""
        ordered = sorted({start: (size, name) for start, size, name in names}.items())
        for number, (start, (size, name)) in enumerate(ordered):
            place = self.mapping(start)
            ends = [start + size] if size else [functions[start]] if start in functions else []
            ends += [one[0] for one in ordered[number + 1 : number + 2]]
            yield start, min(ends + ([place.end] if place else [])), name

    def mapping(self, address: int) -> Mapping | None:
        """What lies there."""
        at = bisect_right(self._mappings, address, key=lambda one: one.start) - 1
        found = self._mappings[at] if at >= 0 else None
        return found if found and address < found.end else None

    def function(self, address: int) -> Function:
        """Of an address; that behind a call may belong to the next function, so ask for the one
        before it."""
        place = self.mapping(address)
        own = _around(self._extents, address)
        if place is None or not place.path.startswith("/") or place.path.endswith("(deleted)"):
            named = _around(self._named, address)
            start = own[0] if own else place.start if place else address
            if named:
                return Function(named[2], "", named[0], address - named[0])
            return Function("", "" if place is None or "[" not in place.path else place.path,
                            start, address - start)  # fmt: skip
        file = self._files(place.path)
        offset = file.address(address - place.start + place.offset)
        symbol = file.symbol(offset)
        library = Path(place.path).name.partition(".cpython-")[0]
        if symbol is not None:
            name, start = symbol
            return Function(demangled(name), library, address - (offset - start), offset)
        start = own[0] if own else address
        return Function("", library, start, offset - (address - start))

    def entry(self, address: int) -> int | None:
        """The first address of the function there, if its name or extent is known."""
        function, own = self.function(address), _around(self._extents, address)
        return function.start if function.name else own[0] if own else None


def _around(sorted_extents: Sequence[tuple], address: int) -> tuple | None:
    at = bisect_right(sorted_extents, address, key=lambda one: one[0]) - 1
    found = sorted_extents[at] if at >= 0 else None
    return found if found and address < found[1] else None


class _File:
    """The functions that an ELF file names (System V ABI, chapter 4)."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            self._data = b""

    @property
    def _is_elf(self) -> bool:
        return self._data[:5] == b"\x7fELF\x02"

    def address(self, offset: int) -> int:
        """Of what lies so far into the file, as its symbols count."""
        if self._is_elf:
            (start,) = struct.unpack_from("<Q", self._data, 32)
            size, count = struct.unpack_from("<HH", self._data, 54)
            for number in range(count):
                kind, flags, at, virtual, _, length = struct.unpack_from(
                    "<IIQQQQ", self._data, start + number * size
                )
                if kind == _LOADED and flags & _EXECUTABLE and at <= offset < at + length:
                    return offset - at + virtual
        return offset

    @cached_property
    def _table(self) -> tuple[np.ndarray, int]:
        """Functions by address, and where their names are: of the full table if it was kept."""
        empty = np.zeros(0, _SYMBOL)
        if not self._is_elf:
            return empty, 0
        (start,) = struct.unpack_from("<Q", self._data, 40)
        size, count = struct.unpack_from("<HH", self._data, 58)
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._data, start + number * size)
            for number in range(count)
        ]
        for wanted in (_SYMBOLS, _DYNAMIC_SYMBOLS):
            for section in sections:
                if section[1] == wanted:
                    found = np.frombuffer(self._data, _SYMBOL, section[5] // 24, section[4])
                    kept = np.isin(found["info"] & 15, _FUNCTIONS) & (found["value"] > 0)
                    table = found[kept]
                    return table[np.argsort(table["value"])], sections[section[6]][4]
        return empty, 0

    def symbol(self, address: int) -> tuple[str, int] | None:
        """Name and start of the function; None if it has no name here."""
        table, names = self._table
        at = int(np.searchsorted(table["value"], address, side="right")) - 1
        if at < 0:
            return None
        one = table[at]
        start, size = int(one["value"]), int(one["size"])
        # Hand-written code often has no size.
        if size and address >= start + size:
            return None
        begin = names + int(one["name"])
        end = self._data.find(b"\0", begin)
        return bytes(self._data[begin:end]).decode(errors="replace"), start


@cache
def _demangle() -> ctypes._NamedFuncPointer | None:
    try:
        found = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    found.restype = ctypes.c_void_p
    return found


@cache
def demangled(name: str) -> str:
    """A C++ name as it was written; any other as it is."""
    call = _demangle()
    if call is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = call(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        free = ctypes.CDLL(None).free
        free.argtypes = (ctypes.c_void_p,)
        free(text)


_WRAPPED = re.compile(r"\[clone [^]]*\]|\[abi:[^]]*\]")


def short(name: str) -> str:
    """A C++ name without its template's and function's parameters."""
    found, depth = [], 0
    text = _WRAPPED.sub("", name).replace("operator()", "operator\0")
    text = text.replace("(anonymous namespace)::", "")
    for letter in text:
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth = max(0, depth - 1)
        elif not depth:
            found.append(letter)
    plain = "".join(found).replace("\0", "()").strip()
    plain = re.sub(r"\s+(const|volatile|&+|\[.*)$", "", plain)
    return plain.rsplit(" ", 1)[-1] if "operator" not in plain else plain
