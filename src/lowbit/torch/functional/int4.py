"""Products of batches of matrices, and with a weight of 4 bits."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.kernels.triton.fast.tiles import (
    GROUP_UNIT,
    MIDDLE,
    TILE_ROWS,
    WORDS,
    Int4Weight,
    to_tiles,
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


# The product of bfloat16 or float16 activations with a weight of 4 bits.


def pack_int4(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, group_size: int
) -> Int4Weight:
    """Bring a weight into tiles, once for every M.

    weight: values 0 to 15, uint8 [N, K]; or int32 [N, K/8] with 8 of them to a word, the first in
    the lowest bits. scale: float32, bfloat16 or float16 [N, groups], and zero_point, of any dtype,
    likewise, or None for 8: w = scale · (value − zero_point). group_size: a multiple of 32; the
    last group may be shorter. (A QTensor `q` of [K, N], quantized to uint4 with axis=1 and groups
    along K, is packed from `q.values.T`, `q.scale.T` and `q.zero_point.T`.)

    TypeError for other dtypes; ValueError for shapes that do not match, a group size that is not
    served, and values above 15.
    """
    words = _words(weight)
    N, K = words.shape[0], words.shape[1] * 8
    check_tensor("pack_int4", "scale", scale, FLOATS)
    if not isinstance(group_size, int) or group_size < 1 or group_size % GROUP_UNIT:
        raise ValueError(f"pack_int4: group_size is {group_size}; give a multiple of {GROUP_UNIT}")
    groups = -(-K // group_size)
    for name, one in (("scale", scale), ("zero_point", zero_point)):
        if one is not None and list(one.shape) != [N, groups]:
            raise ValueError(
                f"pack_int4: {name} has the shape {list(one.shape)}; for a weight [{N}, {K}] in "
                f"groups of {group_size} it must be [{N}, {groups}]"
            )
    below, beside = -N % TILE_ROWS, -words.shape[1] % WORDS
    tiles = to_tiles(pad(words, (0, beside, 0, below))).contiguous()
    row_scale, zero, row_zero = pad(scale, (0, 0, 0, below)).contiguous(), None, None
    if zero_point is not None and bool((zero_point.float() != MIDDLE).any()):
        off = (zero_point.float() - MIDDLE).to(scale.dtype)
        row_zero = pad(off, (0, 0, 0, below)).contiguous()
        zero = row_zero.T.contiguous()
    return Int4Weight(tiles, row_scale.T.contiguous(), row_scale, zero, row_zero, N, K, group_size)


def _words(weight: Tensor) -> Tensor:
    """int32 [N, K/8], K rounded up to whole words."""
    check_tensor("pack_int4", "weight", weight, (torch.int32, torch.uint8))
    if weight.dim() != 2:
        raise ValueError(f"pack_int4: weight has the shape {list(weight.shape)}; it must be [N, K]")
    if weight.dtype == torch.int32:
        return weight
    if weight.numel() and int(weight.max()) > 15:
        row, column = (weight > 15).nonzero()[0].tolist()
        raise ValueError(
            f"pack_int4: weight[{row}, {column}] is {int(weight[row, column])}; values of 4 bits "
            "are 0 to 15"
        )
    if weight.shape[1] % 8:
        raise ValueError(f"pack_int4: K is {weight.shape[1]}; it must be a multiple of 8")
    eight = weight.view(weight.shape[0], -1, 8).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = (eight << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_matmul(x: Tensor, weight: Int4Weight) -> Tensor:
    """x · (scale · (weight − zero_point))ᵀ: [..., K] by [N, K] → [..., N].

    x: bfloat16, float16 or float32, any strides; the result has its dtype. weight: from
    `pack_int4`, on the same device. Differentiable in x. Sums are float32. One row of x, K to
    32768, is multiplied in integers of 16 bits relative to the greatest of each 32 k, and NaN or
    infinity in it makes every result NaN; up to 128 rows by tensor cores, in groups of a multiple
    of 128; for others, and for float32, the weight is dequantized to x's dtype first.

    TypeError for another dtype; ValueError for a K or a device that does not match.
    """
    check_tensor("int4_matmul", "x", x, FLOATS)
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"int4_matmul: weight is a {type(weight).__name__}; give pack_int4(...)")
    if x.dim() == 0 or x.shape[-1] != weight.K:
        raise ValueError(
            f"int4_matmul: x has the shape {list(x.shape)}; its last dimension must be {weight.K}"
        )
    if x.device != weight.tiles.device:
        raise ValueError(
            f"int4_matmul: x is on {x.device} and weight on {weight.tiles.device}; move one of them"
        )
    return _int4_matmul_op(x, *vars(weight).values())


def _keep_weight(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, *parts = inputs
    ctx.save_for_backward(*parts[:5])
    ctx.sizes = parts[5:]


def _gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    weight = Int4Weight(*ctx.saved_tensors, *ctx.sizes)
    return dz @ weight.dequantized().to(dz.dtype), *[None] * len(fields(weight))


_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "int"}
_FIELDS = ", ".join(f"{_TYPES[str(one.type)]} {one.name}" for one in fields(Int4Weight))

_int4_matmul_op = register(
    f"int4_matmul(Tensor x, {_FIELDS}) -> Tensor",
    kernel="int4_matmul.int4_matmul",
    cpu=lambda x, *parts: (x.double() @ Int4Weight(*parts).dequantized().T).to(x.dtype),
    fake=lambda x, *parts: x.new_empty(*x.shape[:-1], Int4Weight(*parts).N),
    backward=_gradient,
    keep=_keep_weight,
)


@specified("int4_matmul")
def _packed_and_multiplied(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, group_size: int
) -> Tensor:
    return int4_matmul(x, pack_int4(words, scale, zero & 15, group_size=group_size))
