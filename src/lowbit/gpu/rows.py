"""Operators over rows, which are the last dimension: softmax, sum, LayerNorm, RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.gpu.arguments import check_alike, check_rows, check_shape, check_tensor
from lowbit.gpu.registration import differentiate, gradient, register, specified
from lowbit.kernels.triton.fast import norm as _norm
from lowbit.kernels.triton.fast import norm_weight
from lowbit.kernels.triton.fast import row_sum as _row_sum
from lowbit.kernels.triton.fast import softmax as _softmax


@specified("softmax")
def softmax(x: Tensor) -> Tensor:
    """exp(x) / Σ exp(x) over the last dimension, for values of any magnitude.

    x: float32, bfloat16 or float16 [..., length], any strides; the result has its shape and dtype
    and is contiguous. Arithmetic is float32. Differentiable. On a GPU each element is read and
    written once. A row with NaN or +inf, or of -inf alone, gives NaN, as in PyTorch.

    TypeError for another dtype; ValueError for length 0.
    """
    check_tensor("softmax", "x", x)
    check_rows("softmax", x)
    return _softmax_op(x)


@specified("row_sum")
def row_sum(x: Tensor) -> Tensor:
    """Σ x over the last dimension.

    x: float32, bfloat16 or float16 [..., length], any strides; the result is [...] in x's dtype,
    summed in float32 in an order that the shape alone decides. Differentiable.

    TypeError for another dtype; ValueError for length 0.
    """
    check_tensor("row_sum", "x", x)
    check_rows("row_sum", x)
    return _row_sum_op(x)


@specified("layer_norm")
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last dimension (Ba, Kiros and
    Hinton, Layer normalization, 2016).

    x: float32, bfloat16 or float16 [..., length], any strides; weight, bias: [length], of the same
    dtype as x. The result has x's shape and dtype. Arithmetic is float32. Differentiable in all.

    TypeError for another dtype; ValueError for a shape or device that does not match, for a bias
    without a weight, and for a negative eps.
    """
    _check_norm("layer_norm", x, weight, bias, eps)
    return _layer_norm_op(x, weight, bias, eps)[0]


