"""What a file of `lowbit.torch.save` says about its tensors, and under which keys they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit.torch.config import QuantizeConfig, config_from_json
from lowbit.torch.weight import Facts
from lowbit.weights.format import WeightFormat
from lowbit.weights.tensor_file import DTYPES, StoredTensor, TensorFile

FILE = TensorFile("lowbit.torch", "model of lowbit.torch.save", "4", older=("1", "2", "3"))
TORCH = {code: found for code, n in DTYPES.items() if (found := getattr(torch, n, None))}
CODES = {dtype: code for code, dtype in TORCH.items()}
"""PyTorch's dtypes by the format's names, and the other way round."""


def stored_tensor(tensor: Tensor) -> StoredTensor:
    """A plain tensor of one of these dtypes, copied where it does not lie so on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return StoredTensor(CODES[tensor.dtype], tuple(tensor.shape), data)


@dataclass(frozen=True)
class StoredWeight:
    """What a file says of a quantized weight; `dtype` is what it showed."""

    config: QuantizeConfig
    format: WeightFormat
    transposed: bool = False
    dtype: torch.dtype = torch.float32

    def facts(self, shape: tuple[int, ...], dtype: torch.dtype, packing: str) -> Facts:
        """Of a weight that shows itself with this shape and dtype."""
        rows, depth = shape[::-1] if self.transposed else shape
        return Facts(rows, depth, dtype, self.format, packing, self.config, self.transposed)


@dataclass(frozen=True)
class Header:
    """weights: by key. shared: keys whose tensor is stored under another, and that one. buffers:
    those that belong to no state_dict."""

    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()

    def source(self, key: str) -> str:
        """The key under which a key's tensor is stored."""
        return self.shared.get(key, key)

    def parts(self) -> dict[str, tuple[str, str]]:
        """Of all tensors that are part of a quantized weight, by their keys: the weight's key, and
        the name of the part."""
        return {
            part_key(key, part): (key, part)
            for key, one in self.weights.items()
            if key not in self.shared
            for part in one.format.parts
        }

    def metadata(self) -> dict[str, str]:
        """As texts, for the file."""
        layers = {key: json.loads(one.config.to_json()) for key, one in self.weights.items()}
        own = {
            key: {
                "embedding": one.format != one.config.weight_format,
                "transposed": one.transposed,
                "dtype": CODES[one.dtype],
            }
            for key, one in self.weights.items()
        }
        texts = {"layers": layers, "weights": own, "shared": self.shared, "buffers": self.buffers}
        return {name: json.dumps(one) for name, one in texts.items()}


def read_header(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> Header:
    """What the metadata of a file say. ValueError, naming it, if they are damaged."""
    try:
        layers, shared = json.loads(metadata["layers"]), json.loads(metadata["shared"])
        own = json.loads(metadata.get("weights", "{}"))
        buffers = tuple(json.loads(metadata.get("buffers", "[]")))
        weights = {
            key: _stored_weight(config_from_json(json.dumps(config)), own.get(key))
            for key, config in layers.items()
        }
        if not all(isinstance(key, str) for key in (*shared.values(), *buffers)):
            raise TypeError("'shared' does not map keys to keys")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} has damaged metadata: {error!r}") from None
    return Header(weights, shared, buffers)


def _stored_weight(config: QuantizeConfig, own: Any) -> StoredWeight:
    if own is None:  # before version 4 there were linear layers only
        return StoredWeight(config, config.weight_format)
    format = config.embedding_format if own["embedding"] else config.weight_format
    if format is None:
        raise ValueError(f"{config} leaves embeddings in float")
    return StoredWeight(config, format, bool(own["transposed"]), TORCH[own["dtype"]])


def part_key(weight_key: str, part: str) -> str:
    """The key of a part of a quantized weight."""
    # Cannot clash: a module cannot have a parameter and a submodule, both called "weight".
    return weight_key if part == "values" else f"{weight_key}.{part}"
