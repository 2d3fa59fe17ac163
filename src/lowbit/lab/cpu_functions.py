"""What computes the operations on a CPU: lowbit's functions on NumPy arrays, and Numba's kernels.

Each takes a case of its operation and the inputs of that case, and returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import lowbit
from lowbit.numerics import QTensor, int_format
from lowbit.registry import Registry
from lowbit.spec import Array, Case

CpuFunction = Callable[..., Array]
"""(case, inputs, isa=, threads=): the result."""

cpu_functions: Registry[CpuFunction] = Registry("operation on a CPU")
"""By the name of the operation in `lowbit.spec.operations`."""


@cpu_functions.register("matmul")
def matmul(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    """`lowbit.matmul`."""
    return lowbit.matmul(inputs["a"], weight(case, inputs), **how)


@cpu_functions.register("matmul_scaled")
def matmul_scaled(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    """`lowbit.matmul_scaled`."""
    out = case.dtype("c")
    if "out_scale" in inputs:
        how["out_scale"] = float(inputs["out_scale"])
        how["out_zero_point"] = int(inputs["out_zero_point"])
    given = {name: inputs.get(name) for name in ("a", "a_scale", "a_zero_point")}
    found = lowbit.matmul_scaled(
        b=weight(case, inputs), out_dtype=out.name, **given, **_post_ops(case, inputs), **how
    )
    return found.view(out.storage)


@cpu_functions.register("linear_dynamic")
@cpu_functions.register("linear_groups")
def linear_dynamic(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    """`lowbit.linear_dynamic`."""
    how |= {"symmetric": case.static["symmetric"], **_post_ops(case, inputs)}
    return lowbit.linear_dynamic(_rows(inputs["x"]), weight(case, inputs), **how)


@cpu_functions.register("linear_weight_only")
def linear_weight_only(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    """`lowbit.linear_weight_only`."""
    out = case.dtype("c")
    how |= {"out_dtype": out.name, **_post_ops(case, inputs)}
    found = lowbit.linear_weight_only(_rows(inputs["x"]), weight(case, inputs), **how)
    return found.view(out.storage)


@cpu_functions.register("gemm")
def gemm(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    """`lowbit.gemm`."""
    factors = {"alpha": case.static["alpha"], "out_dtype": case.dtype("out").name}
    if "c" in inputs:
        factors |= {"c": inputs["c"], "beta": case.static["beta"]}
    return lowbit.gemm(inputs["a"], inputs["b"], **factors, **how)


def weight(case: Case, inputs: Mapping[str, Array]) -> Any:
    """The right operand b of a case as lowbit takes it: packed, with its scales if it has any."""
    b, fmt = inputs["b"], int_format(case.dtype("b").name)
    scale = inputs.get("b_scale")
    if scale is None:
        return lowbit.pack(b, dtype=fmt.name) if fmt.bits == 4 else b
    zero = inputs.get("b_zero_point", np.zeros(scale.shape, np.int32))
    groups: dict[str, int] = {}
    if b.ndim == 3:
        groups = {"group_size": b.shape[1], "group_axis": 0}
    return lowbit.pack(QTensor(b.reshape(-1, b.shape[-1]), scale, zero, fmt, axis=1, **groups))


def _rows(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _post_ops(case: Case, inputs: Mapping[str, Array]) -> dict[str, Any]:
    """What follows a product: the operands that there are and that take part, and the order."""
    order = case.static["post_ops"]
    operands = {name: inputs[name] for name in ("bias", "residual") if name in inputs}
    if order is None:
        return operands
    kept = [s for s in order if s in operands or s not in ("bias", "residual")]
    steps = tuple(s if isinstance(s, str) else lowbit.Clamp(*s) for s in kept)
    used = {name: operand for name, operand in operands.items() if name in steps}
    return {**used, "steps": steps}
