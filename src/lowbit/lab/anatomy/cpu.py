"""The anatomy of lowbit's own product on a CPU, `product:ISA`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowbit import api
from lowbit import isa as instruction_sets
from lowbit.bench.core.clock import Limits, interleave
from lowbit.bench.peers.own import Lowbit, packed_weight
from lowbit.bench.suites.matmul.problem import Problem, product
from lowbit.isa.instruction_set import InstructionSet
from lowbit.jit import compile as compiler
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks, padded_k
from lowbit.lab.anatomy.lines import lined_ir
from lowbit.lab.anatomy.mca import verdict
from lowbit.lab.anatomy.result import Anatomy, Pane, Part, Places, Row
from lowbit.lab.compare import assembly
from lowbit.lab.compare.code import Code, mix
from lowbit.lab.explain.plan import prepared_of
from lowbit.lab.product_kernels import product_kernels
from lowbit.product.prepare import VARYING

_LIMITS = Limits(noise=0.03, seconds=3.0)
_NODE = re.compile(r"^(!\d+) = (?:distinct )?!(\w+)\((.*)\)$")
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(![\d]+|\w+))')
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"\s+"([^"]*)"')
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")


def anatomy(isa_name: str, shape: str, *, time: bool = True) -> Anatomy:
    """Take the product of uint8 by int8 apart, at a shape `MxK:KxN`.

    ValueError if there is no such instruction set, or the shape is not understood.
    """
    kernels = product_kernels()
    if isa_name not in kernels:
        raise ValueError(f"no kernel product:{isa_name}; there are {', '.join(kernels)}")
    case = product(shape, "u8:s8:s32")
    m, n, k = (case.sizes[name] for name in "MNK")
    isa, asked = instruction_sets.named(isa_name), kernels[isa_name].kernel
    static = asked.static({"m": m, "n": n, "k_size": k})
    ir = lined_ir(asked.kernel, isa, **static)
    places = Places()
    optimized = _ir_pane(str(compiler.optimized(ir, isa)), places)
    text = compiler.assembly(ir, isa)
    listed = _assembly_pane(text, places)
    code = assembly.parse(text)
    inner = code.main_loop()
    body = code.body(inner or ())
    notes: list[str] = []
    parts: tuple[Part, ...] = ()
    if time and not isa.missing() and isa_name == instruction_sets.active().name:
        parts = _parts(shape)
    elif time:
        why = isa.missing() or f"{instruction_sets.active().name} is what runs here"
        notes.append(f"no times: {why}")
    return Anatomy(
        kernel=f"product:{isa_name}",
        about=f"uint8 by int8, {shape}, micro-kernel {static['micro'].name}, {compiler.VERSION}",
        places=places.listed(),
        panes=(places.source(), optimized, listed),
        facts=_facts(code, isa),
        mix=mix(body),
        parts=parts,
        mca=verdict([one.text for one in body], isa),
        notes=tuple(notes),
    )


def _ir_pane(text: str, places: Places) -> Pane:
    """LLVM's IR after optimization; the nodes that say where lines come from are left out."""
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
    for row in text.splitlines():
        if row.startswith("!"):
            continue
        plain, _, node = row.partition(", !dbg ")
        rows.append((plain, place(node.split(",")[0].split(" ")[0]) if node else None))
    return Pane("LLVM IR, optimized", tuple(rows))


def _assembly_pane(text: str, places: Places) -> Pane:
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


def _facts(code: Code, isa: InstructionSet) -> dict[str, str]:
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


def _parts(shape: str) -> tuple[Part, ...]:
    """The four parts of the product with scales, each timed apart, in one thread."""
    plain, scaled = (Problem.make(product(shape, f"u8:s8:{out}")) for out in ("s32", "f32"))
    packed = packed_weight(plain)
    calls: Mapping[str, list[Callable[[], object]]] = {
        "pack B": [lambda: api.pack(plain.b)],
        "pack A": [_packing(plain, packed)],
        "integers": [Lowbit().prepare(plain, 1).call],
        "scaled": [Lowbit().prepare(scaled, 1).call],
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


def _packing(problem: Problem, packed: Any) -> Callable[[], object]:
    """The region of the product that packs its rows, and nothing behind it."""
    prepared = prepared_of(problem, packed, 1)
    plan, asked = prepared.plan, prepared.product
    assert plan is not None
    program = product_kernel.program(
        plan.isa, micro=plan.micro, shape=plan.shape, a_format=asked.a, epilogue=Epilogue(),
        weight=asked.b.stored, fused=False,
    )  # fmt: skip
    rows = blocks(asked.m, plan.block_rows * plan.shape.row_blocks)
    rows *= plan.block_rows * plan.shape.row_blocks
    room = np.zeros(rows * padded_k(asked.k) + LINE + PANEL, np.uint8)
    sums = np.zeros(rows, np.int32)
    call = program.bind(1, VARYING, **{**prepared.fixed, "n": 0})
    given = dict.fromkeys(VARYING, None) | {
        "a": problem.a, "packed": room[-room.ctypes.data % LINE :], "row_sum": sums,
        "m": asked.m, "out_stride": 0, "first_row": 0,
    }  # fmt: skip
    return lambda: call(*given.values())