@specified("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, Root mean
    square layer normalization, 2019).

    Arguments, result and errors are those of `layer_norm`.
    """
    _check_norm("rms_norm", x, weight, None, eps)
    return _rms_norm_op(x, weight, eps)[0]


def _check_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    check_tensor(op, "x", x)
    check_rows(op, x)
    if bias is not None and weight is None:
        raise ValueError(f"{op}: there is a bias and no weight; give a weight of ones")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            check_tensor(op, name, value)
            check_alike(op, x=x, **{name: value})
            check_shape(op, name, value, x.shape[-1:])
    if not eps >= 0:
        raise ValueError(f"{op}: eps is {eps}; it must be 0 or more")


def _softmax_reference(x: Tensor) -> Tensor:
    return torch.softmax(x.double(), -1).to(x.dtype)


def _softmax_backward_reference(z: Tensor, dz: Tensor) -> Tensor:
    wide, grad = z.double(), dz.double()
    return (wide * (grad - (wide * grad).sum(-1, keepdim=True))).to(z.dtype)


def _row_sum_reference(x: Tensor) -> Tensor:
    return x.double().sum(-1).to(x.dtype)


def _empty_like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


_softmax_op = register(
    "softmax(Tensor x) -> Tensor",
    kernel=_softmax.softmax,
    reference=_softmax_reference,
    fake=_empty_like,
)
_softmax_backward_op = register(
    "softmax_backward(Tensor z, Tensor dz) -> Tensor",
    kernel=_softmax.softmax_backward,
    reference=_softmax_backward_reference,
    fake=_empty_like,
)
_row_sum_op = register(
    "row_sum(Tensor x) -> Tensor",
    kernel=_row_sum.row_sum,
    reference=_row_sum_reference,
    fake=lambda x: x.new_empty(x.shape[:-1]),
)


def _keep_softmax(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Any, dz: Tensor) -> Tensor:
    (z,) = ctx.saved_tensors
    return _softmax_backward_op(z, dz)


def _keep_shape(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _row_sum_gradient(ctx: Any, dz: Tensor) -> Tensor:
    return dz.unsqueeze(-1).expand(ctx.shape)


differentiate(_softmax_op, _softmax_gradient, _keep_softmax)
differentiate(_row_sum_op, _row_sum_gradient, _keep_shape)


def _layer_norm_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _norm.norm(x, weight, bias, eps, True)


def _rms_norm_kernel(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    z, _, rstd = _norm.norm(x, weight, None, eps, False)
    return z, rstd


def _layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z = (wide - mean) * rstd
    z = z if weight is None else z * weight.double()
    z = z if bias is None else z + bias.double()
    return z.to(x.dtype), mean.float().reshape(-1), rstd.float().reshape(-1)


def _rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.double()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    z = wide * rstd if weight is None else wide * rstd * weight.double()
    return z.to(x.dtype), rstd.float().reshape(-1)


def _layer_norm_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    kept = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return x.new_empty(x.shape), kept, torch.empty_like(kept)


def _rms_norm_fake(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    kept = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return x.new_empty(x.shape), kept


_layer_norm_op = register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_layer_norm_kernel,
    reference=_layer_norm_reference,
    fake=_layer_norm_fake,
)
_rms_norm_op = register(
    "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)",
    kernel=_rms_norm_kernel,
    reference=_rms_norm_reference,
    fake=_rms_norm_fake,
)


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor, centred: bool) -> Tensor:
    kept = (*x.shape[:-1], 1)
    wide = x.double() - mean.double().reshape(kept) if centred else x.double()
    return wide * rstd.double().reshape(kept)


def _norm_backward_reference(
    dz: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, centred: bool
) -> Tensor:
    normalized = _normalized(x, mean, rstd, centred)
    g = dz.double() if weight is None else dz.double() * weight.double()
    dx = g - normalized * (g * normalized).mean(-1, keepdim=True)
    if centred:
        dx = dx - g.mean(-1, keepdim=True)
    return (dx * rstd.double().reshape(*x.shape[:-1], 1)).to(x.dtype)


def _norm_weight_reference(
    dz: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype, centred: bool
) -> Tensor:
    length = x.shape[-1]
    wide = dz.double().reshape(-1, length)
    normalized = _normalized(x, mean, rstd, centred).reshape(-1, length)
    return torch.stack([(wide * normalized).sum(0), wide.sum(0)]).to(dtype)


_norm_backward_op = register(
    "norm_backward(Tensor dz, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool centred)"
    " -> Tensor",
    kernel=_norm.norm_backward,
    reference=_norm_backward_reference,
    fake=lambda dz, x, *_: x.new_empty(x.shape),
)
_norm_weight_op = register(
    "norm_weight_backward(Tensor dz, Tensor x, Tensor mean, Tensor rstd, ScalarType dtype, "
    "bool centred) -> Tensor",
    kernel=norm_weight.norm_weight_backward,
    reference=_norm_weight_reference,
    fake=lambda dz, x, mean, rstd, dtype, centred: x.new_empty((2, x.shape[-1]), dtype=dtype),
)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight = inputs[:2]
    # RMSNorm has no mean; its place is taken by what is there anyway, and not read.
    mean, rstd = output[-2:] if len(output) == 3 else (output[1], output[1])
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.centred, ctx.number = len(output) == 3, len(inputs)


def _norm_gradient(ctx: Any, dz: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx = sums = None
    if ctx.needs_input_grad[0]:
        dx = _norm_backward_op(dz, x, weight, mean, rstd, ctx.centred)
    if any(ctx.needs_input_grad[1:]):
        sums = _norm_weight_op(dz, x, mean, rstd, x.dtype, ctx.centred)
    wanted = ctx.needs_input_grad
    dweight = sums[0] if sums is not None and wanted[1] else None
    if not ctx.centred:
        return dx, dweight, None
    # A copy: an operator's results must not share memory.
    dbias = sums[1].clone() if sums is not None and wanted[2] else None
    return dx, dweight, dbias, None


differentiate(_layer_norm_op, _norm_gradient, _keep_norm)
differentiate(_rms_norm_op, _norm_gradient, _keep_norm)


@specified("softmax_dx")
def _softmax_dx(x: Tensor, dz: Tensor) -> Tensor:
    return gradient(softmax, "x", dz, x=x)


@specified("layer_norm_dx", wanted="x")
@specified("layer_norm_dweight", wanted="weight")
def _layer_norm_gradient(x: Tensor, weight: Tensor, dz: Tensor, wanted: str) -> Tensor:
    return gradient(layer_norm, wanted, dz, x=x, weight=weight)


@specified("layer_norm_dbias")
def _layer_norm_dbias(x: Tensor, weight: Tensor, bias: Tensor, dz: Tensor) -> Tensor:
    return gradient(layer_norm, "bias", dz, x=x, weight=weight, bias=bias)


@specified("rms_norm_dx", wanted="x")
@specified("rms_norm_dweight", wanted="weight")
def _rms_norm_gradient(x: Tensor, weight: Tensor, dz: Tensor, wanted: str) -> Tensor:
    return gradient(rms_norm, wanted, dz, x=x, weight=weight)
