"""max(y, 0)."""

import math

from lowbit.isa.generic import maximum
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import constant
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops


def relu(x: Value) -> Value:
    """max(x, 0)."""
    return keeping_nan(x, maximum(x, constant(x, 0.0)))


post_ops.add("relu", Elementwise(relu, (0.0, math.inf), proportional=True))
