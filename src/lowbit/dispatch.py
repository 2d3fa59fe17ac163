"""Which kernel serves a product, how it is cut, and why.

A plan depends on shapes, types, the instruction set and the number of threads, and is kept: the
second call with the same ones costs a dictionary look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet, host
from lowbit.jit import threads
from lowbit.jit.kernel import Program
from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.integer.micro_kernel import (
    UNPROVEN,
    Demand,
    MicroKernel,
    Shape,
    micro_kernels,
)
from lowbit.kernels.cpu.integer.product import product
from lowbit.kernels.cpu.rows.activation import Source
from lowbit.kernels.cpu.shared.epilogue import OUTPUTS, Epilogue
from lowbit.kernels.cpu.shared.groups import Grouping, group_count
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE, blocks, padded_k

# Multiply-adds below which another thread costs more than it brings: some microseconds' worth.
_WORK_PER_THREAD = 1 << 20
# Bytes of packed left operand that one call may hold; longer ones are served in chunks of rows.
_WORKSPACE = 8 << 20
# Several items for each thread, so that one that lost its core does not hold up the others; but
# each of so much work (multiply-adds) that what other cores' caches hold of it does not matter.
_ITEMS_PER_THREAD = 4
_WORK_PER_ITEM = 1 << 27
_FUSED_COLUMNS = 256  # of an item, for which packing its rows is a small part of the work
_STEPS_PER_PANEL = 4  # steps of rows that should share one fetch of a panel
FLOATS = {"f32": 4, "bf16": 2}  # sources that rows are made from, and the bytes of an element
_MOST_THREADS = 1 << 10  # beyond any machine; runtimes crash where far more are asked for
_MOST_PLANS = 1 << 12


class Request(NamedTuple):
    """What decides a plan; `threads` None is as many as there are now and the work is worth."""

    isa: str
    m: int
    n: int
    k: int
    source: Source
    epilogue: Epilogue
    threads: int | None = None
    largest_pair: int = UNPROVEN
    weight: str = "s8"
    grouping: Grouping | None = None

    @property
    def demand(self) -> Demand:
        """What the micro-kernels are asked about."""
        return Demand(self.m, self.n, self.k, self.largest_pair, self.weight, self.grouping)


# An array, its address, or None where it is not used.
Address = npt.NDArray[Any] | int | None


def _moved(address: Address, distance: int) -> Address:
    """The place `distance` bytes further; nowhere stays nowhere."""
    if not distance or address is None:
        return address
    if isinstance(address, np.ndarray):
        address = int(address.__array_interface__["data"][0])
    return address + distance


@dataclass(frozen=True, eq=False)
class Plan:
    """How one product runs: which program, and how its rows and panels are cut.

    `chunk_rows` rows are served by one call of the program, which needs `packed_bytes` of scratch.
    """

    request: Request
    program: Program
    micro: MicroKernel
    shape: Shape
    chunk_rows: int
    packed_bytes: int
    block_rows: int
    item_steps: int
    item_panels: int
    private_bytes: int  # of each thread
    threads: int
    makes_rows: bool  # whether scales and zero points come from the rows of a themselves
    groups: int  # entries that such a row has, for scales and sums
    n: int
    k: int

    def run(
        self,
        a: Address,
        strides: tuple[int, int],
        right: tuple[int, int, int, int],
        out: Address,
        out_stride: int,
        *,
        scale: Address = None,
        zero: Address = None,
        bias: Address = None,
        residual: Address = None,
        parameters: Address = None,
    ) -> None:
        """Compute. Operands that the epilogue does not use are None; strides count elements.

        a: the left operand, `strides` apart from row to row and within one; scale, zero: float32
        and int32, one entry a row of a, or None where they are made from float32 rows.
        right: a PackedMatrix's addresses. out: rows, contiguous, `out_stride` apart. bias: float32
        for each column, padded to whole panels; residual: float32 [M, N], contiguous; parameters:
        float32, the numbers of steps and output.
        """
        rows = self.request.m
        if self.chunk_rows >= rows:
            self._run_rows(rows, a, strides, right, out, out_stride, scale, zero, bias, residual,
                           parameters)  # fmt: skip
            return
        element = FLOATS.get(self.request.source.kind, 1)
        out_element = OUTPUTS[self.request.epilogue.out].bytes
        for first in range(0, rows, self.chunk_rows):
            self._run_rows(
                min(self.chunk_rows, rows - first),
                _moved(a, first * strides[0] * element),
                strides,
                right,
                _moved(out, first * out_stride * out_element),
                out_stride,
                _moved(scale, 4 * first),
                _moved(zero, 4 * first),
                bias,
                _moved(residual, 4 * first * self.request.n),
                parameters,
            )

    def _run_rows(
        self,
        rows: int,
        a: Address,
        strides: tuple[int, int],
        right: tuple[int, int, int, int],
        out: Address,
        out_stride: int,
        scale: Address,
        zero: Address,
        bias: Address,
        residual: Address,
        parameters: Address,
    ) -> None:
        """One call of the program. What it makes for each row follows the packed rows."""
        packed, address = workspace.reserve(
            self.packed_bytes
            + self.threads * self.private_bytes
            + 4 * self.chunk_rows * (1 + 2 * self.groups)
        )
        private = address + self.packed_bytes
        made = private + self.threads * self.private_bytes
        row_sums = made + 4 * self.chunk_rows
        if self.makes_rows:
            zero, scale = made, row_sums + 4 * self.chunk_rows * self.groups
        row_stride, stride = strides
        panels, sums, zeros, scales = right
        self.program(
            self.threads, a, row_stride, stride, packed, scale, zero, row_sums,
            panels, sums, zeros, scales, bias, residual, self.n, parameters, out, out_stride,
            rows, self.n, self.k, self.block_rows, self.item_steps, self.item_panels,
            private, self.private_bytes,
        )  # fmt: skip


_plans: dict[Request, Plan] = {}


class Candidate(NamedTuple):
    """A micro-kernel that was looked at, and why it does not serve ("" if it does)."""

    isa: InstructionSet
    micro: MicroKernel | None
    why: str


def consider(isa: InstructionSet, demand: Demand) -> tuple[Candidate, ...]:
    """Every micro-kernel looked at for a product, down the chain of sets; the last one serves."""
    seen: list[Candidate] = []
    for one in instruction_sets.chain(isa):
        kernels = [kernel for kernel in micro_kernels() if kernel.isa == one.name]
        if not kernels:
            seen.append(Candidate(one, None, f"there is no kernel for {one.name}"))
        for kernel in kernels:
            why = kernel.refuses(demand)
            seen.append(Candidate(one, kernel, why))
            if not seen[-1].why:
                return tuple(seen)
    raise RuntimeError(f"no kernel for {isa.name} or what it falls back to")


@cache
def wants_proof(isa: str) -> bool:
    """Whether knowing the weights could get a product on this set a faster kernel."""
    chosen = instruction_sets.named(isa)
    unproven = Demand(64, 64, 64)
    return consider(chosen, unproven._replace(largest_pair=0))[-1] != consider(chosen, unproven)[-1]


def plan(request: Request) -> Plan:
    """The plan for a request: the one made before, or a new one."""
    if request.threads is None:
        count = thread_count(request.m, request.n, request.k)
        request = request._replace(threads=count)
    found = _plans.get(request)
    if found is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        found = _plans[request] = _make(request)
    return found


def thread_count(m: int, n: int, k: int, wanted: int | None = None) -> int:
    """How many threads a product uses: `wanted`, or as many as there are and the work is worth."""
    if wanted is not None:
        return min(threads.checked(wanted), _MOST_THREADS)
    worth = m * n * k // _WORK_PER_THREAD
    return 1 if worth < 2 else min(threads.max_threads(), worth)


def _make(request: Request) -> Plan:
    asked = instruction_sets.get(request.isa)
    demand, grouping = request.demand, request.grouping
    isa, micro, _ = consider(asked, demand)[-1]
    assert micro is not None
    count = thread_count(request.m, request.n, request.k, request.threads)
    row_bytes = padded_k(request.k) * demand.planes
    # Rows of bytes are packed as fast as they are copied, so they may be packed again for each
    # item beside, if that is wide; quantizing them again would take longer than a barrier.
    width = host.caches()["L2"] // 2 // row_bytes
    fused = request.source.kind in ("u8", "s8") and width >= min(request.n, _FUSED_COLUMNS)
    fused = fused and not micro.shape(demand)[0].span  # in which rows are read span by span
    chunk_rows = request.m
    if not fused:
        chunk_rows = min(chunk_rows, max(LINE, _WORKSPACE // row_bytes // LINE * LINE))
    shape, block_rows = micro.shape(demand._replace(m=chunk_rows))
    step_rows = block_rows // demand.planes * shape.depth
    if chunk_rows < request.m:
        chunk_rows = chunk_rows // step_rows * step_rows
    steps = blocks(chunk_rows, step_rows)
    item_steps, item_panels = _items(request, shape, steps, step_rows, count, fused)
    program = product.program(
        isa,
        micro=micro,
        shape=shape,
        source=request.source,
        epilogue=request.epilogue,
        weight=request.weight,
        fused=fused,
        grouping=grouping,
    )
    private_bytes = 0
    if fused:  # the rows of a step
        private_bytes += step_rows * row_bytes
    if request.weight != "s8" and not shape.nibbles:  # panels as bytes
        private_bytes += item_panels * demand.lines * PANEL_LINE
    if shape.span:
        private_bytes += item_steps * item_panels * shape.step_sums
    return Plan(
        request=request,
        program=program,
        micro=micro,
        shape=shape,
        chunk_rows=chunk_rows,
        packed_bytes=0 if fused else steps * step_rows * row_bytes,
        block_rows=block_rows,
        item_steps=item_steps,
        item_panels=item_panels,
        private_bytes=private_bytes,
        threads=count,
        makes_rows=request.source.kind in FLOATS,
        groups=group_count(grouping, request.k) if grouping else 1,
        n=request.n,
        k=request.k,
    )


def _items(
    request: Request, shape: Shape, steps: int, step_rows: int, count: int, fused: bool
) -> tuple[int, int]:
    """How many steps of rows and panels of columns make one item of work.

    The panels of an item are read again for each step, so they should stay in half of the
    second-level cache; so should the rows, where the items beside read them again, a quarter each.
    Where that leaves too few items for the threads, rows are cut finer as long as an item keeps
    some steps for each panel that it fetches, then columns, then rows down to single steps.
    With spans of K, that is true of the panels of a span, and of sums in place of rows.
    """
    cache = host.caches()["L2"]
    fitting = cache // (2 if fused else 4) // (shape.span * LINE or padded_k(request.k))
    groups = blocks(request.n, PANEL * shape.panels)
    across = blocks(groups, max(1, fitting // (PANEL * shape.panels)))  # items side by side
    step_bytes_rows = step_rows * request.demand.planes
    if shape.span:  # then not rows take the other quarter, but their sums
        fitting = cache // 4 // (4 * min(request.n, fitting))
    down = 1 if fused else blocks(steps, max(1, fitting // step_bytes_rows))  # and below
    each = request.m * request.n * request.k // count // _WORK_PER_ITEM
    wanted = count * min(_ITEMS_PER_THREAD, max(1, each)) if count > 1 else 1
    for least_steps in (_STEPS_PER_PANEL, 1):
        down = max(down, min(blocks(wanted, across), max(1, steps // least_steps)))
        across = max(across, min(blocks(wanted, down), groups))
    return blocks(steps, down), blocks(groups, across) * shape.panels
