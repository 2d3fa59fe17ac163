"""y + bias[n]."""

from lowbit.kernels.cpu.shared.post_op import Apply, Columns, PostOp, post_ops


class Bias(PostOp):
    """Adds float32 [N]."""

    operand = "bias"
    proportional = True

    def begin(self, at: Columns) -> Apply:
        bias = at.scaled(at.of_columns(at.operands.bias))
        return lambda row, value: value + bias


post_ops.add("bias", Bias())
