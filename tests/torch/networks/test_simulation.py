"""Kernels and simulation of quantized networks: each node alone, from the same integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from torch import nn

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.passes.infer import facts
from lowbit.graph.session import Session
from lowbit.isa import available
from lowbit.torch import StaticInt8Config, quantize_

Array = np.ndarray[Any, Any]
SETS = [name for name in (available()[0], "avx2") if name in available()]


def alone(
    node: Node, tensors: Mapping[str, Tensor], constants: Mapping[str, Any], seen: dict[str, Array]
) -> Any:
    """A network of one node, and what it reads of the whole one."""
    read = [name for name in dict.fromkeys(node.inputs) if name in seen]
    held = {name: one for name, one in constants.items() if name in node.inputs}
    made = tuple(filter(None, node.outputs))
    kinds = {name: tensors[name] for name in (*read, *made)}
    return Graph(tuple(read), made, (node,), held, kinds), {name: seen[name] for name in read}


def wrong(got: Array, want: Array, tensor: Tensor) -> str:
    """What is wrong with a node's output; "" if nothing is."""
    if got.shape != want.shape or want.dtype.kind != "f":
        return "" if np.array_equal(got, want) else "differs"
    far = np.abs(got.astype(np.float64) - want)
    if tensor.scale is None:
        worst = far.max(initial=0) / max(float(np.abs(want).max(initial=0)), 1e-6)
        return f"off by {worst:.1e} of the greatest" if worst > 1e-5 else ""
    steps = np.rint(far / tensor.scale)  # a sum next to a half may be rounded to either side
    few = max(2, want.size // 10)
    bad = steps.max(initial=0) > 1 or np.count_nonzero(steps) > few
    return f"{np.count_nonzero(steps)} of {want.size} differ, {steps.max()} steps" if bad else ""


@pytest.mark.deep
@pytest.mark.parametrize(("name", "linear"), [
    ("mobile", "static"), ("unet", "dynamic"),
])  # fmt: skip
def test_each_node_is_its_simulation_to_a_quantum(
    build: Callable[[str], tuple[nn.Module, Callable[[int], Any]]], name: str, linear: Any
) -> None:
    model, inputs = build(name)
    made: Any = quantize_(model, StaticInt8Config(linear=linear), calibration=[inputs(4)])
    (x,) = inputs(3)
    graph = made.graph.bound({"batch": 3})
    tensors, known = facts(graph)
    seen: dict[str, Array] = {}
    evaluate(graph, {graph.inputs[0]: x.numpy()}, seen.__setitem__)
    seen = {value: one for value, one in seen.items() if value not in known}
    for node in graph.nodes:
        one, given = alone(node, tensors, {**graph.constants, **known}, seen)
        if not given or node.outputs[0] in known:
            continue
        want = evaluate(one, given)
        for isa in SETS:
            got = Session(one, threads=2, isa=isa).run(**given)
            bad = {key: wrong(got[key], want[key], tensors[key]) for key in want}
            assert not any(bad.values()), (node.op, node.name, isa, bad)
