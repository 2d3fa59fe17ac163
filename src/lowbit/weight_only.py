"""Linear layers whose weight alone is quantized: float activations times 4-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from lowbit.arguments import check_inner, check_scaled, float_rows, output, per_column, per_element
from lowbit.finish import Finish, steps_tuple
from lowbit.forms import keep, threads_key
from lowbit.kernels.cpu.shared.epilogue import Step
from lowbit.weights.panels import PackedMatrix

_PLANES = {np.dtype(np.float32): 3, np.dtype(bfloat16): 2}  # digits that are as good as the type
_OUTPUTS = ("float32", "bfloat16")


def linear_weight_only(
    x: Any,
    b: PackedMatrix,
    bias: Any = None,
    *,
    residual: Any = None,
    steps: Sequence[Step] | None = None,
    out_dtype: str = "float32",
    out: Any = None,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """x @ dequantized b + bias: [M, K] by [K, N] → [M, N].

    x: float32, or bfloat16 (a PyTorch tensor, or NumPy's of ml_dtypes). b: packed from a QTensor of
    4-bit integers, with or without groups. For each group of a row of x (without groups: the row)

        X = max|x| / Q        q = round(x / X)        Q = 2^22 − 1 for float32, 32639 for bfloat16
        y[m, n] = Σ_g s_gn · X_mg · (Σ_{k∈g} w_kn·q_mk − z_gn · Σ_{k∈g} q_mk)

    with exact integer sums, groups in ascending order, in float32; then `residual` and `steps` as
    in `matmul_scaled`. So the result is the same bits on every instruction set and for any number
    of threads, and off by no more than its specification says. A group of x that holds NaN
    or infinity gives a row of NaN; one whose X would be below 2^−126 counts as zeros.
    `out_dtype`: "float32" or "bfloat16".

    TypeError: x is of another type. ValueError: shapes do not match, b is not of 4-bit integers
    or has no scale, or a group is so long that int32 could overflow (1,118,481 k). RuntimeError:
    the machine lacks the instruction set `isa`.
    """
    left = x if type(x) is np.ndarray and x.dtype == np.float32 else float_rows(x, "x")
    if type(b) is not PackedMatrix or b.scale is None:
        check_scaled(b)
    order = steps_tuple(steps)
    key = ("weight-only", left.shape, left.strides, left.dtype, threads_key(threads), isa,
           bias is None, residual is None, order, out_dtype)  # fmt: skip
    grouped = b.grouped
    form = grouped.forms.get(key)
    if form is None:
        if left.ndim != 2:
            raise ValueError(f"x must have two dimensions, got shape {left.shape}")
        check_inner(left, b.shape, "x")
        if b.weight == "s8":
            raise ValueError(f"b must be of 4-bit integers, got {b.dtype}: use linear_dynamic")
        if out_dtype not in _OUTPUTS:
            raise ValueError(f"out_dtype must be one of {', '.join(_OUTPUTS)}, got {out_dtype!r}")
        given = tuple(n for n, v in (("bias", bias), ("residual", residual)) if v is not None)
        form = keep(key, grouped, left, Finish.of(given, order, out_dtype), a_zero=False,
                    threads=threads, isa=isa, planes=_PLANES[left.dtype])  # fmt: skip
    added = None if bias is None else per_column(bias, b.N, "bias")
    beside = None if residual is None else per_element(residual, form.shape, "residual")
    result, returned = output(x, out, form.shape, form.finish.storage, (x, residual, bias))
    form.run(left, result, bias=added, residual=beside)
    return returned
