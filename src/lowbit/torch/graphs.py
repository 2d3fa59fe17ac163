"""Calls that a GPU repeats without Python: CUDA graphs, one for each shape of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    given: Tensor
    result: Tensor


class CapturedCalls:
    """A function of a tensor, on a device: on CUDA captured at the first call with a shape, and
    replayed at others; elsewhere called.

    The function must do the same to the same memory in each call, and wait for nothing: what it
    does at a first call is done twice. Results lie in memory that the next call with that shape
    writes anew. Not for several threads at once.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._function, self._device = function, device
        self._graphs: dict[torch.Size, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __call__(self, given: Tensor) -> Tensor:
        """given: in the host's memory, or on the device."""
        if self._pool is None:
            return self._function(given)
        known = self._graphs.get(given.shape)
        if known is None:
            with torch.cuda.device(self._device):
                known = self._graphs[given.shape] = self._captured(given)
        known.given.copy_(given, non_blocking=True)
        known.graph.replay()
        return known.result

    def _captured(self, given: Tensor) -> _Graph:
        given = given.to(self._device, copy=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function(given)  # compiles kernels and takes workspaces
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._function(given)
        return _Graph(graph, given, result)


def on_host(x: Tensor) -> npt.NDArray[Any]:
    """A tensor as an array, when the device has computed it. It lies in pages that the device
    writes to, and that PyTorch keeps for the next one: copying it otherwise takes longer than a
    step where there are many logits."""
    if x.device.type != "cuda":
        return x.numpy()
    made = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    made.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return made.numpy()
