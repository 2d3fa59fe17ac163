"""The text of PTX as instructions. See NVIDIA's PTX ISA."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lowbit_lab.compare.code import Code, Instruction, Kind

# Where the instructions of PTX come from.

_PLACE = r"(\d+)\s+(\d+)\s+(\d+)"
_STATEMENT = re.compile(rf"\.loc\s+{_PLACE}(?:.*inlined_at\s+{_PLACE})?")
_BEGIN, _END, _LOCATION = "// begin inline asm", "// end inline asm", ".loc"


def settled(ptx: str) -> str:
    """The PTX with one location for each block of inline assembly.

    LLVM gives each line of such a block a location of its own, counted on from the statement's line
    as if the block stood in the file, and says nothing behind it if the next instruction belongs to
    the statement, too. The first is the statement's.
    """
    kept: list[str] = []
    inside = located = False
    for row in ptx.splitlines():
        text = row.strip()
        if text in (_BEGIN, _END):
            inside, located = text == _BEGIN, False
        elif inside and text.startswith(_LOCATION):
            if located:
                continue
            located = True
        kept.append(row)
    return "\n".join(kept) + "\n"


class Lines:
    """The line of the kernel's own files while its locations are read.

    now: None before the first, 0 for what a compiler says of no line.
    """

    def __init__(self, own: Container[int]) -> None:
        self.now: int | None = None
        self._own = own
        self._callers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}

    def enter(self, statement: str) -> None:
        """Go to the location of a statement `.loc`: its line, or of what is inlined from another
        file the line of the call. None where the call is one of several."""
        found = _STATEMENT.match(statement)
        if found is None:
            return
        numbers = [int(number) for number in found.groups() if number]
        place, caller = tuple(numbers[:3]), tuple(numbers[3:])
        if caller:
            self._callers.setdefault(place, set()).add(caller)
        if place[1] == 0:
            self.now = 0
            return
        lines = self._lines({place} if not caller or place[0] in self._own else {caller})
        if self.now not in lines:
            self.now = lines.pop() if len(lines) == 1 else None

    def _lines(self, places: set[tuple[int, ...]]) -> set[int]:
        """The lines of the own files that lead to these places."""
        found, seen = set[int](), set[tuple[int, ...]]()
        while places:
            place = places.pop()
            if place[0] in self._own:
                found.add(place[1])
            elif place not in seen:
                places |= self._callers.get(place, set())
            seen.add(place)
        return found


_INSTRUCTION = re.compile(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_DECLARED = re.compile(
    r"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.b(\d+)\s+([\w$]+)(?:\[(\d*)\])?"
)
_GLOBAL = re.compile(
    r"\.(?:global|const)\s+(?:\.align\s+\d+\s+)?\.[bsuf](\d+)\s+([\w$]+)(?:\[(\d+)\])?"
    r"(?:\s*=\s*\{?([^};]*)\}?)?;"
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z])(\d+)\s+(?:\.ptr[^,)]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)"
)
_REGISTER = re.compile(r"%[a-z]+\d+|%SPL?\b|%[a-z]\w*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TYPE = re.compile(r"\.(?:[a-z]+?)(8|16|32|64|128)(?:x\d)?\b")
_SPACES = ("global", "shared", "local", "param", "const")
_WRITES_NOTHING = ("st", "bra", "bar", "barrier", "ret", "exit", "red", "membar", "fence", "trap")
_CONTROL = ("bra", "bar", "barrier", "ret", "exit", "setp", "brx", "call", "trap")
_OTHER = ("mov", "membar", "fence", "nanosleep", "griddepcontrol", "activemask", "prefetch")
_FLOATS = re.compile(r"\.b?f(16|32|64)|tf32|\.e[45]m")
_TENSOR = ("mma", "wmma", "wgmma", "tcgen05")
_LOADS = ("ld", "ldu", "ldmatrix", "st", "stmatrix", "atom", "red", "cp", "tex", "suld", "sust")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel: its letter ("u", "f", "b"), bits, and elements if it is an array."""

    name: str
    letter: str
    bits: int
    count: int = 1


