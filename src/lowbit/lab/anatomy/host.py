"""The anatomy of what is compiled for this machine's processor: LLVM IR and assembly."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from lowbit import isa as instruction_sets
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import compile as compiler
from lowbit.jit.kernel import Kernel
from lowbit.lab.anatomy.lines import lined_ir, verdict
from lowbit.lab.anatomy.result import Anatomy, Pane, Places, assembly_pane, code_pane, ir_pane
from lowbit.lab.compare import assembly
from lowbit.lab.compare.code import Code, mix
from lowbit.lab.compare.kinds.cpu import LowbitCpu, NumbaCpu
from lowbit.lab.compare.problem import Problem
from lowbit.lab.compare.variant import Variant


def of_code(
    kernel: str, about: str, places: Places, panes: Sequence[Pane], code: Code,
    isa: InstructionSet, **more: Any,
) -> Anatomy:  # fmt: skip
    """What assembly says, with its panes. more: the other fields of an anatomy."""
    body = code.body(code.main_loop() or ())
    return Anatomy(
        kernel=kernel,
        about=about,
        places=places.listed(),
        panes=(places.source(), *panes),
        facts=_registers(code, isa),
        mix=mix(body),
        mca=verdict([one.text for one in body], isa),
        **more,
    )


def listing(
    kernel: Kernel, isa: InstructionSet, places: Places, **static: Any
) -> tuple[list[Pane], Code]:
    """The IR and assembly of a kernel of lowbit."""
    ir = lined_ir(kernel, isa, **static)
    text = compiler.assembly(ir, isa)
    optimized = ir_pane(str(compiler.optimized(ir, isa)), places)
    return [optimized, assembly_pane(text, places)], assembly.parse(text)


def lowbit_anatomy(variant: Variant, problem: Problem, about: str) -> Anatomy:
    """That of a kernel of lowbit, for its instruction set."""
    kind, places = LowbitCpu(), Places()
    asked = kind.asked(variant)
    static = kind.static(variant, kind.arguments(variant, problem, problem.arrays()))
    isa = instruction_sets.named(asked.isa)
    panes, code = listing(asked.kernel, isa, places, **static)
    about = f"{about}; lowbit for {isa.name}, {compiler.VERSION}"
    return of_code(variant.name, about, places, panes, code, isa)


def numba_anatomy(variant: Variant, problem: Problem, about: str) -> Anatomy:
    """That of a function under numba.njit that is compiled. Numba writes lines for a debugger only:
    it is compiled a second time with them, and what differs is said."""
    import numba

    kind, places = NumbaCpu(), Places()
    function, signature = kind.function(variant.kernel), kind.signature(variant, problem)
    file = function.__code__.co_filename
    options = {**variant.kernel.targetoptions, "debug": True, "_dbg_extend_lifetimes": False}
    lined = numba.njit(**{n: v for n, v in options.items() if n != "nopython"})(function)
    with warnings.catch_warnings(category=numba.NumbaDebugInfoWarning, action="ignore"):
        lined.compile(signature)
    codes: list[Code] = []
    for one in (variant.kernel, lined):
        made = one.overloads[signature]
        codes.append(assembly.parse(made.library.get_asm_str(), made.fndesc.mangled_name, file))
    made = lined.overloads[signature]
    panes = [
        ir_pane(made.library.get_llvm_str(), places, made.fndesc.mangled_name),
        code_pane("assembly", codes[1], file, places),
    ]
    same = [one.opcode for one in codes[0].instructions] == [
        one.opcode for one in codes[1].instructions
    ]
    note = "with lines Numba compiles it to other instructions than without; these are with lines"
    about = f"{about}; Numba {numba.__version__}"
    return of_code(
        variant.name, about, places, panes, codes[1], instruction_sets.active(),
        notes=() if same else (note,),
    )  # fmt: skip


def _registers(code: Code, isa: InstructionSet) -> dict[str, str]:
    """What of registers and tiles is in use, and what does not fit."""
    used = {name for one in code.instructions for name in one.writes | one.reads}
    vectors = sum(bool(re.fullmatch(r"v\d+", name)) for name in used)
    tiles = sum(bool(re.fullmatch(r"tmm\d+", name)) for name in used)
    general = len(used & {"a", "b", "c", "d", "si", "di", "bp", *map(str, range(8, 16))})
    inner = code.body(code.main_loop() or ())
    stack = [one for one in inner if "sp" in one.address]
    facts = {
        "vector registers": f"{vectors} of {isa.vector_registers}, of {isa.vector_bytes} bytes",
        "general registers": f"{general} of 15",
        "instructions": f"{len(code.instructions)}, {len(inner)} of them in the inner loop",
        "stack in the inner loop": f"{len(stack)} accesses",
    }
    return facts | ({"tiles": f"{tiles} of {isa.tiles}"} if isa.tiles else {})
