"""The public functions for arrays: each checks its arguments, prepares a product, and runs it.

NumPy arrays and PyTorch CPU tensors go in; what comes out is of the kind that went in on the left.
Strides are any, sizes from 0 on. Arguments are checked before anything is computed or written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.jit.cached_call import Check, Same, constant, thread_check
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.numerics import IntDtype, QTensor
from lowbit.product import gemm as gemms
from lowbit.product import requests
from lowbit.product.arguments import (
    FLOATS,
    array,
    bytes_array,
    bytes_matrix,
    check_scaled,
    factor,
    flips,
    float_rows,
    moderate_number,
    output,
    per_column,
    per_element,
    per_row,
    plain_number,
    real_dtype,
    row_stride,
    zero_points,
)
from lowbit.product.call_cache import (
    CallCache,
    addend_as_given,
    as_given,
    bias_as_given,
    out_as_given,
    real,
    threads_as_given,
    zero_point,
)
from lowbit.product.dispatch import threads_key
from lowbit.product.gemm import LITTLE, prepare_gemm
from lowbit.product.output import AnyPostOp, post_ops_tuple
from lowbit.product.types import FloatDtype, FloatType, Kind, Numbers, Operand, OutDtype
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.panels import pack as pack_matrix

_INT32 = np.dtype(np.int32)
_INT8 = np.dtype(np.int8)
_FLOAT32 = np.dtype(np.float32)
_NUMBERS = {type(None), int, float}  # types of scales and zero points that serve all rows
_LINEAR_OUTPUTS = ("float32", "bfloat16")
_ALWAYS_SAFE = 1 << 15  # the K to which no sum of products of differences of bytes can overflow

_exact, _scaled, _dynamic, _weight_only = map(
    CallCache, ("matmul", "matmul_scaled", "linear_dynamic", "linear_weight_only")
)
_gemm = CallCache("gemm", arrays=2)


@_exact.builtin
def matmul(
    a: Kind,
    b: Operand | PackedMatrix,
    *,
    out: Kind | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """The exact integer product a @ b: int8 or uint8 [M, K] by [K, N] → int32 [M, N].

    `b` may also be a PackedMatrix from `lowbit.pack`. Stacks of matrices, [..., M, K] by
    [..., K, N], are multiplied pair by pair, their leading dimensions broadcast as in NumPy.
    `threads` limits the threads of this call, `isa` forces an instruction set for it; neither
    changes the result.

    TypeError: an operand is not of 8-bit integers. ValueError: shapes do not match, K is so large
    that int32 could overflow, or `out` shares memory with an operand or itself. RuntimeError: the
    machine lacks the instruction set.
    """
    left = a if type(a) is np.ndarray else array(a, "a")
    packed = isinstance(b, PackedMatrix)
    if left.ndim > 2 or (not packed and getattr(b, "ndim", 2) > 2):
        return _batched(a, b, out, threads, isa)
    read: tuple[Any, ...] = (left,)
    if packed:
        right = requests.panel_format(b, isa)
    else:  # for this one product, which takes less time than proving what its values allow
        values = bytes_matrix(b, "b")
        read, b = (left, values), pack_matrix(values, isa=isa)
        right = b.format
    form = left.shape, left.strides, left.dtype
    prepared = requests.integers(form, right, threads_key(threads), isa, row_stride(out))
    result, returned = output(a, out, prepared.shape, _INT32, read)
    operands = {**prepared.weight(b), "row_zero": flips(left, 1)}
    prepared.into(result, {**operands, "a": left})
    if packed and _exact.is_hot(b, prepared):
        checks = {
            "a": as_given(a, left, "a"),
            "out": out_as_given(out, result),
            "threads": threads_as_given(threads, prepared),
            "isa": constant(isa),
        }
        _exact.add(b, prepared, operands, checks, result, out is None)
    return returned


def pack(
    b: Operand | QTensor,
    *,
    dtype: IntDtype | None = None,
    zero_point: npt.ArrayLike | None = None,
    isa: str | None = None,
) -> PackedMatrix:
    """Pack a right operand once, for `matmul` and every function of this library that follows it.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit or 4-bit integers [K, N] with one scale, or one for each column
    (axis=1), or of each group along K (axis=1, group_axis=0, group_size a multiple of 8).
    `dtype` "int4" or "uint4" packs an int8 or uint8 array of such values two to a byte.
    `zero_point`: for a QTensor with groups, real numbers [groups, N], in place of its own zero
    points: b ≈ scale·(values − zero_point). What is kept is exact to float32's rounding. The result
    does not depend on the instruction set.

    TypeError: not of 8-bit integers, or of another sign than `dtype`. ValueError: not
    two-dimensional, other scales along K, a value outside of `dtype`, naming the first, or a
    zero_point where there are no groups, of another shape or not finite in float32.
    """
    given = b if isinstance(b, QTensor) else bytes_matrix(b, "b")
    return pack_matrix(given, dtype=dtype, zero_point=zero_point, isa=isa)


def _batched(a: Any, b: Any, out: Any, threads: int | None, isa: str | None) -> Any:
    """`matmul` of stacks. A packed or two-dimensional b serves all of a's matrices at once."""
    left = bytes_array(a, "a")
    right = b if isinstance(b, PackedMatrix) else bytes_array(b, "b")
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"a has shape {left.shape} and b {right.shape}: the last dimension of a must equal "
            "the last but one of b"
        )
    if isinstance(right, PackedMatrix) or right.ndim == 2:
        flat = left.reshape(math.prod(left.shape[:-1]), left.shape[-1])
        columns = right.shape[1]
        given = () if isinstance(right, PackedMatrix) else (right,)
        result, returned = output(a, out, (*left.shape[:-1], columns), _INT32, (left, *given))
        result[...] = matmul(flat, right, threads=threads, isa=isa).reshape(result.shape)
        return returned
    leading = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*leading, left.shape[-2], right.shape[-1])
    result, returned = output(a, out, shape, _INT32, (left, right))
    left = np.broadcast_to(left, (*leading, *left.shape[-2:]))
    right = np.broadcast_to(right, (*leading, *right.shape[-2:]))
    for index in np.ndindex(leading):
        matmul(left[index], right[index], out=result[index], threads=threads, isa=isa)
    return returned


