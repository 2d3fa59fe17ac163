"""A Numba kernel whose threads meet in a shared array, as the text of a file."""

BARRIER = """
from numba import cuda, float32
from jaxtyping import Float32
import numpy as np

def spec(x: Float32[np.ndarray, "N0"]) -> Float32[np.ndarray, "N0"]:
    padded = np.pad(x, (0, -len(x) % 8))
    return padded.reshape(-1, 8)[:, ::-1].reshape(-1)[: len(x)] * 1.0

@cuda.jit
def reverse(x, z, N0):
    tile = cuda.shared.array(8, float32)
    t = cuda.threadIdx.x
    i = cuda.grid(1)
    tile[t] = x[i] if i < N0 else 0.0
    {barrier}
    if i < N0:
        z[i] = tile[7 - t]

def grid(meta):
    return -(-meta["N0"] // 8)

constants = {{"threads": 8}}
"""
