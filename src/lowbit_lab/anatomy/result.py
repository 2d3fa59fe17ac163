"""What an anatomy says, as data."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

import lowbit
from lowbit.isa.instruction import Instruction
from lowbit.isa.instruction_set import InstructionSet
from lowbit.isa.value import Value
from lowbit.jit.emit import Emitter
from lowbit.jit.kernel import Kernel
from lowbit_lab.backends.ahead import Locations
from lowbit_lab.compare.code import Code
from lowbit_lab.run.trace import Place
from lowbit_lab.views.trace import function_at

SCHEMA = "lowbit-anatomy-1"

Row = tuple[str, int | None]
"""A line of text, and which place of the source it comes from, by its number; None: of none."""


@dataclass(frozen=True)
class Pane:
    """A text of the kernel in one language."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Part:
    """One of the four parts of a product, with its time of one call in seconds. how: by what
    runs that was measured."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Anatomy:
    """A kernel taken apart.

    places: files and lines of the source that rows refer to. facts: by name, in words. mix: the
    instructions of the inner loop by kind. mca: what llvm-mca says of it, or why it says nothing.
    """

    kernel: str
    about: str
    places: tuple[tuple[str, int], ...]
    panes: tuple[Pane, ...]
    facts: Mapping[str, str]
    mix: Mapping[str, int]
    parts: tuple[Part, ...] = ()
    mca: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False)


class Places:
    """Numbers for places of the source, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, file: str, line: int) -> int:
        """That of a line of a file."""
        return self._numbers.setdefault((file, line), len(self._numbers))

    def listed(self) -> tuple[tuple[str, int], ...]:
        """All of them, files by their own names."""
        return tuple((file.rpartition("/")[2], line) for file, line in self._numbers)

    def source(self) -> Pane:
        """The functions in which the places lie, file after file."""
        shown: dict[str, dict[int, str]] = {}
        for file, line in self._numbers:
            if line not in shown.setdefault(file, {}):
                first, lines = function_at(Place(file, line))
                shown[file].update(enumerate(lines, first))
        rows: list[Row] = []
        for file, lines in shown.items():
            rows.append((file.rpartition("/")[2], None))
            before = min(lines) - 1
            for line, text in sorted(lines.items()):
                if line != before + 1:
                    rows.append(("", None))
                rows.append((f"{line:5} {text}", self._numbers.get((file, line))))
                before = line
        return Pane("source", tuple(rows))


# The texts that become of a kernel, each row with the place of the source that it comes from.

