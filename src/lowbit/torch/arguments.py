"""Checks that several operators share; each raises with what was given and what to give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def names(dtypes: Sequence[torch.dtype]) -> str:
    """For messages: "float32, bfloat16 or float16"."""
    words = [str(one).removeprefix("torch.") for one in dtypes]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def check_tensor(op: str, name: str, value: Tensor, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """TypeError unless it is a tensor of one of these dtypes; ValueError unless on GPU or CPU."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; give a torch.Tensor")
    if value.dtype not in dtypes:
        got = str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {got}; give {names(dtypes)}")
    if value.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{op}: {name} is on {value.device}; move it to a CUDA GPU or the CPU")


def check_batches(name: str, given: object) -> None:
    """TypeError for one batch in place of several: its rows are not what a model takes."""
    if isinstance(given, Tensor | Mapping | str):
        raise TypeError(
            f"{name} is a {type(given).__name__}; give batches, one after another: [batch, ...]"
        )


def check_alike(op: str, **tensors: Tensor) -> None:
    """ValueError unless all are on one device, TypeError unless all have one dtype."""
    (first, one), *rest = tensors.items()
    for name, other in rest:
        if other.device != one.device:
            raise ValueError(
                f"{op}: {first} is on {one.device} and {name} on {other.device}; move them to one"
            )
        if other.dtype is not one.dtype:
            raise TypeError(
                f"{op}: {first} is {one.dtype} and {name} {other.dtype}; convert one of them"
            )


def check_shape(op: str, name: str, value: Tensor, shape: Sequence[int]) -> None:
    """ValueError unless it has this shape."""
    if list(value.shape) != list(shape):
        raise ValueError(
            f"{op}: {name} has the shape {list(value.shape)}; it must be {list(shape)}"
        )


def check_rows(op: str, x: Tensor) -> None:
    """ValueError unless x has rows, of one element at least."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: x has the shape {list(x.shape)}; it must be [..., length], length 1 or more"
        )
