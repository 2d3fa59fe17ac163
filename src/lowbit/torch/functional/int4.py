"""Products of batches of matrices, and with weights of 4 and 8 bits in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.triton.fast.tiles import (
    ACTIVATIONS,
    GATES,
    GROUP_UNIT,
    MIDDLE,
    Extra,
    TiledWeight,
    columns_of,
    finished,
)
from lowbit.torch.arguments import FLOATS, check_alike, check_shape, check_tensor
from lowbit.torch.registration import register, specified, specified_gradients

# The product of two batches of matrices.


@specified("batched_matmul")
def bmm(x: Tensor, y: Tensor, *, tf32: bool = False) -> Tensor:
    """z_b = x_b y_b.

    x: [batches, rows, terms], y: [batches, terms, columns], both float32, bfloat16 or float16, any
    strides; the result is [batches, rows, columns] in their dtype, contiguous, summed in float32.
    tf32: float32 operands are rounded to TF32 (10 bits after the point), which matrix units take.
    Differentiable, any number of times. Operands of which neither rows nor columns begin at
    multiples of 16 bytes are copied.

    TypeError for another dtype, or two; ValueError for shapes that do not match.
    """
    for name, value in (("x", x), ("y", y)):
        check_tensor("bmm", name, value)
        if value.dim() != 3:
            raise ValueError(
                f"bmm: {name} has the shape {list(value.shape)}; it must have three "
                "dimensions, the batch first"
            )
    check_alike("bmm", x=x, y=y)
    check_shape("bmm", "y", y, (x.shape[0], x.shape[2], y.shape[2]))
    return _bmm_op(x, y, tf32)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, y, ctx.tf32 = inputs
    ctx.save_for_backward(x, y)


def _products_gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y = ctx.saved_tensors
    dx = _bmm_op(dz, y.mT, ctx.tf32) if ctx.needs_input_grad[0] else None
    dy = _bmm_op(x.mT, dz, ctx.tf32) if ctx.needs_input_grad[1] else None
    return dx, dy, None


_bmm_op = register(
    "bmm(Tensor x, Tensor y, bool tf32) -> Tensor",
    kernel="batched_matmul.batched_matmul",
    cpu=lambda x, y, tf32: (x.double() @ y.double()).to(x.dtype),
    backward=_products_gradient,
    keep=_keep,
)

specified_gradients("batched_matmul", bmm, "x", "y")


# The product of bfloat16 or float16 activations with a weight of 4 or 8 bits.


def pack_int4(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, group_size: int
) -> TiledWeight:
    """Bring a weight of 4 bits into tiles, once for every M; or those of experts, where all that is
    given has one dimension more, the experts', before the others.

    weight: values 0 to 15, uint8 [N, K]; or int32 [N, K/8] with 8 of them to a word, the first in
    the lowest bits. scale: float32, bfloat16 or float16 [N, groups], and zero_point, of any dtype,
    likewise, or None for 8: w = scale · (value − zero_point). group_size: a multiple of 32; the
    last group may be shorter. (A QTensor `q` of [K, N], quantized to uint4 with axis=1 and groups
    along K, is packed from `q.values.T`, `q.scale.T` and `q.zero_point.T`.)

    Products take the upper 16 bits of a scale's significand, which are all of those of bfloat16
    and float16; of zero points that are not integers, and of scales beside them, bfloat16.

    TypeError for other dtypes; ValueError for shapes that do not match, a group size that is not
    served, and values above 15.
    """
    check_tensor("pack_int4", "weight", weight, (torch.int32, torch.uint8))
    _check_matrix("pack_int4", weight)
    if weight.dtype == torch.int32:
        pairs = weight.contiguous().view(torch.uint8)
        weight = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    elif weight.numel() and int(weight.max()) > 15:
        at = (weight > 15).nonzero()[0].tolist()
        raise ValueError(
            f"pack_int4: weight{at} is {int(weight[tuple(at)])}; values of 4 bits are 0 to 15"
        )
    _check_groups("pack_int4", weight, scale, zero_point, group_size)
    zero = None
    if zero_point is not None and bool((zero_point.float() != MIDDLE[4]).any()):
        off = zero_point.float() - MIDDLE[4]
        whole = bool(((off == off.round()) & (off >= -MIDDLE[4]) & (off <= MIDDLE[4])).all())
        zero = off.to(torch.int8 if whole else torch.float32)
    return TiledWeight.of(weight, scale, zero, group_size, bits=4)


def pack_int8(weight: Tensor, scale: Tensor, *, group_size: int | None = None) -> TiledWeight:
    """Bring a weight of 8 bits, w = scale · value, into tiles, once for every M.

    weight: int8 [N, K]. scale: float32, bfloat16 or float16, [N], or [N, groups] of a group_size
    that is a multiple of 32. Experts and errors as of `pack_int4`.
    """
    check_tensor("pack_int8", "weight", weight, (torch.int8,))
    _check_matrix("pack_int8", weight)
    size = group_size or max(weight.shape[-1] + -weight.shape[-1] % 128, 128)
    scale = scale[..., None] if scale.dim() < weight.dim() else scale
    _check_groups("pack_int8", weight, scale, None, size)
    return TiledWeight.of(weight.view(torch.uint8) ^ MIDDLE[8], scale, None, size, bits=8)


def check_extra(
    name: str, extra: Extra, shape: Sequence[int], activations: Iterable[str] = ACTIVATIONS
) -> None:
    """ValueError unless it can follow a product of this shape."""
    if extra.activation not in activations:
        known = ", ".join(map(repr, activations))
        raise ValueError(f"{name}: activation is {extra.activation!r}; give one of {known}")
    if extra.activation in GATES and shape[-1] % 16:
        raise ValueError(f"{name}: a gate takes rows by 16; the weight has {shape[-1]}")
    if extra.bias is not None:
        check_shape(name, "bias", extra.bias, shape[-1:])
    if extra.residual is not None:
        columns = columns_of(shape[-1], extra.activation)
        check_shape(name, "residual", extra.residual, (*shape[:-1], columns))


def _check_matrix(name: str, weight: Tensor) -> None:
    if weight.dim() not in (2, 3) or not len(weight):
        raise ValueError(
            f"{name}: weight has the shape {list(weight.shape)}; it must be [N, K], or "
            "[experts, N, K]"
        )


def _check_groups(name: str, weight: Tensor, scale: Tensor, zero: Tensor | None, size: int) -> None:
    check_tensor(name, "scale", scale, FLOATS)
    if not isinstance(size, int) or size < 1 or size % GROUP_UNIT:
        raise ValueError(f"{name}: group_size is {size}; give a multiple of {GROUP_UNIT}")
    *rows, K = weight.shape
    groups = -(-K // size)
    for what, one in (("scale", scale), ("zero_point", zero)):
        if one is not None and list(one.shape) != [*rows, groups]:
            raise ValueError(
                f"{name}: {what} has the shape {list(one.shape)}; for a weight {[*rows, K]} in "
                f"groups of {size} it must be {[*rows, groups]}"
            )


def check_operands(name: str, x: Tensor, weight: TiledWeight) -> None:
    """TypeError or ValueError unless x [..., K] can be multiplied by a weight."""
    check_tensor(name, "x", x, FLOATS)
    if not isinstance(weight, TiledWeight):
        raise TypeError(f"{name}: weight is a {type(weight).__name__}; give pack_int4(...)")
    if x.dim() == 0 or x.shape[-1] != weight.K:
        raise ValueError(
            f"{name}: x has the shape {list(x.shape)}; its last dimension must be {weight.K}"
        )
    if x.device != weight.tiles.device:
        raise ValueError(
            f"{name}: x is on {x.device} and weight on {weight.tiles.device}; move one of them"
        )


def weight_only_matmul(
    x: Tensor,
    weight: TiledWeight,
    bias: Tensor | None = None,
    *,
    activation: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(x · (scale · (weight − zero_point))ᵀ + bias) + residual: [..., K] by [N, K].

    x: bfloat16, float16 or float32, any strides; the result, [..., N], has its dtype. weight: from
    `pack_int4` or `pack_int8`, on the same device. bias: [N]; activation: "", "relu", "silu" or
    "gelu"; residual: [..., N]. Differentiable in x, bias and residual. Sums are float32. With more
    than 32 rows of x, and with groups of less than 128, the weight is rounded to x's dtype.

    activation "swiglu", "geglu" or "geglu_tanh" (GELU by tanh): a gated unit, f(x · gateᵀ) ⊙
    (x · upᵀ), of a weight whose rows, and whose bias, `interleaved` has put together: result and
    residual are [..., N / 2].

    TypeError for another dtype; ValueError for a K, a shape or a device that does not match, and
    for another activation.
    """
    extra, known = Extra(bias, residual, activation), (*ACTIVATIONS, *GATES)
    return multiplied("weight_only_matmul", x, weight, extra, _weight_only_op, known=known)


