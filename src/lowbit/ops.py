"""The public functions, one for each operation.

NumPy arrays and PyTorch CPU tensors go in; what comes out is of the kind that went in on the left.
Strides are any, sizes from 0 on. Arguments are checked before anything is computed or written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import dispatch
from lowbit import isa as instruction_sets
from lowbit.arguments import (
    bytes_array,
    bytes_matrix,
    check_depth,
    check_inner,
    float_matrix,
    output,
    padded,
    per_row,
)
from lowbit.dispatch import Left, Output, Request, Right
from lowbit.finish import INTEGERS, Finish
from lowbit.jit import threads as thread_runtime
from lowbit.kernels.cpu.activation import Source
from lowbit.kernels.cpu.epilogue import Epilogue, Step
from lowbit.kernels.cpu.layout import FLIP, GROUP, LINE, PANEL, blocks, padded_k
from lowbit.kernels.cpu.pack import pack as pack_kernel
from lowbit.numerics import QTensor, int_format
from lowbit.packed import PackedMatrix, aligned_empty

_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
_LIMITS = {np.dtype(np.int8): (-128, 127), np.dtype(np.uint8): (0, 255)}
_KINDS = {np.dtype(np.int8): "s8", np.dtype(np.uint8): "u8", np.dtype(np.float32): "f32"}


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
    if getattr(a, "ndim", 2) > 2 or getattr(b, "ndim", 2) > 2:
        return _batched(a, b, out, threads, isa)
    left = bytes_matrix(a, "a")
    right = b if isinstance(b, PackedMatrix) else bytes_matrix(b, "b")
    check_inner(left, right.shape)
    check_depth(left.shape[1], left.dtype, np.dtype(right.dtype))
    shape = left.shape[0], right.shape[1]
    result, returned = output(a, out, shape, np.dtype(np.int32), (left, right))
    used = instruction_sets.active(isa).name
    packed = right if isinstance(right, PackedMatrix) else pack(right, isa=isa)
    zero = np.full(shape[0], FLIP, np.int32) if left.dtype == np.int8 else None
    # Proving what weights allow takes longer than one product: only for those packed for many.
    _run(left, packed, result, zero=zero, threads=threads, isa=used, prove=packed is b)
    return returned


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
        result, returned = output(a, out, (*left.shape[:-1], columns), np.dtype(np.int32))
        result[...] = matmul(flat, right, threads=threads, isa=isa).reshape(result.shape)
        return returned
    leading = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*leading, left.shape[-2], right.shape[-1])
    result, returned = output(a, out, shape, np.dtype(np.int32), (left, right))
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

    By default: bias, then residual, where given. `out_dtype` is "float32", "bfloat16" (the bits
    as uint16 in NumPy, a tensor in PyTorch), or "uint8" or "int8", which are quantized:
    clamp(round_half_even(y · (1/out_scale)) + out_zero_point).

    The sum is an exact int32; every float operation rounds once, in the order written, so the
    result is the same bits on every instruction set and for any number of threads.

    Raises as `matmul` does, and ValueError if b has no scale, a parameter has another shape, a
    step is unknown, or a step's operand is missing.
    """
    left = bytes_matrix(a, "a")
    _check_scaled(b)
    check_inner(left, b.shape)
    rows = left.shape[0]
    scale = per_row(a_scale, rows, _FLOAT32, "a_scale")
    zero = None
    if a_zero_point is not None:
        zero = per_row(a_zero_point, rows, _INT32, "a_zero_point", _LIMITS[left.dtype])
    centred = zero is not None and bool(zero.any()), _centred(b)
    check_depth(left.shape[1], left.dtype, np.dtype(b.dtype), centred)
    finish = Finish.of(b.N, rows, bias, residual, steps, out_dtype, out_scale, out_zero_point)
    result, returned = output(a, out, (rows, b.N), finish.storage, (left, finish.residual))
    used = instruction_sets.active(isa).name
    if left.dtype == np.int8:  # stored as unsigned
        zero = np.full(rows, FLIP, np.int32) if zero is None else zero + np.int32(FLIP)
    _run(
        left,
        b,
        result,
        scale=scale,
        zero=zero,
        finish=finish,
        threads=threads,
        isa=used,
    )
    return finish.reinterpreted(returned)


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
    `numerics.quantize_rows` followed by `matmul_scaled`, bit for bit. A row that holds NaN or
    infinity gives a row of NaN.

    TypeError: x is not float32. ValueError: shapes do not match, or b has no scale.
    """
    left = float_matrix(x, "x")
    _check_scaled(b)
    check_inner(left, b.shape, "x")
    check_depth(left.shape[1], np.dtype(np.uint8), np.dtype(b.dtype), (True, _centred(b)))
    shape = left.shape[0], b.N
    finish = Finish.of(b.N, shape[0], bias, residual, steps)
    result, returned = output(x, out, shape, finish.storage, (left, finish.residual))
    used = instruction_sets.active(isa).name
    if not _rows_contiguous(left):
        left = np.ascontiguousarray(left)
    _run(left, b, result, finish=finish, symmetric=symmetric, threads=threads, isa=used)
    return returned


def _run(
    a: npt.NDArray[Any],
    b: PackedMatrix,
    out: npt.NDArray[Any],
    *,
    scale: npt.NDArray[np.float32] | None = None,
    zero: npt.NDArray[np.int32] | None = None,
    finish: Finish = INTEGERS,
    symmetric: bool = False,
    prove: bool = True,
    threads: int | None,
    isa: str,
) -> None:
    """Checked operands into `out`; what is None leaves its step out of the epilogue."""
    if not out.size:
        return
    if not a.shape[1]:  # an empty sum: one column of zeros gives the same, through all steps
        zeros = np.zeros((1, b.N), np.int8)
        tensor = QTensor(zeros, np.ones((), np.float32), np.zeros((), np.int32), int_format("int8"))
        a, b, zero = np.zeros((a.shape[0], 1), a.dtype), pack(tensor), None
    target = out if _rows_contiguous(out) else np.empty(out.shape, out.dtype)
    floats = a.dtype == np.float32
    row_stride, stride = (a.strides[0] // 4, 1) if floats else _strides(a)
    source = Source(_KINDS[a.dtype], contiguous=stride == 1, symmetric=symmetric)
    epilogue = Epilogue(
        a_zero=floats or zero is not None,
        b_zero=b.zero_points is not None,
        steps=finish.steps,
        out=finish.out,
    )
    wanted = prove and dispatch.wants_proof(isa)
    proven = b.largest_pair if wanted else dispatch.UNPROVEN
    request = Request(isa, a.shape[0], b.N, a.shape[1], source, epilogue, threads, proven)
    dispatch.plan(request).run(
        Left(_address(a), row_stride, stride, _address(scale), _address(zero)),
        Right(*b.addresses, bias=_address(finish.bias)),
        Output(
            _address(target),
            target.strides[0] // target.itemsize,
            _address(finish.residual),
            0 if finish.residual is None else finish.residual.strides[0] // 4,
            _address(finish.requantize),
        ),
    )
    if target is not out:
        out[...] = target


_DYNAMIC = {
    (symmetric, bias): (
        Source("f32", symmetric=symmetric),
        Epilogue(a_zero=True, steps=("bias",) if bias else (), out="f32"),
    )
    for symmetric in (False, True)
    for bias in (False, True)
}


def linear_dynamic_pointers(
    x: int,
    M: int,
    K: int,
    x_stride: int,
    panels: int,
    column_sums: int,
    scale: int,
    bias: int,
    N: int,
    out: int,
    out_stride: int,
    symmetric: bool,
) -> None:
    """`linear_dynamic` on addresses, unchecked, for callers that hold tensors of another library.

    x: float32 rows, contiguous, `x_stride` elements apart; panels, column_sums, scale: as in a
    PackedMatrix without zero points; bias: float32 padded to whole panels, or 0; out: float32
    rows, `out_stride` elements apart. M, N, K are at least 1.
    """
    source, epilogue = _DYNAMIC[symmetric, bias != 0]
    request = Request(instruction_sets.active().name, M, N, K, source, epilogue)
    dispatch.plan(request).run(
        Left(x, x_stride),
        Right(panels, column_sums, 0, scale, bias),
        Output(out, out_stride),
    )


def pack(b: Any, *, isa: str | None = None) -> PackedMatrix:
    """Pack a right operand once, for `matmul`, `matmul_scaled` and `linear_dynamic`.

    b: int8 or uint8 [K, N], of any strides (a weight [N, K] is packed as `weight.T`, without a
    copy); or a QTensor of 8-bit integers [K, N] with one scale, or one for each column (axis=1).
    The result does not depend on the instruction set.

    TypeError: not of 8-bit integers. ValueError: not two-dimensional, or scales along K.
    """
    scale = zero = None
    if isinstance(b, QTensor):
        if b.values.ndim != 2 or b.axis not in (None, 1) or b.group_size is not None:
            raise ValueError(
                f"b has scales along axis={b.axis}, group_size={b.group_size}; a packed matrix "
                "[K, N] takes one scale, or one for each column: lowbit.quantize(b, axis=1)"
            )
        columns = b.shape[1]
        scale = padded(np.broadcast_to(b.scale, (columns,)))
        zero = np.broadcast_to(b.zero_point, (columns,))
    values = bytes_matrix(b.values if isinstance(b, QTensor) else b, "b")
    depth, columns = values.shape
    unsigned = values.dtype == np.uint8
    if zero is None:
        zero = np.zeros(columns, np.int32)
    stored_zero = padded(zero - np.int32(FLIP) if unsigned else zero)
    panels = aligned_empty((blocks(columns, PANEL), padded_k(depth) // GROUP, LINE), np.uint8)
    sums = np.zeros(len(stored_zero), np.int32)
    if values.size:
        _pack_into(values, unsigned, panels, sums, isa)
    return PackedMatrix(
        panels=panels,
        column_sums=sums - np.int32(depth) * stored_zero,
        K=depth,
        N=columns,
        dtype=values.dtype.name,
        scale=scale,
        zero_points=stored_zero if stored_zero.any() else None,
    )


def _pack_into(
    values: npt.NDArray[Any],
    unsigned: bool,
    panels: npt.NDArray[np.uint8],
    sums: npt.NDArray[np.int32],
    isa: str | None,
) -> None:
    depth, columns = values.shape
    k_stride, n_stride = _strides(values)
    along = "n" if n_stride == 1 else "k" if k_stride == 1 else ""
    program = pack_kernel.program(instruction_sets.active(isa), along=along, unsigned=unsigned)
    program(
        thread_runtime.max_threads() if values.size >= 1 << 20 else 1,
        *(_address(values), k_stride, n_stride, _address(panels), _address(sums), depth, columns),
    )


def active_kernel(op: str = "linear_dynamic") -> tuple[str, str]:
    """(kernel, instruction set) that serve 8-bit products here now, by name."""
    if op not in ("gemm", "matmul", "matmul_scaled", "linear_dynamic"):
        raise ValueError(f"no operation is called {op!r}")
    isa, micro, _ = dispatch.consider(instruction_sets.active(), 64, 64, 64)[-1]
    return micro.name if micro else "", isa.name


def _check_scaled(b: PackedMatrix) -> None:
    if not isinstance(b, PackedMatrix):
        raise TypeError(
            f"b must be packed, got {type(b).__name__}: lowbit.pack(lowbit.quantize(b, axis=1))"
        )
    if b.scale is None:
        raise ValueError("b has no scale: pack a QTensor, lowbit.pack(lowbit.quantize(b, axis=1))")


def _centred(b: PackedMatrix) -> bool:
    """Whether b's values have zero points of their own, not only those that make them signed."""
    if b.zero_points is None:
        return b.dtype == "uint8"
    return bool((b.zero_points[: b.N] != (-FLIP if b.dtype == "uint8" else 0)).any())


def _rows_contiguous(array: npt.NDArray[Any]) -> bool:
    """Whether rows are contiguous and whole elements apart, as the kernels need it."""
    apart = array.strides[0] % array.itemsize == 0
    return apart and (array.shape[1] <= 1 or array.strides[1] == array.itemsize)


def _strides(array: npt.NDArray[Any]) -> tuple[int, ...]:
    """Strides of bytes, where an axis of one element counts as contiguous."""
    return tuple(s if n > 1 else 1 for s, n in zip(array.strides, array.shape, strict=True))


def _address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else array.__array_interface__["data"][0]
