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
from lowbit.lm.convert import convert

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
    "olmo 3 with yarn": ("olmo2", {
        "attention.sliding_window": 13, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.3,
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


def stacked(name, value, tensors):
    """Experts as files have them today."""
    tensors[name] = value


def by_expert(name, value, tensors):
    """A tensor for each, as in Mixtral's first files."""
    if "_exps" not in name:
        return stacked(name, value, tensors)
    for expert, rows in enumerate(value):
        tensors[name.replace("_exps", f".{expert}")] = rows
    return None


def fused(name, value, tensors):
    """The gates of an expert above what they are multiplied with."""
    if "_gate_exps" not in name and "_up_exps" not in name:
        return stacked(name, value, tensors)
    whole = re.sub("gate|up", "gate_up", name)
    both = [*tensors.pop(whole, ()), value]  # the gate comes first
    tensors[whole] = both if len(both) == 1 else np.concatenate(both, 1)
    return None


def write(path, folder, kind, more, config, layout=stacked, form=None):
    """The model of a folder as a GGUF file: of float32, experts of a form if one is given."""
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
    tensors = {}
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
        layout(name, value, tensors)
    for name, value in tensors.items():
        array = np.ascontiguousarray(value)
        if form is not None and re.search(r"ffn_\w+(_exps|\.\d+)\.", name):
            writer.add_tensor(name, gguf.quantize(array, form), raw_dtype=form)
        else:
            writer.add_tensor(name, array)
    for name in ("long", "short"):
        if factors := checkpoint.description.scaling.get(f"{name}_factor"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.deep("*experts*", "mixtral", "gemma *")
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


@pytest.mark.parametrize("form", [None, gguf.GGMLQuantizationType.Q4_0])
@pytest.mark.parametrize("layout", [by_expert, fused])
def test_experts_are_read_however_they_are_stored(layout, form, tmp_path):
    config = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    random_model("mixtral", tmp_path, **config)
    kind, more = WRITTEN["mixtral"]
    rows = []
    for name, way in (("stacked", stacked), ("other", layout)):
        path = tmp_path / f"{name}.gguf"
        write(path, tmp_path, kind, more, {**COMMON, **config}, way, form)
        rows.append(LanguageModel.load(path, cache="float32").logits([5, 17, 123, 9]))
    convert(path, tmp_path / "converted")
    lm = LanguageModel.load(tmp_path / "converted", cache="float32")
    rows.append(lm.logits([5, 17, 123, 9]))
    np.testing.assert_array_equal(rows[1:], rows[:1] * 2)


def test_experts_that_are_missing_or_differ(tmp_path):
    random_model("mixtral", tmp_path)
    kind, more = WRITTEN["mixtral"]
    path, config = tmp_path / "model.gguf", {**COMMON, **CASES["mixtral"][1]}

    def without(name, value, tensors):
        by_expert(name, value, tensors)
        tensors.pop("blk.0.ffn_up.2.weight", None)

    write(path, tmp_path, kind, more, config, without)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up_exps.*4 experts.*\[2\]"):
        LanguageModel.load(path)

    def mixed(name, value, tensors):
        by_expert(name, value, tensors)
        if (one := tensors.get("blk.0.ffn_up.2.weight")) is not None:
            tensors["blk.0.ffn_up.2.weight"] = one.astype(np.float16)

    write(path, tmp_path, kind, more, config, mixed)
    with pytest.raises(NotImplementedError, match=r"ffn_up_exps.*F16 and F32"):
        LanguageModel.load(path)