@dataclass(frozen=True)
class Ptx:
    """A kernel. memory: the space, alignment and bytes of each variable of a block or thread;
    constants: the bytes of each of the module."""

    name: str
    parameters: tuple[Parameter, ...]
    code: Code
    memory: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    constants: Mapping[str, bytes] = field(default_factory=dict)


def parse(text: str, file: str | None = None, entry: str | None = None) -> Ptx:
    """The kernel `entry`, or the only one, with lines of `file`: of what is inlined from another
    file, the line that it is inlined at. ValueError if there is no such kernel."""
    text = _COMMENT.sub(" ", settled(text))
    found = re.finditer(r"\.entry\s+([\w$]+)\s*(\([^)]*\))?", text)
    starts = {one[1]: one for one in found}
    name = entry if entry in starts else next(iter(starts), None)
    if name is None or (entry is not None and entry != name):
        raise ValueError(f"the PTX has no kernel {entry or 'at all'}; it has {', '.join(starts)}")
    begin = starts[name]
    parameters = tuple(
        Parameter(p[3], p[1], int(p[2]), int(p[4] or 1))
        for line in (begin[2] or "").strip("()").split(",")
        if (p := _PARAMETER.search(line.strip()))
    )
    body = _braced(text, text.index("{", begin.end()))
    own = {
        int(n)
        for n, path in _FILE.findall(text)
        if file is None or Path(path).name == Path(file).name
    }
    memory = {
        one[4]: (
            one[1],
            int(one[2] or 1),
            int(one[3]) // 8 * int(one[5] or (0 if one[5] == "" else 1)),
        )
        for one in _DECLARED.finditer(text[: text.index("{")] + body)
    }
    for one in _DECLARED.finditer(text):
        if one[1] == "shared":
            count = int(one[5]) if one[5] else (0 if one[5] == "" else 1)
            memory.setdefault(one[4], (one[1], int(one[2] or 1), int(one[3]) // 8 * count))
    constants = {one[2]: _initial(*one.groups()) for one in _GLOBAL.finditer(text)}
    return Ptx(name, parameters, _code(body, own), memory, constants)


def _initial(bits: str, name: str, count: str | None, values: str | None) -> bytes:
    """What a variable of the module holds at first: its values, then zeros."""
    size = int(bits) // 8
    given = [one.strip() for one in (values or "").split(",") if one.strip()]
    # Floats are their bits in base 16, behind 0f or 0d; addresses of other variables are not known.
    held = b"".join(
        int(re.sub(r"^0[fFdD]", "0x", one), 0).to_bytes(size, "little", signed=one[0] == "-")
        for one in given
        if one[0] in "-0123456789"
    )
    return held.ljust(size * int(count or 1), b"\0")


def _braced(text: str, start: int) -> str:
    """What stands between a brace and the one that closes it."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start + 1 : place]
    raise ValueError("the PTX ends within a kernel")


def _statements(body: str) -> Iterator[str]:
    """Labels, .loc lines, and what ends with a semicolon."""
    pending = ""
    for line in body.splitlines():
        line = line.strip()
        if not pending and line.startswith((".loc", ".file")):
            yield line
            continue
        if not pending and (label := _LABEL.match(line)):
            yield label[0]
            line = line[label.end() :].strip()
        *whole, rest = (pending + " " + line).split(";")
        yield from (one.strip() for one in whole)
        # A brace that opens or closes a scope belongs to no instruction.
        pending = "" if rest.strip() in ("", "{", "}") else rest.strip()


def _code(body: str, own: set[int]) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = Lines(own)
    for statement in _statements(body):
        statement = re.sub(r"^[{}]\s*(?=[@a-z.])", "", statement)
        if label := _LABEL.fullmatch(statement):
            labels[label[1]] = len(instructions)
        elif statement.startswith(".loc"):
            lines.enter(statement)
        elif statement and not statement.startswith("."):
            instructions.append(_instruction(statement, lines.now))
    return Code(tuple(_placed(instructions)), labels)


def _placed(given: list[Instruction]) -> list[Instruction]:
    """What a compiler made of line 0, which is nobody's, belongs to the line that uses it first; or
    where nothing does, to the line before. An access to memory of line 0, which a compiler may have
    merged of several, belongs to none."""
    used: dict[str, int] = {}
    made: list[Instruction] = []
    for one in reversed(given):
        if one.line == 0 and one.kind == "memory":
            one = replace(one, line=None)
        elif one.line == 0:
            uses = [used[name] for name in sorted(one.writes) if name in used]
            one = replace(one, line=uses[0] if uses else 0)
        if one.line:
            used |= dict.fromkeys(one.reads, one.line)
        made.append(one)
    made.reverse()
    last: int | None = None
    for at, one in enumerate(made):
        if one.line == 0:
            made[at] = replace(one, line=last)
        last = made[at].line or last
    return made


def split_operands(text: str) -> tuple[str, ...]:
    """Operands, which commas part, but not those within braces and brackets."""
    return tuple(one.strip() for one in re.split(r",(?![^{\[]*[}\]])", text) if one.strip())


def _instruction(statement: str, line: int | None) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        return Instruction(statement, statement.split()[0], line)
    guard, opcode, rest = found[1] or "", found[2], found[3]
    operands, base = split_operands(rest), opcode.partition(".")[0]
    kind = _kind(opcode, base)
    nothing = base in _WRITES_NOTHING or base == "cp"
    given = operands if nothing else operands[1:]
    writes = frozenset() if nothing or not operands else frozenset(_REGISTER.findall(operands[0]))
    reads = {name for one in given for name in _REGISTER.findall(one)}
    if guard:
        reads.add(guard.lstrip("!"))
    bracketed = [one for one in operands if one.startswith("[")] if kind == "memory" else []
    space = next((s for s in _SPACES if f".{s}" in opcode), "")
    if base in ("ldmatrix", "stmatrix"):
        space = "shared"
    return Instruction(
        text=" ".join(f"{opcode} {rest}".split()),
        opcode=opcode,
        line=line,
        operands=operands,
        guard=guard,
        target=operands[0] if base == "bra" else None,
        writes=writes,
        reads=frozenset(reads),
        address=frozenset(name for one in bracketed for name in _REGISTER.findall(one)),
        kind="other" if space == "param" else kind,
        space="" if space == "param" else space,
        nbytes=_nbytes(opcode, base, operands) if kind == "memory" else 0,
        stores=base in ("st", "red", "stmatrix", "sust"),
    )


def _kind(opcode: str, base: str) -> Kind:
    if base in _LOADS and not (base == "cp" and "_group" in opcode):
        return "memory"
    if base in _CONTROL:
        return "control"
    if base == "cvt":
        return "conversion"
    if base in _OTHER or base in ("cvta", "cp", "ld"):
        return "other"
    floats = _FLOATS.search(opcode) or base in _TENSOR or base.startswith("dp")
    return "arithmetic" if floats and base not in ("selp", "setp") else "integer"


def _nbytes(opcode: str, base: str, operands: tuple[str, ...]) -> int:
    if base == "cp":
        return int(operands[2], 0) if ".bulk" not in opcode and len(operands) > 2 else 0
    sizes = _TYPE.findall(opcode)
    width = int(sizes[-1]) // 8 if sizes else 0
    if base in ("ldmatrix", "stmatrix"):
        return 4 * int((re.search(r"\.x(\d)", opcode) or ["", "1"])[1])
    several = re.search(r"\.v(\d)\b", opcode)
    return width * int(several[1] if several else 1)
