"""Products of float matrices, prepared: everything but numbers and addresses is decided once.

Operands are NumPy arrays of float32 or bfloat16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as pairs
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.float.dots import float_dots
from lowbit.kernels.cpu.float.product import float_product
from lowbit.kernels.cpu.shared.layout import LINE
from lowbit.product.arguments import check_inner, check_no_overlap
from lowbit.product.dispatch import thread_count
from lowbit.product.float_dispatch import MOST_DOT_ROWS, DotsPlan, FloatPlan, plan, plan_dots
from lowbit.product.float_product import FloatProduct, Layout
from lowbit.product.prepare import KEPT

Array = npt.NDArray[Any]

_NARROW = 16  # columns below which a tall output is computed as its transpose
_FLOAT32 = np.dtype(np.float32)


class Operands(NamedTuple):
    """The matrices of a product, and where its result goes."""

    a: Array
    b: Array
    c: Array | None
    out: Array


Factors = tuple[float, float]  # alpha, beta


class PreparedGemm(Protocol):
    """How products of certain layouts are computed."""

    def run(self, given: Operands, factors: Factors) -> None: ...


def multiply(given: Operands, factors: Factors, threads: int, isa: str, apart: bool = True) -> None:
    """out = alpha·(a @ b) + beta·c; threads as `threads_key` gives them.

    Without a part in the result, matrices are not read. `apart`: whether `out` is known to share
    no memory with the others. Raises as `lowbit.gemm`.
    """
    a, b, c, out = given
    prepared = prepare_gemm(
        Layout.of(a), Layout.of(b), None if c is None else Layout.of(c), Layout.of(out),
        factors[0] != 0, factors[1] != 0, threads, isa,
    )  # fmt: skip
    if not apart:
        parted = _parted(given, factors)
        if parted is not given:
            multiply(parted, factors, threads, isa)
            return
    prepared.run(given, factors)


def _parted(given: Operands, factors: Factors) -> Operands:
    """The operands, c copied if it overlaps `out` without being it.

    ValueError: out shares memory with what is read while it is written.
    """
    a, b, c, out = given
    if factors[0] and any(np.may_share_memory(one, out) for one in (a, b)):
        raise ValueError("out shares memory with a or b, which would be overwritten while read")
    if c is None or not factors[1] or not np.may_share_memory(c, out):
        return given
    same = c.__array_interface__["data"] == out.__array_interface__["data"]
    if same and (c.dtype, c.strides) == (out.dtype, out.strides):
        return given
    return given._replace(c=c.astype(np.float32))


@lru_cache(maxsize=KEPT)
def prepare_gemm(
    a: Layout,
    b: Layout,
    c: Layout | None,
    out: Layout,
    multiplies: bool,
    adds: bool,
    threads: int,
    isa: str,
) -> PreparedGemm:
    """Check that everything fits together, and find out how to compute it."""
    for name, one in (("a", a), ("b", b), ("c", c), ("out", out)):
        if one is not None and any(stride % one.dtype.itemsize for stride in one.strides):
            raise ValueError(
                f"{name} has strides of {one.strides} bytes, no multiples of its elements' size: "
                "copy it first"
            )
    check_inner(a.shape, b.shape)
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}: convert one of them")
    check_no_overlap(out.shape, out.strides, out.dtype.itemsize)
    shape = a.shape[0], b.shape[1]
    for name, one in (("out", out), ("c", c)):
        if one is not None and one.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {one.shape}")
    if c is None and adds:
        raise ValueError("beta is given without c: give c, or leave beta out")
    added = c if adds else None
    if 0 in shape or not multiplies or not a.shape[1]:
        return _Scaling(adds)
    narrow = shape[1] < _NARROW and shape[0] > shape[1]
    by_rows, by_columns = out.steps[1] == 1, out.steps[0] == 1
    swapped = by_columns if narrow else by_columns and not by_rows
    few = min(shape) <= MOST_DOT_ROWS
    detour = _Detour(
        threads=threads,
        isa=isa,
        copies_a=few and not swapped and not narrow and b.steps[0] == 1 and a.steps[1] != 1,
        copies_b=few and (swapped or narrow) and a.steps[1] == 1 and b.steps[0] != 1,
        copies_c=added is not None
        and (added.dtype != _FLOAT32 or added.steps[0 if swapped else 1] != 1),
        by_columns=narrow or swapped,
        copies_out=not (swapped or (by_rows and not narrow)),
    )
    if detour.copies_a or detour.copies_b or detour.copies_c or detour.copies_out:
        return detour
    count = thread_count(*shape, a.shape[1], threads)
    if swapped:
        a, b, added, out = b.T, a.T, added.T if added else None, out.T
    product = FloatProduct(a, b, added, out, isa, count)
    dots = plan_dots(product)
    if dots is not None:
        return _Dots(product, dots, swapped)
    return _Blocked(product, plan(product), swapped)


@dataclass(frozen=True)
class _Scaling:
    """Where there are no products: out = beta·c, or zero."""

    adds: bool

    def run(self, given: Operands, factors: Factors) -> None:
        if not self.adds or given.c is None:
            given.out[...] = 0
            return
        scaled = given.c.astype(np.float32) * np.float32(factors[1])
        scaled[np.isnan(scaled)] = np.nan  # of one sign, as in products
        given.out[...] = scaled.astype(given.out.dtype)


@dataclass(frozen=True)
class _Detour:
    """Copy first what the kernels cannot take, or would be slow with, as it lies.

    Copies of c and of the output, which is copied back, are by columns or by rows.
    """

    threads: int
    isa: str
    copies_a: bool
    copies_b: bool
    copies_c: bool
    by_columns: bool
    copies_out: bool

    def run(self, given: Operands, factors: Factors) -> None:
        a, b, c, out = given
        order = "F" if self.by_columns else "C"
        a = a.copy(order="C") if self.copies_a else a
        b = b.copy(order="F") if self.copies_b else b
        if c is not None and self.copies_c:
            c = c.astype(np.float32, order=order)
        target = np.empty(out.shape, out.dtype, order=order) if self.copies_out else out
        multiply(Operands(a, b, c, target), factors, self.threads, self.isa)
        if self.copies_out:
            out[...] = target


def _bits(factors: Factors) -> tuple[int, int]:
    """The bits of float32 numbers, as the kernels take them."""
    return _KNOWN_BITS.get(factors) or struct.unpack("<II", struct.pack("<ff", *factors))


_KNOWN_BITS = {(1.0, 0.0): (0x3F800000, 0), (1.0, 1.0): (0x3F800000, 0x3F800000)}


class _Dots:
    """Few rows by columns that lie along K; `swapped`: everything is transposed."""

    def __init__(self, product: FloatProduct, plan: DotsPlan, swapped: bool) -> None:
        self._swapped, self._reads_c = swapped, product.c is not None
        program = float_dots.program(
            plan.micro.isa,
            micro=plan.micro,
            rows=plan.rows,
            columns=plan.columns,
            kind=product.kind,
            out_kind=product.out.kind,
        )
        self._call = program.bind(
            product.threads,
            ("a", "b", "c", "out", "alpha", "beta"),
            a_row_stride=product.a.steps[0],
            b_column_stride=product.b.steps[1],
            c_stride=product.c.steps[0] if product.c else 0,
            out_stride=product.out.steps[0],
            m=product.m,
            n=product.n,
            k_size=product.k,
            item_blocks=plan.item_blocks,
            reads_c=int(self._reads_c),
        )

    def run(self, given: Operands, factors: Factors) -> None:
        a, b, c, out = given
        if self._swapped:
            a, b = b, a
        self._call(a, b, c if self._reads_c else None, out, *_bits(factors))


class _Part(NamedTuple):
    """One call of `float_product`, and where its part of each operand begins, in bytes."""

    call: Callable[..., None]
    a: int
    b: int
    c: int
    partial: int
    out: int


_VARYING = ("a", "b", "packed_a", "packed_b", "c", "partial", "out", "alpha", "beta")


class _Blocked:
    """Blocks of rows by panels of columns, in one call or in several; `swapped`: transposed."""

    def __init__(self, product: FloatProduct, plan: FloatPlan, swapped: bool) -> None:
        self._swapped, self._reads_c = swapped, product.c is not None
        self._shape = product.m, product.n
        # Sums that are not final stay in float32: in the output, if that is what it is.
        self._keeps_sums = product.out.kind == "bf16" and product.k > min(
            plan.k_block, plan.chunk_depth
        )
        self._parts = _parts(product, plan, self._keeps_sums)
        self._packed_b = -(-plan.packed_a // LINE) * LINE
        self._scratch = self._packed_b + plan.packed_b

    def run(self, given: Operands, factors: Factors) -> None:
        a, b, c, out = given
        if self._swapped:
            a, b = b, a
        if not self._reads_c:
            c = None
        memory, packed = workspace.reserve(self._scratch)
        sums = np.empty(self._shape, np.float32) if self._keeps_sums else out
        bits = _bits(factors)
        for part in self._parts:
            part.call(
                _moved(a, part.a), _moved(b, part.b), packed, packed + self._packed_b,
                None if c is None else _moved(c, part.c), _moved(sums, part.partial),
                _moved(out, part.out), *bits,
            )  # fmt: skip
        del memory  # until here nothing else may use it


def _moved(array: Array, distance: int) -> Array | int:
    """The place so many bytes behind an array's first element."""
    return array.__array_interface__["data"][0] + distance if distance else array


