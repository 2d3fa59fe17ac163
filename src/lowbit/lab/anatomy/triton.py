"""The anatomy of a Triton kernel: TTIR, TTGIR, PTX and machine code beside its text."""

from __future__ import annotations

import re

from lowbit.lab.anatomy.result import Anatomy, Pane, Places, Row
from lowbit.lab.backends.backend import Request
from lowbit.lab.compare.code import Code, mix
from lowbit.lab.compare.kinds.triton import TritonKind
from lowbit.lab.compare.occupancy import occupancy
from lowbit.lab.compare.problem import Problem
from lowbit.lab.compare.ptx.parse import parse
from lowbit.lab.compare.toolchain import MissingToolError, assemble
from lowbit.lab.compare.variant import Variant

_USE = re.compile(r"\s*loc\((#\w+)\)")
_DEFINED = re.compile(r'^(#\w+) = loc\((?:"([^"]*)":(\d+):\d+|"[^"]*"\((#\w+)\)|callsite\((#\w+))')


def anatomy(request: Request, sm: int) -> Anatomy:
    """Take a Triton kernel apart, compiled for a compute capability at the sizes of its exercise.

    Raises what Triton's compiler raises.
    """
    operation = request.operation
    problem = Problem(operation.complete(operation.exercise), operation, None, request.output)
    variant = Variant(request.kernel, "", request.grid, None, dict(request.given))
    built = TritonKind().build(variant, problem, sm)
    assert built.ptx is not None
    assert built.stages is not None
    places, notes = Places(), list[str]()
    panes = [
        _ir_pane(name, built.stages[key], places)
        for name, key in (("TTIR", "ttir"), ("TTGIR", "ttgir"))
    ]
    ptx = parse(built.ptx, built.file)
    panes.append(_code_pane("PTX", ptx.code, built.file, places))
    facts = {"threads of a program": str(built.threads), "shared memory": f"{built.shared} bytes"}
    code = ptx.code
    try:
        machine = assemble(built.ptx, sm, built.file)
    except (MissingToolError, RuntimeError) as error:
        notes.append(str(error))
    else:
        facts["registers"] = f"{machine.registers} of 255 a thread"
        facts["spilled"] = f"{machine.spill_stores} bytes stored, {machine.spill_loads} loaded"
        held = occupancy(sm, built.threads, machine.registers, built.shared)
        if held is not None:
            facts["warps"] = (
                f"{held.warps} of {held.most} a multiprocessor, limited by {held.limit}"
            )
        if machine.sass is None:
            notes.append(machine.missing or "")
        else:
            code = machine.sass
            panes.append(_code_pane("SASS", code, built.file, places))
    inner = code.main_loop()
    sizes = ", ".join(f"{name}={size}" for name, size in problem.sizes.items())
    return Anatomy(
        kernel=operation.name,
        about=f"{operation.doc} {sizes}; sm_{sm}, {built.made_by}",
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


def _ir_pane(title: str, text: str, places: Places) -> Pane:
    """MLIR; where a row comes from is said by #loc names that are defined at the end."""
    defined = {one[1]: one for row in text.splitlines() if (one := _DEFINED.match(row))}

    def place(name: str) -> int | None:
        for _ in range(8):
            one = defined.get(name)
            if one is None:
                return None
            if one[2]:
                return places.number(one[2], int(one[3]))
            name = one[4] or one[5]
        return None

    rows: list[Row] = []
    for row in text.splitlines():
        if row.startswith("#"):
            continue
        used = _USE.findall(row)
        rows.append((_USE.sub("", row), place(used[-1]) if used else None))
    return Pane(title, tuple(rows))


def _code_pane(title: str, code: Code, file: str, places: Places) -> Pane:
    """Labels and instructions."""
    at: dict[int, list[str]] = {}
    for label, index in code.labels.items():
        at.setdefault(index, []).append(label)
    rows: list[Row] = []
    for index, one in enumerate(code.instructions):
        rows += [(f"{label}:", None) for label in at.get(index, ())]
        guard = f"@{one.guard} " if one.guard else ""
        where = None if one.line is None else places.number(file, one.line)
        rows.append((f"    {guard}{one.text}", where))
    return Pane(title, tuple(rows))
