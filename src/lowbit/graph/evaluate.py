"""What a graph means, computed by NumPy: slow, and the definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from ml_dtypes import bfloat16

from lowbit.graph.graph import Graph, Tensor, numbers
from lowbit.graph.operator import Array, finite, operators
from lowbit.numerics import dequantize_affine, int_format, quantize_affine

Watch = Callable[[str, Array], None]
Compute = Callable[..., tuple[Array, ...]]
"""As `Operator.compute`, of one operator."""


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Array],
    watch: Watch | None = None,
    compute: Mapping[str, Compute] | None = None,
) -> dict[str, Array]:
    """The outputs by name, as numbers: those with scales are what their integers stand for.

    watch: is given every value, by name, as the nodes that read it see it. compute: by operator,
    what takes the place of its definition, to be faster.
    """
    values: dict[str, Array | None] = {"": None}
    left = graph.uses()
    faster = compute or {}

    def keep(name: str, value: Array) -> None:
        values[name] = value = rounded(value, graph.tensors.get(name))
        if watch is not None:
            watch(name, value)

    for name in graph.inputs:
        keep(name, np.asarray(inputs[name]))
    for name, constant in graph.constants.items():
        values[name] = numbers(constant)
    for node in graph.nodes:
        function = faster.get(node.op) or operators.get(node.op).compute
        made = function(node, *(values[name] for name in node.inputs))
        for name, value in zip(node.outputs, made, strict=False):
            if name:
                keep(name, value)
        for name in filter(None, node.inputs):
            left[name] -= 1
            if not left[name]:
                del values[name]
    return {name: value for name in graph.outputs if (value := values[name]) is not None}


def rounded(value: Array, tensor: Tensor | None) -> Array:
    """The numbers that are left of a value which is kept as `tensor` says."""
    if tensor is None:
        return value
    if tensor.scale is None:
        if value.dtype.name == tensor.dtype:
            return value
        narrow = value.astype(tensor.dtype)
        return narrow.astype(np.float32) if narrow.dtype == bfloat16 else narrow
    scale, zero = np.float32(tensor.scale), np.int32(tensor.zero_point)
    stored = quantize_affine(finite(value), scale, zero, int_format(tensor.dtype))
    return dequantize_affine(stored, scale, zero)
