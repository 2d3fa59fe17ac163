"""What computes operations on a CPU: lowbit's functions on NumPy arrays, and the steps.

Each is called with a case of its operation and the inputs of that case, and returns the result;
`lowbit check cpu` checks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import lowbit
from lowbit.kernels.steps.registry import ON_CPU, Step, steps
from lowbit.numerics import QTensor, int_format
from lowbit.registry import Registry
from lowbit.spec import Array, Case, Operation
from lowbit.spec.operations import operations


@dataclass(frozen=True)
class CpuFunction:
    """Something that computes an operation.

    call: (case, inputs, out=, isa=, threads=), which returns `out`, filled. compiled: whether it
    exists for each instruction set; else it takes neither `isa` nor `threads`. same_bits: whether
    the result is the same on every set, as it is for any number of threads.
    """

    name: str
    operation: Operation
    call: Callable[..., Array]
    compiled: bool = True
    same_bits: bool = True

    def __call__(self, case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
        return self.call(case, inputs, **how)


cpu_functions: Registry[CpuFunction] = Registry("function on a CPU")


def _computes(
    *names: str, same_bits: bool = True
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Register what computes the operations of these names."""

    def register(call: Callable[..., Array]) -> Callable[..., Array]:
        for name in names:
            cpu_functions.add(
                name, CpuFunction(name, operations.get(name), call, same_bits=same_bits)
            )
        return call

    return register


@_computes("matmul")
def _matmul(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    return lowbit.matmul(inputs["a"], weight(case, inputs), **how)


@_computes("matmul_scaled")
def _matmul_scaled(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    if "out_scale" in inputs:
        how["out_scale"] = float(inputs["out_scale"])
        how["out_zero_point"] = int(inputs["out_zero_point"])
    how |= {name: inputs.get(name) for name in ("a_scale", "a_zero_point")}
    how |= {"out_dtype": case.dtype("c").name, **_post_ops(case, inputs)}
    return lowbit.matmul_scaled(inputs["a"], weight(case, inputs), **how)


@_computes("linear_dynamic", "linear_groups")
def _linear_dynamic(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"symmetric": case.static["symmetric"], **_post_ops(case, inputs)}
    return lowbit.linear_dynamic(_rows(inputs["x"]), weight(case, inputs), **how)


@_computes("linear_weight_only")
def _linear_weight_only(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"out_dtype": case.dtype("c").name, **_post_ops(case, inputs)}
    return lowbit.linear_weight_only(_rows(inputs["x"]), weight(case, inputs), **how)


@_computes("gemm", same_bits=False)
def _gemm(case: Case, inputs: Mapping[str, Array], **how: Any) -> Array:
    how |= {"alpha": case.static["alpha"], "out_dtype": case.dtype("out").name}
    if "c" in inputs:
        how |= {"c": inputs["c"], "beta": case.static["beta"]}
    return lowbit.gemm(inputs["a"], inputs["b"], **how)


def step_functions() -> dict[str, CpuFunction]:
    """The steps on a CPU that every processor can run. ModuleNotFoundError if Numba is not
    installed."""

    def function(step: Step) -> CpuFunction:
        def call(case: Case, inputs: Mapping[str, Array], out: Array, **how: Any) -> Array:
            a, b = inputs["a"], inputs["b"]
            arranged = (a, b) if step.layout.stated else step.layout.arrange(a, b)
            step.run(*arranged, out, how.get("isa"))
            return out

        operation, bits = step.layout.operation, step.ladder != "cpu-float32"
        return CpuFunction(step.name, operation, call, bool(step.isas), same_bits=bits)

    every = (one for ladder in ON_CPU for one in steps(ladder))
    return {one.name: function(one) for one in every if not one.isas or "generic" in one.isas}


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
    return {**used, "post_ops": steps}
