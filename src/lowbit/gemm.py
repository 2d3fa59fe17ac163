"""The product of float matrices: alpha·A·B + beta·C in float32 or bfloat16, summed in float32.

Everything that follows from shapes, strides and types alone (checks, plan, programs) is prepared
once and kept; a call then costs some look-ups and the addresses of its operands.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit import dispatch
from lowbit import isa as instruction_sets
from lowbit.arguments import check_no_overlap, empty, matrix, tensor_of, viewed
from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.float.call import (
    BYTES,
    Layout,
    Run,
    dots_call,
    product_call,
    request_of,
)
from lowbit.kernels.cpu.float.plan import MOST_DOT_ROWS, make, make_dots
from lowbit.numerics.float32 import BEYOND, float32_number

Array = npt.NDArray[Any]

_NARROW = 16  # columns below which a tall output is computed as its transpose
_KEPT = 1 << 12  # how many combinations of shapes and strides are kept prepared


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """alpha·(a @ b) + beta·c: [M, K] by [K, N], and [M, N].

    a and b: NumPy arrays or PyTorch CPU tensors, both float32 or both bfloat16 (in NumPy, the
    dtype of ml_dtypes), of any strides: a transposed operand is a view, and costs no copy. c:
    float32 or bfloat16 [M, N]; it may be `out` itself. Products are summed in float32. The result
    is float32, or bfloat16 if `out_dtype` (a name or a dtype) or `out` says so; it is rounded to
    that once. It is no part of PyTorch's autograd.

    With beta = 0, c is not read, whatever is in it; with alpha = 0 or K = 0, a and b are not.
    The result does not depend on the number of threads. It does, in the last bits, on the
    instruction set: `isa` forces one, `threads` limits the threads, for this call.

    TypeError: an operand is of another type. ValueError: shapes do not match, beta is given
    without c, or `out` shares memory with a or b. RuntimeError: the machine lacks the set.
    """
    left, right = _layout(a, "a"), _layout(b, "b")
    added = None if c is None else _layout(c, "c")
    factors = _factor(alpha, "alpha"), _factor(beta, "beta")
    if out is None:
        shape = _result_shape(left, right)
        out = _empty(a, shape, "float32" if out_dtype is None else _dtype_name(out_dtype))
        target = _layout(out, "out")
    else:
        target = _layout(out, "out")
        if out_dtype is not None and _dtype_name(out_dtype) != target.dtype:
            raise ValueError(f"out is {target.dtype}, but out_dtype is {out_dtype!r}")
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            raise ValueError("out is read-only")
    used = instruction_sets.active(isa).name
    call = _prepared(left, right, added, target, factors[0] != 0, factors[1] != 0, used)
    call.run(_Operands(a, b, c, out), factors, threads)
    return out


def _factor(value: Any, name: str) -> float:
    known = type(value) is float and -BEYOND < value < BEYOND
    return value if known else float32_number(value, name)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


_FLOAT32 = np.dtype(np.float32)


def _layout(value: Any, name: str) -> Layout:
    """What a matrix is. TypeError, ValueError: none, or not on the CPU, or of another type."""
    if type(value) is np.ndarray and value.dtype is _FLOAT32 and value.ndim == 2:
        return Layout("float32", value.shape, value.strides)
    array = matrix(value, name)
    dtype = array.dtype.name
    if dtype not in BYTES:
        raise TypeError(f"{name} must be float32 or bfloat16, got {dtype}; convert it first")
    return Layout(dtype, array.shape, array.strides)


def _dtype_name(dtype: Any) -> str:
    name = getattr(dtype, "__name__", str(dtype).split(".")[-1])
    if name not in BYTES:
        raise ValueError(f"out_dtype must be float32 or bfloat16, got {dtype!r}")
    return name


def _result_shape(a: Layout, b: Layout) -> tuple[int, int]:
    """[M, N]; ValueError if the inner sizes differ."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a is {a.shape[0]}x{a.shape[1]} and b is {b.shape[0]}x{b.shape[1]}: "
            f"the columns of a ({a.shape[1]}) must equal the rows of b ({b.shape[0]})"
        )
    return a.shape[0], b.shape[1]


def _empty(like: Any, shape: tuple[int, int], dtype: str) -> Any:
    made = empty(shape, _FLOAT32 if dtype == "float32" else np.dtype(bfloat16))
    return tensor_of(made) if _is_tensor(like) else made


def _address(value: Any) -> int:
    if not isinstance(value, np.ndarray):
        return value.data_ptr()
    if value.dtype is _FLOAT32:
        # Four times as fast as asking for __array_interface__, where Python's buffers can do it.
        for lying in (value, value.T):
            if lying.flags.carray:
                return ctypes.addressof(ctypes.c_char.from_buffer(lying.data))
    return value.__array_interface__["data"][0]


def _array(value: Any) -> Array:
    """A NumPy view."""
    return viewed(value) if _is_tensor(value) else value


def _float32(value: Any) -> npt.NDArray[np.float32]:
    """A copy as float32, row by row."""
    return _array(value).astype(np.float32, order="C")


def _rows_copied(value: Any) -> Any:
    """A copy with contiguous rows, of the same kind."""
    return value.contiguous() if _is_tensor(value) else value.copy(order="C")


class _Operands(NamedTuple):
    """What the user gave, and where the result goes."""

    a: Any
    b: Any
    c: Any
    out: Any


class _Call(Protocol):
    """How products of certain layouts are computed."""

    def run(self, given: _Operands, factors: tuple[float, float], threads: int | None) -> None: ...


