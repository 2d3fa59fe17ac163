"""Operators over rows, which are the last dimension: softmax, sum, LayerNorm, RMSNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.torch.arguments import check_alike, check_rows, check_shape, check_tensor
from lowbit.torch.registration import register, specified, specified_gradients


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
def sum(x: Tensor) -> Tensor:
    """Σ x over the last dimension.

    x: float32, bfloat16 or float16 [..., length], any strides; the result is [...] in x's dtype,
    summed in float32 in an order that the shape alone decides. Differentiable.

    TypeError for another dtype; ValueError for length 0.
    """
    check_tensor("sum", "x", x)
    check_rows("sum", x)
    return _sum_op(x)


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
    return _norm_op(x, weight, bias, eps, True)[0]


@specified("rms_norm")
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (Zhang and Sennrich, Root mean
    square layer normalization, 2019).

    Arguments, result and errors are those of `layer_norm`.
    """
    _check_norm("rms_norm", x, weight, None, eps)
    return _norm_op(x, weight, None, eps, False)[0]


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


def _softmax_backward_reference(z: Tensor, dz: Tensor) -> Tensor:
    wide, grad = z.double(), dz.double()
    return (wide * (grad - (wide * grad).sum(-1, keepdim=True))).to(z.dtype).contiguous()


_softmax_backward_op = register(
    "softmax_backward(Tensor z, Tensor dz) -> Tensor",
    kernel="softmax.softmax_backward",
    cpu=_softmax_backward_reference,
)
_softmax_op = register(
    "softmax(Tensor x) -> Tensor",
    kernel="softmax.softmax",
    cpu=lambda x: torch.softmax(x.double(), -1).to(x.dtype),
    backward=lambda ctx, dz: _softmax_backward_op(*ctx.saved_tensors, dz),
    keep=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def _keep_shape(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.shape = inputs[0].shape


_sum_op = register(
    "sum(Tensor x) -> Tensor",
    kernel="row_sum.row_sum",
    cpu=lambda x: x.double().sum(-1).to(x.dtype).contiguous(),
    backward=lambda ctx, dz: dz.unsqueeze(-1).expand(ctx.shape),
    keep=_keep_shape,
)


def _norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.double()
    mean = wide.mean(-1, keepdim=True) if centred else wide.new_zeros(())
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z = (wide - mean) * rstd
    z = z if weight is None else z * weight.double()
    z = z if bias is None else z + bias.double()
    kept = mean.float().reshape(-1) if centred else x.new_empty(0, dtype=torch.float32)
    return z.to(x.dtype).contiguous(), kept, rstd.float().reshape(-1)


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
    return (dx * rstd.double().reshape(*x.shape[:-1], 1)).to(x.dtype).contiguous()


def _norm_weight_reference(
    dz: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dtype: torch.dtype, centred: bool
) -> Tensor:
    length = x.shape[-1]
    wide = dz.double().reshape(-1, length)
    normalized = _normalized(x, mean, rstd, centred).reshape(-1, length)
    return torch.stack([(wide * normalized).sum(0), wide.sum(0)]).to(dtype)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, _, ctx.centred = inputs
    ctx.save_for_backward(x, weight, *output[1:])


def _norm_gradient(ctx: Any, dz: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    dx = dweight = dbias = None
    if wanted[0]:
        dx = _norm_backward_op(dz, x, weight, mean, rstd, ctx.centred)
    if wanted[1] or wanted[2]:
        # Copies: an operator's results must not share memory.
        sums = _norm_weight_op(dz, x, mean, rstd, x.dtype, ctx.centred)
        dweight = sums[0].clone() if wanted[1] else None
        dbias = sums[1].clone() if wanted[2] else None
    return dx, dweight, dbias, None, None


_norm_op = register(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred)"
    " -> (Tensor, Tensor, Tensor)",
    kernel="norm.norm",
    cpu=_norm_reference,
    backward=_norm_gradient,
    keep=_keep_norm,
)
_norm_backward_op = register(
    "norm_backward(Tensor dz, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool centred)"
    " -> Tensor",
    kernel="norm.norm_backward",
    cpu=_norm_backward_reference,
)
_norm_weight_op = register(
    "norm_weight_backward(Tensor dz, Tensor x, Tensor mean, Tensor rstd, ScalarType dtype, "
    "bool centred) -> Tensor",
    kernel="norm.norm_weight_backward",
    cpu=_norm_weight_reference,
)

specified_gradients("softmax", softmax, "x")
specified_gradients("layer_norm", layer_norm, "x", "weight", "bias")
specified_gradients("rms_norm", rms_norm, "x", "weight")
