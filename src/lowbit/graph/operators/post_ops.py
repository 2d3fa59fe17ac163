"""What follows a product in its own node: the attribute `post_ops` of Conv, ConvTranspose, Linear.

It is a tuple of steps, each a tuple of a name and numbers, done in order on the product with its
bias: ("relu",), ("clamp", 0.0, 6.0), ("residual",), which adds the node's fourth input, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array
from lowbit.graph.operators.elementwise import gelu, gelu_tanh, hard_swish, sigmoid, silu

FUNCTIONS: dict[str, Callable[..., Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "clamp": lambda x, low, high: np.clip(x, low, high),
    "sigmoid": sigmoid,
    "silu": silu,
    "hardswish": hard_swish,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
}
"""Functions of float64 numbers."""


def finished(node: Node, value: Array, dtype: np.dtype[Any], residual: Array | None) -> Array:
    """A product with its bias, float64, rounded to `dtype`, after the node's post-operations.

    Each of these is computed in float64 and rounded to `dtype`, as nodes of their own would be.
    ValueError: a step is unknown, or its operand is missing or of another shape.
    """
    value = value.astype(dtype)
    for name, *numbers in node.get("post_ops", ()):
        if name == "residual":
            if residual is None or residual.shape != value.shape:
                shape = None if residual is None else residual.shape
                raise ValueError(f"expected a residual of shape {value.shape}, got {shape}")
            value = (value + residual).astype(dtype)
        elif name in FUNCTIONS:
            value = FUNCTIONS[name](value.astype(np.float64), *numbers).astype(dtype)
        else:
            raise ValueError(f"no post-operation is called {name!r}; known: {', '.join(FUNCTIONS)}")
    return value
