"""Machine code of NVIDIA's GPUs as instructions: what nvdisasm prints."""

from __future__ import annotations

import re
from pathlib import Path

from lowbit_lab.compare.code import Code, Instruction, Kind

_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_LABEL = re.compile(r"^\s*(\.L_x?_?\w+):")
_LINE = re.compile(r'//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)", line (\d+))?')
_REGISTER = re.compile(r"\b(UR\d+|R\d+|UP\d|P\d)\b(\.64|\.reuse)?")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_WIDE = re.compile(r"\.(64|128|U8|S8|U16|S16)\b")

_SPACES = {"G": "global", "S": "shared", "L": "local", "C": "constant", "": ""}
_MEMORY = re.compile(r"(LD|ST)(G|S|L|C|)(?:M|STS)?(?![A-Z])")
_ARITHMETIC = (
    "FADD", "FMUL", "FFMA", "DADD", "DMUL", "DFMA", "HADD2", "HMUL2", "HFMA2", "MUFU", "HMMA",
    "IMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA", "FMNMX", "IDP", "FSWZADD", "DMNMX", "FADD32I",
    "FMUL32I", "FFMA32I", "UTCHMMA",
)  # fmt: skip
_CONVERSION = ("F2F", "F2I", "I2F", "I2FP", "F2FP", "I2I", "FRND")
_CONTROL = (
    "BRA", "EXIT", "RET", "CALL", "BAR", "ISETP", "FSETP", "DSETP", "BSSY", "BSYNC", "WARPSYNC",
    "DEPBAR", "LDGDEPBAR", "SYNCS", "UISETP",
)  # fmt: skip
_OTHER = ("MOV", "UMOV", "CS2R", "S2R", "S2UR", "NOP", "PLOP3", "UPLOP3", "R2UR", "SHFL", "VOTE")


def parse(text: str, file: str | None = None) -> Code:
    """The first function of a listing, made with line numbers, those of `file` kept."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line: int | None = None
    listing = False  # whether the row before was a location, too
    for row in text.splitlines():
        if row.lstrip().startswith(".section") and instructions:
            break
        if place := _LINE.search(row):
            # The innermost comes first, then whoever it is inlined into.
            line = (line if listing else None) or _own_line(place, file)
            listing = True
            continue
        listing = False
        if label := _LABEL.match(row):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(row):
            instructions.append(_instruction(found[1] or "", found[2], found[3], line))
    return Code(tuple(instructions), labels)


def _own_line(place: re.Match[str], file: str | None) -> int | None:
    for path, line in ((place[1], place[2]), (place[3], place[4])):
        if path is not None and (file is None or Path(path).name == Path(file).name):
            return int(line) or None
    return None


def _instruction(guard: str, opcode: str, rest: str, line: int | None) -> Instruction:
    base, operands = opcode.partition(".")[0], [one.strip() for one in rest.split(",")]
    kind, space = _kind(base)
    memory, target = kind == "memory", _TARGET.search(rest)
    stores = memory and base.startswith(("ST", "RED"))
    lanes = 2 if ".64" in opcode or ".WIDE" in opcode or base.startswith("D") else 1
    lanes = 4 if memory and ".128" in opcode else lanes
    writes = set[str]()
    if operands[0] and not stores and base not in ("BRA", "EXIT", "BAR"):
        for name in _names(operands[0]):
            writes |= _following(name, lanes)
        # A comparison, and an addition with a carry, have a second result.
        if len(operands) > 1 and re.fullmatch(r"U?P(\d|T)", operands[1]):
            writes |= set(_names(operands[1]))
    read = rest if stores else ",".join(operands[1:])
    wide = 2 if lanes > 1 and not memory else 1
    reads = {one for name in _names(read) for one in _following(name, wide)} | set(_names(guard))
    address = set[str]()
    if memory:
        for within in re.findall(r"\[([^\]]*)\]", rest):
            for name, suffix in _REGISTER.findall(within):
                address |= _following(name, 2 if suffix == ".64" else 1)
    return Instruction(
        text=f"{opcode} {rest}".strip(),
        opcode=opcode,
        line=line,
        operands=tuple(operands),
        guard=guard,
        target=target[1] if target and base == "BRA" else None,
        writes=frozenset(writes),
        reads=frozenset(reads),
        address=frozenset(address),
        kind=kind,
        space=space,
        nbytes=_nbytes(opcode) if memory else 0,
        stores=stores,
        uniform=base.startswith("U"),
    )


def _kind(base: str) -> tuple[Kind, str]:
    found = _MEMORY.match(base)
    if base.startswith(("ATOM", "RED", "UTMA", "LDGSTS")):
        return "memory", "shared" if base == "ATOMS" else "global"
    if base.startswith(_OTHER) or base == "LDC" or base == "ULDC":
        return "other", ""
    if base in _CONTROL:
        return "control", ""
    if found:
        return "memory", _SPACES[found[2]]
    if base in _CONVERSION:
        return "conversion", ""
    return ("arithmetic" if base in _ARITHMETIC else "integer"), ""


def _nbytes(opcode: str) -> int:
    found = _WIDE.search(opcode)
    if found is None:
        return 4
    return {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}[found[1]]


def _names(text: str) -> list[str]:
    return [name for name, _ in _REGISTER.findall(text)]


def _following(name: str, count: int) -> set[str]:
    """A register and those behind it that a wide value takes."""
    letters, number = re.fullmatch(r"(\D+)(\d+)", name).groups()  # type: ignore[union-attr]
    return {f"{letters}{int(number) + i}" for i in range(count if "R" in letters else 1)}
