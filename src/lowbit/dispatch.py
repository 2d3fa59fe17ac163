"""Which kernel serves a product, how it is cut, and why.

A plan depends on shapes, types, the instruction set and the number of threads, and is kept: the
second call with the same ones costs a dictionary look-up.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet, host
from lowbit.jit import threads
from lowbit.jit.kernel import Program
from lowbit.kernels.cpu.activation import Source
from lowbit.kernels.cpu.epilogue import OUTPUTS, Epilogue
from lowbit.kernels.cpu.layout import FLIP, LINE, PANEL, blocks, padded_k
from lowbit.kernels.cpu.product import product
from lowbit.kernels.micro_kernel import MicroKernel, Shape
from lowbit.kernels.registry import micro_kernels
from lowbit.packed import aligned_empty

# Multiply-adds below which another thread costs more than it brings: some microseconds' worth.
_WORK_PER_THREAD = 1 << 20
# Bytes of packed left operand that one call may hold; longer ones are served in chunks of rows.
_WORKSPACE = 8 << 20
_ITEMS_PER_THREAD = 4  # so that a thread that lost its core does not hold up the others
_STEPS_PER_PANEL = 4  # steps of rows that should share one fetch of a panel
# What a right operand that nobody has looked at must be taken for: any two may be neighbours.
UNPROVEN = 2 * FLIP
_MOST_THREADS = 1 << 10  # beyond any machine; runtimes crash where far more are asked for
_MOST_PLANS = 1 << 12


class _Workspace(threading.local):
    """Scratch memory of one Python thread, grown when a call needs more."""

    def __init__(self) -> None:
        self.size = self.address = 0

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, aligned to 64, until the next call."""
        if size > self.size:
            self.memory = aligned_empty((size,), np.uint8)
            self.size, self.address = size, self.memory.ctypes.data
        return self.address


_workspace = _Workspace()


class Request(NamedTuple):
    """What decides a plan; `threads` None is as many as there are and the work is worth."""

    isa: str
    m: int
    n: int
    k: int
    source: Source
    epilogue: Epilogue
    threads: int | None = None
    largest_pair: int = UNPROVEN


class Left(NamedTuple):
    """Addresses of the left operand; strides count its elements.

    `scale`, `zero`: one entry a row, 0 where the epilogue does not use them or where they are made
    from a float32 operand on the way.
    """

    address: int
    row_stride: int
    stride: int = 1
    scale: int = 0
    zero: int = 0


class Right(NamedTuple):
    """Addresses of a packed right operand and what belongs to its columns; 0 where unused."""

    panels: int
    sums: int
    zero: int = 0
    scale: int = 0
    bias: int = 0


class Output(NamedTuple):
    """Addresses of the output, of what the epilogue adds to it and of how it is quantized.

    Strides count elements. `residual`: float32 of the output's shape; `requantize`: float32
    inverse scale and zero point. 0 where the epilogue does not use them.
    """

    address: int
    row_stride: int
    residual: int = 0
    residual_stride: int = 0
    requantize: int = 0


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
    threads: int

    def run(self, left: Left, right: Right, out: Output) -> None:
        """Compute, one chunk of rows after another."""
        m, n, k = self.request.m, self.request.n, self.request.k
        chunk, made = self.chunk_rows, self.request.source.kind == "f32"
        scratch = _workspace.reserve(self.packed_bytes + 12 * chunk)
        rows = scratch + self.packed_bytes
        left_bytes = left.row_stride * (4 if made else 1)
        out_bytes = out.row_stride * OUTPUTS[self.request.epilogue.out].bytes
        for first in range(0, m, chunk):
            self.program(
                self.threads,
                left.address + first * left_bytes,
                left.row_stride,
                left.stride,
                scratch,
                rows if made else left.scale + 4 * first,
                rows + 4 * chunk if made else left.zero + 4 * first,
                rows + 8 * chunk,
                right.panels,
                right.sums,
                right.zero,
                right.scale,
                right.bias,
                out.residual + 4 * first * out.residual_stride,
                out.residual_stride,
                out.requantize,
                out.address + first * out_bytes,
                out.row_stride,
                min(chunk, m - first),
                n,
                k,
                self.block_rows,
                self.item_steps,
                self.item_panels,
            )


