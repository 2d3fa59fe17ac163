"""What kernels over rows have in common: how rows are cut, and how the parts of one meet.

A program holds a block of whole rows in registers, or, where a row is too long for that, one part
of it: then the programs of a row tell each other their sums through memory, and memory still sees
each element read once and written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import compute_capability, multiprocessors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_WARP = 32
_ELEMENTS_OF_A_THREAD = 128
"""More than this many float32 do not fit in the registers of a thread."""

# The rule where no table knows better: how many elements a thread and a program hold.
_WANTED_OF_A_THREAD, _LEAST_BLOCK, _MOST_WARPS = 16, 2048, 16


@dataclass(frozen=True)
class RowConfig:
    """How rows are cut: `rows` of them to a program, and `chunk` elements of each.

    A row longer than `chunk` is shared by several programs.
    """

    rows: int
    chunk: int
    num_warps: int

    def parts(self, length: int) -> int:
        """How many programs share a row."""
        return -(-length // self.chunk)

    def refusal(self, length: int, processors: int) -> str | None:
        """Why rows of this length cannot be cut so on a GPU of so many multiprocessors; None if
        they can."""
        for name in ("rows", "chunk", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                return f"{name} is {value}; it must be a power of two"
        held = self.rows * self.chunk / (self.num_warps * _WARP)
        if processors > 1 and held > _ELEMENTS_OF_A_THREAD:
            return f"a thread would hold {held:.0f} elements, more than {_ELEMENTS_OF_A_THREAD}"
        parts = self.parts(length)
        if parts > 1 and self.rows > 1:
            return f"a row in {parts} parts cannot share its programs with other rows"
        # The parts of a row wait for each other, so all of them must be able to run at once.
        if parts > processors:
            return f"a row would have {parts} parts, more than the {processors} multiprocessors"
        return None


RowTable = Mapping[int, tuple[tuple[int, RowConfig], ...]]
"""By compute capability: (the longest row that it is for, configuration), the shortest first."""


def row_config(
    table: RowTable,
    length: int,
    device: torch.device,
    given: RowConfig | None,
    largest_chunk: int,
) -> RowConfig:
    """The configuration given, else that of the table, else that of a rule, which cuts rows longer
    than `largest_chunk`.

    ValueError if the one given does not fit, or if the row is too long for the GPU.
    """
    processors = multiprocessors(device)
    if given is not None:
        refusal = given.refusal(length, processors)
        if refusal:
            raise ValueError(f"{given} does not fit rows of {length}: {refusal}")
        return given
    for longest, config in table.get(compute_capability(device), ()):
        if length <= longest and config.refusal(length, processors) is None:
            return config
    config = _by_rule(length, processors, largest_chunk)
    refusal = config.refusal(length, processors)
    if refusal:
        raise ValueError(
            f"rows of {length} elements are too long for this GPU: {refusal}; the limit is "
            f"{processors * largest_chunk}"
        )
    return config


def _by_rule(length: int, processors: int, largest_chunk: int) -> RowConfig:
    chunk = triton.next_power_of_2(length)
    if processors > 1:
        chunk = min(chunk, largest_chunk)
    rows = max(1, _LEAST_BLOCK // chunk)
    warps = rows * chunk // (_WARP * _WANTED_OF_A_THREAD)
    return RowConfig(rows, chunk, min(max(warps, 4), _MOST_WARPS))


@dataclass(frozen=True)
class Cut:
    """A problem of `rows` by `length`, cut: its grid, the constexprs of the kernels below, and
    the memory through which the parts of a row meet."""

    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int]
    num_warps: int

    @classmethod
    def of(cls, rows: int, length: int, config: RowConfig, device: torch.device) -> Cut:
        """Cut it. Where rows have one part, the memory is never touched."""
        parts = config.parts(length)
        if parts > 1:
            met = torch.zeros(rows + 1, dtype=torch.int32, device=device)
            sums = torch.empty(2 * rows * parts, dtype=torch.float32, device=device)
        else:
            met = torch.empty(1, dtype=torch.int32, device=device)
            sums = torch.empty(1, dtype=torch.float32, device=device)
        arguments = {
            "sums_ptr": sums,
            "met_ptr": met,
            "rows": rows,
            "length": length,
            "ROWS": config.rows,
            "CHUNK": config.chunk,
            "PARTS": parts,
            "PARTS_BLOCK": triton.next_power_of_2(parts),
        }
        return cls((-(-rows // config.rows) * parts,), arguments, config.num_warps)


def as_rows(x: Tensor) -> Tensor:
    """[..., length] as [rows, length] whose rows are contiguous; a copy only where it must be."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


@triton.jit
def place(met_ptr, rows, ROWS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """The rows (int64 [ROWS]), the part, and the columns ([CHUNK]) of this program.

    Parts wait for each other, so no part may start after one of a later row: programs are
    numbered in the order in which they start, by a counter behind those of the rows.
    """
    program = tl.program_id(0)
    if PARTS > 1:
        program = tl.atomic_add(met_ptr + rows, 1, sem="relaxed")
    row = (program // PARTS) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    part = program % PARTS
    return row, part, part * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def meet(
    first, second, sums_ptr, met_ptr, row, part, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr
):
    """Two numbers ([1]) of every part of the row, as blocks [1, PARTS_BLOCK], in order.

    Each part writes its own, counts itself, and waits until all have. Lanes past PARTS get 0.
    """
    at = sums_ptr + row * (2 * PARTS)
    tl.store(at + 2 * part, first)
    tl.store(at + 2 * part + 1, second)
    tl.debug_barrier()
    counter = met_ptr + tl.sum(row, axis=0)
    tl.atomic_add(counter, 1, sem="release")
    while tl.atomic_add(counter, 0, sem="acquire") < PARTS:
        pass
    tl.debug_barrier()
    others = tl.arange(0, PARTS_BLOCK)[None, :]
    known = others < PARTS
    firsts = tl.load(at[:, None] + 2 * others, mask=known, other=0.0, cache_modifier=".cg")
    seconds = tl.load(at[:, None] + 2 * others + 1, mask=known, other=0.0, cache_modifier=".cg")
    return firsts, seconds
