"""Products of float matrices, prepared: everything but numbers and addresses is decided once.

Operands are NumPy arrays of float32 or bfloat16.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import product as pairs
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import verbose
from lowbit.jit.cached_call import MOST_SCRATCH
from lowbit.jit.launch import Launch, Place, Word
from lowbit.kernels.cpu.float.dots import float_dots
from lowbit.kernels.cpu.float.product import float_product
from lowbit.kernels.cpu.shared.layout import LINE, blocks
from lowbit.product.arguments import (
    check_float,
    check_inner,
    check_matrix,
    check_no_overlap,
    shares_bytes,
)
from lowbit.product.describe import of_floats, tell_plan
from lowbit.product.dispatch import thread_count
from lowbit.product.float_dispatch import MOST_DOT_ROWS, DotsPlan, FloatPlan, plan, plan_dots
from lowbit.product.prepare import KEPT
from lowbit.product.prepared import SCRATCH, Prepared, identity, shifted
from lowbit.product.product import FloatProduct, Layout

Array = npt.NDArray[Any]
Facts = tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]  # of a matrix, as in Layout

LITTLE = 1 << 19  # multiply-adds below which one thread does it all
_LARGE = 1 << 28  # those beside which what Python does for a call is nothing
_NARROW = 16  # columns below which a tall output is computed as its transpose
_PER_CYCLE = 32  # multiply-adds of float32, about
_ALONE = LITTLE // _PER_CYCLE
_FLOAT32 = np.dtype(np.float32)


class CopyFirst(NamedTuple):
    """What kernels cannot take, or would be slow with, as it lies: it is copied first. Copies of c
    and of the output, which is copied back, are by columns or by rows."""

    a: bool
    b: bool
    c: bool
    out: bool
    by_columns: bool

    @property
    def names(self) -> str:
        return "+".join(name for name in ("a", "b", "c", "out") if getattr(self, name))


def run(
    prepared: Prepared, a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
) -> None:
    """alpha·(a @ b) + beta·c, as it was prepared."""
    copied = prepared.plan
    if prepared.launches:
        prepared.run({"a": a, "b": b, "c": c, "out": out, **factors(alpha, beta)})
    elif isinstance(copied, CopyFirst):
        order = "F" if copied.by_columns else "C"
        a = a.copy(order="C") if copied.a else a
        b = b.copy(order="F") if copied.b else b
        if c is not None and copied.c:
            c = c.astype(np.float32, order=order)
        target = np.empty(out.shape, out.dtype, order=order) if copied.out else out
        layouts = (None if one is None else (*Layout.of(one),) for one in (a, b, c, target))
        again = prepare_gemm(*layouts, True, beta != 0, *prepared.request)
        run(again, a, b, c, target, alpha, beta)
        if copied.out:
            out[...] = target
    elif c is None or not beta:
        out[...] = 0
    else:
        scaled = c.astype(np.float32) * np.float32(beta)
        scaled[np.isnan(scaled)] = np.nan  # of one sign, as in products
        out[...] = scaled.astype(out.dtype)


@lru_cache(maxsize=64)
def factors(alpha: float, beta: float) -> Mapping[str, int]:
    """The operands that are numbers: the bits of float32."""
    alpha_bits, beta_bits = struct.unpack("<2I", struct.pack("<2f", alpha, beta))
    return {"alpha": alpha_bits, "beta": beta_bits}


def apart(
    a: Array, b: Array, c: Array | None, out: Array, alpha: float, beta: float
) -> Array | None:
    """c as it may be read while `out` is written: a copy, if it overlaps that without being it.

    ValueError: out is read-only, or shares memory with a or b, which have a part in the result.
    """
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if alpha and any(shares_bytes(operand, out) for operand in (a, b)):
        raise ValueError("out shares memory with a or b, which would be overwritten while read")
    if c is None or not beta or not shares_bytes(c, out):
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
) -> Prepared:
    """Check that everything fits together, and find out how to compute it: `run` takes it.

    Its operands, of launches: a, b, c, out and the `factors`.

    out: a dtype stands for a new array by rows. threads: as `threads_key` gives them.
    """
    given = {"a": Layout(*a), "b": Layout(*b)}
    if c is not None:
        given["c"] = Layout(*c)
    for name, one in given.items():
        _check_matrix(name, one)
    check_inner(a[1], b[1])
    if a[0] != b[0]:
        raise TypeError(f"a is {a[0]} and b is {b[0]}: convert one of them")
    shape = a[1][0], b[1][1]
    if isinstance(out, np.dtype):
        result = Layout(out, shape, (shape[1] * out.itemsize, out.itemsize))
    else:
        given["out"] = result = Layout(*out)
        _check_matrix("out", result)
        check_no_overlap(result.shape, result.strides, result.dtype.itemsize)
    for name in ("out", "c"):
        if name in given and given[name].shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {given[name].shape}")
    if c is None and adds:
        raise ValueError("beta is given without c: give c, or leave beta out")
    if 0 in shape or not multiplies or not a[1][1]:
        return Prepared(None, shape, text=verbose.line("gemm", "-", "-", "no products"))
    added = given["c"] if c is not None and adds else None
    name = instruction_sets.active(isa).name
    return _prepared(given["a"], given["b"], added, result, threads, name)


def _check_matrix(name: str, one: Layout) -> None:
    """A matrix must have two dimensions, a type that is known, and whole elements as strides."""
    check_matrix(one.shape, name)
    check_float(one.dtype, name)
    if any(stride % one.dtype.itemsize for stride in one.strides):
        raise ValueError(
            f"{name} has strides of {one.strides} bytes, no multiples of its elements' size: "
            "copy it first"
        )


@lru_cache(maxsize=KEPT)
def prepare_fitting(
    a: Facts, b: Facts, c: Facts | None, out: Facts, threads: int, isa: str
) -> Prepared:
    """As `prepare_gemm`, of operands that are known to fit together. One of a and b may be of 16
    bits, float16 too, where the other is float32: it is widened when it is read."""
    if 0 in out[1] or not a[1][1]:
        return Prepared(None, out[1], text=verbose.line("gemm", "-", "-", "no products"))
    return _prepared(Layout(*a), Layout(*b), Layout(*c) if c else None, Layout(*out), threads, isa)


def _prepared(
    a: Layout, b: Layout, c: Layout | None, out: Layout, threads: int, isa: str
) -> Prepared:
    """How to compute what has products; c is None where it has no part."""
    shape = out.shape
    narrow = shape[1] < _NARROW and shape[0] > shape[1]
    by_rows, by_columns = out.steps[1] == 1, out.steps[0] == 1
    swapped = by_columns if narrow else by_columns and not by_rows
    few = min(shape) <= MOST_DOT_ROWS
    copied = CopyFirst(
        a=few and not swapped and not narrow and b.steps[0] == 1 and a.steps[1] != 1,
        b=few and (swapped or narrow) and a.steps[1] == 1 and b.steps[0] != 1,
        c=c is not None and (c.dtype != _FLOAT32 or c.steps[0 if swapped else 1] != 1),
        by_columns=narrow or swapped,
        out=not (swapped or (by_rows and not narrow)),
    )
    if copied.names:
        sizes, how = "x".join(map(str, shape)), f"copies {copied.names}"
        text = verbose.line("gemm", "-", sizes, how, isa, abs(threads))
        verbose.info("miss,%s,what is copied first lies as no kernel takes it", text)
        return Prepared((threads, isa), shape, text=text, plan=copied)
    count = thread_count(shape[0], shape[1], a.shape[1], threads, _PER_CYCLE, _ALONE)
    if swapped:
        a, b, c, out = b.T, a.T, c.T if c else None, out.T
    product = FloatProduct(a, b, c, out, isa, count, swapped)
    dots = plan_dots(product)
    made = _dots(product, dots) if dots is not None else _blocked(product, plan(product))
    tell_plan(made.text)
    return made


def _dots(product: FloatProduct, plan: DotsPlan) -> Prepared:
    """Few rows by columns that lie along K."""
    program = float_dots.program(
        plan.micro.isa,
        micro=plan.micro,
        rows=plan.rows,
        columns=plan.columns,
        kind=product.a.kind,
        right_kind=product.b.kind,
        out_kind=product.out.kind,
    )
    own = {"m": product.m, "k_size": product.k, "item_blocks": plan.item_blocks}
    launch = Launch(program, {**_words(product), **own})
    text = of_floats(product, f"{plan.micro.name} dots", program.isa.name)
    return Prepared(product, product.shape, [launch], product.threads, 0, text, plan,
                    little=_is_little(product))  # fmt: skip


def _is_little(product: FloatProduct) -> bool:
    """Whether its calls are worth being known."""
    return product.m * product.n * product.k < _LARGE


def _words(product: FloatProduct) -> dict[str, Word]:
    """What both kernels are given; nothing stands for c without a part in the product."""
    c, (left, right) = product.c, product.names
    return {
        **identity("out", "alpha", "beta"),
        "a": Place(left),
        "b": Place(right),
        "c": Place("c" if c else "nothing"),
        "a_row_stride": product.a.steps[0],
        "b_column_stride": product.b.steps[1],
        "c_stride": c.steps[0] if c else 0,
        "out_stride": product.out.steps[0],
        "n": product.n,
        "reads_c": int(c is not None),
    }


def _blocked(product: FloatProduct, plan: FloatPlan) -> Prepared:
    """Blocks of rows by panels of columns, in one launch or in several."""
    a, b, c, out, _, threads, _ = product
    m, n, k, (left, right) = product.m, product.n, product.k, product.names
    # Sums that are not final stay in float32: in the output, if that is what it is.
    several = not plan.k_slice and k > min(plan.k_block, plan.chunk_depth)
    keeps_sums = several and out.kind == "bf16"
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
    private = blocks(plan.shared_bytes, LINE) * LINE
    partial = private + threads * plan.private_bytes
    scratch = partial + (4 * m * n if keeps_sums else 0)
    words: dict[str, Word] = {
        **_words(product),
        "shared": Place(SCRATCH),
        "private": Place(SCRATCH, private),
        "private_bytes": plan.private_bytes,
        "group_panels": plan.group_panels,
        "a_stride": a.steps[1],
        "b_stride": b.steps[0],
        "partial_stride": n,
        "k_block": plan.k_block,
        "k_slice": plan.k_slice,
        "item_blocks": plan.item_blocks,
        "item_panels": plan.item_panels,
    }
    launches = []
    for row, first in pairs(range(0, m, plan.chunk_rows), range(0, k, plan.chunk_depth)):
        part = {
            "m": min(plan.chunk_rows, m - row),
            "k_size": min(plan.chunk_depth, k - first),
            "first": int(first == 0),
            "last": int(first + plan.chunk_depth >= k),
        }
        begin = {
            left: row * a.strides[0] + first * a.strides[1],
            right: first * b.strides[0],
            "c": row * c.strides[0] if c else 0,
            "out": row * out.strides[0],
        }
        sums = {"partial": Place(SCRATCH, partial + (row * n * 4 if keeps_sums else 0))}
        launches.append(shifted(Launch(program, {**words, **part, **sums}), begin))
    text = of_floats(product, plan.micro.name, program.isa.name)
    little = len(launches) == 1 and not keeps_sums and scratch <= MOST_SCRATCH
    little &= _is_little(product)
    return Prepared(product, product.shape, launches, threads, scratch, text, plan, little=little)
