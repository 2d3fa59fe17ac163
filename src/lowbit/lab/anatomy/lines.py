"""Code generation that remembers which line of a kernel's text each instruction comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
