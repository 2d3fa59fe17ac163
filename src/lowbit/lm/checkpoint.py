"""Where a model's tensors come from: a GGUF file, or a folder with config.json and safetensors.

Names are GGUF's: token_embd, output_norm, output, and of each layer blk.N.attn_norm, attn_q, ….
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.lm.blocks import BLOCKS, Block
from lowbit.lm.description import Description
from lowbit.lm.folders import Sources, known_name, refuse_adapters, tensors_of
from lowbit.lm.gguf import Gguf, StoredMatrix, read
from lowbit.lm.keys import refuse
from lowbit.lm.layout import ModelLayout, Rules, refuse_unread
from lowbit.lm.matrix_rows import Matrix, MatrixRows, below, floats_of, forgetting, rows_of
from lowbit.lm.naming import naming
from lowbit.lm.quantized import Layer, check, layers_of
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.tensor_file import StoredTensor

Floats = npt.NDArray[np.float32]
_Expert = StoredTensor | Layer
DESCRIPTION = "lowbit_description"
"""In a config.json that is none of transformers': its `Description`; tensors have GGUF's names."""
_OWN_KEYS = {DESCRIPTION, "quantization_config"}
_MATRIX = (
    r"(token_embd|output|blk\.\d+\.(attn_(q|k|v|qkv|output)"
    r"|ffn_((gate_)?up|gate|down)(_exps|_shexp)?))"
)

_EXPERT_OF_GGUF = r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight"  # of files of 2023


class GgufCheckpoint:
    """A GGUF file.

    notes: elements that were rounded once more when they were read, by reason."""

    def __init__(self, path: Path) -> None:
        self._file: Gguf = read(path)
        self.metadata = self._file.metadata
        self.description = Description.of_gguf(self.metadata)
        self._experts = dict[str, dict[int, str]]()
        for name in self._file.tensors:
            if match := re.fullmatch(_EXPERT_OF_GGUF, name):
                self._experts.setdefault(f"{match[1]}_exps.weight", {})[int(match[2])] = name
        single = {name for experts in self._experts.values() for name in experts.values()}
        self.names = frozenset(self._file.tensors).union(self._experts) - single
        self.notes = dict[str, int]()
        self.layout = ModelLayout.of(self.description, self.names, None)
        twice = {name for name in self._experts if name in self._file.tensors}
        refuse_unread(self.layout.unread(self.names) | twice)

    def vector(self, name: str) -> Floats:
        """A tensor of floats."""
        return self._stored(name).rows()

    def matrix(self, name: str) -> Matrix:
        """A weight [N, K]; experts below each other."""
        return self.reader(name).whole()

    def reader(self, name: str) -> MatrixRows:
        """What reads rows of a weight [N, K]; experts below each other."""
        parts = [self._stored(part) for part in self._parts(name)]
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            raise NotImplementedError(f"{name}: experts of {' and '.join(sorted(kinds))}")
        block, order = BLOCKS[kinds.pop()], None
        rows = sum(math.prod(part.shape[:-1]) for part in parts)
        if self._in_pairs(name) and rows % self.description.head_dim == 0:
            order = _by_halves(rows, self.description.head_dim)
        whole = below([_reader(block, part, order) for part in parts])
        assert whole is not None
        return whole

    @property
    def nbytes(self) -> int:
        """Of all tensors in the file."""
        return sum(tensor.data.nbytes for tensor in self._file.tensors.values())

    def is_matrix(self, name: str) -> bool:
        """Whether it is a weight of a product; other tensors are read as floats."""
        return bool(re.fullmatch(_MATRIX, name.removesuffix(".weight")))

    def held(self, name: str) -> QuantizedWeight | npt.NDArray[Any]:
        """A weight [N, K], in the file's dtype where it is of floats."""
        reader = self.reader(name)
        return reader.read(slice(0, reader.shape[0]))

    def order(self, name: str) -> None:
        """Which input a weight's columns stand for: each for its own."""

    def rows(self, name: str, which: Sequence[int]) -> Floats:
        """Some rows of a matrix."""
        stored, first = self._stored(name), which[0]
        if max(which) >= stored.shape[0]:
            raise ValueError(f"{name} has {stored.shape[0]} rows, of which {max(which)} is none")
        one = len(which) == 1  # of a text: a slice is faster
        rows = stored.data[first : first + 1] if one else stored.data[np.asarray(which)]
        return BLOCKS[stored.kind].rows(rows)

    def bias(self, name: str) -> Floats:
        """A bias [N], in the order of its weight's rows."""
        value = self.vector(f"{name}.bias")
        if self._in_pairs(name):
            value = value[_by_halves(len(value), self.description.head_dim)]
        return value

    def _parts(self, name: str) -> list[str]:
        """The tensors that a weight consists of."""
        if (experts := self._experts.get(name)) is None:
            return [name]
        count = self.description.experts
        if wrong := sorted(set(range(count)) ^ experts.keys()):
            raise ValueError(f"{name} is of {count} experts; missing or more than that: {wrong}")
        return [experts[i] for i in sorted(experts)]

    def _in_pairs(self, name: str) -> bool:
        return self.description.interleaved and bool(re.match(r"blk\.\d+\.attn_[qk](\.|$)", name))

    def _stored(self, name: str) -> Any:
        return _of(self._file.tensors, name)


