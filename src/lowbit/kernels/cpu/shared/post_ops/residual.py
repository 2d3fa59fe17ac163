"""y + residual[m, n]."""

from lowbit.kernels.cpu.shared.post_op import Apply, Columns, PostOp, post_ops


class Residual(PostOp):
    """Adds float32 [M, N]."""

    operand = "residual"
    proportional = True

    def begin(self, at: Columns) -> Apply:
        return lambda row, value: at.plus(value, at.of_output(at.operands.residual, row))


post_ops.add("residual", Residual())
