"""The anatomy of lowbit's own product on a CPU, `product:ISA`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lowbit import api
from lowbit import isa as instruction_sets
from lowbit.bench.core.clock import Limits, interleave
from lowbit.bench.peers.own import Lowbit, packed_weight
from lowbit.bench.suites.matmul.problem import Problem, product
from lowbit.jit import compile as compiler
from lowbit.kernels.cpu.integer.product import product as product_kernel
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, blocks, padded_k
from lowbit.lab.anatomy.host import listing, of_code
from lowbit.lab.anatomy.result import Anatomy, Part, Places
from lowbit.lab.explain.plan import prepared_of
from lowbit.lab.product_kernels import product_kernels
from lowbit.lab.source import PRODUCT

_LIMITS = Limits(noise=0.03, seconds=3.0)


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
