"""Products of activations of 8 bits on the GPU: int8, or float8 (e4m3), with scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.triton.fast.tiles import Extra, TiledWeight, by_torch, finished
from lowbit.numerics.affine import quantize_rows as in_numpy
from lowbit.torch.arguments import FLOATS, check_shape, check_tensor
from lowbit.torch.functional.int4 import (
    WEIGHT_FIELDS,
    check_extra,
    keep_weight,
    multiplied,
    weight_gradient,
)
from lowbit.torch.registration import register

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
_LEAST = 2.0**-126  # a scale; smaller ones are 1


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, *, symmetric: bool = True, blocks: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows x [M, K] as numbers of 8 bits: values, scales and zero points; x = scale · (q − zero).

    x: float32, bfloat16 or float16. dtype: int8 or float8_e4m3fn. The scales, float32, are [M], or
    with `blocks` [M, ceil(K / 128)], one for each 128 k. symmetric: without zero points, which
    are None; else int32 [M], for int8 without blocks. The arithmetic is that of
    `lowbit.numerics.affine.quantize_rows`, less 128: a row of zeros has the scale 1, and one that
    holds NaN or infinity the scale NaN.

    TypeError for another dtype; ValueError for another shape, or zero points where there are none.
    """
    check_tensor("quantize_rows", "x", x, FLOATS)
    if dtype not in EIGHT_BITS:
        raise TypeError(f"quantize_rows: dtype is {dtype}; give torch.int8 or torch.float8_e4m3fn")
    if x.dim() != 2:
        raise ValueError(f"quantize_rows: x has the shape {list(x.shape)}; it must be [M, K]")
    if not symmetric and (blocks or dtype != torch.int8):
        raise ValueError("quantize_rows: only int8 without blocks has zero points")
    x = x if x.stride(1) == 1 else x.contiguous()
    q, scale, zero = torch.ops.lowbit.quantize_rows.default(x, dtype, symmetric, blocks)
    return q, scale, None if symmetric else zero


