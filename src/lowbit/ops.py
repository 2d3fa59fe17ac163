"""The public functions, one for each operation.

NumPy arrays and PyTorch CPU tensors go in; what comes out is of the kind that went in on the left.
Strides are any, sizes from 0 on. Arguments are checked before anything is computed or written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import dispatch
from lowbit import isa as instruction_sets
from lowbit.arguments import (
    array,
    bytes_array,
    bytes_matrix,
    check_depth,
    check_inner,
    check_scaled,
    float_matrix,
    output,
    per_column,
    per_element,
    per_row,
    zero_points,
)
from lowbit.finish import INTEGERS, Finish, steps_tuple
from lowbit.forms import Form, keep, threads_key
from lowbit.kernels.cpu.integer.micro_kernel import Demand
from lowbit.kernels.cpu.rows.activation import Source
from lowbit.kernels.cpu.shared.epilogue import Epilogue, Step
from lowbit.kernels.cpu.shared.groups import Grouping
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.numerics import QTensor
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.panels import pack as pack_matrix

_INT32 = np.dtype(np.int32)
_ALWAYS_SAFE = 1 << 15  # the K to which no sum of products of differences of bytes can overflow


def matmul(
    a: Any, b: Any, *, out: Any = None, threads: int | None = None, isa: str | None = None
) -> Any:
    """The exact integer product a @ b: int8 or uint8 [M, K] by [K, N] → int32 [M, N].

    `b` may also be a PackedMatrix from `lowbit.pack`. Stacks of matrices, [..., M, K] by
    [..., K, N], are multiplied pair by pair, their leading dimensions broadcast as in NumPy.
    `threads` limits the threads of this call, `isa` forces an instruction set for it; neither
    changes the result.

    TypeError: an operand is not of 8-bit integers. ValueError: shapes do not match, or K is so
    large that int32 could overflow. RuntimeError: the machine lacks the instruction set.
    """
    if not isinstance(b, PackedMatrix):
        return _matmul_unpacked(a, b, out, threads, isa)
    left = a if type(a) is np.ndarray else array(a, "a")
    key = ("integers", left.shape, left.strides, left.dtype, threads_key(threads), isa)
    form = b.forms.get(key)
    if form is None:
        if left.ndim > 2:
            return _batched(a, b, out, threads, isa)
        form = _integer_form(key, a, b, threads, isa)
    result, returned = output(a, out, form.shape, _INT32, (left,))
    form.run(left, result, zero=_flips(left))
    return returned


def pack(
    b: Any, *, dtype: str | None = None, zero_point: Any = None, isa: str | None = None
) -> PackedMatrix:
    """Pack a right operand once, for `matmul` and every function of this library that follows it.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit or 4-bit integers [K, N] with one scale, or one for each column
    (axis=1), or of 4-bit integers with groups along K (group_axis=0, group_size a multiple of 8).
    `dtype` "int4" or "uint4" packs an int8 or uint8 array of such values two to a byte.
    `zero_point`: for a QTensor with groups, real numbers [groups, N], kept as float32, in place of
    its own zero points: b ≈ scale·(values − zero_point). The result does not depend on the
    instruction set.

    TypeError: not of 8-bit integers, or of another sign than `dtype`. ValueError: not
    two-dimensional, other scales along K, a value outside of `dtype`, naming the first, or a
    zero_point where there are no groups, of another shape or not finite in float32.
    """
    given = b if isinstance(b, QTensor) else bytes_matrix(b, "b")
    return pack_matrix(given, dtype=dtype, zero_point=zero_point, isa=isa)


def _matmul_unpacked(a: Any, b: Any, out: Any, threads: int | None, isa: str | None) -> Any:
    """`matmul` of what is packed for this one product."""
    if getattr(a, "ndim", 2) > 2 or getattr(b, "ndim", 2) > 2:
        return _batched(a, b, out, threads, isa)
    left, right = bytes_matrix(a, "a"), bytes_matrix(b, "b")
    check_inner(left, right.shape)
    check_depth(left.shape[1], left.dtype, right.dtype.name)
    shape = left.shape[0], right.shape[1]
    result, returned = output(a, out, shape, _INT32, (left, right))
    used = instruction_sets.active(isa).name
    # Proving what weights allow takes longer than one product.
    form = _integer_form((), left, pack_matrix(right, isa=used), threads, used, prove=False)
    form.run(left, result, zero=_flips(left))
    return returned


def _integer_form(
    key: tuple[Any, ...],
    a: Any,
    b: PackedMatrix,
    threads: int | None,
    isa: str | None,
    prove: bool = True,
) -> Form:
    left = bytes_matrix(a, "a")
    check_inner(left, b.shape)
    check_depth(left.shape[1], left.dtype, b.dtype)
    signed = left.dtype == np.int8
    return keep(key, b, left, INTEGERS, a_zero=signed, threads=threads, isa=isa, prove=prove)


def _flips(left: npt.NDArray[Any]) -> npt.NDArray[np.int32] | None:
    """The zero points that signed left operands have once they are stored as unsigned ones."""
    if left.dtype == np.uint8:
        return None
    zeros = np.empty(left.shape[0], np.int32)
    zeros.fill(FLIP)
    return zeros


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


def matmul_scaled(
    a: Any,
    b: PackedMatrix,
    *,
    a_scale: Any,
    a_zero_point: Any = None,
    bias: Any = None,
    residual: Any = None,
    steps: Sequence[Step] | None = None,
    out_dtype: str = "float32",
    out_scale: float | None = None,
    out_zero_point: int = 0,
    out: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """The product of quantized matrices as real numbers [M, N], and what follows it in a network.

        y[m, n] = float32(Σ_k (a[m, k] − a_zero_point[m]) · (b[k, n] − z_n)) · a_scale[m] · s_n

    a: int8 or uint8 [M, K]; b: packed from a QTensor, whose s_n and z_n it holds; a_scale and
    a_zero_point: one number or [M]. Then `steps`, in order, each a name or `Clamp(low, high)`:

        "bias"       y + bias[n]              "relu"       max(y, 0)
        "residual"   y + residual[m, n]       "silu"       y·σ(y)
        "gelu"       y·Φ(y)                   "gelu_tanh"  GELU's tanh approximation

    By default: bias, then residual, where given. `out_dtype` is "float32", "bfloat16" (in
    NumPy the dtype of ml_dtypes), or "uint8" or "int8", which are quantized:
    clamp(round_half_even(y · (1/out_scale)) + out_zero_point).

    The sum is an exact int32; every float operation rounds once, in the order written, so the
    result is the same bits on every instruction set and for any number of threads.

    Raises as `matmul` does, and ValueError if b has no scale, a parameter has another shape, a
    step is unknown, or a step's operand is missing.
    """
    left = a if type(a) is np.ndarray else array(a, "a")
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    if a_zero_point is not None and b.K > _ALWAYS_SAFE and not np.any(a_zero_point):
        a_zero_point = None
    chosen = (a_zero_point is None, bias is None, residual is None, steps_tuple(steps))
    key = (left.shape, left.strides, left.dtype, threads_key(threads), isa, *chosen,
           out_dtype, out_scale, out_zero_point)  # fmt: skip
    form = b.forms.get(key)
    if form is None:
        check_inner(bytes_matrix(left, "a"), b.shape)
        given = tuple(n for n, v in (("bias", bias), ("residual", residual)) if v is not None)
        finish = Finish.of(given, steps_tuple(steps), out_dtype, out_scale, out_zero_point)
        shifted = a_zero_point is not None, b.centred
        check_depth(left.shape[1], left.dtype, b.dtype, shifted)
        a_zero = a_zero_point is not None or left.dtype == np.int8
        form = keep(key, b, left, finish, a_zero=a_zero, threads=threads, isa=isa)
    given = left, residual, a_scale, a_zero_point, bias
    result, returned = output(a, out, form.shape, form.finish.storage, given)
    rows = form.shape[0]
    scale = per_row(a_scale, rows, "a_scale")
    if a_zero_point is None:
        zero = _flips(left)
    else:
        shift = FLIP if left.dtype == np.int8 else 0
        zero = zero_points(a_zero_point, rows, left.dtype, "a_zero_point", shift)
    added = None if bias is None else per_column(bias, b.N, "bias")
    beside = None if residual is None else per_element(residual, form.shape, "residual")
    form.run(left, result, scale, zero, added, beside)
    return returned


def linear_dynamic(
    x: Any,
    b: PackedMatrix,
    bias: Any = None,
    *,
    symmetric: bool = False,
    residual: Any = None,
    steps: Sequence[Step] | None = None,
    out: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """x @ b + bias with x quantized to 8 bits, row by row, on the way: float32 [M, K] → [M, N].

    b: packed from a QTensor. `symmetric` fixes the zero point of every row; otherwise each row's
    range is used whole. `residual` and `steps` as in `matmul_scaled`. The arithmetic is that of
    `numerics.quantize_rows` followed by `matmul_scaled`, bit for bit. With groups in b, each
    group's integer sums are scaled and added in float32, in ascending order (spec: linear_groups).
    A row that holds NaN or infinity gives a row of NaN.

    TypeError: x is not float32. ValueError: shapes do not match, or b has no scale.
    """
    left = x if type(x) is np.ndarray else array(x, "x")
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    order = steps_tuple(steps)
    key = (left.shape, left.strides, left.dtype, threads_key(threads), isa, symmetric,
           bias is None, residual is None, order)  # fmt: skip
    form = b.forms.get(key)
    if form is None:
        check_inner(float_matrix(left, "x"), b.shape, "x")
        given = tuple(n for n, v in (("bias", bias), ("residual", residual)) if v is not None)
        planes = 0
        if b.group_size is not None:
            planes = 1
        else:
            unsigned = np.dtype(np.uint8)
            check_depth(left.shape[1], unsigned, b.dtype, (True, b.centred))
        a_zero = not (planes and symmetric)
        form = keep(key, b, left, Finish.of(given, order), a_zero=a_zero, threads=threads, isa=isa,
                    symmetric=symmetric, planes=planes)  # fmt: skip
    added = None if bias is None else per_column(bias, b.N, "bias")
    beside = None if residual is None else per_element(residual, form.shape, "residual")
    result, returned = output(x, out, form.shape, form.finish.storage, (left, residual, bias))
    form.run(left, result, bias=added, residual=beside)
    return returned


@lru_cache(maxsize=1 << 12)
def linear_plan(
    m: int,
    k: int,
    n: int,
    activations: str,
    bfloat16: bool,
    group_size: int,
    zero_points: bool,
    biased: bool,
    threads: int,
) -> dispatch.Plan:
    """How to compute a linear layer on addresses, for callers that hold another library's tensors.

    `plan.run(x, (stride, 1), right, out, out_stride, bias=bias)` then is `linear_dynamic` or
    `linear_weight_only` of rows [m, k] with `right`, the addresses of a PackedMatrix [k, n]:
    panels, column_sums, zero_points, scale. Sizes are at least 1; nothing behind an address is
    checked.

    - activations: "dynamic", which are quantized row by row; "symmetric", the same without zero
      points; or "float", which are not quantized.
    - bfloat16: the type of "float" activations and of the result, else float32.
    - group_size: k of a group of 4-bit weights, or 0 for 8-bit weights without groups.
    - zero_points: whether the weight has them, int8, beside the scales of its groups.
    - biased: whether there is a bias, float32, padded to whole panels.
    - threads: what `lowbit.forms.threads_key(None)` gives.

    ValueError if there is no such layer.
    """
    if activations not in ("dynamic", "symmetric", "float"):
        raise ValueError(
            f"activations must be 'dynamic', 'symmetric' or 'float', got {activations!r}"
        )
    quantized, symmetric = activations != "float", activations == "symmetric"
    if not group_size and not quantized:
        raise ValueError("activations 'float' need a 4-bit weight with groups, got an 8-bit one")
    out = "bf16" if bfloat16 else "f32"
    request = dispatch.Request(
        isa=instruction_sets.active().name,
        m=m,
        n=n,
        k=k,
        source=Source(out, symmetric=symmetric),
        epilogue=Epilogue(a_zero=True, steps=("bias",) if biased else (), out=out),
    )
    if group_size:
        planes = 1 if quantized else 2 if bfloat16 else 3
        scales = "row" if quantized else "none"
        a_zero = quantized and not symmetric
        request = request._replace(
            epilogue=request.epilogue._replace(a_zero=a_zero, scales=scales),
            weight="u4",
            grouping=Grouping(group_size, planes, "s8" if zero_points else ""),
        )
    return dispatch.plan(request)


def active_kernel(op: str = "linear_dynamic") -> tuple[str, str]:
    """(kernel, instruction set) that serve 8-bit products here now, by name."""
    if op not in ("gemm", "matmul", "matmul_scaled", "linear_dynamic"):
        raise ValueError(f"no operation is called {op!r}")
    isa, micro, _ = dispatch.consider(instruction_sets.active(), Demand(64, 64, 64))[-1]
    return micro.name if micro else "", isa.name
