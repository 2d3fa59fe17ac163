"""Products of float matrices, prepared: everything but numbers and addresses is decided once.

Operands are NumPy arrays of float32 or bfloat16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as pairs
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import verbose
from lowbit.jit.kernel import Program
from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.float.dots import float_dots
from lowbit.kernels.cpu.float.product import float_product
from lowbit.kernels.cpu.shared.layout import LINE
from lowbit.product.arguments import check_float, check_inner, check_matrix, check_no_overlap
from lowbit.product.call_cache import GemmCache, OneCall
from lowbit.product.describe import of_floats, tell_plan
from lowbit.product.dispatch import thread_count
from lowbit.product.float_dispatch import MOST_DOT_ROWS, DotsPlan, FloatPlan, plan, plan_dots
from lowbit.product.float_product import FloatProduct, Layout
from lowbit.product.prepare import KEPT

Array = npt.NDArray[Any]
Facts = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]  # of a matrix, as in Layout

LITTLE = 1 << 19  # multiply-adds below which one thread does it all
_KNOWN = 1 << 28  # those beside which what Python does for a call is nothing
_MOST_SUMS = 64 << 20  # bytes of sums that wait in scratch, which is kept from call to call
_NARROW = 16  # columns below which a tall output is computed as its transpose
_PER_CYCLE = 32  # multiply-adds of float32, about
_ALONE = LITTLE // _PER_CYCLE
_FLOAT32 = np.dtype(np.float32)


Launch = tuple[Program, dict[str, Any]]
"""A program, and a word for each of its parameters."""


class PreparedGemm(Protocol):
    """How products of certain layouts are computed, and the shape of what they give.

    Without a part in it, c is not read. told: what a line of jit.verbose says of it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def one_call(self) -> OneCall | None: ...
    @property
    def told(self) -> str: ...
    def run(
        self, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
    ) -> None: ...


class Launched(Protocol):
    """One that is nothing but launches of kernels, which need `scratch` bytes.

    An address may be any object that a distance in bytes can be added to.
    """

    @property
    def scratch(self) -> int: ...
    def launches(
        self, start: Any, a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float
    ) -> Iterator[Launch]: ...


cache = GemmCache()


def keep(
    prepared: PreparedGemm,
    a: Any,
    b: Any,
    c: Any,
    alpha: float,
    beta: float,
    out: Any,
    result: Array,
    most: int | None,
    *options: Any,
) -> None:
    """Let a call be known from now on, if it is hot, and so little work that this is worth it.

    out: None if `result` was made for it. most: see jit.cached_call.thread_check. options: the
    arguments after `out`.
    """
    one = prepared.one_call
    arrays = type(a) is type(b) is np.ndarray and (out is None or out is result)
    if one is None or c is not None or beta or not arrays or verbose.LEVEL:
        return
    if a.size * b.shape[1] < _KNOWN and cache.ways.is_hot(prepared):
        cache.add(prepared, one, a, b, out, result, _bits(alpha), (c, alpha, beta, *options), most)


def apart(
    a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
) -> Array | None:
    """c as it may be read while `out` is written: a copy, if it overlaps that without being it.

    ValueError: out shares memory with a or b, which have a part in the result.
    """
    if alpha and any(np.may_share_memory(one, out) for one in (a, b)):
        raise ValueError("out shares memory with a or b, which would be overwritten while read")
    if c is None or not beta or not np.may_share_memory(c, out):
        return c
    same = c.__array_interface__["data"] == out.__array_interface__["data"]
    if same and (c.dtype, c.strides) == (out.dtype, out.strides):
        return c
    return c.astype(np.float32)


