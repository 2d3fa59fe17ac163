"""Float weights in files: safetensors of any writer, and PyTorch's own, of which nothing but
tensors is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowbit.torch.header import stored_tensor
from lowbit.torch.summary import some
from lowbit.weights.tensor_file import StoredTensor, TensorFile, read_tensors

FILE = TensorFile("lowbit-checkpoint", "file of float weights", "1")


def save(path: str | os.PathLike[str], state: Mapping[str, Tensor], made: str) -> None:
    """Write a state dict; `made` says how it was made. OSError if that fails."""
    tensors = {name: stored_tensor(tensor) for name, tensor in state.items()}
    FILE.write(path, {"made": made}, tensors)


def halved(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with matrices and filters in float16; vectors, as norms have them, stay as they
    are. A file of half the size."""
    return {
        name: tensor.half() if tensor.is_floating_point() and tensor.dim() > 1 else tensor
        for name, tensor in state.items()
    }


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors in a .safetensors file, or in a .pth or .pt file of a state dict.

    Floating-point ones become float32. FileNotFoundError if there is no such file, ValueError if
    it holds something else.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    if Path(path).suffix == ".safetensors":
        found = {name: _tensor(stored) for name, stored in read_tensors(path).items()}
    else:
        found = _unpickled(path)
    return {name: t.float() if t.is_floating_point() else t for name, t in found.items()}


def _tensor(stored: StoredTensor) -> Tensor:
    array = stored.numpy()
    return torch.from_numpy(array.astype(np.float32) if array.dtype.kind in "fV" else array.copy())


def _unpickled(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} cannot be read as tensors: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError(f"{os.fspath(path)} holds no state dict: tensors by name")
    return found


def load_into(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Give a network its weights. ValueError, with keys or shapes that differ, unless all fit.

    Counters of batches, which older checkpoints lack, may be missing.
    """
    own = network.state_dict()
    missing = [n for n in own if n not in state and not n.endswith(".num_batches_tracked")]
    unknown = [name for name in state if name not in own]
    shapes = [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", shapes))
    wrong = [f"{kind}: {some(names, 4)}" for kind, names in kinds if names]
    if wrong:
        raise ValueError(
            f"{source} is no checkpoint of {type(network).__name__}; {'; '.join(wrong)}"
        )
    network.load_state_dict(dict(state), strict=False)