def _rows_on_cpu(
    x: Tensor, dtype: torch.dtype, symmetric: bool, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if dtype == torch.int8 and not blocks:
        codes, scale, zero = map(torch.from_numpy, in_numpy(x.float().numpy(), symmetric))
        return (codes ^ 128).view(torch.int8), scale, zero[:0] if symmetric else zero - 128
    M, K = x.shape
    size = 128 if blocks else max(K, 1)
    wide = torch.nn.functional.pad(x.float(), (0, -K % size if K else size))
    wide = wide.view(M, wide.shape[1] // size, size)
    most = 127.0 if dtype == torch.int8 else 448.0
    scale = wide.abs().amax(-1, True) / most
    scale = torch.where(scale < _LEAST, 1.0, scale).where(wide.isfinite().all(-1, True), torch.nan)
    q = (wide * (1 / scale)).clamp(-most, most)
    q = q.round() if dtype == torch.int8 else q
    values = q.flatten(1)[:, :K].nan_to_num().to(dtype).contiguous()
    scale = scale.flatten(1) if blocks else scale.flatten()
    return values, scale, torch.zeros(0, dtype=torch.int32)


def _rows_fake(
    x: Tensor, dtype: torch.dtype, symmetric: bool, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, K = x.shape
    scale = x.new_empty((M, -(-K // 128)) if blocks else (M,), dtype=torch.float32)
    zero = x.new_empty((0 if symmetric else M,), dtype=torch.int32)
    return x.new_empty((M, K), dtype=dtype), scale, zero


register(
    "quantize_rows(Tensor x, ScalarType dtype, bool symmetric, bool blocks) "
    "-> (Tensor, Tensor, Tensor)",
    kernel="quantize_rows.quantize_rows",
    cpu=_rows_on_cpu,
    fake=_rows_fake,
)


def scaled_matmul(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_zero: Tensor | None = None,
    w_sum: Tensor | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """activation((x − x_zero) · wᵀ · scales + bias) + residual: [M, K] by [N, K] → [M, N].

    x and w: both int8, or both float8_e4m3fn. x_scale and w_scale: float32 [M] and [N]; or, of
    float8, [M, ceil(K / 128)] and [ceil(N / 128), ceil(K / 128)], for blocks. x_zero: int32 [M],
    with w_sum, int32 [N], the sums of w's rows. bias: [N]; residual: [M, N]; activation: "",
    "relu", "silu" or "gelu". dtype: of the result. Integers are summed exactly, for K to 131,072.

    TypeError for other dtypes; ValueError for shapes that do not match, and another activation.
    """
    name = "scaled_matmul"
    check_tensor(name, "x", x, EIGHT_BITS)
    check_tensor(name, "w", w, (x.dtype,))
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(
            f"{name}: x has the shape {list(x.shape)} and w {list(w.shape)}; they must be [M, K] "
            "and [N, K]"
        )
    (M, K), N = x.shape, len(w)
    for what, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        check_tensor(name, what, scale, (torch.float32,))
    if w_scale.dim() == 2 and x.dtype != torch.int8:
        check_shape(name, "x_scale", x_scale, (M, -(-K // 128)))
        check_shape(name, "w_scale", w_scale, (-(-N // 128), -(-K // 128)))
    else:
        check_shape(name, "x_scale", x_scale, (M,))
        check_shape(name, "w_scale", w_scale, (N,))
    if (x_zero is None) != (w_sum is None):
        raise ValueError(f"{name}: give x_zero and w_sum, or neither")
    for what, one, shape in (("x_zero", x_zero, (M,)), ("w_sum", w_sum, (N,))):
        if one is not None:
            check_tensor(name, what, one, (torch.int32,))
            check_shape(name, what, one, shape)
    check_extra(name, Extra(bias, residual, activation), (M, N))
    return torch.ops.lowbit.scaled_matmul.default(
        x, w, x_scale, w_scale, x_zero, w_sum, bias, residual, activation, dtype
    )


def _scaled_on_cpu(*given: Any) -> Tensor:
    x, w, x_scale, w_scale, x_zero, _, bias, residual, activation, dtype = given
    extra = Extra(bias, residual, activation)
    return by_torch(x, w, x_scale, w_scale, x_zero, extra, torch.float64).to(dtype)


register(
    "scaled_matmul(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? x_zero, "
    "Tensor? w_sum, Tensor? bias, Tensor? residual, str activation, ScalarType dtype) -> Tensor",
    kernel="scaled.scaled_matmul",
    cpu=_scaled_on_cpu,
    fake=lambda x, w, *rest: x.new_empty((len(x), len(w)), dtype=rest[-1]),
)


def int4_dynamic_matmul(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.int8,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """`weight_only_matmul` of x whose rows become 8 bits on the way, and a weight of 4 bits.

    dtype: int8 or float8_e4m3fn; each row has one scale and no zero point, as `quantize_rows` finds
    it. The sums of each group are scaled in float32; int8 is summed exactly within. On a GPU up to
    32 rows of 16 bits stay as they are: there the weight's memory is the limit. Zero points of the
    weight are 0 to 16 for float8. The derivative is that of `weight_only_matmul`.

    TypeError for another dtype; ValueError for a weight of 8 bits, and as of `weight_only_matmul`.
    """
    name = "int4_dynamic_matmul"
    if dtype not in EIGHT_BITS:
        raise TypeError(f"{name}: dtype is {dtype}; give torch.int8 or torch.float8_e4m3fn")
    if isinstance(weight, TiledWeight) and weight.bits != 4:
        raise ValueError(f"{name}: the weight has {weight.bits} bits; give pack_int4(...)")
    return multiplied(name, x, weight, Extra(bias, residual, activation), _dynamic_op, dtype)


def _dynamic_on_cpu(x: Tensor, *given: Any) -> Tensor:
    weight, extra = TiledWeight(*given[:8]), Extra(*given[8:11])
    q, scale, _ = _rows_on_cpu(x.reshape(-1, weight.K), given[11], True, False)
    product = (q.double() * scale.double()[:, None]) @ weight.dequantized().T
    z = product.view(*x.shape[:-1], weight.N)
    return finished(z, extra.to(torch.float64)).to(x.dtype)


_dynamic_op = register(
    f"int4_dynamic_matmul(Tensor x, {WEIGHT_FIELDS}, Tensor? bias, Tensor? residual, "
    "str activation, ScalarType dtype) -> Tensor",
    kernel="eight_by_four.int4_dynamic_matmul",
    cpu=_dynamic_on_cpu,
    fake=lambda x, *parts: x.new_empty(*x.shape[:-1], TiledWeight(*parts[:8]).N),
    backward=weight_gradient,
    keep=keep_weight,
)
