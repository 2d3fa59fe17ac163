"""y + residual[m, n]."""

from lowbit.isa.generic import load_head
from lowbit.kernels.cpu.shared.post_op import Apply, Columns, PostOp, post_ops


class Residual(PostOp):
    """Adds float32 [M, N]."""

    operand = "residual"

    def begin(self, at: Columns) -> Apply:
        start, stride = at.operands.residual + at.column, at.operands.columns
        return lambda row, value: value + load_head(start + row * stride, at.left, at.lanes)


post_ops.add("residual", Residual())