@lru_cache(maxsize=KEPT)
def prepare_gemm(
    a: Facts,
    b: Facts,
    c: Facts | None,
    out: Facts | np.dtype[Any],
    multiplies: bool,
    adds: bool,
    threads: int,
    isa: str | None,
) -> PreparedGemm:
    """Check that everything fits together, and find out how to compute it.

    out: a dtype stands for a new array by rows. threads: as `threads_key` gives them.
    """
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    shape = _checked_shape(given)
    new = isinstance(out, np.dtype)
    result = Layout(out, shape, (shape[1] * out.itemsize, out.itemsize)) if new else Layout(*out)
    if not new:
        _check_matrix("out", result)
        check_no_overlap(result.shape, result.strides, result.dtype.itemsize)
    others = {"out": result} | ({} if c is None else {"c": Layout(*c)})
    for name, one in others.items():
        if one.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {one.shape}")
    if c is None and adds:
        raise ValueError("beta is given without c: give c, or leave beta out")
    if 0 in shape or not multiplies or not a[1][1]:
        return Scaling(shape, adds)
    added = Layout(*c) if c is not None and adds else None
    name = instruction_sets.active(isa).name
    return _prepared(Layout(*a), Layout(*b), added, result, threads, name)


def _checked_shape(given: dict[str, Facts]) -> tuple[int, int]:
    """The shape of the product of a and b."""
    for name, facts in given.items():
        _check_matrix(name, Layout(*facts))
    a, b = given["a"], given["b"]
    check_inner(a[1], b[1])
    if a[0] != b[0]:
        raise TypeError(f"a is {a[0]} and b is {b[0]}: convert one of them")
    return a[1][0], b[1][1]


def _check_matrix(name: str, one: Layout) -> None:
    """A matrix must have two dimensions, a type that is known, and whole elements as strides."""
    check_matrix(one.shape, name)
    check_float(one.dtype, name)
    if any(stride % one.dtype.itemsize for stride in one.strides):
        raise ValueError(
            f"{name} has strides of {one.strides} bytes, no multiples of its elements' size: "
            "copy it first"
        )


def _prepared(
    a: Layout, b: Layout, c: Layout | None, out: Layout, threads: int, isa: str
) -> PreparedGemm:
    """How to compute what has products; c is None where it has no part."""
    shape = out.shape
    narrow = shape[1] < _NARROW and shape[0] > shape[1]
    by_rows, by_columns = out.steps[1] == 1, out.steps[0] == 1
    swapped = by_columns if narrow else by_columns and not by_rows
    few = min(shape) <= MOST_DOT_ROWS
    detour = Detour(
        shape=shape,
        threads=threads,
        isa=isa,
        copies_a=few and not swapped and not narrow and b.steps[0] == 1 and a.steps[1] != 1,
        copies_b=few and (swapped or narrow) and a.steps[1] == 1 and b.steps[0] != 1,
        copies_c=c is not None and (c.dtype != _FLOAT32 or c.steps[0 if swapped else 1] != 1),
        by_columns=narrow or swapped,
        copies_out=not (swapped or (by_rows and not narrow)),
    )
    if detour.copies:
        verbose.log.info("miss,%s,what is copied first lies as no kernel takes it", detour.told)
        return detour
    count = thread_count(shape[0], shape[1], a.shape[1], threads, _PER_CYCLE, _ALONE)
    if swapped:
        a, b, c, out = b.T, a.T, c.T if c else None, out.T
    product = FloatProduct(a, b, c, out, isa, count)
    dots = plan_dots(product)
    made: _Dots | _Blocked
    if dots is not None:
        made = _Dots(product, dots, swapped)
    else:
        made = _Blocked(product, plan(product), swapped)
    tell_plan(made.told)
    return made


@dataclass(frozen=True)
class Scaling:
    """Where there are no products: out = beta·c, or zero."""

    shape: tuple[int, ...]
    adds: bool
    one_call: None = None
    told: str = verbose.line("gemm", "-", "-", "no products")

    def run(
        self, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
    ) -> None:
        if not self.adds or c is None:
            out[...] = 0
            return
        scaled = c.astype(np.float32) * np.float32(beta)
        scaled[np.isnan(scaled)] = np.nan  # of one sign, as in products
        out[...] = scaled.astype(out.dtype)