def _parts(product: FloatProduct, plan: FloatPlan, keeps_sums: bool) -> list[_Part]:
    """The calls that make up a product."""
    a, b, c, out, _, threads = product
    m, n, k = product.m, product.n, product.k
    parts = []
    for column in range(0, n, plan.chunk_columns):
        columns = min(plan.chunk_columns, n - column)
        program = float_product.program(
            plan.micro.isa,
            micro=plan.micro,
            shape=plan.shape(columns),
            left=plan.left,
            right=plan.right,
            out_kind=out.kind,
        )
        for row, first in pairs(range(0, m, plan.chunk_rows), range(0, k, plan.chunk_depth)):
            call = program.bind(
                threads,
                _VARYING,
                a_row_stride=a.steps[0],
                a_stride=a.steps[1],
                b_column_stride=b.steps[1],
                b_stride=b.steps[0],
                c_stride=c.steps[0] if c else 0,
                partial_stride=n if keeps_sums else out.steps[0],
                out_stride=out.steps[0],
                m=min(plan.chunk_rows, m - row),
                n=columns,
                k_size=min(plan.chunk_depth, k - first),
                k_block=plan.k_block,
                item_blocks=plan.item_blocks,
                item_panels=plan.item_panels,
                reads_c=int(c is not None),
                first=int(first == 0),
                last=int(first + plan.chunk_depth >= k),
            )
            at_out = row * out.strides[0] + column * out.dtype.itemsize
            part = _Part(
                call,
                a=row * a.strides[0] + first * a.strides[1],
                b=first * b.strides[0] + column * b.strides[1],
                c=row * c.strides[0] + column * 4 if c else 0,
                partial=(row * n + column) * 4 if keeps_sums else at_out,
                out=at_out,
            )
            parts.append(part)
    return parts
