"""What lowbit does with arrays, in NumPy and in PyTorch, as a type checker reads it.

Run:  python examples/arrays.py

Integer products are exact; floats are quantized on the way; vectors are searched; images are
convolved. Each result is compared with what float64 says, and the largest difference is printed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import lowbit

Floats = npt.NDArray[np.float32]


def integers(rng: np.random.Generator) -> None:
    """Products of 8-bit integers: exact, and the same with a packed operand."""
    a = rng.integers(0, 256, (64, 500), dtype=np.uint8)
    b = rng.integers(-128, 128, (500, 96), dtype=np.int8)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    product = lowbit.matmul(a, b)
    packed = lowbit.pack(b)
    print("exact:", np.array_equal(product, exact))
    print("packed:", np.array_equal(lowbit.matmul(a, packed, out=product), exact))


def layer(rng: np.random.Generator, bits: int) -> None:
    """A linear layer of floats with a weight of 8 bits, or of 4 in groups of 32."""
    x: Floats = rng.standard_normal((64, 512), dtype=np.float32)
    w: Floats = rng.standard_normal((512, 96), dtype=np.float32)
    bias = np.ones(96, np.float32)
    if bits == 8:
        weight = lowbit.pack(lowbit.quantize(w, "int8", axis=1))
        y = lowbit.linear_dynamic(x, weight, bias, post_ops=("bias", "relu"))
    else:
        groups = lowbit.quantize(
            w, "int4", axis=1, group_size=32, group_axis=0, symmetric=False, range="mse"
        )
        y = lowbit.linear_weight_only(x, lowbit.pack(groups), bias, post_ops=("bias", "relu"))
    exact = np.maximum(x.astype(np.float64) @ w + 1, 0)
    print(
        f"layer of {bits} bits: off by {np.abs(y - exact).max() / exact.max():.2%} of the largest"
    )


def images(rng: np.random.Generator) -> None:
    """A convolution of 8-bit images, channels last."""
    x = rng.integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    w = rng.integers(-128, 128, (4, 3, 3, 3), dtype=np.int8)
    sums = lowbit.convolution(x, lowbit.pack_convolution(w), padding=1)
    middle = int((x[0, 3:6, 3:6].astype(np.int64).transpose(2, 0, 1) * w[0]).sum())
    print("convolution:", sums.shape, sums[0, 4, 4, 0] == middle)


def search(rng: np.random.Generator) -> None:
    """The nearest of vectors of 4 bits, ranked by the originals."""
    vectors: Floats = rng.standard_normal((2000, 96), dtype=np.float32)
    index = lowbit.VectorIndex(96, bits=4, metric="cosine")
    index.add(vectors)
    _, ids = index.search(vectors[:5], 1, rescore=vectors)
    print("each finds itself:", ids[:, 0].tolist())


def tensors() -> None:
    """The same functions on tensors, which give tensors."""
    import torch

    a = torch.randint(-128, 128, (3, 40), dtype=torch.int8)
    product = lowbit.matmul(a, a.T)
    print(type(product).__name__, product.dtype, bool((product == product.T).all()))


def main() -> None:
    """Everything, with the same data each time."""
    rng = np.random.default_rng(0)
    integers(rng)
    layer(rng, 8)
    layer(rng, 4)
    images(rng)
    search(rng)
    tensors()


if __name__ == "__main__":
    main()
