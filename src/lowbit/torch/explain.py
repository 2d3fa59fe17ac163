"""Which kernel serves an operator, how it is cut, and why."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lowbit.kernels.triton import require_triton
from lowbit.kernels.triton.fast.launch import Choice, Gpu, choices, gpu_of


def explain(
    operator: str,
    *,
    device: torch.device | str | Gpu = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    **sizes: Any,
) -> Choice[Any]:
    """Which kernel serves an operator of `lowbit.torch.functional`, how it is cut, and why others
    do not; as text, by `str`.

    operator: its name, "softmax", or that of its backward, "softmax_backward". device: where the
    tensors are; a Gpu(capability, multiprocessors) of one that is not here. sizes: what decides, by
    name, such as `length` of rows; those that do not may be given too. Of "linear": M, N, K, the
    weight's `integers` and `group_size`, and `activations`, as a configuration has them.

    ValueError for an unknown operator, with the known ones, for a size that is missing, and where
    no kernel can serve; RuntimeError for a GPU that PyTorch does not find; ModuleNotFoundError
    without Triton.
    """
    require_triton()
    choose = choices.get(operator)
    given = {**sizes, "itemsize": dtype.itemsize}
    given["gpu"] = gpu = device if isinstance(device, Gpu) else gpu_of(torch.device(device))
    wanted = inspect.signature(choose).parameters
    missing = [n for n, p in wanted.items() if n not in given and p.default is p.empty]
    if missing:
        raise ValueError(f"{operator} is chosen by {', '.join(missing)} too; give numbers for it")
    choice = choose(**{name: given[name] for name in wanted if name in given})
    if gpu.capability or operator == "linear":  # which has kernels for CPUs
        return choice
    here = "the tensors are on the CPU; within lowbit.lab.interpreter() it runs there too"
    refused = (*choice.refused, (choice.kernel, here))
    return Choice("PyTorch in float64", None, "serves CPU tensors", refused)
