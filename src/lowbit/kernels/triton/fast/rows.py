# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""What kernels over rows have in common: how rows are cut, and how the parts of one meet.

A program holds a block of whole rows in registers, or, where a row is too long for that, one part
of it: then the programs of a row tell each other their sums through memory, and memory still sees
each element read once and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.kernels.triton.fast.launch import Choice, Config, Gpu, gpu_of, launch

_WARP = 32
_ELEMENTS_OF_A_THREAD = 128
"""More than this many float32 do not fit in the registers of a thread."""

# The rule where no table knows better: how many elements a thread and a program hold.
_WANTED_OF_A_THREAD, _LEAST_BLOCK, _MOST_WARPS = 16, 2048, 16
LARGEST_CHUNK = 16384


@dataclass(frozen=True)
class RowConfig(Config, rows=1, chunk=1, num_warps=1, pieces=1):
    """How rows are cut: `rows` of them to a program, and `chunk` elements of each.

    A row longer than `chunk` is shared by several programs. A chunk is worked on in so many
    `pieces`, for which the compiler needs fewer registers at once; if there is more than one,
    elements of 16 bits are also held as they are, two to a register, and turned into float32 anew
    for each of their uses.
    """

    rows: int
    chunk: int
    num_warps: int
    pieces: int = 1
    maxnreg: int | None = None

    def parts(self, length: int) -> int:
        """How many programs share a row."""
        return -(-length // self.chunk)

    def misfit(self, length: int, processors: int) -> str | None:
        """Why rows of this length cannot be cut so on a GPU of so many multiprocessors."""
        if self.pieces > self.chunk:
            return f"a chunk of {self.chunk} elements cannot be cut into {self.pieces} pieces"
        held = self.rows * self.chunk / (self.num_warps * _WARP)
        if processors > 1 and held > _ELEMENTS_OF_A_THREAD:
            return f"a thread would hold {held:.0f} elements, more than {_ELEMENTS_OF_A_THREAD}"
        parts = self.parts(length)
        if parts > 1 and self.rows > 1:
            return f"a row of {length} in {parts} parts cannot share its programs with other rows"
        # The parts of a row wait for each other, so all of them must be able to run at once.
        if parts > processors:
            more = f"more than the {processors} multiprocessors"
            return f"a row of {length} would have {parts} parts, {more}"
        return None


RowTable = Mapping[tuple[int, int], tuple[tuple[int, RowConfig], ...]]
"""By compute capability and bytes of an element: (the longest row that it is for, configuration),
the shortest first."""


def row_choice(
    kernel: str, table: RowTable, gpu: Gpu, length: int, itemsize: int
) -> Choice[RowConfig]:
    """For rows of elements of so many bytes: the first configuration of the table that fits, else
    that of a rule, which cuts rows longer than LARGEST_CHUNK.

    ValueError if the row is too long for the GPU.
    """
    refused = list[tuple[str, str]]()
    for longest, config in table.get((gpu.capability, itemsize), ()):
        refusal = config.refusal(length, gpu.multiprocessors)
        if length > longest:
            refusal = f"the table has it for rows of up to {longest}"
        if refusal is None:
            why = f"the table has it for sm_{gpu.capability} and rows of up to {longest}"
            return Choice(kernel, config, why, tuple(refused))
        refused.append((str(config), refusal))
    config = _by_rule(length, gpu.multiprocessors)
    if refusal := config.refusal(length, gpu.multiprocessors):
        raise ValueError(
            f"rows of {length} elements are too long for this GPU: {refusal}; the limit is "
            f"{gpu.multiprocessors * LARGEST_CHUNK}"
        )
    return Choice(kernel, config, "a rule, for what no table has", tuple(refused))


def _by_rule(length: int, processors: int) -> RowConfig:
    chunk = triton.next_power_of_2(length)
    if processors > 1:
        chunk = min(chunk, LARGEST_CHUNK)
    rows = max(1, _LEAST_BLOCK // chunk)
    warps = rows * chunk // (_WARP * _WANTED_OF_A_THREAD)
    return RowConfig(rows, chunk, min(max(warps, 4), _MOST_WARPS))


def as_rows(x: Tensor) -> Tensor:
    """[..., length] as [rows, length] whose rows are contiguous; a copy only where it must be."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def vector_of(*rows: Tensor) -> int:
    """How many elements of these rows, and of a contiguous result, 16 bytes are, where the rows may
    begin at no multiple of that; else 1."""
    length, stride = rows[0].shape[1], rows[0].stride(0)
    vector = 16 // rows[0].element_size()
    # Columns of all tensors, the result's too, must begin alike.
    alike = all(one.stride(0) % vector == length % vector for one in rows)
    return vector if alike and (length % 16 or stride % 16) else 1  # what Triton asks of a number


def launch_rows(
    kernel: Any,
    choose: Callable[[Gpu, int, int], Choice[RowConfig]],
    config: RowConfig | None,
    arguments: Mapping[str, Any],
    **rows: Tensor,
) -> None:
    """Start a kernel over rows, cut as `config` says, or what `choose` chooses.

    rows: of `as_rows`, by name; the kernel takes NAME_ptr and NAME_stride of each. arguments: what
    else it takes, but for the constexprs of the cut and the memory through which the parts of a row
    meet. HELD: elements of 16 bits are held as they are; ASM: `again` can say so to the compiler.
    VEC, if it has that: where rows may begin at no multiple of 16 bytes, how many elements these
    are.

    ValueError if the configuration does not fit.
    """
    x = next(iter(rows.values()))
    (count, length), gpu = x.shape, gpu_of(x.device)
    vector = vector_of(*rows.values()) if "VEC" in getattr(kernel, "arg_names", ()) else 1
    columns = length // vector * vector or length
    config = config or choose(gpu, columns, x.element_size()).config
    config.require(columns, gpu.multiprocessors)
    parts = config.parts(columns)
    if parts > 1:
        words = torch.zeros(count * parts + 1, dtype=torch.int64, device=x.device)
    else:  # never touched
        words = torch.empty(1, dtype=torch.int64, device=x.device)
    given = {
        **({"VEC": vector} if vector > 1 else {}),
        **{f"{name}_ptr": one for name, one in rows.items()},
        **{f"{name}_stride": one.stride(0) for name, one in rows.items()},
        **arguments,
        "words_ptr": words,
        "rows": count,
        "length": length,
        "ROWS": config.rows,
        "CHUNK": config.chunk,
        "PIECES": config.pieces,
        "HELD": config.pieces > 1 and x.element_size() == 2,
        "ASM": gpu.assembly,
        "PARTS": parts,
        "PARTS_BLOCK": triton.next_power_of_2(parts),
    }
    launch(kernel, (triton.cdiv(count, config.rows) * parts,), given, **config.options)


@triton.jit
def place(
    words_ptr, rows,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The rows (int64 [ROWS]), the part, and the columns of its first piece (as [1, columns]).

    Parts wait for each other, so no part may start after one of a later row: programs are
    numbered in the order in which they start, by a counter behind the words of the rows.
    """
    program = tl.program_id(0)
    if PARTS > 1:
        program = tl.atomic_add(words_ptr + rows * PARTS, 1, sem="relaxed").to(tl.int32)
    row = (program // PARTS) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    part = program % PARTS
    return row, part, (part * CHUNK + tl.arange(0, CHUNK // PIECES))[None, :]


# Rows that begin at no multiple of 16 bytes (VEC elements; 1 where all of them do): columns count
# from the first multiple on, up to the last whole VEC, so that loads and stores take 16 bytes. What
# is left at both ends, fewer than VEC elements each, is the `edge`, which part 0 has too.


@triton.jit
def aligned(at, VEC: tl.constexpr):
    """The next multiple of VEC."""
    return at if VEC == 1 else (at + (VEC - 1)) // VEC * VEC


@triton.jit
def before(row, stride, VEC: tl.constexpr):
    """How many elements of these rows come before their columns, [ROWS]."""
    return (aligned(row * stride, VEC) - row * stride).to(tl.int32)


@triton.jit
def limit_of(row, stride, length, VEC: tl.constexpr):
    """How many columns these rows have, [ROWS], or all of them."""
    if VEC == 1:
        return length
    else:  # noqa: RET505  # Triton's compiler looks into code after a return.
        return tl.maximum(length - before(row, stride, VEC), 0) // VEC * VEC


@triton.jit
def within(at, limit, VEC: tl.constexpr):
    """Which columns there are, [ROWS or 1, columns]."""
    return at < limit if VEC == 1 else at < limit[:, None]


@triton.jit
def counted(part, limit, length, CHUNK: tl.constexpr):
    """How many elements a part of a row has, its edge with them."""
    inner = tl.minimum(tl.maximum(limit - part * CHUNK, 0), CHUNK)
    return inner + tl.where(part == 0, length - limit, 0)


@triton.jit
def edge_of(row, rows, part, stride, length, limit, VEC: tl.constexpr):
    """Where in their rows the elements of the edge are, and which there are, [ROWS, 2 VEC]."""
    e = tl.arange(0, 2 * VEC)[None, :]
    head = before(row, stride, VEC)[:, None]
    at = tl.where(e < VEC, e, e - VEC + head + limit[:, None])
    there = (at < length) & ((e >= VEC) | (e < head))
    return at, there & (part == 0) & (row < rows)[:, None]


@triton.jit
def load_pieces(
    x_ptr, stride, row, rows, column, limit, other: tl.constexpr, PIECES: tl.constexpr,
    VEC: tl.constexpr = 1,
):  # fmt: skip
    """The pieces of a chunk of these rows, which begin at `column`, as a tuple."""
    start, there = x_ptr + aligned(row * stride, VEC)[:, None], (row < rows)[:, None]
    pieces = ()
    for i in tl.static_range(PIECES):
        at = column + i * column.shape[1]
        mask = there & within(at, limit, VEC)
        pieces = pieces + (tl.load(start + at, mask=mask, other=other),)  # noqa: RUF005
    return pieces


@triton.jit
def store_piece(z_ptr, piece, row, rows, at, length, limit, VEC: tl.constexpr = 1):
    """Store a piece at the columns `at` of a contiguous z, in z's dtype."""
    to = z_ptr + aligned(row * length, VEC)[:, None] + at
    there = (row < rows)[:, None]
    tl.store(to, piece.to(z_ptr.dtype.element_ty), mask=there & within(at, limit, VEC))


@triton.jit
def load_along(x_ptr, at, length):
    """What all rows share, at the columns `at`, as float32."""
    return tl.load(x_ptr + at, mask=at < length, other=0.0).to(tl.float32)


@triton.jit
def again(piece, zero, HELD: tl.constexpr, ASM: tl.constexpr):
    """The piece as float32, without the compiler's seeing that it had been turned into it before,
    if HELD: it would keep the float32, and they take twice the registers.

    zero: an integer that is 0, which the compiler does not know; another for each use.
    """
    if HELD and ASM:
        piece = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [piece, zero],
            dtype=piece.dtype, is_pure=False, pack=2,
        )  # fmt: skip
    return piece.to(tl.float32)


@triton.jit
def _inverted(number):
    """The bits of a float32, inverted, as the lower half of 64."""
    return (~number.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _number(bits):
    return (~bits.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def meet(first, second, words_ptr, row, part, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """Two numbers ([1]) of every part of the row, as blocks [PARTS_BLOCK], in order.

    Each part writes its numbers as one word, inverted, since words are 0 before (and no
    arithmetic of a GPU gives a NaN of ones alone); then it reads the words of all parts until none
    is 0. A word is written whole, so nothing else has to be in order. Lanes past PARTS get 0.
    """
    # Numbers rather than blocks of one: their layout would be taken over for the row.
    at = words_ptr + tl.sum(row, axis=0) * PARTS
    word = _inverted(tl.sum(first, axis=0)) << 32 | _inverted(tl.sum(second, axis=0))
    tl.atomic_xchg(at + part, word, sem="relaxed")
    others = tl.arange(0, PARTS_BLOCK)
    known = others < PARTS
    nothing = tl.zeros((PARTS_BLOCK,), tl.int64)
    words = tl.atomic_or(at + others, nothing, mask=known, sem="relaxed")
    while tl.sum((known & (words == 0)).to(tl.int32), axis=0) > 0:
        words = tl.atomic_or(at + others, nothing, mask=known, sem="relaxed")
    firsts = tl.where(known, _number(words >> 32), 0.0)
    return firsts, tl.where(known, _number(words), 0.0)