@lru_cache(maxsize=_KEPT)
def _prepared(
    a: Layout, b: Layout, c: Layout | None, out: Layout, multiplies: bool, adds: bool, isa: str
) -> _Call:
    """Check that everything fits together, and find out how to compute it."""
    for name, one in (("a", a), ("b", b), ("c", c), ("out", out)):
        if one is not None and any(stride % BYTES[one.dtype] for stride in one.strides):
            raise ValueError(
                f"{name} has strides of {one.strides} bytes, no multiples of its elements' size: "
                "copy it first"
            )
    shape = _result_shape(a, b)
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}: convert one of them")
    check_no_overlap(out.shape, out.strides, BYTES[out.dtype])
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    if c is None and adds:
        raise ValueError("beta is given without c: give c, or leave beta out")
    if c is not None and c.shape != shape:
        raise ValueError(f"c must have shape {shape}, got {c.shape}")
    added = c if adds else None
    if 0 in shape or not multiplies or not a.shape[1]:
        return _Scaling(adds)
    narrow = shape[1] < _NARROW and shape[0] > shape[1]
    by_rows, by_columns = out.steps[1] == 1, out.steps[0] == 1
    swapped = by_columns if narrow else by_columns and not by_rows
    few = min(shape) <= MOST_DOT_ROWS
    detour = _Detour(
        isa=isa,
        copies_a=few and not swapped and not narrow and b.steps[0] == 1 and a.steps[1] != 1,
        copies_b=few and (swapped or narrow) and a.steps[1] == 1 and b.steps[0] != 1,
        copies_c=added is not None
        and (added.dtype != "float32" or added.steps[0 if swapped else 1] != 1),
        by_columns=narrow or swapped,
        copies_out=not (swapped or (by_rows and not narrow)),
    )
    if detour.copies_a or detour.copies_b or detour.copies_c or detour.copies_out:
        return detour
    return _Product(a, b, added, out, swapped, isa)


@dataclass(frozen=True)
class _Scaling:
    """Where there are no products: out = beta·c, or zero."""

    adds: bool

    def run(self, given: _Operands, factors: tuple[float, float], threads: int | None) -> None:
        out = _array(given.out)
        if not self.adds:
            out[...] = 0
            return
        scaled = _float32(given.c) * np.float32(factors[1])
        scaled[np.isnan(scaled)] = np.nan  # of one sign, as in products
        out[...] = scaled.astype(out.dtype)


@dataclass(frozen=True)
class _Detour:
    """Copy first what the kernels cannot take, or would be slow with, as it lies.

    Copies of c and of the output, which is copied back, are by columns or by rows.
    """

    isa: str
    copies_a: bool
    copies_b: bool
    copies_c: bool
    by_columns: bool
    copies_out: bool

    def run(self, given: _Operands, factors: tuple[float, float], threads: int | None) -> None:
        a = _rows_copied(given.a) if self.copies_a else given.a
        b = _rows_copied(given.b.T).T if self.copies_b else given.b
        c = _float32(given.c) if self.copies_c else given.c
        out = given.out
        if self.copies_out:
            rows, columns = out.shape
            dtype = _layout(out, "out").dtype
            shape = (columns, rows) if self.by_columns else (rows, columns)
            made = _empty(out, shape, dtype)
            out = made.T if self.by_columns else made
        if self.copies_c and self.by_columns:
            c = np.asfortranarray(c)
        alpha, beta = factors
        gemm(a, b, c, alpha=alpha, beta=beta, out=out, threads=threads, isa=self.isa)
        if self.copies_out:
            _array(given.out)[...] = _array(out)


_KNOWN_BITS = {0.0: 0, 1.0: 0x3F800000}


def _bits(value: float) -> int:
    """The bits of a float32, as the kernels take their factors."""
    known = _KNOWN_BITS.get(value)
    return struct.unpack("<I", struct.pack("<f", value))[0] if known is None else known


class _Product:
    """The product itself: out by rows or, `swapped`, everything transposed."""

    def __init__(
        self, a: Layout, b: Layout, c: Layout | None, out: Layout, swapped: bool, isa: str
    ) -> None:
        self.spans = a.span, b.span, c.span if c else (0, 0), out.span
        self.same = c is not None and c.strides == out.strides
        self.swapped, self.isa = swapped, isa
        if swapped:
            a, b, c, out = b.T, a.T, c.T if c else None, out.T
        self.layouts = a, b, c, out
        self.sizes = out.shape[0], out.shape[1], a.shape[1]
        self.runs: dict[int, Run] = {}

    def run(self, given: _Operands, factors: tuple[float, float], threads: int | None) -> None:
        a, b, out = _address(given.a), _address(given.b), _address(given.out)
        c = 0 if self.layouts[2] is None else _address(given.c)
        if self._overlap(a, 0, out) or self._overlap(b, 1, out):
            raise ValueError("out shares memory with a or b, which would be overwritten while read")
        if c and not (self.same and c == out) and self._overlap(c, 2, out):
            c_apart = _float32(given.c)
            apart = given._replace(c=np.asfortranarray(c_apart) if self.swapped else c_apart)
            gemm(*apart[:3], alpha=factors[0], beta=factors[1], out=apart.out, threads=threads,
                 isa=self.isa)  # fmt: skip
            return
        count = dispatch.thread_count(*self.sizes, threads)
        run = self.runs.get(count)
        if run is None:
            run = self.runs[count] = self._planned(count)
        if self.swapped:
            a, b = b, a
        run(a, b, c, out, _bits(factors[0]), _bits(factors[1]))

    def _overlap(self, address: int, which: int, out: int) -> bool:
        low, high = self.spans[which]
        return address + low < out + self.spans[3][1] and out + self.spans[3][0] < address + high

    def _planned(self, threads: int) -> Run:
        request = request_of(self.layouts, self.isa, threads)
        dots = make_dots(request)
        if dots is not None:
            return dots_call(self.layouts, dots, request)
        return product_call(self.layouts, make(request), workspace.reserve)
