"""The same on the GPU: the same inputs, with a guard zone around every tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowbit.spec import Array
from lowbit_lab.backends.backend import Subject
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import Run, Trial
from lowbit_lab.run.tensor import CheckedTensor, array_of, tensor_of, unwritten

_GUARD = 4096
_PATTERN = 0x5A


def wanted(device: str | None, subject: Subject) -> bool:
    """Whether to run on the GPU. ValueError or RuntimeError if that is asked for in vain."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device is {device!r}; it must be cpu or cuda")
    if not subject.on_gpu and device == "cuda":
        raise ValueError("only Triton kernels are run on the GPU; check this one with device cpu")
    if device == "cpu" or not subject.on_gpu:
        return False
    try:
        import torch

        available = torch.cuda.is_available()
    except ModuleNotFoundError:
        available = False
    if device == "cuda" and not available:
        raise RuntimeError("there is no GPU that PyTorch can use; check with device cpu")
    return available


def run_on_gpu(subject: Subject, trial: Trial) -> Run:
    """Run it on the GPU. The memory knows of bytes that were changed around or between the elements
    of a tensor, and of nothing else."""
    import torch

    sizes, fresh = trial.case.sizes, subject.tensors(trial)
    memory = Memory(fresh)
    held = {tensor.name: _guarded(tensor) for tensor in fresh}
    output = unwritten(subject.operation.result, sizes)
    try:
        result = subject.start(sizes, {one.name: _view(held[one.name], one) for one in fresh})
        torch.cuda.synchronize()
    except Exception as error:  # what Triton's compiler or the driver raises has no common kind
        text = str(error).strip().splitlines() or ["without a message"]
        crash = Finding("crash", f"{type(error).__name__}: {text[0]}", device="cuda")
        return Run(trial, memory, output, crash, False)
    for tensor in fresh:
        if _overwritten(held[tensor.name].cpu().numpy(), tensor):
            message = f"bytes around or between the elements of {tensor.name} were changed"
            memory.note(Finding("guard-overwritten", message, tensor=tensor.name, device="cuda"))
    output = tensor_of(output.type, array_of(result), "contiguous", "output")
    return Run(trial, memory, output, None, False)


def _guarded(tensor: CheckedTensor) -> Any:
    import torch

    whole = np.full(2 * _GUARD + tensor.storage.size, _PATTERN, np.uint8)
    whole[_GUARD : _GUARD + tensor.storage.size] = tensor.storage
    return torch.from_numpy(whole).cuda()


def _view(held: Any, tensor: CheckedTensor) -> Any:
    import torch

    dtype = getattr(torch, tensor.type.dtype)
    inside = held[_GUARD : _GUARD + tensor.storage.size].view(dtype)
    return torch.as_strided(inside, tensor.shape, tensor.strides)


def _overwritten(after: Array, tensor: CheckedTensor) -> bool:
    """Whether a byte changed that is no element's."""
    size = tensor.storage.size
    gaps = tensor.elements.owner < 0
    inside = after[_GUARD : _GUARD + size]
    around = np.concatenate([after[:_GUARD], after[_GUARD + size :]])
    return bool((around != _PATTERN).any() or (inside[gaps] != tensor.storage[gaps]).any())
