"""A sum of each row, right in every variant, and slow for one reason in each but the first. The
line of the reason bears the kind of fault; `lowbit compare` has to name it."""

import numpy as np
from jaxtyping import Float32
from numba import cuda, float32, int64

from lowbit.spec import operation
from lowbit_lab.compare import cuda_c, variant


@operation(exercise={"N": 64, "T": 96}, summed=("T",))
def spec(x: Float32[np.ndarray, "N T"]) -> Float32[np.ndarray, "N"]:
    """z_n = sum_t x_nt."""
    return x.sum(axis=1)


sizes = {"N": 256, "T": 512}
block = (32,)


def grid(size):
    return size["N"]


def columns(size):
    return -(-size["N"] // 32)


@cuda.jit
def clean(x, z):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    part = cuda.shared.array(32, float32)
    total = float32(0.0)
    for t in range(lane, x.shape[1], 32):
        total += x[row, t]
    part[lane] = total
    cuda.syncthreads()
    if lane == 0:
        for i in range(1, 32):
            total += part[i]
        z[row] = total


@cuda.jit
def float_literal(x, z):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    part = cuda.shared.array(32, float32)
    total = float32(0.0)
    for t in range(lane, x.shape[1], 32):
        total += x[row, t] * 1.0  # float64 float64-variable
    part[lane] = total
    cuda.syncthreads()
    if lane == 0:
        for i in range(1, 32):
            total += part[i]
        z[row] = total


@cuda.jit
def division(x, z, width):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    part = cuda.shared.array(32, float32)
    total = float32(0.0)
    for t in range(lane, x.shape[1], 32):
        at = int64(row) * width + t
        total += x[at // width, t]  # int64-division
    part[lane] = total
    cuda.syncthreads()
    if lane == 0:
        for i in range(1, 32):
            total += part[i]
        z[row] = total


@cuda.jit
def a_row_a_thread(x, z):
    row = cuda.grid(1)
    if row < x.shape[0]:
        total = float32(0.0)
        for t in range(x.shape[1]):
            total += x[row, t]  # uncoalesced
        z[row] = total


@cuda.jit
def banks(x, z):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    part = cuda.shared.array((32, 32), float32)
    total = float32(0.0)
    for t in range(lane, x.shape[1], 32):
        part[lane, 0] = x[row, t]  # bank-conflict
        total += part[lane, 0]
    part[0, lane] = total
    cuda.syncthreads()
    if lane == 0:
        for i in range(1, 32):
            total += part[0, i]
        z[row] = total


spilled = cuda_c("""
__global__ void __launch_bounds__(1024, 2) spilled(const float* x, float* z, int N, int T) {
    __shared__ float part[32];
    float held[64];
    int row = blockIdx.x, lane = threadIdx.x;
    float total = 0.0f;
    for (int i = 0; i < 64; i++)
        held[i] = i;
    for (int t = lane; t < T; t += 32) {
        float value = x[row * T + t];
        for (int i = 0; i < 64; i++)
            held[i] = held[i] * value + value;  // spill
    }
    for (int t = lane; t < T; t += 32)
        total += x[row * T + t];
    float all = 0.0f;
    for (int i = 0; i < 64; i++)
        all += held[i];
    part[lane] = all == -1.0f ? all : total;
    __syncthreads();
    if (lane == 0) {
        for (int i = 1; i < 32; i++)
            total += part[i];
        z[row] = total;
    }
}
""")

variants = [
    clean,
    float_literal,
    variant(division, width=lambda size: size["T"]),
    variant(a_row_a_thread, grid=columns),
    banks,
    spilled,
]