int4_matmul = weight_only_matmul


def multiplied(
    name: str, x: Tensor, weight: TiledWeight, extra: Extra, op: Callable[..., Tensor], *rest: Any,
    known: Iterable[str] = ACTIVATIONS,
) -> Tensor:  # fmt: skip
    """What an operator of x, a weight's fields, an Extra's and others gives, once these are known
    to be good; differentiable."""
    check_operands(name, x, weight)
    if weight.experts > 1:
        raise ValueError(f"{name}: weight holds {weight.experts} experts; call grouped_matmul")
    if extra.residual is not None:
        check_alike(name, x=x, residual=extra.residual)
    check_extra(name, extra, (*x.shape[:-1], weight.N), known)
    parts = vars(weight).values()
    given = (x, *extra[:2])
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
        return finished(op(x, *parts, *Extra(), *rest), extra)
    return op(x, *parts, *extra, *rest)


def keep_weight(ctx: Any, inputs: Any, output: Tensor) -> None:
    """For `weight_gradient`."""
    _, *parts = inputs
    ctx.save_for_backward(*parts[:4])
    ctx.sizes, ctx.others = parts[4:8], len(parts)


def weight_gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    """Of x, by the weight that the tiles stand for."""
    weight = TiledWeight(*ctx.saved_tensors, *ctx.sizes)
    return dz @ weight.dequantized().to(dz.dtype), *[None] * ctx.others


def _on_cpu(x: Tensor, *parts: Any) -> Tensor:
    weight, extra = TiledWeight(*parts[:8]), Extra(*parts[8:])
    product = x.double() @ weight.dequantized().T
    return finished(product, extra.to(torch.float64)).to(x.dtype)


_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "int"}
WEIGHT_FIELDS = ", ".join(f"{_TYPES[str(one.type)]} {one.name}" for one in fields(TiledWeight))

_weight_only_op = register(
    f"weight_only_matmul(Tensor x, {WEIGHT_FIELDS}, Tensor? bias, Tensor? residual, "
    "str activation) -> Tensor",
    kernel="weight_only.weight_only_matmul",
    cpu=_on_cpu,
    fake=lambda x, *parts: x.new_empty(
        *x.shape[:-1], columns_of(TiledWeight(*parts[:8]).N, parts[-1])
    ),
    backward=weight_gradient,
    keep=keep_weight,
)


@specified("int4_matmul")
def _packed_and_multiplied(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, group_size: int
) -> Tensor:
    return int4_matmul(x, pack_int4(words, scale, zero & 15, group_size=group_size))