_plans: dict[Request, Plan] = {}


class Candidate(NamedTuple):
    """A micro-kernel that was looked at, and why it does not serve ("" if it does)."""

    isa: InstructionSet
    micro: MicroKernel | None
    why: str


def consider(
    isa: InstructionSet, m: int, n: int, k: int, largest_pair: int = UNPROVEN
) -> tuple[Candidate, ...]:
    """Every micro-kernel looked at for a product, down the chain of sets; the last one serves."""
    seen: list[Candidate] = []
    for one in instruction_sets.chain(isa):
        kernels = [kernel for kernel in micro_kernels() if kernel.isa == one.name]
        if not kernels:
            seen.append(Candidate(one, None, f"there is no kernel for {one.name}"))
        for kernel in kernels:
            seen.append(Candidate(one, kernel, kernel.refuses(m, n, k, largest_pair)))
            if not seen[-1].why:
                return tuple(seen)
    raise RuntimeError(f"no kernel for {isa.name} or what it falls back to")


@cache
def wants_proof(isa: str) -> bool:
    """Whether knowing the weights could get a product on this set a faster kernel."""
    chosen = instruction_sets.named(isa)
    return consider(chosen, 64, 64, 64, 0)[-1] != consider(chosen, 64, 64, 64)[-1]


def plan(request: Request) -> Plan:
    """The plan for a request: the one made before, or a new one."""
    found = _plans.get(request)
    if found is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        found = _plans[request] = _make(request)
    return found


def thread_count(m: int, n: int, k: int, wanted: int | None = None) -> int:
    """How many threads a product uses: `wanted`, or as many as there are and the work is worth."""
    if wanted is not None:
        if not isinstance(wanted, int) or wanted < 1:
            raise ValueError(f"threads must be an integer of at least 1, got {wanted!r}")
        return min(wanted, _MOST_THREADS)
    worth = m * n * k // _WORK_PER_THREAD
    return 1 if worth < 2 else min(threads.max_threads(), worth)


def _make(request: Request) -> Plan:
    asked = instruction_sets.get(request.isa)
    sizes = request.m, request.n, request.k
    isa, micro, _ = consider(asked, *sizes, request.largest_pair)[-1]
    assert micro is not None
    count = thread_count(request.m, request.n, request.k, request.threads)
    row_bytes = padded_k(request.k)
    most_rows = max(LINE, _WORKSPACE // row_bytes // LINE * LINE)
    chunk_rows = min(request.m, most_rows)
    shape, block_rows = micro.shape(chunk_rows)
    step_rows = block_rows * shape.depth
    if chunk_rows < request.m:
        chunk_rows = chunk_rows // step_rows * step_rows
    steps = blocks(chunk_rows, step_rows)
    item_steps, item_panels = _items(request, shape, steps, step_rows, count)
    program = product.program(
        isa, micro=micro, shape=shape, source=request.source, epilogue=request.epilogue
    )
    return Plan(
        request=request,
        program=program,
        micro=micro,
        shape=shape,
        chunk_rows=chunk_rows,
        packed_bytes=steps * step_rows * row_bytes,
        block_rows=block_rows,
        item_steps=item_steps,
        item_panels=item_panels,
        threads=count,
    )


def _items(
    request: Request, shape: Shape, steps: int, step_rows: int, count: int
) -> tuple[int, int]:
    """How many steps of rows and panels of columns make one item of work.

    What an item reads of either operand should stay in a quarter of the second-level cache. Where
    that leaves too few items for the threads, rows are cut finer as long as an item keeps some
    steps for each panel that it fetches, then columns, then rows down to single steps.
    """
    fitting = host.caches()["L2"] // 4 // padded_k(request.k)  # rows, or columns
    groups = blocks(request.n, PANEL * shape.panels)
    across = blocks(groups, max(1, fitting // (PANEL * shape.panels)))  # items side by side
    down = blocks(steps, max(1, fitting // step_rows))  # and below each other
    wanted = _ITEMS_PER_THREAD * count if count > 1 else 1
    for least_steps in (_STEPS_PER_PANEL, 1):
        down = max(down, min(blocks(wanted, across), max(1, steps // least_steps)))
        across = max(across, min(blocks(wanted, down), groups))
    return blocks(steps, down), blocks(groups, across) * shape.panels
