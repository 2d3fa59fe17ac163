"""The anatomy of a kernel for a GPU: its compiler's texts, PTX and machine code beside its own."""

from __future__ import annotations

from pathlib import Path

from lowbit.lab.anatomy.result import Anatomy, Places, code_pane, mlir_pane
from lowbit.lab.compare.code import mix
from lowbit.lab.compare.faults import occupancy
from lowbit.lab.compare.kind import build
from lowbit.lab.compare.problem import Problem
from lowbit.lab.compare.ptx.parse import parse
from lowbit.lab.compare.toolchain import MissingToolError, assemble
from lowbit.lab.compare.variant import Variant


def anatomy(variant: Variant, problem: Problem, sm: int, file: Path, about: str) -> Anatomy:
    """Take a kernel of a file apart, compiled for a compute capability at the sizes of a problem.

    ValueError with what its compiler says; RuntimeError if that is not installed.
    """
    built = build(variant, problem, sm, file)
    if built.ptx is None:
        raise MissingToolError("; ".join(built.missing))
    places, notes = Places(), list[str]()
    panes = [
        mlir_pane(name.upper(), built.stages[name], places)
        for name in ("ttir", "ttgir")
        if built.stages is not None
    ]
    ptx = parse(built.ptx, built.file, built.entry)
    panes.append(code_pane("PTX", ptx.code, built.file, places))
    facts = {"threads of a block": str(built.threads), "shared memory": f"{built.shared} bytes"}
    code = ptx.code
    try:
        machine = assemble(built.ptx, sm, built.file, built.most_registers)
    except (MissingToolError, RuntimeError) as error:
        notes.append(str(error))
    else:
        shared = machine.shared + built.shared
        facts["shared memory"] = f"{shared} bytes"
        facts["registers"] = f"{machine.registers} of 255 a thread"
        facts["spilled"] = f"{machine.spill_stores} bytes stored, {machine.spill_loads} loaded"
        held = occupancy(sm, built.threads, machine.registers, shared)
        if held is not None:
            facts["warps"] = (
                f"{held.warps} of {held.most} a multiprocessor, limited by {held.limit}"
            )
        if machine.sass is None:
            notes.append(machine.missing or "")
        else:
            code = machine.sass
            panes.append(code_pane("SASS", code, built.file, places))
    inner = code.main_loop()
    return Anatomy(
        kernel=variant.name,
        about=f"{about}; sm_{sm}, {built.made_by}",
        places=places.listed(),
        panes=(places.source(), *panes),
        facts=facts,
        mix=mix(code.body(inner or ())),
        mca=("llvm-mca models processors, not GPUs",),
        notes=(
            *notes,
            "no times: a GPU is needed, and the four parts are those of products on a CPU",
        ),
    )
