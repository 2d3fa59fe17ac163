"""Code generation that remembers which line of a kernel's text each instruction comes from."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
