"""Tensors of a folder of transformers: in which files they are, and what they are called here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowbit.lm.architectures import architecture
from lowbit.lm.layout import ModelLayout
from lowbit.lm.quantized import Layer
from lowbit.weights.tensor_file import StoredTensor, read_tensors

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

# What transformers calls them, by what they are called here. The first that fits is right.
_NAMES = (
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", r"blk.\1.attn_\2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm", r"blk.\1.attn_\2_norm"),
    (r"model\.layers\.(\d+)\.self_attn\.qkv_proj", r"blk.\1.attn_qkv"),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj", r"blk.\1.attn_output"),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"blk.\1.ffn_\2"),
    (r"model\.layers\.(\d+)\.mlp\.gate_up_proj", r"blk.\1.ffn_up"),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate", r"blk.\1.ffn_gate_inp"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert_gate", r"blk.\1.ffn_gate_inp_shexp"),
    (r"model\.layers\.(\d+)\.mlp\.shared_expert\.(gate|up|down)_proj", r"blk.\1.ffn_\2_shexp"),
    (r"model\.layers\.(\d+)\.input_layernorm", r"blk.\1.attn_norm"),
    (r"model\.layers\.(\d+)\.pre_feedforward_layernorm", r"blk.\1.ffn_norm"),
    (r"model\.layers\.(\d+)\.post_feedforward_layernorm", r"blk.\1.post_ffw_norm"),
)  # fmt: skip
_EXPERT = r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)"
_OF_EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up",
               "down_proj": "down"}  # fmt: skip
_AFTER_ATTENTION = r"model\.layers\.(\d+)\.post_attention_layernorm"

_UNUSED = ((r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", "config.json says it"),)
"""Tensors that change nothing, with the reason."""
_OF_IMAGES = r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\..*"
"""Tensors of a model that sees, which is read as text."""
_UNUSED_OF_QUANTIZED = (
    (r"input_(scale|zero_point)", "how activations are quantized is said by load(activations=…)"),
    (r"(output|q|k|v)_(scale|zero_point)", "the format of keys and values by load(cache=…)"),
)
"""Tensors of quantized folders that change nothing, by the last part of the name."""


def known_name(stem: str, kind: str) -> str | None:
    """What a module of transformers' is called here, an expert with its number behind; None:
    nothing that is known. kind: the architecture."""
    stem = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", stem)
    if stem == "model.lm_head":
        stem = "lm_head"
    if match := re.fullmatch(_EXPERT, stem):
        return f"blk.{match[1]}.ffn_{_OF_EXPERTS.get(match[3], match[3])}_exps.{match[2]}"
    if match := re.fullmatch(_AFTER_ATTENTION, stem):
        behind = "post_attention_norm"
        return f"blk.{match[1]}.{behind if behind in architecture(kind).norms else 'ffn_norm'}"
    for pattern, ours in _NAMES:
        if match := re.fullmatch(pattern, stem):
            return match.expand(ours)
    return None


def refuse_adapters(path: Path) -> None:
    """NotImplementedError: weights beside those of the model are to be added to them."""
    if files := [name for name in _ADAPTERS if (path / name).exists()]:
        raise NotImplementedError(
            f"{path} has an adapter ({', '.join(files)}), which is not read: merge it into the "
            "weights first (merge_and_unload of peft), or move it away"
        )


def tensors_of(path: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    """The files of weights of a folder, and their tensors: those of its index, or else
    model.safetensors; other files are none of the model's.

    ValueError: there is neither, or the index contradicts its files. FileNotFoundError: a file of
    the index is missing."""
    index, single = path / _INDEX, path / _SINGLE
    if not index.is_file():
        if not single.is_file():
            others = ", ".join(sorted(file.name for file in path.glob("*.safetensors")))
            raise ValueError(
                f"{path} holds no {_SINGLE}, and no {_INDEX} that names other files of weights"
                + (f"; it holds {others}" if others else "")
            )
        return [single], read_tensors(single)
    files = _indexed(index)
    tensors: dict[str, StoredTensor] = {}
    for file, names in files.items():
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing, in which {index.name} has {len(names)} tensors: "
                f"{', '.join(sorted(names)[:3])}, ..."
            )
        held = read_tensors(file)
        if wrong := sorted(held.keys() ^ names):
            where = "is not in" if wrong[0] in held else "has no place in"
            there = index if wrong[0] in held else file
            raise ValueError(f"{wrong[0]!r} {where} {there}, though {_other(there, file, index)}")
        tensors |= held
    return list(files), tensors


def _other(there: Path, file: Path, index: Path) -> str:
    other = file if there == index else index
    return f"{other.name} has it"


def _indexed(index: Path) -> dict[Path, set[str]]:
    """The files of an index, and the names of their tensors. ValueError: it is none."""
    try:
        places: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in places.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is no file of this folder")
            files.setdefault(index.parent / file, set()).add(name)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{index} is no index of tensors: {error!r}") from error
    return files


class Sources:
    """Tensors by their names here, and what they are called in files.

    ValueError: two of them have one name here."""

    def __init__(
        self, files: Mapping[str, StoredTensor], name: Callable[[str], str | None]
    ) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._names: dict[str, str] = {}
        self._strange: list[str] = []
        for file_name, tensor in files.items():
            stem, _, part = file_name.rpartition(".")
            known = name(stem)
            if known is None:
                self._strange.append(file_name)
                continue
            ours = f"{known}.{part}"
            if ours in self._names:
                raise ValueError(f"{self._names[ours]} and {file_name} are one tensor")
            self._names[ours] = file_name
            self.tensors[ours] = tensor

    def unread(self, layout: ModelLayout, layers: Mapping[str, Layer], sees: bool) -> set[str]:
        """Tensors that nothing reads and that may matter, by their names in files. layers: those
        that are quantized. sees: whether some may be of images."""
        parts = layout.parts()
        unread = set(self._strange)
        for ours, file_name in self._names.items():
            stem, _, part = ours.rpartition(".")
            whole = re.sub(r"(_exps)\.\d+$", r"\1", stem)
            allowed = {"weight"} if stem not in layers else set(layers[stem].read_parts)
            if parts.get(whole, False):
                allowed.add("bias")
            if whole not in parts or part not in allowed:
                unread.add(file_name)
        return {name for name in unread if not _is_unused(name, bool(layers), sees)}

    def refuse_float8(self, layers: Mapping[str, Layer]) -> None:
        """ValueError: floats of 8 bits without a scale."""
        for ours, tensor in self.tensors.items():
            if tensor.dtype.startswith("F8_") and ours.rpartition(".")[0] not in layers:
                raise ValueError(
                    f"{self._names[ours]} is of float8, and no scale that is read stands beside it"
                )


def _is_unused(name: str, quantized: bool, sees: bool) -> bool:
    """Whether a tensor is known to change nothing."""
    part = name.rpartition(".")[2]
    return (
        any(re.fullmatch(pattern, name) for pattern, _ in _UNUSED)
        or (sees and re.fullmatch(_OF_IMAGES, name) is not None)
        or (quantized and any(re.fullmatch(pattern, part) for pattern, _ in _UNUSED_OF_QUANTIZED))
    )
