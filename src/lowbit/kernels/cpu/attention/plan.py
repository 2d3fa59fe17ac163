"""How attention is cut, and where its parts lie: what `attention` is given besides its operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.isa import InstructionSet, chain
from lowbit.isa.avx512 import starts_like_fma
from lowbit.kernels.cpu.float.micro_kernel import FloatMicro, float_micro_kernels
from lowbit.kernels.cpu.shared.formats import TENSORS, Affine, check_formats, to_store

_ROWS = 32  # queries of a block, about: their scores and a panel of keys fit the nearest cache
_ITEMS = 4  # for each thread, so that all end at about the same time

N = TypeVar("N")


class AttentionForm(NamedTuple):
    """What is computed. It keys the code.

    inputs, out: formats of q, k and v, and of the output. mask: float32 numbers are added to the
    scores. padding: bytes say which keys take part: 0 for those that do not. window: a query
    attends to so many keys at most, the last ones; 0: to all. cap: scores become cap · tanh(score /
    cap) before masks are added; 0: they stay. scaled_rows: rows of k and v are "s8", each with its
    scale behind it, a float32, and q is float32.
    """

    inputs: str
    out: str
    mask: bool = False
    padding: bool = False
    window: int = 0
    cap: float = 0.0
    scaled_rows: bool = False

    @property
    def queries(self) -> str:
        """The format of q."""
        return "f32" if self.scaled_rows else self.inputs


class Strides(NamedTuple, Generic[N]):
    """From batch to batch, head to head and row to row, in elements; along a row they are 1. Of a
    mask, 0 where it is broadcast."""

    batch: N
    head: N
    row: N


class Geometry(NamedTuple, Generic[N]):
    """The table of integers that the kernel reads.

    heads; `group` query heads share a key head; `chunks` of `chunk_rows` queries are items of their
    own. Query i attends to keys j ≤ i + diagonal, in a window to the last of these. Then scratch:
    bytes of a thread, and where in them the packed values, queries, scores, sums, factors and
    converted rows begin; key_units and value_units: of a packed column; score_stride, sum_stride:
    from row to row. Then the strides of q, k, v, out, mask and padding.
    """

    heads: N
    group: N
    chunks: N
    chunk_rows: N
    queries: N
    keys: N
    head_dim: N
    value_dim: N
    diagonal: N
    scratch_bytes: N
    values_at: N
    queries_at: N
    scores_at: N
    sums_at: N
    factors_at: N
    converted_at: N
    key_units: N
    value_units: N
    score_stride: N
    sum_stride: N
    strides: Sequence[Strides[N]]


_FLAT = len(Geometry._fields) - 1
OPERANDS = ("q", "k", "v", "out", "mask", "padding")


def geometry_of(numbers: Sequence[N]) -> Geometry[N]:
    """The record of the table's numbers, one after another."""
    rest = numbers[_FLAT:]
    strides = [Strides(*rest[i : i + 3]) for i in range(0, len(rest), 3)]
    return Geometry._make([*numbers[:_FLAT], strides])


TABLE_LENGTH = _FLAT + 3 * len(OPERANDS)


@dataclass(frozen=True)
class AttentionPlan:
    """isa, form, micro: of the program, attention.program(isa, form=form, micro=micro). geometry:
    int64, its table. items: its argument. scratch_bytes: for each thread, at multiples of 64."""

    isa: InstructionSet
    form: AttentionForm
    micro: FloatMicro
    geometry: npt.NDArray[np.int64]
    items: int
    scratch_bytes: int


