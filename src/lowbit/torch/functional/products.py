"""The product of two batches of matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.torch.arguments import check_alike, check_shape, check_tensor
from lowbit.torch.registration import register, specified, specified_gradients


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


def _gradient(ctx: Any, dz: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, y = ctx.saved_tensors
    dx = _bmm_op(dz, y.mT, ctx.tf32) if ctx.needs_input_grad[0] else None
    dy = _bmm_op(x.mT, dz, ctx.tf32) if ctx.needs_input_grad[1] else None
    return dx, dy, None


_bmm_op = register(
    "bmm(Tensor x, Tensor y, bool tf32) -> Tensor",
    kernel="batched_matmul.batched_matmul",
    cpu=lambda x, y, tf32: (x.double() @ y.double()).to(x.dtype),
    backward=_gradient,
    keep=_keep,
)

specified_gradients("batched_matmul", bmm, "x", "y")
