"""Operators on the bits of integers, of any size."""

from __future__ import annotations

from functools import partial

from lowbit.graph.graph import Node
from lowbit.graph.lower import Lowering, itemsize, lowerings
from lowbit.graph.lowering.elementwise import add, broadcast
from lowbit.kernels.cpu.tensors.elementwise import Step, plan_elementwise


def _bits(expression: tuple[Step, ...], lowering: Lowering, node: Node) -> None:
    inputs = [lowering.view(name) for name in node.inputs]
    out = lowering.output(node.outputs[0])
    strides = [out.strides, *(broadcast(one, out.shape) for one in inputs)]
    raw = f"raw{itemsize(out.tensor)}"
    form = plan_elementwise([raw] * len(inputs), raw, expression, out.shape, strides)
    add(lowering, form, [out, *inputs], None)


for _name in ("And", "Or", "Xor"):
    lowerings.add(f"Bitwise{_name}", partial(_bits, (0, 1, f"bits_{_name.lower()}")))
lowerings.add("BitwiseNot", partial(_bits, (0, "bits_not")))
