"""The product of two batches of matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.gpu.arguments import check_alike, check_shape, check_tensor
from lowbit.gpu.registration import differentiate, gradient, register, specified
from lowbit.kernels.triton.fast import batched_matmul as _batched


@specified("batched_matmul")
def batched_matmul(x: Tensor, y: Tensor, *, tf32: bool = False) -> Tensor:
    """z_b = x_b y_b.

    x: [batches, rows, terms], y: [batches, terms, columns], both float32, bfloat16 or float16, any
    strides; the result is [batches, rows, columns] in their dtype, contiguous, summed in float32.
    tf32: float32 operands are rounded to TF32 (10 bits after the point), which matrix units take.
    Differentiable, any number of times. Operands of which neither rows nor columns begin at
    multiples of 16 bytes are copied.

    TypeError for another dtype, or two; ValueError for shapes that do not match.
    """
    for name, value in (("x", x), ("y", y)):
        check_tensor("batched_matmul", name, value)
        if value.dim() != 3:
            raise ValueError(
                f"batched_matmul: {name} has the shape {list(value.shape)}; it must have three "
                "dimensions, the batch first"
            )
    check_alike("batched_matmul", x=x, y=y)
    check_shape("batched_matmul", "y", y, (x.shape[0], x.shape[2], y.shape[2]))
    return _batched_op(x, y, tf32)


def _batched_reference(x: Tensor, y: Tensor, tf32: bool) -> Tensor:
    return (x.double() @ y.double()).to(x.dtype)


def _batched_fake(x: Tensor, y: Tensor, tf32: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], y.shape[2]))


_batched_op = register(
    "batched_matmul(Tensor x, Tensor y, bool tf32) -> Tensor",
    kernel=_batched.batched_matmul,
    reference=_batched_reference,
    fake=_batched_fake,
)


def _keep_operands(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, y, ctx.tf32 = inputs
    ctx.save_for_backward(x, y)


def _batched_gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y = ctx.saved_tensors
    dx = _batched_op(dz, y.mT, ctx.tf32) if ctx.needs_input_grad[0] else None
    dy = _batched_op(x.mT, dz, ctx.tf32) if ctx.needs_input_grad[1] else None
    return dx, dy, None


differentiate(_batched_op, _batched_gradient, _keep_operands)


@specified("batched_matmul_dx", wanted="x")
@specified("batched_matmul_dy", wanted="y")
def _batched_matmul_gradient(x: Tensor, y: Tensor, dz: Tensor, wanted: str) -> Tensor:
    return gradient(batched_matmul, wanted, dz, x=x, y=y)
