"""The product of bfloat16 or float16 activations with a weight of 4 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.gpu.arguments import FLOATS, check_tensor
from lowbit.gpu.registration import differentiate, register, specified
from lowbit.kernels.triton.fast import int4_matmul as _int4

_ACTIVATIONS = (torch.bfloat16, torch.float16)
_MOST_BY_ROWS = 128  # of x, from which on writing the weight as floats takes less time
_DEQUANTIZED_TILES = 256  # of rows of the weight, that are floats at one time


class Int4Weight(NamedTuple):
    """A weight [N, K] of 4 bits as the kernels read it; made by `pack_int4`.

    tiles: int32 [ceil(N/64), ceil(K/128), 64, 16], 8 nibbles to a word (fast/int4_matmul.py draws
    them). scale: floats [groups, N rounded up to 64], and row_scale the same by row, [N, groups];
    zero, row_zero: as these, of the nibbles less 8, or None where all of them are 0. group_size:
    the k that share a scale.
    """

    tiles: Tensor
    scale: Tensor
    row_scale: Tensor
    zero: Tensor | None
    row_zero: Tensor | None
    N: int
    K: int
    group_size: int


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
    if not isinstance(group_size, int) or group_size < 32 or group_size % 32:
        raise ValueError(f"pack_int4: group_size is {group_size}; give a multiple of 32")
    groups = -(-K // group_size)
    for name, one in (("scale", scale), ("zero_point", zero_point)):
        if one is not None and list(one.shape) != [N, groups]:
            raise ValueError(
                f"pack_int4: {name} has the shape {list(one.shape)}; for a weight [{N}, {K}] in "
                f"groups of {group_size} it must be [{N}, {groups}]"
            )
    tall, deep = -(-N // _int4.TILE_ROWS), -(-K // _int4.TILE_DEPTH)
    filled = words.new_zeros(tall * _int4.TILE_ROWS, deep * _int4.WORDS)
    filled[:N, : words.shape[1]] = words
    tiles = filled.view(tall, _int4.TILE_ROWS, deep, _int4.WORDS).transpose(1, 2).contiguous()

    def padded(each: Tensor) -> Tensor:
        result = scale.new_zeros(tall * _int4.TILE_ROWS, groups)
        result[:N] = each
        return result

    row_scale, row_zero = padded(scale), None
    if zero_point is not None and bool((zero_point.float() != _int4.MIDDLE).any()):
        row_zero = padded(zero_point.float() - _int4.MIDDLE)
    zero = None if row_zero is None else row_zero.T.contiguous()
    return Int4Weight(
        tiles, row_scale.T.contiguous(), row_scale, zero, row_zero, N, K, group_size
    )  # fmt: skip


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

    x: bfloat16 or float16, any strides; the result has its dtype. weight: from `pack_int4`, on the
    same device. Differentiable in x. Sums are float32. One row of x, K to 32768, is multiplied in
    integers of 16 bits relative to the greatest of each 32 k, and NaN or infinity in it makes every
    result NaN; up to 128 rows by tensor cores, in groups of a multiple of 128; for others the
    weight is dequantized to x's dtype first.

    TypeError for another dtype; ValueError for a K or a device that does not match.
    """
    check_tensor("int4_matmul", "x", x, _ACTIVATIONS)
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
    tiles, scale, row_scale, zero, row_zero, N, _, group_size = weight
    return _int4_matmul_op(x, tiles, scale, row_scale, zero, row_zero, N, group_size)


def _kernel(x: Tensor, *parts: Any) -> Tensor:
    weight = _int4.Weight(*parts)
    tiles, N, group_size = weight.tiles, weight.N, weight.group_size
    depth = x.shape[-1]
    flat = x.reshape(-1, depth)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    if not len(flat) or not N or not depth:
        return x.new_zeros(*x.shape[:-1], N)
    by_rows = group_size % _int4.TILE_DEPTH == 0
    if len(flat) == 1 and depth <= _int4.MOST_DEPTH:
        z = _int4.vector(flat, weight)
    elif len(flat) <= _MOST_BY_ROWS and by_rows:
        z = torch.cat([_int4.rows(part, weight) for part in flat.split(_int4.MOST_ROWS)])
    else:
        z = x.new_empty(len(flat), N)
        for first in range(0, tiles.shape[0], _DEQUANTIZED_TILES):
            w = _int4.dequantize(weight, depth, x.dtype, first, _DEQUANTIZED_TILES)
            at = first * _int4.TILE_ROWS
            torch.matmul(flat, w.T, out=z[:, at : at + len(w)])
    return z.view(*x.shape[:-1], N)


def _dequantized(
    depth: int, tiles: Tensor, row_scale: Tensor, row_zero: Tensor | None, N: int, group_size: int
) -> Tensor:
    """The weight in float64, [N, K]."""
    words = tiles.transpose(1, 2).reshape(-1, tiles.shape[1] * _int4.WORDS)[:N]
    shifts = torch.arange(0, 32, 4, device=tiles.device, dtype=torch.int32)
    q = ((words[:, :, None] >> shifts) & 15).reshape(N, -1)[:, :depth].double() - _int4.MIDDLE
    group = torch.arange(depth, device=tiles.device) // group_size
    if row_zero is not None:
        q = q - row_zero.double()[:N, group]
    return q * row_scale.double()[:N, group]


def _reference(x: Tensor, *parts: Any) -> Tensor:
    own = _int4.Weight(*parts)
    w = _dequantized(x.shape[-1], own.tiles, own.row_scale, own.row_zero, own.N, own.group_size)
    return (x.double() @ w.T).to(x.dtype)


def _fake(x: Tensor, *parts: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], _int4.Weight(*parts).N)


_int4_matmul_op = register(
    "int4_matmul(Tensor x, Tensor tiles, Tensor scale, Tensor row_scale, Tensor? zero, "
    "Tensor? row_zero, int N, int group_size) -> Tensor",
    kernel=_kernel,
    reference=_reference,
    fake=_fake,
)


def _keep_weight(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, tiles, _, row_scale, _, row_zero, ctx.N, ctx.group_size = inputs
    ctx.depth = x.shape[-1]
    ctx.save_for_backward(tiles, row_scale, row_zero)


def _gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    tiles, row_scale, row_zero = ctx.saved_tensors
    w = _dequantized(ctx.depth, tiles, row_scale, row_zero, ctx.N, ctx.group_size)
    return dz @ w.to(dz.dtype), None, None, None, None, None, None, None


differentiate(_int4_matmul_op, _gradient, _keep_weight)


@specified("int4_matmul")
def _packed_and_multiplied(
    x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, group_size: int
) -> Tensor:
    return int4_matmul(x, pack_int4(words, scale, zero & 15, group_size=group_size))