def _config(path: Path) -> dict[str, Any]:
    """What a config.json holds. ValueError: that is no object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise ValueError(f"{path} must hold an object")
    return config


def _reader(block: Block, stored: StoredMatrix, order: npt.NDArray[np.int64] | None) -> MatrixRows:
    """What reads rows of blocks; order: which row stands where."""
    data = stored.data.reshape(-1, stored.data.shape[-1])
    shape = len(data), stored.shape[-1]

    def read(which: slice) -> Any:
        rows = data[which if order is None else order[which]]
        return rows.view(block.dtype) if block.parts is None else block.weight(rows)

    if block.offsets and block.bits > 4 and shape[1] <= block.elements:
        return rows_of(read(slice(0, len(data))))  # whether they are in groups follows from all
    dtype = "" if block.dtype is None else np.dtype(block.dtype).name
    return MatrixRows(shape, read, dtype, forgetting(data, order=order))


def _by_halves(rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The rows of heads whose pairs lie side by side, in the order in which halves do."""
    order = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return order.transpose(0, 2, 1).reshape(-1)


class FolderCheckpoint:
    """A folder of transformers', of floats or quantized in one of the ways of lm/quantized.py.

    paths: its files of weights. files: all tensors, by their names in these. notes: elements that
    were rounded once more when they were read, by reason."""

    def __init__(self, path: Path) -> None:
        config = _config(path / "config.json")
        text = config.get("text_config", config)  # of models that see, too
        self.metadata, self.notes = config, dict[str, int]()
        own = config.get(DESCRIPTION)
        if own is None:
            self.description = Description.of_config(config)
            rules = Rules.of(self.description.architecture, text, config)
        else:
            self.description, rules = Description.of_own(own), None
            refuse("config.json", {key: config[key] for key in config.keys() - _OWN_KEYS})
        quantization = config.get("quantization_config") or text.get("quantization_config") or {}
        check(quantization)
        refuse_adapters(path)
        self.paths, self.files = tensors_of(path)
        self._renamed = own is None
        sources = Sources(self.files, self.name)
        self._tensors = sources.tensors
        self._layers = layers_of(quantization, self._tensors, self.notes)
        if (table := self._layers.get("token_embd")) is not None and not table.in_rows:
            raise NotImplementedError(f"{path}: embeddings that are quantized are not read")
        layers = {f"{stem}.weight" for stem in self._layers}
        self._experts = self._by_number()
        every = layers.union(self._tensors, self._experts)
        self.names = frozenset(name for name in every if not re.search(r"_exps\.\d", name))
        self.layout = ModelLayout.of(self.description, self.names, rules)
        refuse_unread(sources.unread(self.layout, self._layers, text is not config))
        sources.refuse_float8(self._layers)
        if rules is not None:
            self._refuse_biases(rules)

    def _refuse_biases(self, rules: Rules) -> None:
        """ValueError: there is a bias that is not 0, where config.json says that there is none."""
        for layer in self.layout.layers:
            for stem in layer.products:
                part, name = stem.removeprefix(f"{layer.name}."), f"{stem}.bias"
                if name in self.names and not rules.biased.get(part) and self._array(name).any():
                    raise ValueError(f"{name} is there, and config.json says that there is none")

    def _by_number(self) -> dict[str, list[_Expert]]:
        """The weights of all experts of a kind, in their order, by the name of all."""
        found: dict[str, dict[int, _Expert]] = {}
        for stem in {name.rpartition(".")[0] for name in self._tensors}:
            if match := re.fullmatch(r"(blk\.\d+\.ffn_\w+_exps)\.(\d+)", stem):
                one = self._layers.get(stem) or _of(self._tensors, f"{stem}.weight")
                found.setdefault(f"{match[1]}.weight", {})[int(match[2])] = one
        count = self.description.experts
        if not count:  # then nothing reads them
            return {}
        for name, parts in found.items():
            if wrong := sorted(set(range(count)) ^ parts.keys()):
                raise ValueError(f"{name} is of {count} experts; missing or more: {wrong}")
        return {name: [parts[i] for i in sorted(parts)] for name, parts in found.items()}

    def name(self, stem: str) -> str | None:
        """What a file's module is called here, an expert with its number behind; None: nothing of
        the language model."""
        return known_name(stem, self.description.architecture) if self._renamed else stem

    def vector(self, name: str) -> Floats:
        """A tensor of floats."""
        value = self._array(name).astype(np.float32)
        return value + np.float32(self.description.norm_offset if "norm" in name else 0)

    def matrix(self, name: str) -> Matrix:
        """A weight [N, K], its columns in the `order` of its inputs; experts below each other."""
        return self.reader(name).whole()

    def reader(self, name: str) -> MatrixRows:
        """What reads rows of a weight [N, K], its columns in the `order` of its inputs; experts
        below each other."""
        if (layer := self._layers.get(name.removesuffix(".weight"))) is not None:
            return layer.reader()
        if name in self._experts:
            return _below(name, self._experts[name])
        return floats_of(self._array(name))

    @property
    def nbytes(self) -> int:
        """Of all tensors in the files."""
        return sum(tensor.data.nbytes for tensor in self.files.values())

    def layer(self, stem: str) -> Layer | None:
        """A quantized layer by its `name`."""
        return self._layers.get(stem)

    def order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Which input a weight's columns stand for, [K]; None: each for its own."""
        layer = self._layers.get(name.removesuffix(".weight"))
        return None if layer is None else layer.order

    def rows(self, name: str, which: Sequence[int]) -> Floats:
        """Some rows of a matrix."""
        if (layer := self._layers.get(name.removesuffix(".weight"))) is not None:
            return layer.rows(np.asarray(which))
        return self._array(name)[np.asarray(which)].astype(np.float32)

    def bias(self, name: str) -> Floats:
        """A bias [N]."""
        return self.vector(f"{name}.bias")

    def _array(self, name: str) -> npt.NDArray[Any]:
        array = _of(self._tensors, name).numpy()
        if array.dtype.kind in "biu":
            raise ValueError(f"{name} must be floats, got {array.dtype}")
        return array


def _below(name: str, experts: Sequence[_Expert]) -> MatrixRows:
    """The weights of experts below each other. ValueError: they are not of one kind."""
    weights = list[MatrixRows]()
    for expert in experts:
        if isinstance(expert, StoredTensor):
            weights.append(floats_of(expert.numpy()))
        elif expert.order is not None:
            raise NotImplementedError(
                f"{expert.name}: experts with an order of inputs are not read"
            )
        else:
            weights.append(expert.reader())
    if (whole := below(weights)) is None:
        raise ValueError(f"{name}: experts must be quantized in one way")
    return whole


Checkpoint = GgufCheckpoint | FolderCheckpoint


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A GGUF file, or a folder with config.json.

    FileNotFoundError, ValueError: it is neither, or damaged. NotImplementedError: not served."""
    path = Path(path)
    with naming(path):
        if not path.is_dir():
            return GgufCheckpoint(path)
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no config.json")
        return FolderCheckpoint(path)


def _of(tensors: Mapping[str, Any], name: str) -> Any:
    if name not in tensors:
        raise ValueError(f"the model has no tensor {name}")
    return tensors[name]
