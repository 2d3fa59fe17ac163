"""Compiling Triton kernels for a GPU that is not there, to look at the instructions."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.registry.locks import cached_property

# Pointers that PyTorch hands out, and sizes that are multiples of 16, are compiled for as such.
_ALIGNED = 16
_RESOURCE = re.compile(r"\b([A-Z]+)(?:\[\d+\])?:(\d+)")
_POINTER_OR_NUMBER = re.compile(r"(\*?[a-z]+\d+|tensordesc<.+>)(?::(\d+))?")


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel: its PTX, its machine code (as text: `sass`), and what it takes.

    registers: of a thread; shared, local: bytes of a program, and of a thread's local memory (its
    stack, which holds what did not fit into registers). stages: the texts before PTX, by name.
    """

    ptx: str
    cubin: bytes
    registers: int
    shared: int
    local: int
    stages: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def sass(self) -> str:
        """By nvdisasm, when asked for: it takes longer than ptxas. What it else finds out of the
        flow of data adds nothing to this text."""
        return _printed(self.cubin, "nvdisasm", "-ndf", "-novliw", "-pb", "-hex")

    def count(self, instruction: str) -> int:
        """How many machine instructions begin with this, for example "LDG.E.128"."""
        return len(re.findall(rf"\s{re.escape(instruction)}\b", self.sass))

    @property
    def wide_loads(self) -> int:
        """How many loads from global memory take 16 bytes a thread, or are bulk tensor copies."""
        return len(re.findall(r"\s(?:LDG\S*\.128|UTMALDG)\b", self.sass))


def compile_ahead(
    kernel: Any, arguments: Mapping[str, Any], sm: int, **options: int | bool
) -> Compiled:
    """Compile a function under triton.jit, or gluon.jit, for a compute capability such as 80 or 90.

    arguments: for every parameter a type ("*bf16", "i32", "fp32"), taken as aligned to 16, or as
    divisible by 16; "i32:1" for a number that is not; "tensordesc<bf16[1, 64]>" for a descriptor;
    a tuple of these for a tuple. Any other value is a constexpr's. options: num_warps and the like.
    Raises what Triton's compiler raises; ValueError for a missing argument.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    missing = [name for name in kernel.arg_names if name not in arguments]
    if missing:
        raise ValueError(
            f"no argument for {', '.join(missing)}; give a type, or a constexpr's value"
        )
    constants, attributes = dict[tuple[int, ...], Any](), dict[tuple[int, ...], Any]()

    def typed(value: Any, *place: int) -> Any:
        """The type of an argument; of a tuple, the types of its elements."""
        if isinstance(value, tuple) and not kernel.params[place[0]].is_constexpr:
            return tuple(typed(one, *place, i) for i, one in enumerate(value))
        found = _POINTER_OR_NUMBER.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            constants[place] = value
            return "constexpr"
        aligned = int(found[2] or _ALIGNED) % _ALIGNED == 0
        if aligned and not found[1].startswith(("fp", "tensordesc")):
            attributes[place] = [["tt.divisibility", _ALIGNED]]
        return found[1]

    signature = {name: typed(arguments[name], place) for place, name in enumerate(kernel.arg_names)}
    of = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = of(kernel, signature, constants, attributes)
    options = {"enable_fp_fusion": True, **options}

    def compiled() -> Any:
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)

    made = compiled()
    if inspect.getfile(kernel.fn) not in made.asm["ttgir"]:
        # Triton's cache knows a kernel by its text and line: this was a copy in another file.
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            made = compiled()
    asm = made.asm
    usage = _RESOURCE.findall(_printed(asm["cubin"], "cuobjdump", "-res-usage"))
    taken = {name: int(number) for name, number in usage}
    local = taken.get("STACK", 0) + taken.get("LOCAL", 0)
    stages = {name: asm[name] for name in ("ttir", "ttgir", "llir") if name in asm}
    return Compiled(asm["ptx"], asm["cubin"], taken["REG"], made.metadata.shared, local, stages)


def _printed(cubin: bytes, tool: str, *flags: str) -> str:
    """What one of Triton's tools prints of machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *flags, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip()}")
    return done.stdout