@dataclass(frozen=True)
class Sizes:
    """q [batch, heads, queries, head_dim], k [batch, key_heads, keys, head_dim], v [batch,
    key_heads, keys, value_dim]; in memory in any order of the first three dimensions."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    key_heads: int


def micro_for(isa: InstructionSet, products: str) -> FloatMicro:
    """The inner loop for products in "bf16", where that is faster, or "f32" at this level.

    Tiles are. Pairs of bfloat16 in vectors are where they start as often as products of float32:
    attention of 12 heads of 197 keys took 0.60 times as long with them as with float32 on Zen 5,
    and 1.4 times on Emerald Rapids.

    ValueError: products are of neither.
    """
    if products not in ("bf16", "f32"):
        raise ValueError(f"products are in 'bf16' or 'f32', got {products!r}")
    kinds = [(False, True)]  # whether pairs, and in registers
    if products == "bf16":
        kinds = [(True, False), *([(True, True)] if starts_like_fma() else []), *kinds]
    for kind in kinds:
        for one in chain(isa, extensions=True):
            for micro in float_micro_kernels:
                if micro.isa is one and (micro.pair, micro.in_registers) == kind:
                    return micro
    raise AssertionError("the last set of a chain has an inner loop")


def step_shape(micro: FloatMicro) -> tuple[int, int, int]:
    """Rows and vectors of a step; rows of a block of queries, some steps."""
    shapes = micro.shapes()
    rows, vectors = shapes[0]
    if micro.in_registers:  # as many products as it can be for what is loaded
        rows, vectors = max(shapes, key=lambda one: one[0] * one[1] / (one[0] + one[1]))
    return rows, vectors, max(1, _ROWS // rows) * rows


def window_step(micro: FloatMicro) -> int:
    """What the first key that is packed is a multiple of, where queries have a window: so each key
    takes the same place in panels and vectors, and sums are the same bits, whichever queries are
    computed together."""
    width = step_shape(micro)[1] * micro.lanes
    return math.lcm(width, micro.quantum, 2 * micro.lanes)


def plan_attention(
    form: AttentionForm, sizes: Sizes, strides: Sequence[Sequence[int]], isa: InstructionSet,
    products: str = "bf16", diagonal: int | None = None, threads: int = 1,
) -> AttentionPlan:  # fmt: skip
    """What `attention` needs.

    - strides: of q, k, v and the output, then of a mask and of padding if the form has them, each
      from batch to batch, head to head, row to row, in elements (see `Strides`).
    - products: "bf16", rounded once to it where operands are float32, or "f32". The machine's own
      instructions are taken, or float32.
    - diagonal: query i attends to the keys 0 to i + diagonal; None: to all.
    - threads: how many there will be, for the number of items; the result does not depend on it.

    ValueError: a format, products, sizes or strides are none.
    """
    check_formats((form.inputs, form.out), TENSORS)
    if sizes.key_heads < 1 or sizes.heads % sizes.key_heads:
        raise ValueError(f"{sizes.heads} heads cannot share {sizes.key_heads} of keys evenly")
    if min(sizes.batch, sizes.queries, sizes.keys) < 0 or min(sizes.head_dim, sizes.value_dim) < 1:
        raise ValueError(f"sizes are not negative, and dimensions positive: {sizes}")
    if form.window and (form.mask or form.padding or form.window < 0 or diagonal is None):
        raise ValueError(f"a window goes with a diagonal and without masks: {form}")
    wanted = 4 + form.mask + form.padding
    if len(strides) != wanted or any(len(one) != 3 for one in strides):
        raise ValueError(f"{wanted} times three strides are expected, got {strides}")
    given = list(strides[:4])
    given += [strides[4] if form.mask else (0, 0, 0), strides[-1] if form.padding else (0, 0, 0)]
    micro = micro_for(isa, products)
    block = step_shape(micro)[2]
    heads, blocks = sizes.batch * sizes.heads, -(-sizes.queries // block)
    chunks = min(blocks, max(1, -(-threads * _ITEMS // max(heads, 1)) if threads > 1 else 1))
    chunk_rows = -(-blocks // max(chunks, 1)) * block
    chunks = -(-sizes.queries // max(chunk_rows, 1))
    numbers = [
        sizes.heads, sizes.heads // sizes.key_heads, chunks, chunk_rows, sizes.queries, sizes.keys,
        sizes.head_dim, sizes.value_dim, sizes.keys if diagonal is None else diagonal,
        *_scratch(form, sizes, micro),
        *(n for one in given for n in one),
    ]  # fmt: skip
    geometry, scratch = np.array(numbers, np.int64), geometry_of(numbers).scratch_bytes
    return AttentionPlan(micro.isa, form, micro, geometry, heads * chunks, scratch)


def converted_kind(form: AttentionForm, micro: FloatMicro) -> str:
    """What k and v are converted to before they are packed; "" if they are packed as they are."""
    if micro.pair:
        return "" if form.inputs == "bf16" else "bf16"
    return "" if form.inputs in ("f32", "bf16") else "f32"


def _scratch(form: AttentionForm, sizes: Sizes, micro: FloatMicro) -> list[int]:
    """Of `Geometry`, from scratch_bytes to sum_stride."""
    _, vectors, block = step_shape(micro)
    width, line, depth = vectors * micro.lanes, 64, 2 if micro.pair else 1

    def units(count: int) -> int:
        return -(-count // micro.quantum) * micro.quantum // depth

    def whole(count: int) -> int:
        return -(-count // width) * width

    key_units, value_units = units(sizes.head_dim), units(sizes.keys)
    # An odd number of lines, so that the rows of a tile do not meet in the same ones of the cache.
    score_stride = -(-whole(sizes.keys) // 32) * 32 + 16
    sum_stride = -(-whole(sizes.value_dim) // 32) * 32 + 16
    places, end = list[int](), 0
    converted = max(sizes.head_dim, sizes.value_dim) * sizes.keys * (4 // depth)
    for size in (
        whole(sizes.keys) * key_units * 4, whole(sizes.value_dim) * value_units * 4,
        block * key_units * 4, block * score_stride * 4, block * sum_stride * 4, block * 4,
        converted if converted_kind(form, micro) else 0,
    ):  # fmt: skip
        places.append(end)
        end += -(-size // line) * line
    return [end, *places[1:], key_units, value_units, score_stride, sum_stride]


def attention_parameters(
    scale: float,
    q: Affine | None = None,
    k: Affine | None = None,
    v: Affine | None = None,
    out: Affine | None = None,
) -> npt.NDArray[np.float32]:
    """The parameters of `attention`: what scores are multiplied by before the softmax, and (scale,
    zero point) of whatever is of 8 bits. ValueError: `scale` is not positive."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive, got {scale}")
    factor = scale * math.log2(math.e)
    scales = [1.0 if one is None else one[0] for one in (q, k, v)]
    zeros = [0 if one is None else one[1] for one in (q, k, v)]
    first = factor * scales[0] * scales[1]
    return np.array([first, scales[2], *zeros, *to_store(out)], np.float32)
