"""Architectures in GGUF: random models of transformers, written by the package as llama.cpp's
converter does."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import pytest

from lowbit.lm import LanguageModel
from lowbit.lm.checkpoint import FolderCheckpoint

from .test_architectures import CASES, COMMON, logits, random_model

# What GGUF says besides sizes, and its name for the architecture.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma 2": ("gemma2", {
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
        "attention.sliding_window": 13, "attention.scale": 48**-0.5,
    }),
    "gemma 3 with scaled positions": ("gemma3", {
        "attention.sliding_window": 13, "attention.scale": 48**-0.5, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e3,
        "attention.sliding_window_pattern": 6,
    }),
    "phi 3 with a window": ("phi3", {"attention.sliding_window": 13}),
    "phi 3, many positions": ("phi3", {
        "rope.scaling.attn_factor": (1 + np.log(8) / np.log(32)) ** 0.5,
        "rope.scaling.original_context_length": 32,
    }),
    "mixtral": ("llama", {"expert_count": 4, "expert_used_count": 2}),
    "qwen 2, experts": ("qwen2moe", {"expert_count": 8, "expert_used_count": 3}),
    "qwen 3, experts": ("qwen3moe", {"expert_count": 8, "expert_used_count": 3}),
    "qwen 3 with yarn": ("qwen3", {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }),
}  # fmt: skip


def write(path, folder, kind, more, config):
    """The model of a folder as a GGUF file of float32."""
    checkpoint = FolderCheckpoint(folder)
    writer = gguf.GGUFWriter(path, kind)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    given = {
        "block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
        "context_length": config["max_position_embeddings"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": checkpoint.description.epsilon,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": head_dim, "rope.freq_base": checkpoint.description.base, **more,
    }  # fmt: skip
    for key, value in given.items():
        add = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_float32)(f"{kind}.{key}", value)
    for name in sorted(checkpoint.names):
        wide = name.endswith(".weight") and "norm" not in name
        value: Any = checkpoint.matrix(name) if wide else checkpoint.vector(name)
        if kind == "llama" and re.search(r"attn_[qk]\.", name):  # neighbours are turned together
            halves = value.reshape(-1, 2, head_dim // 2, value.shape[-1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if "_exps" in name:
            value = value.reshape(more["expert_count"], -1, value.shape[-1])
        if "inp_shexp" in name:
            value = value.reshape(-1)
        writer.add_tensor(name, np.ascontiguousarray(value))
    for name in ("long", "short"):
        if factors := checkpoint.description.scaling.get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", WRITTEN)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = random_model(name, tmp_path)
    kind, more = WRITTEN[name]
    write(tmp_path / "model.gguf", tmp_path, kind, more, {**COMMON, **CASES[name][1]})
    ids = np.random.default_rng(1).integers(0, 300, 50).tolist()
    want = logits(model, ids)
    lm = LanguageModel.load(tmp_path / "model.gguf", cache="float32")
    # Norms are told an epsilon of float32.
    assert np.abs(lm.logits(ids) - want).max() <= 2e-5 * np.abs(want).max()
