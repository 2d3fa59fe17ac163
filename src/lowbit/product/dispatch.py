"""Which kernel serves a product, how it is cut, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet, host
from lowbit.jit import threads
from lowbit.kernels.cpu.integer.micro_kernel import (
    KernelQuery,
    MicroKernel,
    Shape,
    micro_kernels,
)
from lowbit.kernels.cpu.rows.shifted import Image
from lowbit.kernels.cpu.shared import serving
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, PANEL_LINE, blocks, padded_k
from lowbit.kernels.cpu.shared.panel_format import NIBBLES, SplitFormat
from lowbit.kernels.cpu.shared.serving import Candidate
from lowbit.product.product import Product

# How a product's steps of rows and strips of columns are cut into items for threads.

_MOST = 8  # items for each thread that are looked at
# Cycles that an item takes besides its products and its bytes: to take it, to come to full speed.
_CYCLES = 1 << 10
_BYTES_A_CYCLE = 16  # from the second level and beyond
# Cycles for each row of an item that has others beside it: cores take from each other the lines of
# the output where these meet, and what is fetched ahead of them.
_EDGE = 256
# When a thread finds no item left, the others are half through theirs, on the average.
_UNFINISHED = 0.5


def cut(
    steps: int, strips: int, least: tuple[int, int], threads: int, cycles: float, rows: int,
    strip_bytes: int, row_bytes: int,
) -> tuple[int, int]:  # fmt: skip
    """How many steps and strips make one item: what lets so many threads end first.

    least: into how many items they are to be cut at least, below and beside each other. cycles: of
    the products of one step, of so many rows, and one strip. Bytes: of a row and of a strip's
    columns, which an item reads once.
    """
    down, across = least
    if threads == 1:
        return blocks(steps, down), blocks(strips, across)
    most = max(_MOST * threads, down * across)
    step, strip = rows * row_bytes / _BYTES_A_CYCLE, strip_bytes / _BYTES_A_CYCLE

    def time(height: int, width: int) -> float:
        below, beside = blocks(steps, height), blocks(strips, width)
        items, edge = below * beside, rows * _EDGE if beside > 1 else 0

        def spent(height: float, width: float) -> float:
            return height * (width * cycles + step + edge) + width * strip + _CYCLES

        average = spent(steps / below, strips / beside)  # the last ones are smaller
        return blocks(items, threads) * average + _UNFINISHED * spent(height, width)

    cuts = {
        (blocks(steps, below), blocks(strips, beside))
        for below in range(down, max(down, min(steps, most // across)) + 1)
        for beside in range(across, max(across, min(strips, most // below)) + 1)
    }
    return min(sorted(cuts, reverse=True), key=lambda one: time(*one))


# Cycles of work that one thread does alone: to wake another took 15 to 35 µs on the machines that
# were tried. Of more, each thread has so many: sixteen then took 0.5 to 0.9 of what fewer did, most
# of all where some cores were slow. Of work that waits for memory, a cycle is so many bytes.
_ALONE, _CYCLES_FOR_THREAD, _BYTES_PER_CYCLE = 1 << 16, 1 << 13, 16
# Bytes of packed left operand that one call may hold; longer ones are served in chunks of rows.
_WORKSPACE = 8 << 20
_ITEMS_PER_THREAD = 4  # so that one that lost its core does not hold up the others
_FUSED_COLUMNS = 256  # of an item, for which packing its rows is a small part of the work
_PACKED_AGAIN = 4  # times that vectors pack rows at most that come from beyond the second level
_SHORTEST_STREAMED = 128  # k
_MOST_THREADS = 1 << 10  # beyond any machine; runtimes crash where far more are asked for


@dataclass(frozen=True)
class Plan:
    """How one product runs: which micro-kernel, and how its rows and panels are cut.

    `chunk_rows` rows are served by one call, which needs `packed_bytes` of scratch for them all,
    unless each step's are packed beside its products (`fused`), and `private_bytes` a thread. An
    item has `item_steps` steps of rows by `item_panels` panels. `alone`: it would use one thread
    however many there were.
    """

    isa: InstructionSet
    micro: MicroKernel
    shape: Shape
    fused: bool
    chunk_rows: int
    block_rows: int
    item_steps: int
    item_panels: int
    packed_bytes: int
    private_bytes: int
    threads: int
    alone: bool


def consider(isa: InstructionSet, query: KernelQuery) -> tuple[Candidate[MicroKernel], ...]:
    """Every micro-kernel looked at for a product of integers; the last one serves."""
    return serving.consider(micro_kernels(), isa, query)


PRODUCTS = ("matmul", "matmul_scaled", "linear_dynamic")
"""The public functions that `active_kernel` serves."""


def active_kernel() -> tuple[str, str]:
    """(kernel, instruction set) that serve 8-bit products here now, by name."""
    isa, micro, _ = consider(instruction_sets.active(), KernelQuery(64, 64, 64))[-1]
    return micro.name if micro else "", isa.name


@cache
def wants_proof(isa: str | None) -> bool:
    """Whether knowing the weights could get a product on this set a faster kernel."""
    chosen = instruction_sets.active() if isa is None else instruction_sets.named(isa)
    unproven = KernelQuery(64, 64, 64)
    return consider(chosen, unproven._replace(largest_pair=0))[-1] != consider(chosen, unproven)[-1]


@cache
def wants_split(isa: str | None) -> bool:
    """Whether splitting the weights could get a product on this set a faster kernel."""
    chosen = instruction_sets.active() if isa is None else instruction_sets.named(isa)
    whole = KernelQuery(64, 64, 64)
    small = whole._replace(split=SplitFormat(4, 0))
    return consider(chosen, small)[-1] != consider(chosen, whole)[-1]


def threads_key(wanted: int | None) -> int:
    """What a product says of its threads: the number asked for, or, negative, as many as there are.

    ValueError for what is no number of threads: it could equal one that is (1.0, True).
    """
    if wanted is None:
        return -threads.max_threads()
    return wanted if type(wanted) is int and wanted > 0 else threads.checked(wanted)


def thread_count(
    m: int, n: int, k: int, wanted: int, per_cycle: int = MicroKernel.per_cycle, alone: int = _ALONE
) -> int:
    """How many threads a product uses; `wanted` as `threads_key` gives it. alone: cycles below
    which that is one."""
    if wanted > 0:
        return min(wanted, _MOST_THREADS)
    cycles = max(m * n * k // per_cycle, (m * k + k * n + m * n) // _BYTES_PER_CYCLE)
    return 1 if cycles < alone else min(-wanted, cycles // _CYCLES_FOR_THREAD)


def plan(product: Product) -> Plan:
    """The plan for a product, of at least one row, column and k, on a set of any machine."""
    query = product.query
    isa, micro, _ = consider(instruction_sets.named(product.isa), query)[-1]
    assert micro is not None
    sizes, wanted = (product.m, product.n, product.k), product.threads
    count = thread_count(*sizes, wanted, micro.per_cycle)
    most = wanted if wanted > 0 else -_MOST_THREADS
    query = query._replace(alone=count == 1)
    shape, block_rows = micro.shape(query)
    ring = shape.ring if product.by_lines else 0
    fused = _fused(product, micro, shape, ring)
    chunk_rows = product.m
    if not fused:
        chunk_rows = min(chunk_rows, max(LINE, _WORKSPACE // product.row_bytes // LINE * LINE))
    if chunk_rows < product.m:
        shape, block_rows = micro.shape(query._replace(m=chunk_rows))
    step_rows = block_rows // product.a.digits * shape.row_blocks
    if chunk_rows < product.m:
        chunk_rows = chunk_rows // step_rows * step_rows
    steps = blocks(chunk_rows, step_rows)
    private_bytes = 0
    if product.image:
        item_steps, item_panels = _items_of_image(product, shape, step_rows, count)
        lines = _lines(product.image, shape, item_steps, step_rows)
        private_bytes += product.image.strip(lines, step_rows)
        shape = replace(shape, pitch=product.image.pitch(lines), gap=product.image.gap)
    else:
        work = steps, step_rows, count
        item_steps, item_panels = _items(product, micro, shape, work, fused)
        if fused and not shape.piece:  # the rows of a step
            private_bytes += step_rows * product.a.digits * LINE * (ring or query.k_blocks)
    if product.b.stored in NIBBLES and not shape.nibbles:  # panels as bytes
        private_bytes += item_panels * query.k_blocks * PANEL_LINE
    private_bytes += micro.scratch_bytes(shape, query.k_blocks)
    if shape.span:
        waiting = shape.panels if shape.panels_stay else item_panels
        private_bytes += item_steps * waiting * shape.step_sums
    return Plan(
        isa=isa,
        micro=micro,
        shape=shape,
        fused=fused,
        chunk_rows=chunk_rows,
        block_rows=block_rows,
        item_steps=item_steps,
        item_panels=item_panels,
        packed_bytes=0 if fused else steps * step_rows * product.row_bytes,
        private_bytes=private_bytes,
        threads=count,
        alone=thread_count(*sizes, most, micro.per_cycle) == 1,
    )


def _fused(product: Product, micro: MicroKernel, shape: Shape, ring: int) -> bool:
    """Whether each step's rows are packed beside its products.

    Rows of bytes are packed as fast as they are copied, so they may be packed again for each item
    beside, if that is wide; by vectors, if rows come from afar, always for two items, and not for
    many (split panels have one). Quantizing them again would take longer than a barrier. With spans
    of K they are packed for a span, or beforehand, and read span by span; and panels that stay meet
    all rows of an item.
    """
    if shape.in_place or product.image is not None:
        return True
    if shape.panels_stay or not product.a.copied or (shape.span and not ring):
        return False
    cache = host.caches()["L2"]
    width = cache // 2 // (shape.span * LINE or product.row_bytes)
    far = product.m * product.row_bytes > cache and not micro.outruns_vectors
    again = far and not shape.summed and product.n > _PACKED_AGAIN * width
    wide = width >= min(product.n, _FUSED_COLUMNS) or (far and product.n <= 2 * width)
    return wide and not again


def _items_of_image(product: Product, shape: Shape, step_rows: int, count: int) -> tuple[int, int]:
    """How many steps of one image's rows, and panels, make one item: whole lines of the output.

    Strips, which items make for themselves, should stay in a quarter of the second-level cache, and
    panels in half; and for several threads there should be some items for each, as far as these do
    not make for few lines what more have in common: then panels are shared out besides.
    """
    cache = host.caches()["L2"]
    image = product.image
    assert image is not None
    images = product.m // image.pixels
    many = shape.lines or 1
    steps, each = (
        (blocks(image.lines, many), 1)
        if shape.lines
        else (image.lines, blocks(image.length, step_rows))
    )
    item, shared = steps, min(blocks(image.reach, image.skip * many), steps)
    while item > shared and image.strip(item * many, step_rows) > cache // 4:
        item = max(shared, blocks(item, 2))
    wanted = blocks(count * _ITEMS_PER_THREAD, images) if count > 1 else 1
    item = min(item, max(blocks(steps, wanted), shared))
    strips = blocks(product.n, PANEL * shape.panels)
    fitting = cache // 2 // padded_k(product.k) // (PANEL * shape.panels)
    least = _least_across(shape, strips, fitting)
    across = min(strips, max(least, blocks(wanted, blocks(steps, item))))
    return item * each, blocks(strips, across) * shape.panels


def _least_across(shape: Shape, strips: int, fitting: int) -> int:
    """Into how many items side by side strips are cut at least, where so many fit into a cache.
    Rows that are transposed are so again for each, and slow enough for panels from far."""
    return 1 if shape.summed else blocks(strips, max(1, fitting))


def _lines(image: Image, shape: Shape, steps: int, step_rows: int) -> int:
    """The output lines of so many steps."""
    return steps * shape.lines or steps // blocks(image.length, step_rows)


def outgrows_caches(product: Product, plan: Plan) -> bool:
    """Whether the output is so large that it is better written past the caches.

    Beyond the second level, tiles would wait for it. The products of vectors take so much longer
    that caches can write some of it back meanwhile, which a Cascade Lake core did faster up to
    four times that level. Short products would wait for memory: an output that is new, whose pages
    have just been cleared, an Emerald Rapids core wrote two to three times as fast through caches.
    """
    times = 1 if plan.micro.outruns_vectors else 4
    large = product.m * product.n * product.out_bytes > times * host.caches()["L2"]
    return large and product.k >= _SHORTEST_STREAMED


def _items(
    product: Product, micro: MicroKernel, shape: Shape, work: tuple[int, int, int], fused: bool
) -> tuple[int, int]:
    """How many steps of rows and panels of columns make one item; work: how many steps
    there are, of how many rows, for how many threads.

    The panels of an item are read again for each step, so they should stay in half of the
    second-level cache; so should the rows, where the items beside read them again, a quarter each.
    With panels of nibbles, which items unpack, rows have twice that.
    With spans of K, that is true of the panels of a span, and of sums in place of rows. Where
    panels stay, rows should be in half of it, and panels come from wherever they are.
    """
    steps, step_rows, count = work
    cache = host.caches()["L2"]
    half = fused and not shape.span
    fitting = cache // (2 if half else 4) // (shape.span * LINE or padded_k(product.k))
    columns = PANEL * shape.panels
    strips = blocks(product.n, columns)
    across = _least_across(shape, strips, fitting // columns)
    if shape.panels_stay:
        across, fitting = 1, cache // 2 // padded_k(product.k)
    elif shape.span:  # then not rows take the other quarter, but their sums
        fitting = cache // (2 if fused else 4) // (4 * min(product.n, fitting))
    elif product.b.stored in NIBBLES and not shape.nibbles:
        fitting *= 2  # panels are unpacked again for each item
    rows = step_rows * product.a.digits
    down = 1 if half else blocks(steps, max(1, fitting // rows))  # and below
    cycles = rows * columns * product.k / micro.per_cycle
    sizes = rows, columns * product.k, product.k
    height, width = cut(steps, strips, (down, across), count, cycles, *sizes)
    return height, width * shape.panels