_NODE = re.compile(r"^(!\d+) = (?:distinct )?!(\w+)\((.*)\)$")
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(![\d]+|\w+))')
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"\s+"([^"]*)"')
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_USE = re.compile(r"\s*loc\((#\w+)\)")


def ir_pane(text: str, places: Places, function: str | None = None) -> Pane:
    """LLVM's IR after optimization, of one function or of all; what says where lines come from is
    left out."""
    nodes: dict[str, tuple[str, dict[str, str]]] = {}
    for row in text.splitlines():
        if found := _NODE.match(row):
            fields = {name: quoted or plain for name, quoted, plain in _FIELD.findall(found[3])}
            nodes[found[1]] = found[2], fields

    def place(node: str) -> int | None:
        kind, fields = nodes.get(node, ("", {}))
        file = nodes.get(nodes.get(fields.get("scope", ""), ("", {}))[1].get("file", ""))
        if kind != "DILocation" or file is None:
            return None
        path = f"{file[1].get('directory', '')}/{file[1].get('filename', '')}"
        return places.number(path, int(fields.get("line", 0)))

    rows: list[Row] = []
    within = function is None
    for row in text.splitlines():
        if function is not None and row.startswith("define"):
            within = f"@{function}(" in row or f'@"{function}"(' in row
        if not within or row.startswith("!") or "llvm.dbg." in row or "#dbg_" in row:
            continue
        plain, _, node = row.partition(", !dbg ")
        rows.append((plain, place(node.split(",")[0].split(" ")[0]) if node else None))
    return Pane("LLVM IR, optimized", tuple(rows))


def assembly_pane(text: str, places: Places) -> Pane:
    """Labels and instructions."""
    files = {one[1]: f"{one[2]}/{one[3]}" for row in text.splitlines() if (one := _FILE.match(row))}
    rows: list[Row] = []
    now: int | None = None
    for row in text.splitlines():
        if row.lstrip().startswith(".section") and rows:
            break
        if place := _LOCATION.match(row):
            file = files.get(place[1])
            now = places.number(file, int(place[2])) if file and place[2] != "0" else None
        elif re.match(r"^\s+[a-z]", row):
            rows.append((row.expandtabs(8).rstrip(), now))
        elif re.match(r"^(\.LBB|[a-z])\w*:", row):
            rows.append((row, None))
    return Pane("assembly", tuple(rows))


def mlir_pane(title: str, text: str, places: Places) -> Pane:
    """MLIR."""
    locations, rows = Locations(text), list[Row]()
    for row in text.splitlines():
        if row.startswith("#"):
            continue
        place = locations.place(next(reversed(_USE.findall(row)), ""))
        number = None if place is None else places.number(place.file, place.line)
        rows.append((_USE.sub("", row), number))
    return Pane(title, tuple(rows))


def code_pane(title: str, code: Code, file: str, places: Places) -> Pane:
    """Labels and instructions."""
    at: dict[int, list[str]] = {}
    for label, index in code.labels.items():
        at.setdefault(index, []).append(label)
    rows: list[Row] = []
    for index, one in enumerate(code.instructions):
        rows += [(f"{label}:", None) for label in at.get(index, ())]
        where = None if one.line is None else places.number(file, one.line)
        rows.append((f"    {one}", where))
    return Pane(title, tuple(rows))


# Code generation that remembers which line of a kernel's text each instruction comes from.

_KERNELS = str(Path(lowbit.__file__).parent / "kernels")


class LinedEmitter(Emitter):
    """An emitter that gives each instruction the innermost line of kernels/, or of the kernel's
    own file, that asked for it."""

    def __init__(self, isa: InstructionSet, name: str, own: str) -> None:
        super().__init__(isa, name)
        self._own = own
        self._scopes: dict[str, Any] = {}
        module = self.module
        self._file = self._file_of(own)
        unit = module.add_debug_info(
            "DICompileUnit",
            {
                "language": ir.DIToken("DW_LANG_Python"),
                "file": self._file,
                "producer": "lowbit",
                "runtimeVersion": 0,
                "isOptimized": True,
                "emissionKind": ir.DIToken("LineTablesOnly"),
            },
            is_distinct=True,
        )
        kind = module.add_debug_info("DISubroutineType", {"types": module.add_metadata([None])})
        self._program = module.add_debug_info(
            "DISubprogram",
            {
                "name": name,
                "file": self._file,
                "line": 1,
                "type": kind,
                "unit": unit,
                "spFlags": ir.DIToken("DISPFlagDefinition"),
            },
            is_distinct=True,
        )
        self.function.set_metadata("dbg", self._program)
        flags = [ir.IntType(32)(2), "Debug Info Version", ir.IntType(32)(3)]
        module.add_named_metadata("llvm.module.flags", flags)
        module.add_named_metadata("llvm.dbg.cu", unit)
        self._mark()

    def _file_of(self, path: str) -> Any:
        where = Path(path)
        return self.module.add_debug_info(
            "DIFile", {"filename": where.name, "directory": str(where.parent)}
        )

    def _scope(self, path: str) -> Any:
        if path not in self._scopes:
            self._scopes[path] = self.module.add_debug_info(
                "DILexicalBlockFile",
                {"scope": self._program, "file": self._file_of(path), "discriminator": 0},
            )
        return self._scopes[path]

    def _mark(self) -> None:
        """What is emitted from here on belongs to the line that is running."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file == self._own or file.startswith(_KERNELS):
                self.builder.debug_metadata = self.module.add_debug_info(
                    "DILocation", {"line": frame.f_lineno, "column": 1, "scope": self._scope(file)}
                )
                return
            frame = frame.f_back
        self.builder.debug_metadata = self.module.add_debug_info(
            "DILocation", {"line": 1, "column": 1, "scope": self._program}
        )

    def execute(self, instruction: Instruction, operands: tuple[Any, ...]) -> Value | None:
        self._mark()
        return super().execute(instruction, operands)

    def advance(self, pointer: Value, elements: Value | int) -> Value:
        self._mark()
        return super().advance(pointer, elements)

    def range(
        self, start: Value | int, stop: Value | int, step: Value | int = 1
    ) -> Iterator[Value]:
        self._mark()
        return super().range(start, stop, step)

    def parallel(self, items: Value) -> Iterator[Value]:
        self._mark()
        return super().parallel(items)


def lined_ir(kernel: Kernel, isa: InstructionSet, /, **static: Any) -> str:
    """The LLVM IR of a kernel as `Kernel.ir` gives it, with lines."""
    own = kernel.text.__code__.co_filename
    emitter = LinedEmitter(isa, kernel.name, own)
    kernel.text(emitter, *emitter.parameters(list(kernel.types.values())), **static)
    return str(emitter.finish())


# llvm-mca's verdict on an inner loop: what it should take by LLVM's model of a processor.

_OLDEST = 16
_ITERATIONS = 100
_VERSION = re.compile(r"LLVM version (\d+)")
_WANTED = re.compile(
    r"^(Iterations|Instructions|Total Cycles|uOps Per Cycle|IPC|Block RThroughput)"
)
_PRESSURE = re.compile(
    r"^\s*- (Resource Pressure|Register Dependencies|Data Dependencies|Memory Dependencies).*\["
)


@cache
def _tool() -> str | None:
    """The newest llvm-mca that is new enough."""
    names = [f"llvm-mca-{n}" for n in range(_OLDEST + 14, _OLDEST - 1, -1)] + ["llvm-mca"]
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found = _VERSION.search(done.stdout)
        if found and int(found[1]) >= _OLDEST:
            return path
    return None


def verdict(loop: Sequence[str], isa: InstructionSet) -> tuple[str, ...]:
    """What llvm-mca says of a loop's instructions on the processor that it runs on; or one line
    that says why it says nothing."""
    tool = _tool()
    if not loop:
        return ("llvm-mca: there is no loop",)
    if tool is None:
        return (f"llvm-mca: no LLVM {_OLDEST} or newer is installed; apt-get install llvm-16",)
    if isa.is_foreign:
        return (f"llvm-mca: {isa.name} is not this machine's architecture",)
    text = "\n".join([line for line in loop if not line.startswith("j")]) + "\n"
    # This machine's processor, or where that lacks the instructions, one that has them.
    for cpu in ("native", "sapphirerapids"):
        command = [tool, f"-mcpu={cpu}", f"-iterations={_ITERATIONS}", "-bottleneck-analysis"]
        features = ",".join(f"+{one}" for one in isa.features)
        done = subprocess.run(
            [*command, f"-mattr={features}"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            rows = done.stdout.splitlines()
            said = [f"llvm-mca, {cpu}, {_ITERATIONS} passes"]
            said += [" ".join(row.split()) for row in rows if _WANTED.match(row)]
            said += [" ".join(row.split()) for row in rows if _PRESSURE.match(row)]
            return tuple(said)
    return (f"llvm-mca: {(done.stderr.strip().splitlines() or ['it failed'])[0]}",)
