"""The anatomy of a kernel of lowbit by its name, or of a file's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lowbit import api
from lowbit import isa as instruction_sets
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import compile as compiler
from lowbit.jit.kernel import Kernel
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks, padded_k
from lowbit_lab.anatomy.result import (
    Anatomy,
    Pane,
    Part,
    Places,
    assembly_pane,
    code_pane,
    ir_pane,
    lined_ir,
    mlir_pane,
    verdict,
)
from lowbit_lab.backends.backend import Variant
from lowbit_lab.backends.language import language_of
from lowbit_lab.backends.source import PRODUCT, read, request_named
from lowbit_lab.bench.core.clock import Limits, interleave
from lowbit_lab.bench.peers.own import LowbitMatmul, packed_weight
from lowbit_lab.bench.suites.matmul import problem as matmul
from lowbit_lab.bench.suites.matmul.problem import product
from lowbit_lab.compare import assembly
from lowbit_lab.compare.code import Code, mix
from lowbit_lab.compare.faults import occupancy
from lowbit_lab.compare.problem import Problem
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.compare.run import build
from lowbit_lab.compare.toolchain import MissingToolError, assemble
from lowbit_lab.explain.kernels import product_kernels
from lowbit_lab.explain.product import prepared_of
from lowbit_lab.languages.lowbit import LowbitKernel
from lowbit_lab.languages.numba import NumbaCpu

_SHAPE = "256x1024:1024x1024"
_SIZE = 1024  # about what sizes are that a file does not give


def anatomy_of(
    name: str,
    shape: str | None = None,
    sm: int = 90,
    *,
    sizes: Mapping[str, int] | None = None,
    time: bool = True,
) -> Anatomy:
    """Take `product:ISA` apart at a shape `MxK:KxN`; or for a compute capability and at sizes by
    name a Triton kernel of lowbit, or of a file, as `FILE.py` or `FILE.py:kernel`, one of any kind.

    ValueError, with the names that there are, for another name; FileNotFoundError.
    """
    path, separator, kernel = name.partition(".py")
    if name.startswith(PRODUCT):
        return product_anatomy(name.removeprefix(PRODUCT), shape or _SHAPE, time=time)
    if shape:
        raise ValueError(f"the shape {shape!r} is a product's; sizes of {name} are N0=100,T=64")
    if separator and kernel[:1] in ("", ":"):
        return _of_file(Path(path + separator), kernel[1:], sm, sizes or {})
    return _teaching(name, sm, sizes or {})


def _teaching(name: str, sm: int, sizes: Mapping[str, int]) -> Anatomy:
    request = request_named(name)
    operation = request.operation
    problem = Problem(
        operation.complete({**operation.exercise, **sizes}), operation, None, request.output
    )
    variant = replace(request.variant, name=operation.name)
    file = Path(language_of(variant.kernel, "compile").source(variant.kernel)[2])
    return gpu_anatomy(variant, problem, sm, file, f"{operation.doc} {_listed(problem.sizes)}")


def _of_file(path: Path, kernel: str, sm: int, sizes: Mapping[str, int]) -> Anatomy:
    comparison = read(path, sizes, _SIZE)
    variants = {one.name: one for one in comparison.variants}
    first = next(iter(variants))
    if kernel in ("", "kernel") and kernel not in variants:
        kernel = comparison.kernel or (kernel if len(variants) > 1 else first)
    if kernel not in variants:
        wrong = f"no kernel {kernel!r}, but" if kernel else "several kernels:"
        raise ValueError(f"{path} defines {wrong} {', '.join(variants)}; write {path}:{first}")
    variant, problem = variants[kernel], comparison.large
    language = language_of(variant.kernel, "compile")
    about = f"{language.title}, {_listed(problem.sizes)}"
    if language.for_gpu:
        return gpu_anatomy(variant, problem, sm, path, about)
    build(variant, problem, sm, path)  # which says what is wrong with it
    of_kind = numba_anatomy if language is NumbaCpu else lowbit_anatomy
    return of_kind(variant, problem, about)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# The anatomy of lowbit's own product on a CPU, `product:ISA`.

_LIMITS = Limits(noise=0.03, seconds=3.0)


def product_anatomy(isa_name: str, shape: str, *, time: bool = True) -> Anatomy:
    """Take the product of uint8 by int8 apart, at a shape `MxK:KxN`.

    ValueError if there is no such instruction set, or the shape is not understood.
    """
    kernels = product_kernels()
    if isa_name not in kernels:
        raise ValueError(f"no kernel product:{isa_name}; there are {', '.join(kernels)}")
    case = product(shape, "u8:s8:s32")
    m, n, k = (case.sizes[name] for name in "MNK")
    isa, asked = instruction_sets.named(isa_name), kernels[isa_name].variant.kernel
    static = asked.static({"m": m, "n": n, "k_size": k})
    places = Places()
    panes, code = listing(asked.kernel, isa, places, **static)
    notes: list[str] = []
    parts: tuple[Part, ...] = ()
    if time and not isa.missing() and isa_name == instruction_sets.active().name:
        parts = _parts(shape)
    elif time:
        why = isa.missing() or f"{instruction_sets.active().name} is what runs here"
        notes.append(f"no times: {why}")
    about = f"uint8 by int8, {shape}, micro-kernel {static['micro'].name}, {compiler.VERSION}"
    name = f"{PRODUCT}{isa_name}"
    return of_code(name, about, places, panes, code, isa, parts=parts, notes=tuple(notes))


def _parts(shape: str) -> tuple[Part, ...]:
    """The four parts of the product with scales, each timed apart, in one thread."""
    plain, scaled = (
        matmul.MatmulProblem.make(product(shape, f"u8:s8:{out}")) for out in ("s32", "f32")
    )
    packed = packed_weight(plain)
    calls: Mapping[str, list[Callable[[], object]]] = {
        "pack B": [lambda: api.pack(plain.b)],
        "pack A": [_packing(plain, packed)],
        "integers": [LowbitMatmul().prepare(plain, 1).call],
        "scaled": [LowbitMatmul().prepare(scaled, 1).call],
    }
    taken = {name: one.median for name, one in interleave(calls, _LIMITS).items()}
    kernel = taken["integers"] - taken["pack A"]
    output = taken["scaled"] - taken["integers"]
    return (
        Part("packing of B", taken["pack B"], "lowbit.pack, once for each weight"),
        Part("packing of A", taken["pack A"], "the product's own text with no columns to multiply"),
        Part("kernel", kernel, "the product to int32 less the packing of A"),
        Part("output processing", output, "the product to float32 with scales less that to int32"),
    )


def _packing(problem: matmul.MatmulProblem, packed: Any) -> Callable[[], object]:
    """The region of the product that packs its rows, and nothing behind it."""
    prepared = prepared_of(problem, packed, 1)
    plan, asked = prepared.plan, prepared.request
    assert plan is not None
    program = product_kernel.program(
        plan.isa, micro=plan.micro, shape=plan.shape, a_format=asked.a, epilogue=Epilogue(),
        weight=asked.b.stored, fused=False,
    )  # fmt: skip
    rows = blocks(asked.m, plan.block_rows * plan.shape.row_blocks)
    rows *= plan.block_rows * plan.shape.row_blocks
    room = np.zeros(rows * padded_k(asked.k) + LINE + PANEL, np.uint8)
    sums = np.zeros(rows, np.int32)
    first = prepared.launches[0]
    places = tuple(first.places)
    call = program.bind(1, places, **{**first.numbers, "m": asked.m, "n": 0})
    given = {"a": problem.a, "packed": room[-room.ctypes.data % LINE :], "row_sum": sums}
    return lambda: call(*map(given.get, places))


# The anatomy of a kernel for a GPU: its compiler's texts, PTX and machine code beside its own.


def gpu_anatomy(variant: Variant, problem: Problem, sm: int, file: Path, about: str) -> Anatomy:
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


# The anatomy of what is compiled for this machine's processor: LLVM IR and assembly.


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
    places, asked = Places(), LowbitKernel.asked_of(variant.kernel)
    static = asked.static_at(LowbitKernel.arguments(variant, problem, problem.arrays(variant)))
    isa = asked.chosen
    panes, code = listing(asked.kernel, isa, places, **static)
    about = f"{about}; lowbit for {isa.name}, {compiler.VERSION}"
    return of_code(variant.name, about, places, panes, code, isa)


def numba_anatomy(variant: Variant, problem: Problem, about: str) -> Anatomy:
    """That of a function under numba.njit that is compiled. Numba writes lines for a debugger only:
    it is compiled a second time with them, and what differs is said."""
    import numba

    places, function = Places(), NumbaCpu.function(variant.kernel)
    signature = NumbaCpu.signature(variant, problem)
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