@dataclass(frozen=True)
class Detour:
    """Copy first what the kernels cannot take, or would be slow with, as it lies.

    Copies of c and of the output, which is copied back, are by columns or by rows.
    """

    shape: tuple[int, ...]
    threads: int
    isa: str
    copies_a: bool
    copies_b: bool
    copies_c: bool
    by_columns: bool
    copies_out: bool
    one_call: None = None

    @property
    def copies(self) -> str:
        """What is copied."""
        which = {"a": self.copies_a, "b": self.copies_b, "c": self.copies_c, "out": self.copies_out}
        return "+".join(name for name, copied in which.items() if copied)

    @property
    def told(self) -> str:
        shape, how = "x".join(map(str, self.shape)), f"copies {self.copies}"
        return verbose.line("gemm", "-", shape, how, self.isa, abs(self.threads))

    def run(
        self, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
    ) -> None:
        order = "F" if self.by_columns else "C"
        a = a.copy(order="C") if self.copies_a else a
        b = b.copy(order="F") if self.copies_b else b
        if c is not None and self.copies_c:
            c = c.astype(np.float32, order=order)
        target = np.empty(out.shape, out.dtype, order=order) if self.copies_out else out
        layouts = (None if one is None else (*Layout.of(one),) for one in (a, b, c, target))
        prepared = prepare_gemm(*layouts, True, beta != 0, self.threads, self.isa)
        prepared.run(a, b, c, target, alpha, beta)
        if self.copies_out:
            out[...] = target


def _bits(factor: float) -> int:
    """The bits of a float32 number, as the kernels take it."""
    return struct.unpack("<I", struct.pack("<f", factor))[0]


_PLAIN = _bits(1.0), 0


class _Dots:
    """Few rows by columns that lie along K; `swapped`: everything is transposed."""

    def __init__(self, product: FloatProduct, plan: DotsPlan, swapped: bool) -> None:
        self.shape = (product.n, product.m) if swapped else (product.m, product.n)
        self._swapped, self._reads_c = swapped, product.c is not None
        program = float_dots.program(
            plan.micro.isa,
            micro=plan.micro,
            rows=plan.rows,
            columns=plan.columns,
            kind=product.kind,
            out_kind=product.out.kind,
        )
        fixed = {
            "a_row_stride": product.a.steps[0],
            "b_column_stride": product.b.steps[1],
            "c_stride": product.c.steps[0] if product.c else 0,
            "out_stride": product.out.steps[0],
            "m": product.m,
            "n": product.n,
            "k_size": product.k,
            "item_blocks": plan.item_blocks,
            "reads_c": int(self._reads_c),
        }
        varying = ("a", "b", "c", "out", "alpha", "beta")
        self.told = of_floats(product, f"{plan.micro.name} dots", program.isa.name)
        self._program, self._fixed = program, fixed
        self._call = program.bind(product.threads, varying, **fixed)
        self.one_call = (
            None if self._reads_c else OneCall(program, fixed, {}, 0, swapped, product.threads)
        )

    def run(
        self, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
    ) -> None:
        if self._swapped:
            a, b = b, a
        self._call(a, b, c if self._reads_c else None, out, _bits(alpha), _bits(beta))

    scratch = 0

    def launches(
        self, start: Any, a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float
    ) -> Iterator[Launch]:
        if self._swapped:
            a, b = b, a
        words = {"a": a, "b": b, "c": c if self._reads_c else None, "out": out}
        yield self._program, {**self._fixed, **words, "alpha": _bits(alpha), "beta": _bits(beta)}


class _Part(NamedTuple):
    """One call of `float_product`, and where its part of each operand begins, in bytes."""

    call: Callable[..., None]
    fixed: dict[str, int]
    a: int
    b: int
    c: int
    partial: int
    out: int


_VARYING = ("a", "b", "shared", "private", "c", "partial", "out", "alpha", "beta")


