"""One matrix product in float32, one thread for each element of the result, written in many ways.

    lowbit compare examples/gpu_matmul_variants.py

A kernel in Numba-CUDA was five times slower than the same kernel in CUDA C. The first eight are
what was tried by hand to find out why; the last ones close the gap. See docs/compare.md.
"""

# ruff: noqa: F722
import numpy as np
from jaxtyping import Float32
from numba import cuda, float32, uint32, uint64

from lowbit.spec import operation
from lowbit_lab.compare import cuda_c, variant


@operation(
    exercise={"M": 33, "N": 65, "K": 41}, factors=("a", "b"), accumulator="float32", result="c"
)
def spec(
    a: Float32[np.ndarray, "M K"], b: Float32[np.ndarray, "K N"]
) -> Float32[np.ndarray, "M N"]:
    """c = a b."""
    return a @ b


sizes = {"M": 4092, "N": 4092, "K": 4092}
block = (32, 32)


def grid(size):
    return -(-size["N"] // 32), -(-size["M"] // 32)


@cuda.jit
def as_found(a, b, c):
    row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
    col = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if row >= c.shape[0] or col >= c.shape[1]:
        return
    total = 0
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, col]
    c[row, col] = total


@cuda.jit
def block_size_fixed(a, b, c):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row >= c.shape[0] or col >= c.shape[1]:
        return
    total = 0
    for k in range(a.shape[1]):
        total += a[row, k] * b[k, col]
    c[row, col] = total


@cuda.jit
def no_early_return(a, b, c):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total = 0
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit
def float_start_value(a, b, c):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total = 0.0
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit("void(float32[:,:], float32[:,:], float32[:,:])")
def explicit_signature(a, b, c):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total = 0.0
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit
def annotations(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    row: int = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col: int = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total: np.float32 = 0.0
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit
def float32_accumulator(a, b, c):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < c.shape[0] and col < c.shape[1]:
        total = float32(0.0)
        for k in range(a.shape[1]):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit
def one_dimensional(a, b, c, M, N, K):
    row = cuda.blockIdx.y * 32 + cuda.threadIdx.y
    col = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if row < M and col < N:
        total = float32(0.0)
        for k in range(K):
            total += a[row * K + k] * b[k * N + col]
        c[row * N + col] = total


@cuda.jit
def unsigned_indices(a, b, c):
    row = uint32(cuda.blockIdx.y * 32 + cuda.threadIdx.y)
    col = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    if row < c.shape[0] and col < c.shape[1]:
        total = float32(0.0)
        for k in range(uint32(a.shape[1])):
            total += a[row, k] * b[k, col]
        c[row, col] = total


@cuda.jit
def unsigned_one_dimensional(a, b, c, M, N, K):
    row = uint32(cuda.blockIdx.y * 32 + cuda.threadIdx.y)
    col = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    if row < M and col < N:
        total = float32(0.0)
        at = uint64(row * K)
        for k in range(uint32(K)):
            total += a[at + k] * b[uint64(k) * N + col]
        c[uint64(row) * N + col] = total


@cuda.jit
def running_indices(a, b, c, M, N, K):
    row = uint32(cuda.blockIdx.y * 32 + cuda.threadIdx.y)
    col = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    if row < M and col < N:
        total = float32(0.0)
        left, right = uint64(row * K), uint64(col)
        end = uint64(left + K)
        while left < end:
            total += a[left] * b[right]
            left += uint64(1)
            right += uint64(N)
        c[uint64(row) * N + col] = total


@cuda.jit
def counted_in_32_bits(a, b, c, M, N, K):
    row = uint32(cuda.blockIdx.y * 32 + cuda.threadIdx.y)
    col = uint32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
    if row < M and col < N:
        total = float32(0.0)
        left, right = uint64(row * K), uint64(col)
        k = uint32(0)
        while k < K:
            total += a[left + k] * b[right]
            k = uint32(k + uint32(1))
            right += uint64(N)
        c[uint64(row) * N + col] = total


c_source = cuda_c("""
__global__ void cuda_c(const float* a, const float* b, float* c, int M, int N, int K) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || col >= N) return;
    float total = 0.0f;
    for (int k = 0; k < K; k++)
        total += a[row * K + k] * b[k * N + col];
    c[row * N + col] = total;
}
""")

# Sizes as int32, as the investigation passed them; as uint32 where indices are to be unsigned.


def as_int32(name):
    return lambda size: np.int32(size[name])


def as_uint32(name):
    return lambda size: np.uint32(size[name])


def flat(kernel, convert):
    return variant(kernel, flat=True, **{name: convert(name) for name in sizes})


variants = [
    as_found,
    block_size_fixed,
    no_early_return,
    float_start_value,
    explicit_signature,
    annotations,
    float32_accumulator,
    flat(one_dimensional, as_int32),
    unsigned_indices,
    flat(unsigned_one_dimensional, as_uint32),
    flat(running_indices, as_uint32),
    flat(counted_in_32_bits, as_uint32),
    c_source,
]
