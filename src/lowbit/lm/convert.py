"""Language models in lowbit's own folders: config.json, safetensors, and what makes tokens of text.

Of a Hugging Face folder, names and config.json stay what they are. Of a GGUF file, tensors have
GGUF's names, config.json holds the `Description` under "lowbit_description" in place of what
transformers knows, and `GGUF_TOKENIZER` what the file says of its tokenizer. A quantized weight is
what weights/folder.py says, in the integers and scales that the file has: nothing is rounded.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.lm.checkpoint import (
    DESCRIPTION,
    Checkpoint,
    FolderCheckpoint,
    GgufCheckpoint,
    open_checkpoint,
)
from lowbit.lm.tokenizer import GGUF_TOKENIZER
from lowbit.numerics.methods import QuantizedWeight
from lowbit.registry.files import write_text
from lowbit.weights import folder
from lowbit.weights.tensor_file import StoredTensor, TensorFile

# transformers wants to read this in files of PyTorch's.
_FILE = TensorFile("pt", "file of a language model", "1")
_SHARD = 2 << 30  # bytes that are in memory before they are written
_OF_TOKENIZERS = ("*token*.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.*",
                  GGUF_TOKENIZER, "generation_config.json", "LICENSE*")  # fmt: skip


@dataclass(frozen=True)
class Written:
    """What became of a model: bytes of its files of weights before and after, how many weights are
    quantized, and elements that were rounded once more when they were read, by reason."""

    bytes_before: int
    bytes_after: int
    quantized: int
    notes: Mapping[str, int]


Tensor = QuantizedWeight | StoredTensor
Tensors = Iterator[tuple[str, Tensor, Any]]


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Written:
    """Write a model as a folder of lowbit's, which `LanguageModel.load` maps, with the same logits.

    source: a GGUF file, or a Hugging Face folder of floats or quantized. target: a folder, new or
    empty.

    FileExistsError: the target holds something. FileNotFoundError, ValueError, NotImplementedError:
    as of `LanguageModel.load`.
    """
    checkpoint = open_checkpoint(source)
    writer = Writer(target)
    for name, tensor, order in tensors_of(checkpoint):
        writer.add(name, tensor, order)
    return writer.finish(source, checkpoint, {})


class Writer:
    """A folder that is written a tensor at a time; without config.json until it is whole.

    FileExistsError: it is there and holds something."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._target = Path(target)
        self._target.mkdir(parents=True, exist_ok=True)
        if any(self._target.iterdir()):
            raise FileExistsError(errno.EEXIST, "it is to be a new or empty folder", str(target))
        self._pending: dict[str, StoredTensor] = {}
        self._files: dict[str, str] = {}  # of each tensor
        self._size = self._quantized = 0
        self._ordered = self._four_bits = False
        self._floats: list[str] = []  # matrices that stay so

    def add(self, name: str, tensor: Tensor, order: Any = None) -> None:
        """A tensor under its name, or a quantized weight [N, K] under that of its layer, with the
        `order` of its inputs, if its columns have one."""
        if isinstance(tensor, StoredTensor):
            parts = {name: tensor}
            if len(tensor.shape) == 2:
                self._floats.append(name.removesuffix(".weight"))
        else:
            arrays = folder.to_tensors(tensor)
            if order is not None:
                arrays[folder.ORDER], self._ordered = order.astype(np.int64), True
            parts = {f"{name}.{part}": StoredTensor.of(array) for part, array in arrays.items()}
            self._quantized += tensor.weight.values.size
            self._four_bits |= tensor.weight.format.bits == 4
        size = sum(part.data.nbytes for part in parts.values())
        if sum(part.data.nbytes for part in self._pending.values()) + size > _SHARD:
            self._flush()
        self._pending |= parts
        self._size += size

    def _flush(self, last: bool = False) -> None:
        count = len(set(self._files.values()))
        name = "model.safetensors" if last and not count else f"model-{count + 1:05}.safetensors"
        if self._pending:
            _FILE.write(self._target / name, {}, self._pending)
        self._files |= dict.fromkeys(self._pending, name)
        self._pending.clear()

    def finish(
        self, source: str | os.PathLike[str], checkpoint: Checkpoint, how: Mapping[str, Any]
    ) -> Written:
        """All but tensors; how: what config.json is to say of the weights besides."""
        self._flush(last=True)
        if len(set(self._files.values())) > 1:
            index = {"metadata": {"total_size": self._size}, "weight_map": self._files}
            self._json("model.safetensors.index.json", index)
        source = Path(source)
        if isinstance(checkpoint, FolderCheckpoint):
            config = dict(checkpoint.metadata)
            for pattern in _OF_TOKENIZERS:
                for file in source.glob(pattern):
                    shutil.copyfile(file, self._target / file.name)
            before = sum(file.stat().st_size for file in checkpoint.paths)
        else:
            description = replace(checkpoint.description, interleaved=False)
            config = {DESCRIPTION: asdict(description)}
            said = checkpoint.metadata.items()
            own = {key: value for key, value in said if key.startswith(("tokenizer.", "general."))}
            self._json(GGUF_TOKENIZER, own)
            before = source.stat().st_size
        config.pop("quantization_config", None)
        if self._quantized:
            version = folder.ORDERED_VERSION if self._ordered else folder.VERSION
            config["quantization_config"] = {
                **folder.CONFIG, "format_version": version,
                "scheme": "w4a8" if self._four_bits else "w8a8", **how,
                "modules_to_not_convert": self._floats or None,
            }  # fmt: skip
        self._json("config.json", config)
        return Written(before, self._size, self._quantized, dict(checkpoint.notes))

    def _json(self, name: str, held: Mapping[str, Any]) -> None:
        text = json.dumps(held, indent=1, ensure_ascii=False)
        write_text(self._target / name, text + "\n")


def tensors_of(checkpoint: Checkpoint) -> Tensors:
    """A model's tensors one after another: each under its name in a folder, a quantized weight
    under that of its layer, with the order of its inputs, if there is one."""
    return (
        _of_gguf(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else _of_folder(checkpoint)
    )


def _of_gguf(checkpoint: GgufCheckpoint) -> Tensors:
    for name in sorted(checkpoint.names):
        stem, _, part = name.rpartition(".")
        if checkpoint.is_matrix(name):
            held = checkpoint.held(name)
            quantized = isinstance(held, QuantizedWeight)
            yield (stem, held, None) if quantized else (name, StoredTensor.of(held), None)
        else:
            value = checkpoint.bias(stem) if part == "bias" else checkpoint.vector(name)
            yield name, StoredTensor.of(value), None


def _of_folder(checkpoint: FolderCheckpoint) -> Tensors:
    done: set[str] = set()
    for name, tensor in checkpoint.files.items():
        stem, _, part = name.rpartition(".")
        layer = checkpoint.layer(checkpoint.name(stem) or "")
        if layer is None or part == "bias":
            yield name, tensor, None
        elif stem not in done:
            done.add(stem)
            yield stem, layer.weight(), layer.order
