"""A constant is added, a block to each program; wrong."""

import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor


def add2_spec(x: Float32[Tensor, "200"]) -> Float32[Tensor, "200"]:
    return x + 10.0


@triton.jit
def add_mask2_kernel(x_ptr, z_ptr, N0, B0: tl.constexpr):
    at = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + at, at < N0)
    tl.store(z_ptr + at, x + 10.0)