class _Blocked:
    """Blocks of rows by panels of columns, in one call or in several; `swapped`: transposed."""

    def __init__(self, product: FloatProduct, plan: FloatPlan, swapped: bool) -> None:
        self.shape = (product.n, product.m) if swapped else (product.m, product.n)
        self._swapped, self._reads_c = swapped, product.c is not None
        self._sums = product.m, product.n
        # Sums that are not final stay in float32: in the output, if that is what it is.
        several = not plan.k_slice and product.k > min(plan.k_block, plan.chunk_depth)
        self._keeps_sums = several and product.out.kind == "bf16"
        program, self._parts = _parts(product, plan, self._keeps_sums)
        self._program = program
        self.told = of_floats(product, plan.micro.name, program.isa.name)
        self._private = -(-plan.shared_bytes // LINE) * LINE
        self._sums_at = self._private + product.threads * plan.private_bytes
        sums = 4 * product.m * product.n if self._keeps_sums else 0
        self._in_scratch = sums <= _MOST_SUMS
        self._scratch = self._sums_at + (sums if self._in_scratch else 0)
        self._call = self._parts[0].call
        whole = len(self._parts) == 1 and not self._keeps_sums
        self._simple = whole and not self._scratch
        offsets = {"shared": 0, "private": self._private}
        self.one_call = (
            OneCall(program, self._parts[0].fixed, offsets, self._scratch, swapped, product.threads)
            if whole and not self._reads_c
            else None
        )

    def run(
        self, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
    ) -> None:
        if self._swapped:
            a, b = b, a
        if not self._reads_c:
            c = None
        factors = _PLAIN if alpha == 1 and not beta else (_bits(alpha), _bits(beta))
        if self._simple:
            self._call(a, b, None, None, c, None, out, *factors)
            return
        memory, shared = workspace.reserve(self._scratch)
        sums: Array | int = shared + self._sums_at
        if not self._in_scratch:
            sums = np.empty(self._sums, np.float32)
        for part in self._parts:
            part.call(
                _moved(a, part.a), _moved(b, part.b), shared, shared + self._private,
                None if c is None else _moved(c, part.c),
                _moved(sums, part.partial),
                _moved(out, part.out), *factors,
            )  # fmt: skip
        del memory  # until here nothing else may use it

    @property
    def scratch(self) -> int:
        m, n = self._sums
        return self._sums_at + (4 * m * n if self._keeps_sums else 0)

    def launches(
        self, start: Any, a: Any, b: Any, c: Any, out: Any, alpha: float, beta: float
    ) -> Iterator[Launch]:
        if self._swapped:
            a, b = b, a
        for part in self._parts:
            yield (
                self._program,
                {
                    **part.fixed,
                    "a": a + part.a,
                    "b": b + part.b,
                    "shared": start,
                    "private": start + self._private,
                    "c": c + part.c if self._reads_c else None,
                    "partial": start + (self._sums_at + part.partial),
                    "out": out + part.out,
                    "alpha": _bits(alpha),
                    "beta": _bits(beta),
                },
            )


def _moved(array: Array | int, distance: int) -> Array | int:
    """The place so many bytes behind an array's first element, or an address."""
    if isinstance(array, int):
        return array + distance
    return array.__array_interface__["data"][0] + distance if distance else array


def _parts(product: FloatProduct, plan: FloatPlan, keeps_sums: bool) -> tuple[Program, list[_Part]]:
    """The calls that make up a product."""
    a, b, c, out, _, threads = product
    m, n, k = product.m, product.n, product.k
    program = float_product.program(
        plan.micro.isa,
        micro=plan.micro,
        shape=plan.shape,
        left=plan.left,
        right=plan.right,
        out_kind=out.kind,
        ahead=plan.ahead,
        sliced=plan.k_slice > 0,
    )
    parts = []
    for row, first in pairs(range(0, m, plan.chunk_rows), range(0, k, plan.chunk_depth)):
        fixed = {
            "private_bytes": plan.private_bytes,
            "group_panels": plan.group_panels,
            "a_row_stride": a.steps[0],
            "a_stride": a.steps[1],
            "b_column_stride": b.steps[1],
            "b_stride": b.steps[0],
            "c_stride": c.steps[0] if c else 0,
            "partial_stride": n,
            "out_stride": out.steps[0],
            "m": min(plan.chunk_rows, m - row),
            "n": n,
            "k_size": min(plan.chunk_depth, k - first),
            "k_block": plan.k_block,
            "k_slice": plan.k_slice,
            "item_blocks": plan.item_blocks,
            "item_panels": plan.item_panels,
            "reads_c": int(c is not None),
            "first": int(first == 0),
            "last": int(first + plan.chunk_depth >= k),
        }
        call = program.bind(threads, _VARYING, **fixed)
        part = _Part(
            call,
            fixed,
            a=row * a.strides[0] + first * a.strides[1],
            b=first * b.strides[0],
            c=row * c.strides[0] if c else 0,
            partial=row * n * 4 if keeps_sums else 0,
            out=row * out.strides[0],
        )
        parts.append(part)
    return program, parts
