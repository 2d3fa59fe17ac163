"""Networks as data, run without PyTorch.

    graph = lowbit.graph.load("model.safetensors")     or from_onnx("model.onnx")
    session = lowbit.graph.Session(graph)
    output = session(images)

lowbit.torch.compile and lowbit.torch.quantize_ make networks of PyTorch models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit.graph.files import load, save
from lowbit.graph.graph import Graph, Node, Tensor
from lowbit.graph.session import NodeTime, Session
from lowbit.registry.locks import importing

if TYPE_CHECKING:
    from lowbit.graph.onnx import from_onnx

__all__ = ["Graph", "Node", "NodeTime", "Session", "Tensor", "from_onnx", "load", "save"]


def __getattr__(name: str) -> Any:
    """What reads ONNX is imported when it is first used."""
    if name != "from_onnx":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        from lowbit.graph.onnx import from_onnx

    return from_onnx
