"""y·σ(y)."""

from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import logistic_of
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops


def silu(x: Value) -> Value:
    """x · σ(x)."""
    return keeping_nan(x, logistic_of(x, 0.0 - x))


post_ops.add("silu", Elementwise(silu))
