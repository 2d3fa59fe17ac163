"""`CompiledModule`: a whole network that lowbit runs, called like the model it was made from."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Graph
from lowbit.graph.operator import Array
from lowbit.graph.passes import simplified
from lowbit.graph.passes.quantize import Decision
from lowbit.graph.session import Session
from lowbit.torch.capture.compute import COMPUTE
from lowbit.torch.capture.export import Captured, capture

_log = logging.getLogger(__name__)
_OWN = {"graph", "report", "session", "_call", "_missing"}


class CompiledModule(nn.Module):
    """A network as one call. `lowbit.torch.compile` and `quantize_` make it.

    It takes and gives what the model did that it was made from: CPU tensors, nested in the same
    way; what was no tensor in the example (a flag, None) has to be the same again. It has no
    parameters, no derivative, and no other mode than eval. A network with operators that no kernel
    serves runs node by node in Python, which is slow; a warning in the log names them.

    - graph: the network. report: what became of each product, and why. session: what runs it; a
      call takes as many threads as PyTorch may use.
    """

    graph: Graph
    report: tuple[Decision, ...]
    session: Session
    _call: Captured
    _missing: str  # why no kernels run it; "" as long as they do

    def __init__(self, captured: Captured, graph: Graph, report: Sequence[Decision] = ()) -> None:
        super().__init__()
        become_compiled(self, captured, graph, report)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arrays = arrays_of(self._call, args, kwargs)
        return results_of(self._call, self._run(arrays))

    def _run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if not self._missing:
            try:
                return self.session.run(**arrays)
            except NotImplementedError as error:
                self._missing = str(error)
                _log.warning("%s runs in Python, which is slow: %s", self.graph.name, error)
        return evaluate(self.graph, arrays, compute=COMPUTE)

    def __reduce__(self) -> tuple[Any, ...]:
        others = {name: one for name, one in vars(self).items() if name not in _OWN}
        return CompiledModule, (self._call, self.graph, self.report), others

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """A copy shares the graph, which never changes, and has its own hooks and attributes."""
        kind, fixed, others = self.__reduce__()
        memo[id(self)] = made = kind(*fixed)
        vars(made).update(deepcopy(others, memo))
        return made

    def extra_repr(self) -> str:
        kinds = [one.choice for one in self.report]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        products = f", products: {counts}" if counts else ""
        return f"{self.graph.name}, {len(self.graph.nodes)} nodes{products}"


def become_compiled(
    module: nn.Module, captured: Captured, graph: Graph, report: Sequence[Decision]
) -> CompiledModule:
    """Turn a module into a CompiledModule. The object stays the same, and with it hooks and every
    reference to it; its parameters, buffers and children are gone."""
    for held in (module._parameters, module._buffers, module._modules):
        held.clear()
    module.__class__ = CompiledModule
    assert isinstance(module, CompiledModule)
    module.training = False
    module.graph, module.report, module._call = graph, tuple(report), captured
    module.session, module._missing = Session(graph), ""
    return module


def compile(
    model: nn.Module, example: Any, *, batch: bool = True, dynamic_shapes: Any = None
) -> CompiledModule:
    """The model as a network that lowbit runs from its first layer to its last.

    The model's layers compute in what they are: float32, or, where `quantize_` was there before, in
    8 or 4 bits. It is left as it is, and shares nothing with the result. Arguments and errors are
    those of `to_graph`.
    """
    captured = capture(model, example, batch=batch, dynamic_shapes=dynamic_shapes)
    return CompiledModule(captured, simplified(captured.graph))


def arrays_of(call: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """The graph's inputs for a call of the model.

    TypeError or ValueError: the call is nested otherwise than the example, or what is no tensor
    differs, or a tensor is not on the CPU, of another dtype, or asks for a derivative."""
    bound = call.signature.bind(*args, **kwargs)
    leaves, nesting = pytree.tree_flatten((bound.args, bound.kwargs))
    if nesting != call.arguments:
        raise TypeError(
            f"this network was compiled for arguments nested as {call.arguments}, got {nesting}"
        )
    arrays = {}
    for name, fixed, leaf in zip(call.inputs, call.leaves, leaves, strict=True):
        if name:
            arrays[name] = _array(name, leaf, call.graph.tensors[name].dtype)
        elif leaf != fixed:
            raise ValueError(f"this network was compiled for {fixed!r}, got {leaf!r}: compile anew")
    return arrays


def _array(name: str, given: Any, dtype: str) -> Array:
    if not isinstance(given, Tensor):
        raise TypeError(f"the input {name!r} is a {type(given).__name__}; give a torch.Tensor")
    if given.device.type != "cpu":
        raise ValueError(f"the input {name!r} is on {given.device}; a network runs on the CPU")
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"the input {name!r} asks for a gradient, which a network does not have")
    if str(given.dtype) != f"torch.{dtype}":
        raise TypeError(f"the input {name!r} is {given.dtype}; give torch.{dtype}")
    return given.detach().contiguous().numpy()


def results_of(call: Captured, made: Mapping[str, Array]) -> Any:
    """What the model gives, for the graph's outputs."""
    leaves = [
        torch.from_numpy(np.require(made[one], requirements=["C", "W"]))
        if isinstance(one, str)
        else one
        for one in call.outputs
    ]
    return pytree.tree_unflatten(leaves, call.results)
