"""Twelve operations, each one idea further than the last: the exercises of the course.

The exercises are those of Triton-Puzzles (https://github.com/srush/Triton-Puzzles), which sizes,
names and order follow; each is stated for any shape. A size is a name in the annotations.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32

from lowbit.registry import Registry
from lowbit.spec import Array, Operation, Sizes, operation
from lowbit.spec.operation import next_power_of_2

exercises: Registry[Operation] = Registry("exercise")
"""By name, in the order of the course."""


def exercise(one: Operation) -> Operation:
    """Make an exercise known by its name."""
    return exercises.add(one.name, one)


_WORD = 8
"""Nibbles in an int32, the lowest first."""


def _all_of_n0(sizes: Sizes) -> int:
    return next_power_of_2(sizes["N0"])


def _all_of_n1(sizes: Sizes) -> int:
    return next_power_of_2(sizes["N1"])


@exercise
@operation(exercise={"N0": 32}, blocks={"B0": _all_of_n0}, special=True)
def add_constant(x: Float32[np.ndarray, "N0"]) -> Float32[np.ndarray, "N0"]:
    """z_i = x_i + 10, by one program."""
    return x + 10


@exercise
@operation(exercise={"N0": 200}, blocks={"B0": 32}, special=True)
def add_constant_blocks(x: Float32[np.ndarray, "N0"]) -> Float32[np.ndarray, "N0"]:
    """z_i = x_i + 10, a block to each program; the last block is ragged."""
    return x + 10


@exercise
@operation(exercise={"N0": 32, "N1": 32}, blocks={"B0": _all_of_n0, "B1": _all_of_n1}, special=True)
def outer_add(
    x: Float32[np.ndarray, "N0"], y: Float32[np.ndarray, "N1"]
) -> Float32[np.ndarray, "N1 N0"]:
    """z_ji = x_i + y_j, by one program."""
    return x[None, :] + y[:, None]


@exercise
@operation(exercise={"N0": 100, "N1": 90}, blocks={"B0": 32, "B1": 32}, special=True)
def outer_add_blocks(
    x: Float32[np.ndarray, "N0"], y: Float32[np.ndarray, "N1"]
) -> Float32[np.ndarray, "N1 N0"]:
    """z_ji = x_i + y_j, a block of two dimensions to each program."""
    return x[None, :] + y[:, None]


@exercise
@operation(exercise={"N0": 100, "N1": 90}, blocks={"B0": 32, "B1": 32})
def outer_mul_relu(
    x: Float32[np.ndarray, "N0"], y: Float32[np.ndarray, "N1"]
) -> Float32[np.ndarray, "N1 N0"]:
    """z_ji = relu(x_i · y_j), where relu(a) is a if a is positive, else 0."""
    product = x[None, :] * y[:, None]
    return np.where(product > 0, product, 0)


@exercise
@operation(exercise={"N0": 100, "N1": 90}, blocks={"B0": 32, "B1": 32}, result="dx")
def mul_relu_backward(
    x: Float32[np.ndarray, "N1 N0"], y: Float32[np.ndarray, "N1"], dz: Float32[np.ndarray, "N1 N0"]
) -> Float32[np.ndarray, "N1 N0"]:
    """dx_ji = dz_ji · y_j where x_ji · y_j > 0, else 0: the backward of z_ji = relu(x_ji · y_j)."""
    # The sign of the product, not the product: that can underflow to a zero that is none.
    positive = np.sign(x) * np.sign(y)[:, None] > 0
    return np.where(positive, dz * y[:, None], 0)


@exercise
@operation(exercise={"N0": 4, "T": 200}, summed=("T",), blocks={"B0": 1, "B1": 32})
def long_sum(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0"]:
    """z_i = Σ_j x_ij, a block of T at a time."""
    return x.sum(axis=1)


@exercise
@operation(exercise={"N0": 4, "T": 200}, summed=("T",), blocks={"B0": 1, "B1": 32})
def long_softmax(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0 T"]:
    """z_ij = exp(x_ij) / Σ_k exp(x_ik), for rows of any magnitude."""
    shifted = np.exp(x - x.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@exercise
@operation(exercise={"N0": 200, "T": 200}, summed=("T",), blocks={"B0": 32, "B1": 32})
def flash_attention(
    q: Float32[np.ndarray, "N0"], k: Float32[np.ndarray, "T"], v: Float32[np.ndarray, "T"]
) -> Float32[np.ndarray, "N0"]:
    """z_i = Σ_j softmax_j(q_i · k_j) · v_j, in one loop over j."""
    scores = q[:, None] * k[None, :]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights @ v) / weights.sum(axis=1)


@exercise
@operation(
    exercise={"N0": 4, "H": 8, "W": 8, "KH": 4, "KW": 4},
    summed=("KH", "KW"),
    blocks={"B0": 1, "B1": 16},
)
def conv2d(
    x: Float32[np.ndarray, "N0 H W"], k: Float32[np.ndarray, "KH KW"]
) -> Float32[np.ndarray, "N0 H W"]:
    """z_bij = Σ_uv k_uv · x_b,i+u,j+v, with zeros past the lower and the right edge."""
    height, width = x.shape[1:]
    padded = np.pad(x, ((0, 0), (0, k.shape[0] - 1), (0, k.shape[1] - 1)))
    total = np.zeros(x.shape)
    for (u, v), weight in np.ndenumerate(k):
        total += weight * padded[:, u : u + height, v : v + width]
    return total


@exercise
@operation(
    exercise={"N2": 4, "N0": 32, "MID": 32, "N1": 32},
    summed=("MID",),
    blocks={"B0": 16, "B1": 16, "B2": 1, "B_MID": 16},
)
def batched_matmul(
    x: Float32[np.ndarray, "N2 N0 MID"], y: Float32[np.ndarray, "N2 MID N1"]
) -> Float32[np.ndarray, "N2 N0 N1"]:
    """z_b = x_b @ y_b."""
    return x @ y


@exercise
@operation(
    exercise={"N0": 32, "MID": 64, "N1": 32},
    summed=("MID",),
    multiple_of={"MID": 64},
    blocks={"B0": 16, "B1": 16, "B_MID": 64},
)
def quantized_matmul(
    scale: Float32[np.ndarray, "N0 MID//8"],
    offset: Int32[np.ndarray, "N0 MID//64"],
    weight: Int32[np.ndarray, "N0 MID//8"],
    activation: Float32[np.ndarray, "MID N1"],
) -> Float32[np.ndarray, "N0 N1"]:
    """z = (scale · (nibble(weight) − nibble(offset))) @ activation.

    A word of `weight` holds a group of 8 values of 0 to 15, the lowest bits first; each group has
    a scale, and an offset that is a nibble of a word of `offset`.
    """
    values = _nibbles(weight) - np.repeat(_nibbles(offset), _WORD, axis=1)
    return (np.repeat(scale, _WORD, axis=1) * values) @ activation


def _nibbles(words: Array) -> Array:
    """int32 [N, C] -> its nibbles [N, 8·C]."""
    shifts = 4 * np.arange(_WORD)
    return (words[:, :, None] >> shifts & 15).reshape(len(words), -1)
