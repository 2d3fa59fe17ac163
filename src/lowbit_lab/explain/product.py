"""Why a product runs as it does: kernel, blocking, layout, and the time that it should take.

The prediction knows two limits, both measured in the same call: how fast products of bytes can be
made on the instruction set, padding included, and how fast the bytes can be read from where they
lie. The larger time is the prediction; what a product takes beyond it is packing, calling, threads
and whatever the kernel leaves unused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowbit import isa as instruction_sets
from lowbit.isa import host
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.shared.layout import PANEL, blocks, padded_k
from lowbit.product import dispatch, requests
from lowbit.product.dispatch import Plan, threads_key
from lowbit.product.prepared import Prepared
from lowbit.product.product import Product
from lowbit.report.text import format_seconds, three_digits
from lowbit.spec.operations.products import linear_dynamic, matmul
from lowbit.weights.panels import PackedMatrix
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.clock import Limits, interleave, quantiles
from lowbit_lab.bench.core.cpu import Cpu
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.record import Spread
from lowbit_lab.bench.core.table import facts_table, format_known, format_spread
from lowbit_lab.bench.peers.own import LowbitMatmul, packed_weight
from lowbit_lab.bench.suites.matmul.problem import MatmulProblem
from lowbit_lab.bench.suites.matmul.problem import product as product_case

_LIMITS = Limits(noise=0.02, seconds=1.0)


@dataclass(frozen=True)
class Rejected:
    """What did not serve: an instruction set, or (with `kernel`) one of its kernels, and why."""

    isa: str
    kernel: str | None
    why: str


@dataclass(frozen=True)
class Blocking:
    """How the product is cut.

    A block has `block_rows` rows; a step multiplies `row_blocks` blocks with `panels` panels of 16
    columns; an item, which one thread takes at a time, has `item_steps` steps by `item_panels`
    panels; one call of the machine code serves `chunk_rows` rows in `items` items on `threads`
    threads.
    """

    block_rows: int
    row_blocks: int
    panels: int
    item_steps: int
    item_panels: int
    chunk_rows: int
    items: int
    threads: int


@dataclass(frozen=True)
class Operand:
    """An operand in memory: its own bytes, those of its packed form, and the share of these that
    is padding."""

    given_bytes: int
    packed_bytes: int
    padding: float


@dataclass(frozen=True)
class Prediction:
    """The time by each limit, in seconds, and which is the larger: "compute" or "memory".

    operations: two for each product, padding included. moved_bytes: both operands, the left one
    packed in between if it is, and the output. level: the nearest cache that holds all of that, or
    "memory".
    """

    operations: int
    moved_bytes: int
    level: str
    compute_seconds: float
    memory_seconds: float
    limit: str

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.compute_seconds, self.memory_seconds)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a product should take, and what it takes: seconds of one call; measured is None of a GPU
    that is not here."""

    ceiling: Ceiling
    prediction: Prediction
    measured: Spread | None

    @property
    def reached(self) -> float | None:
        """The predicted time as a share of the measured one; None where there is none, or the
        limits that predict it were not measured well."""
        if self.measured is None or self.ceiling.disturbed:
            return None
        return peak.share(self.prediction.seconds / self.measured.median)

    def to_json(self) -> str:
        """Everything as JSON text."""
        plain = msgspec.to_builtins(self)
        plain["prediction"]["seconds"] = self.prediction.seconds
        return json.dumps({**plain, "reached": self.reached}, indent=2, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Explanation(Timed):
    """All of it, with warm weights. left: None where its rows are read where they lie.

    largest_pair: the most that two neighbouring weights along K sum to in one direction, where a
    kernel asks for that; None where none does.
    """

    operation: str
    shape: str
    dtypes: str
    cpu: str
    kernel: str
    isa: str
    rejected: tuple[Rejected, ...]
    blocking: Blocking
    left: Operand | None
    right: Operand
    beside_right_bytes: int
    largest_pair: int | None
    measured: Spread


def explain_gemm(shape: str, dtypes: str, threads: int | None = None) -> Explanation:
    """Explain the product of `shape` (`MxK:KxN`) and `dtypes` (`u8:s8:f32`) on this machine.

    `threads`: as many as lowbit would take by itself if None. Runs the product and the kernels
    that measure the limits for about two seconds. ValueError if shape, dtypes or threads are not
    understood; RuntimeError if LOWBIT_ISA forces a set that the machine lacks.
    """
    case = product_case(shape, dtypes)
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    problem = MatmulProblem.make(case)
    with Cpu().using(threads or max_threads()):
        packed = packed_weight(problem)
        prepared = prepared_of(problem, packed, threads)
        plan, product = prepared.plan, prepared.request
        assert plan is not None
        ceiling = peak.measure(plan.isa.name, plan.threads)
        call = LowbitMatmul().prepare(problem, plan.threads).call
        taken = interleave({"lowbit": [call]}, _LIMITS)["lowbit"]
    m, k = case.sizes["M"], case.sizes["K"]
    wants_proof = dispatch.wants_proof(instruction_sets.active().name)
    return Explanation(
        operation=case.spec.name,
        shape=case.name,
        dtypes=dtypes,
        cpu=host.cpu_name(),
        kernel=plan.micro.name,
        isa=plan.isa.name,
        rejected=_rejected(product),
        blocking=_blocking(product, plan),
        left=None
        if plan.shape.in_place
        else _operand(problem.a.nbytes, _packed_rows(product, plan) * padded_k(k), m * k),
        right=_operand(problem.b.nbytes, packed.panels.nbytes, problem.b.size),
        beside_right_bytes=packed.nbytes - packed.panels.nbytes,
        largest_pair=packed.largest_pair if wants_proof else None,
        ceiling=ceiling,
        prediction=_predict(problem, product, plan, packed, ceiling),
        measured=Spread(*quantiles(taken.seconds)),
    )


def prepared_of(problem: MatmulProblem, packed: PackedMatrix, threads: int | None) -> Prepared:
    """What the public function runs for this problem."""
    a, spec = problem.a, problem.case.spec
    left = a.shape, a.strides, a.dtype
    key = (left, requests.panel_format(packed, None), threads_key(threads))
    if spec is matmul:
        return requests.integers(*key, None)
    if spec is linear_dynamic:
        return requests.floats(*key, None, "dynamic", 0, False, False, None)[0]
    shifted = problem.a_zero_point is not None
    output: tuple[str, float | None, int] = ("float32", None, 0)
    if problem.quantizes:
        output = ("uint8", *problem.out_quantization)
    return requests.scaled(*key, None, shifted, True, True, 0, False, False, None, *output)[0]


def _rejected(asked: Product) -> tuple[Rejected, ...]:
    """Sets that this machine lacks, sets above the one asked for, and kernels that refused."""
    active = instruction_sets.named(asked.isa)
    chain = {one.name for one in instruction_sets.chain(active)}
    found = []
    for name, one in instruction_sets.SETS.items():
        if name == asked.isa:
            break
        if name not in chain:
            found.append(Rejected(name, None, one.missing() or f"{asked.isa} is forced"))
    seen = dispatch.consider(active, asked.query)
    for isa, micro, why in seen:
        if why:
            found.append(Rejected(isa.name, None if micro is None else micro.name, why))
    return tuple(found)


def _blocking(product: Product, plan: Plan) -> Blocking:
    step_rows = plan.block_rows * plan.shape.row_blocks
    down = blocks(blocks(plan.chunk_rows, step_rows), plan.item_steps)
    across = blocks(blocks(product.n, PANEL), plan.item_panels)
    return Blocking(
        block_rows=plan.block_rows,
        row_blocks=plan.shape.row_blocks,
        panels=plan.shape.panels,
        item_steps=plan.item_steps,
        item_panels=plan.item_panels,
        chunk_rows=plan.chunk_rows,
        items=down * across,
        threads=plan.threads,
    )


def _packed_rows(product: Product, plan: Plan) -> int:
    """Rows that are multiplied in all: M rounded up to steps, chunk by chunk."""
    step_rows = plan.block_rows * plan.shape.row_blocks
    whole, rest = divmod(product.m, plan.chunk_rows)
    return (whole * blocks(plan.chunk_rows, step_rows) + blocks(rest, step_rows)) * step_rows


def _operand(given_bytes: int, packed_bytes: int, elements: int) -> Operand:
    """Packed elements are bytes, whatever they were before."""
    return Operand(given_bytes, packed_bytes, 1 - elements / packed_bytes)


def _predict(
    problem: MatmulProblem, product: Product, plan: Plan, packed: PackedMatrix, ceiling: Ceiling
) -> Prediction:
    rows, columns = _packed_rows(product, plan), len(packed.column_sums)
    depth = padded_k(product.k)
    operations = 2 * rows * columns * depth
    out = problem.case.stated.dtype("c").bits // 8
    moved = problem.a.nbytes + packed.nbytes + product.m * product.n * out
    moved += 0 if plan.shape.in_place else 2 * rows * depth
    level = peak.level(moved, plan.threads)
    compute = operations / (ceiling.gops * 1e9)
    memory = moved / (ceiling.read_gbs[level] * 1e9)
    limit = "compute" if compute >= memory else "memory"
    return Prediction(operations, moved, level, compute, memory, limit)


# An explanation as text.


def render(one: Explanation) -> RenderableType:
    """One line a fact, grouped as the way of the data goes."""
    table = facts_table()
    table.add_row("kernel", f"{one.kernel} on {one.isa}")
    for each in one.rejected:
        name = each.isa if each.kernel is None else f"{each.kernel} on {each.isa}"
        table.add_row("rejected", f"{name}: {each.why}")
    _add_blocking(table, one.blocking)
    if one.left is None:
        table.add_row("left in place", "its rows are read where they lie")
    else:
        table.add_row("left packed", _operand_text(one.left) + ", in every call")
    beside = f"; beside it {one.beside_right_bytes:,} bytes of sums and scales"
    table.add_row("right packed", _operand_text(one.right) + beside)
    if one.largest_pair is not None:
        table.add_row(
            "proof", f"neighbouring weights of one sign sum to {one.largest_pair} at most"
        )
    add_times(table, one)
    title = Text(f"{one.operation} {one.dtypes} {one.shape} on {one.cpu}", style="bold")
    return Group(title, "", table)


def _add_blocking(table: Table, cut: Blocking) -> None:
    panels = f"{_count(cut.panels, 'panel')} of 16 columns"
    blocks = f"{_count(cut.row_blocks, 'block')} of {_count(cut.block_rows, 'row')}"
    table.add_row("step", f"{blocks} by {panels}")
    item = f"{_count(cut.item_steps, 'step')} by {_count(cut.item_panels, 'panel')}"
    share = f"{_count(cut.items, 'item')} for {_count(cut.threads, 'thread')}"
    table.add_row("item", f"{item}; {share}")
    rows = _count(cut.chunk_rows, "row")
    table.add_row("chunk", f"{rows} in one call of the machine code")


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _operand_text(operand: Operand) -> str:
    return (
        f"{operand.given_bytes:,} bytes become {operand.packed_bytes:,}, of which "
        f"{format_known(operand.padding)} is padding"
    )


def add_times(table: Table, explanation: Timed) -> None:
    """Lines of the limits, the time that they predict, and, where there is one, the measured."""
    guess, limits = explanation.prediction, explanation.ceiling
    table.add_row(
        "compute",
        f"{format_seconds(guess.compute_seconds)}: {guess.operations:,} operations at the measured "
        f"{limits.gops:.0f} GOP/s ({limits.way})",
    )
    table.add_row(
        "memory",
        f"{format_seconds(guess.memory_seconds)}: {guess.moved_bytes:,} bytes at the measured "
        f"{limits.read_gbs[guess.level]:.0f} GB/s of {guess.level}",
    )
    table.add_row("predicted", f"{format_seconds(guess.seconds)}, limited by {guess.limit}")
    if explanation.measured is None:
        return
    spread = format_spread(explanation.measured)
    table.add_row("measured", f"{format_seconds(explanation.measured.median)} ({spread})")
    reached = "not known: the limits were not measured well, other work had the cores"
    if explanation.reached is not None:
        reached = f"{three_digits(100 * explanation.reached)} % of what the limit allows"
    table.add_row("reached", reached)
