"""tanh(y)."""

from lowbit.isa.generic import maximum, select
from lowbit.isa.value import Value
from lowbit.kernels.cpu.shared.functions import exp, fused, polynomial
from lowbit.kernels.cpu.shared.post_op import Elementwise, keeping_nan, post_ops

# tanh(x) = x + x³·p(x²) for |x| < 0.625, from the Cephes library's tanhf.
_NEAR = 0.625
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def tanh(x: Value) -> Value:
    """1 - 2 / (e^2|x| + 1), with the sign of x."""
    magnitude = maximum(x, 0.0 - x)
    far = 1.0 - 2.0 / (exp(magnitude * 2.0) + 1.0)
    square = x * x
    near = fused(x, square * polynomial(square, _TANH), x)
    return keeping_nan(x, select(magnitude < _NEAR, near, select(x < 0.0, 0.0 - far, far)))


post_ops.add("tanh", Elementwise(tanh))