@_scaled.builtin
def matmul_scaled(
    a: Kind,
    b: PackedMatrix,
    *,
    a_scale: Numbers,
    a_zero_point: Numbers | None = None,
    bias: Operand | None = None,
    residual: Operand | None = None,
    post_ops: Sequence[AnyPostOp] | None = None,
    out_dtype: OutDtype = "float32",
    out_scale: float | None = None,
    out_zero_point: int = 0,
    out: Kind | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """The product of quantized matrices as real numbers [M, N], and what follows it in a network.

        y[m, n] = float32(Σ_k (a[m, k] − a_zero_point[m]) · (b[k, n] − z_n)) · a_scale[m] · s_n

    a: int8 or uint8 [M, K]; b: packed from a QTensor, whose s_n and z_n it holds; a_scale and
    a_zero_point: one number or [M]. Then `post_ops`, in order, each a name, or what has numbers:
    `Clamp(low, high)`, `LeakyRelu(slope)`, or `QuantizedResidual(scale, zero_point, dtype)`, which
    adds a residual of 8-bit integers.

        "bias"       y + bias[n]              "relu"       max(y, 0)
        "residual"   y + residual[m, n]       "silu"       y·σ(y)
        "gelu"       y·Φ(y)                   "gelu_tanh"  GELU's tanh approximation
        "sigmoid"    σ(y)                     "hardsigmoid"  min(max(y/6 + 1/2, 0), 1)
        "tanh"       tanh(y)                  "hardswish"    y·hardsigmoid(y)

    By default: bias, then residual, where given. `out_dtype` is "float32", "bfloat16" (in NumPy
    the dtype of ml_dtypes), or "uint8" or "int8", which are quantized:
    clamp(round_half_even(y · (1/out_scale)) + out_zero_point).

    With one a_scale and a_zero_point (or none), both numbers, and all scales within 2^±30, factors
    come first: Σ · (s_n · a_scale), with a bias that comes first, is rounded once; and so is
    y/out_scale where nothing follows but bias, residuals, bounds, "relu", slopes and a last "gelu",
    Σ · ((s_n · (1/out_scale)) · a_scale) + bias[n] · (1/out_scale). A "gelu" or "gelu_tanh" that
    comes last before 8 bits is off by up to 2^-12.8, if out_scale is from 2^-8 to 2^8.

    The sum is an exact int32; every float operation rounds once, in the order written, so the
    result is the same bits on every instruction set and for any number of threads.

    Raises as `matmul` does, and ValueError if b has no scale, a parameter has another shape or is
    beyond float32, a post-operation is unknown, or its operand is missing.
    """
    return _matmul_scaled(a, b, a_scale, a_zero_point, bias, residual, post_ops, out_dtype,
                          out_scale, out_zero_point, out, threads, isa)  # fmt: skip


def _matmul_scaled(
    a: Any, b: PackedMatrix, a_scale: Any, a_zero_point: Any, bias: Any, residual: Any,
    post_ops: Sequence[AnyPostOp] | None, out_dtype: str, out_scale: float | None,
    out_zero_point: int, out: Any, threads: int | None, isa: str | None,
) -> Any:  # fmt: skip
    """`matmul_scaled` of a call that is not known, which may be from now on."""
    left = a if type(a) is np.ndarray else array(a, "a")
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    wanted_scale, wanted_zero_point = a_scale, a_zero_point
    a_scale, a_zero_point = plain_number(a_scale), plain_number(a_zero_point)
    if a_zero_point is not None and b.K > _ALWAYS_SAFE and not np.any(a_zero_point):
        a_zero_point = None
    uniform = type(a_scale) in _NUMBERS and type(a_zero_point) in _NUMBERS
    prepared, spec = requests.scaled(
        (left.shape, left.strides, left.dtype), requests.panel_format(b, isa),
        threads_key(threads), isa, a_zero_point is not None, uniform,
        uniform and moderate_number(a_scale), row_stride(out), bias is not None,
        residual is not None, post_ops_tuple(post_ops), out_dtype,
        plain_number(out_scale), plain_number(out_zero_point),
    )  # fmt: skip
    given = left, residual, a_scale, a_zero_point, bias
    result, returned = output(a, out, prepared.shape, spec.storage, given)
    rows = 1 if uniform else prepared.shape[0]
    scale = per_row(a_scale, rows, "a_scale")
    if a_zero_point is None:
        zero = flips(left, rows)
    else:
        shift = FLIP if left.dtype == _INT8 else 0
        zero = zero_points(a_zero_point, rows, left.dtype, "a_zero_point", shift)
    added = per_column(bias, b.N, "bias")
    beside = per_element(residual, prepared.shape, "residual", spec.residual)
    operands = {**prepared.weight(b), "parameters": spec.parameters}
    prepared.into(result, {
        **operands, "a": left, "row_scale": scale, "row_zero": zero, "bias": added,
        "residual": beside,
    })  # fmt: skip
    if _scaled.is_hot(b, prepared):
        number = real(wanted_scale, prepared) if uniform else as_given(a_scale, scale, "row_scale")
        # A zero point that was dropped, or is one for many scales, is not where it would be put.
        dropped = a_zero_point is None and wanted_zero_point is not None
        elsewhere = dropped or not (uniform or a_zero_point is None)
        checks = {
            "a": as_given(a, left, "a"), "a_scale": number,
            "a_zero_point":
                None if elsewhere else zero_point(wanted_zero_point, left.dtype, prepared),
            "bias": bias_as_given(bias, added, prepared), "post_ops": constant(post_ops),
            "residual": as_given(residual, beside, "residual"),
            "out_dtype": constant(out_dtype), "out_scale": constant(out_scale),
            "out_zero_point": constant(out_zero_point), "out": out_as_given(out, result),
            "threads": threads_as_given(threads, prepared), "isa": constant(isa),
        }  # fmt: skip
        if a_zero_point is None:
            operands["row_zero"] = zero
        _scaled.add(b, prepared, operands, checks, result, out is None)
    return returned


@_dynamic.builtin
def linear_dynamic(
    x: Kind,
    b: PackedMatrix,
    bias: Operand | None = None,
    *,
    symmetric: bool = False,
    residual: Operand | None = None,
    post_ops: Sequence[AnyPostOp] | None = None,
    out: Kind | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """x @ b + bias with x quantized to 8 bits, row by row, on the way: float32 [M, K] → [M, N].

    b: packed from a QTensor. `symmetric` fixes the zero point of every row; otherwise each row's
    range is used whole. `residual` and `post_ops` as in `matmul_scaled`. The arithmetic is that of
    `numerics.quantize_rows` followed by `matmul_scaled`, bit for bit. With groups in b, each
    group's integer sums are scaled and added in float32, in ascending order (spec: linear_groups).
    A row that holds NaN or infinity gives a row of NaN.

    TypeError: x is not float32. ValueError: shapes do not match, or b has no scale.
    """
    left = float_rows(x, "x")
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    rows = "symmetric" if symmetric else "dynamic"
    known = _dynamic, b, {"symmetric": Same(symmetric)}
    return _linear(x, left, b, rows, bias, residual, post_ops, "float32", out, threads, isa, known)


@_weight_only.builtin
def linear_weight_only(
    x: Kind,
    b: PackedMatrix,
    bias: Operand | None = None,
    *,
    residual: Operand | None = None,
    post_ops: Sequence[AnyPostOp] | None = None,
    out_dtype: FloatDtype = "float32",
    out: Kind | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """x @ dequantized b + bias: [M, K] by [K, N] → [M, N].

    x: float32, or bfloat16 (a PyTorch tensor, or NumPy's of ml_dtypes). b: packed from a QTensor,
    with or without groups; of 8-bit integers without groups, a second copy of the panels is made
    and kept. For each group of a row of x (without groups: the row)

        X = max|x| / Q        q = round(x / X)        Q = 2^22 − 1 for float32, 32639 for bfloat16
        y[m, n] = Σ_g s_gn · X_mg · (Σ_{k∈g} w_kn·q_mk − z_gn · Σ_{k∈g} q_mk)

    with exact integer sums, groups in ascending order, in float32; then `residual` and `post_ops`
    as in `matmul_scaled`. So the result is the same bits on every instruction set and for any
    number of threads, and off by no more than its specification says. A group of x that holds
    NaN or infinity gives a row of NaN; one whose X would be below 2^−126 counts as zeros.
    `out_dtype`: "float32" or "bfloat16".

    TypeError: x is of another type. ValueError: shapes do not match, b has no scale, or a group is
    so long that int32 could overflow (of 4 bits 1,118,481 k, of 8 bits 65,793). RuntimeError: the
    machine lacks the instruction set `isa`.
    """
    left = float_rows(x, "x", FLOATS)
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    if out_dtype not in _LINEAR_OUTPUTS:
        known = ", ".join(_LINEAR_OUTPUTS)
        raise ValueError(f"out_dtype must be one of {known}, got {out_dtype!r}")
    known = _weight_only, b, {"out_dtype": constant(out_dtype)}
    b = b.grouped
    return _linear(x, left, b, "float", bias, residual, post_ops, out_dtype, out, threads, isa,
                   known)  # fmt: skip


def _linear(
    x: Any, left: npt.NDArray[Any], b: PackedMatrix, activations: str, bias: Any, residual: Any,
    post_ops: Sequence[AnyPostOp] | None, out_dtype: str, out: Any, threads: int | None,
    isa: str | None, known: tuple[CallCache, PackedMatrix, Mapping[str, Check | None]],
) -> Any:  # fmt: skip
    """A linear layer of rows of floats. `known`: the cache of such calls, what the caller
    calls b, and the check of the argument that the other function does not have."""
    prepared, spec = requests.floats(
        (left.shape, left.strides, left.dtype), requests.panel_format(b, isa),
        threads_key(threads), isa, activations, row_stride(out), bias is not None,
        residual is not None, post_ops_tuple(post_ops), out_dtype,
    )  # fmt: skip
    added = per_column(bias, b.N, "bias")
    beside = per_element(residual, prepared.shape, "residual", spec.residual)
    result, returned = output(x, out, prepared.shape, spec.storage, (x, residual, bias))
    operands = {**prepared.weight(b), "parameters": spec.parameters}
    prepared.into(result, {**operands, "a": left, "bias": added, "residual": beside})
    calls, given, own = known
    if calls.is_hot(given, prepared):
        checks = {
            "x": as_given(x, left, "a"),
            "bias": bias_as_given(bias, added, prepared),
            "residual": as_given(residual, beside, "residual"),
            "post_ops": constant(post_ops),
            "out": out_as_given(out, result),
            "threads": threads_as_given(threads, prepared),
            "isa": constant(isa),
            **own,
        }
        calls.add(given, prepared, operands, checks, result, out is None)
    return returned


@_gemm.builtin
def gemm(
    a: Kind,
    b: Kind,
    c: Operand | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Kind | None = None,
    out_dtype: FloatType | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Kind:
    """alpha·(a @ b) + beta·c: [M, K] by [K, N], and [M, N].

    a and b: NumPy arrays or PyTorch CPU tensors, both float32 or both bfloat16 (in NumPy, the
    dtype of ml_dtypes), of any strides: a transposed operand is a view, and costs no copy. c:
    float32 or bfloat16 [M, N]; it may be `out` itself. Products are summed in float32. The result
    is float32, or bfloat16 if `out_dtype` (a name or a dtype) or `out` says so; it is rounded to
    that once. It is no part of PyTorch's autograd.

    With beta = 0, c is not read, whatever is in it; with alpha = 0 or K = 0, a and b are not.
    The result does not depend on the number of threads. It does, in the last bits, on the
    instruction set and on the strides of a, b, c and `out`. `isa` forces a set, `threads` limits
    the threads, for this call.

    TypeError: an operand is of another type. ValueError: shapes do not match, beta is given
    without c, or `out` shares memory with a, b or itself. RuntimeError: the machine lacks the set.
    """
    left = a if type(a) is np.ndarray else array(a, "a")
    right = b if type(b) is np.ndarray else array(b, "b")
    added = c if c is None or type(c) is np.ndarray else array(c, "c")
    scale, scale_c = factor(alpha, "alpha"), factor(beta, "beta")
    dtype = _FLOAT32 if out_dtype is None else real_dtype(out_dtype)
    given = None if out is None else array(out, "out")
    if given is not None and out_dtype is not None and dtype != given.dtype:
        raise ValueError(f"out is {given.dtype}, but out_dtype is {out_dtype!r}")
    little = threads is None and right.ndim == 2 and left.size * right.shape[1] < LITTLE
    key = 1 if little else threads_key(threads)
    prepared = prepare_gemm(
        (left.dtype, left.shape, left.strides), (right.dtype, right.shape, right.strides),
        None if added is None else (added.dtype, added.shape, added.strides),
        dtype if given is None else (given.dtype, given.shape, given.strides),
        scale != 0, scale_c != 0, key, isa,
    )  # fmt: skip
    returned: Any = out
    if given is None:
        result, returned = output(a, None, prepared.shape, dtype)
    else:
        added, result = gemms.apart(left, right, added, given, scale, scale_c), given
    gemms.run(prepared, left, right, added, result, scale, scale_c)
    if prepared.little and _gemm.is_hot(None, prepared):
        checks = {
            "a": as_given(a, left, prepared.parameter("a")), "c": addend_as_given(c, added, result),
            "b": as_given(b, right, prepared.parameter("b")), "alpha": constant(alpha),
            "beta": constant(beta), "out": as_given(out, result, "out", written=True),
            "out_dtype": constant(out_dtype) or Same(out_dtype), "isa": constant(isa),
            "threads": thread_check(threads, -key if key < 0 else None),
        }  # fmt: skip
        _gemm.add(None, prepared, gemms.factors(scale, scale_c), checks, result, out is None)
    return returned
