"""The operator conv2d."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.torch.arguments import check_alike, check_shape, check_tensor
from lowbit.torch.registration import register, specified

Size = int | Sequence[int]

_LARGEST_INDEX = 2**31


@specified("conv2d", padding=1)
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    tf32: bool = False,
) -> Tensor:
    """z[b, o, i, j] = bias[o] + Σ_cuv weight[o, c, u, v] · x[b, c, i·s + u·d - p, j·s + v·d - p],
    with zeros outside of x: torch.nn.functional.conv2d with one group.

    x: float32, bfloat16 or float16 [B, C, H, W], any strides (NCHW, or NHWC in channels_last);
    weight [O, C, KH, KW] and bias [O] of the same dtype. stride, padding, dilation: a number, or
    one for height and one for width. The result [B, O, OH, OW] has the dtype and memory format of
    x. Sums are float32; tf32 rounds float32 operands to 10 bits of fraction for speed.
    Differentiable; the gradients are computed by PyTorch's own convolutions.

    TypeError for a dtype; ValueError for shapes, devices and numbers that do not fit.
    """
    check_tensor("conv2d", "x", x)
    check_tensor("conv2d", "weight", weight)
    check_alike("conv2d", x=x, weight=weight)
    for name, value in (("x", x), ("weight", weight)):
        if value.dim() != 4 or 0 in value.shape[1:]:
            raise ValueError(
                f"conv2d: {name} has the shape {list(value.shape)}; it must have four dimensions, "
                "of which only the first may be 0"
            )
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"conv2d: x has {x.shape[1]} channels and weight takes {weight.shape[1]}; "
            "there are no groups here, so they must be equal"
        )
    if bias is not None:
        check_alike("conv2d", x=x, bias=bias)
        check_shape("conv2d", "bias", bias, weight.shape[:1])
    pairs = _pair("stride", stride, 1), _pair("padding", padding, 0), _pair("dilation", dilation, 1)
    _check_sizes(x, weight, *pairs[1:])
    return _conv2d_op(x, weight, bias, *pairs, tf32)


def _pair(name: str, value: Size, least: int) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or any(not isinstance(one, int) or one < least for one in both):
        raise ValueError(
            f"conv2d: {name} is {value!r}; give a whole number of {least} or more, or two of them"
        )
    return both[0], both[1]


def _check_sizes(
    x: Tensor, weight: Tensor, padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    for axis, name in ((0, "height"), (1, "width")):
        size = x.shape[2 + axis] + 2 * padding[axis]
        reach = dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        if size < reach:
            raise ValueError(
                f"conv2d: the {name} of x with padding is {size}, and the kernel reaches over "
                f"{reach}; give a larger x or more padding"
            )
    for name, each in (("an image of x", x[:1]), ("weight", weight)):
        reach = sum((n - 1) * s for n, s in zip(each.shape, each.stride(), strict=True))
        if each.numel() and reach >= _LARGEST_INDEX:
            raise ValueError(f"conv2d: {name} reaches over {reach} elements; cut it below 2**31")


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], tf32: bool,
) -> Tensor:  # fmt: skip
    wide = torch.nn.functional.conv2d(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        list(stride),
        list(padding),
        list(dilation),
    )
    last = x.stride(1) == 1 and x.shape[1] > 1
    memory_format = torch.channels_last if last else torch.contiguous_format
    return wide.to(x.dtype).contiguous(memory_format=memory_format)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, bias, *ctx.sizes, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    stride, padding, dilation = ctx.sizes
    wanted = ctx.needs_input_grad
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dz,
        x,
        weight,
        [weight.shape[0]] if ctx.biased else None,
        stride,
        padding,
        dilation,
        False,
        [0, 0],
        1,
        [wanted[0], wanted[1], ctx.biased and wanted[2]],
    )
    return dx, dweight, dbias, None, None, None, None


_conv2d_op = register(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, "
    "int[2] dilation, bool tf32) -> Tensor",
    kernel="conv2d.conv2d",
    cpu=_reference,
    backward=_gradient,
    keep=_keep,
)


@specified("conv2d_nhwc")
def _conv2d_nhwc(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1).permute(0, 2, 3, 1)
