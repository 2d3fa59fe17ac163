"""Assembly of x86-64, in AT&T's syntax, as LLVM prints it, as instructions."""

from __future__ import annotations

import re
from pathlib import Path

from lowbit_lab.compare.code import Code, Instruction, Kind

_LABEL = re.compile(r"^([.\w$]+):")
# How an instruction is to be encoded, as {vex}, may stand before it.
_ROW = re.compile(r"^\s+(?:\{\w+\}\s+)?([a-z]\w*)\s*(.*?)\s*(?:#.*)?$")
_LOCATION = re.compile(r"^\s+\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_REGISTER = re.compile(r"%(\w+)")
_MEMORY = re.compile(r"-?[\w.$+-]*\((%\w+)?(?:,\s*(%\w+)(?:,\s*\d)?)?\)")
_GENERAL = re.compile(r"^(?:[re]?([abcd])[xlh]|[re]?(si|di|bp|sp)l?|r(\d+)[dwb]?)$")
_VECTOR = re.compile(r"^[xyz]mm(\d+)$")
_JUMP = re.compile(r"^j[a-z]+$")
_CONVERSION = re.compile(
    r"^v?cvt|^cltq$|^cwt|^movs[bwl][wlq]|^movz[bw]|^v?pmov[sz]x|^cqto$|^v?pack"
)
_ARITHMETIC = re.compile(
    r"^v?(?:add|sub|mul|div|fn?m(?:add|sub)\d*|max|min|sqrt|hadd|p?(?:madd|dp|add|sub|mul|max|min|sad)\w*)"
    r"(?:[ps][sdh]|[a-z]*)$"
)
_MOVES = re.compile(r"^v?mov|^lea|^v?broadcast|^v?pbroadcast|^prefetch|^tileload|^tilestore")
_WIDTHS = {"b": 1, "w": 2, "l": 4, "q": 8}
_TILE_BYTES = 1024  # of a whole tile of AMX


def parse(text: str, function: str | None = None, file: str | None = None) -> Code:
    """The instructions of one function, or of all the text, lines being those of `file`."""
    own = {
        int(n)
        for n, path in _FILE.findall(text)
        if file is None or Path(path).name == Path(file).name
    }
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line: int | None = None
    within = function is None
    for row in text.splitlines():
        label = _LABEL.match(row)
        if label and function is not None and not label[1].startswith("."):
            within = label[1] == function
        if label:
            labels[label[1]] = len(instructions)
        elif place := _LOCATION.match(row):
            line = int(place[2]) if int(place[1]) in own and place[2] != "0" else None
        elif within and (found := _ROW.match(row)):
            instructions.append(_instruction(found[1], found[2], line))
    return Code(tuple(instructions), labels)


def _register(name: str) -> str:
    """One name for all parts of a register."""
    if found := _VECTOR.match(name):
        return f"v{found[1]}"
    found = _GENERAL.match(name)
    return next((part for part in found.groups() if part), name) if found else name


def _instruction(opcode: str, rest: str, line: int | None) -> Instruction:
    operands = tuple(one.strip() for one in re.split(r",(?![^(]*\))", rest) if one.strip())
    jumps = bool(_JUMP.match(opcode))
    memory = _MEMORY.search(rest) if not opcode.startswith("lea") else None
    stores = memory is not None and bool(operands) and "(" in operands[-1]
    compares = opcode.startswith(("cmp", "test", "ucomi", "vucomi"))
    last = operands[-1] if operands and not stores and not jumps and not compares else ""
    writes = (
        {_register(n) for n in _REGISTER.findall(re.sub(r"\{.*", "", last))}
        if "(" not in last
        else set()
    )
    vector = "mm" in rest
    reads = {_register(n) for n in _REGISTER.findall(rest)}
    if opcode.startswith(("mov", "vmov", "lea", "vbroadcast", "vpbroadcast")) or (
        vector and len(operands) == 3 and "fm" not in opcode and "dp" not in opcode
    ):
        reads = {_register(n) for one in operands[:-1] for n in _REGISTER.findall(one)}
    return Instruction(
        text=f"{opcode} {rest}".strip(),
        opcode=opcode,
        line=line,
        operands=operands,
        target=operands[0] if jumps and operands else None,
        writes=frozenset(writes | ({"flags"} if compares else set())),
        reads=frozenset(reads | ({"flags"} if jumps and opcode != "jmp" else set())),
        address=frozenset(_register(n) for n in _REGISTER.findall(memory[0]))
        if memory
        else frozenset(),
        kind=_kind(opcode, vector, jumps, compares, memory is not None),
        nbytes=_nbytes(opcode, rest) if memory else 0,
        stores=stores,
    )


def _kind(opcode: str, vector: bool, jumps: bool, compares: bool, memory: bool) -> Kind:
    if jumps or compares or opcode.startswith(("ret", "call")):
        return "control"
    if _CONVERSION.match(opcode):
        return "conversion"
    if (vector and _ARITHMETIC.match(opcode)) or opcode.startswith("tdp"):
        return "arithmetic"
    if memory and _MOVES.match(opcode):
        return "memory"
    if opcode.startswith(("mov", "vmov", "nop", "push", "pop", "vz", "prefetch")):
        return "other"
    return "integer"


def _nbytes(opcode: str, rest: str) -> int:
    if opcode.startswith("tile"):
        return _TILE_BYTES
    widest = max(
        (int(bits) for name, bits in (("xmm", 16), ("ymm", 32), ("zmm", 64)) if name in rest),
        default=0,
    )
    scalar = re.search(r"s([sd])$", opcode)
    if scalar and widest:
        return 4 if scalar[1] == "s" else 8
    return widest or _WIDTHS.get(opcode[-1], 8)
