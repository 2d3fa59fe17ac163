"""What no part reads, what is missing and what contradicts is an error that names it."""

from __future__ import annotations

import json
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from lowbit.lm.checkpoint import open_checkpoint
from lowbit.lm.description import Description
from lowbit.lm.layout import ModelLayout, Rules

from .test_hostile_models import PLAIN, of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "use_cache": True, "torch_dtype": "float32",
}  # fmt: skip
Q = "model.layers.0.self_attn.q_proj."


def tensors(layers=2):
    sizes = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    held = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,),
            "lm_head.weight": (40, 16)}  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}"
        held |= {f"{at}.self_attn.{part}.weight": shape for part, shape in sizes.items()}
        held |= {f"{at}.mlp.{part}_proj.weight": (24, 16) for part in ("gate", "up")}
        held[f"{at}.mlp.down_proj.weight"] = (16, 24)
        held |= {f"{at}.{norm}_layernorm.weight": (16,) for norm in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in held.items()}


@pytest.fixture
def folder(tmp_path):
    """Writes a llama, with changes."""

    def write(changes=None, config=None, without=()):
        held = {name: a for name, a in (tensors() | (changes or {})).items() if name not in without}
        safetensors.numpy.save_file(held, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        return tmp_path

    return write


def sharded(path, held, cut="lm_head.weight"):
    """Two files and their index."""
    parts = {"model-00001-of-00002.safetensors": {n: a for n, a in held.items() if n != cut},
             "model-00002-of-00002.safetensors": {cut: held[cut]}}  # fmt: skip
    for name, part in parts.items():
        safetensors.numpy.save_file(part, path / name)
    places = {name: file for file, part in parts.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return list(parts)


@pytest.mark.parametrize("name", [
    f"{Q}weight_scale", f"{Q}input_scale", f"{Q}lora_A.weight", "model.layers.0.self_attn.sinks",
    "model.layers.1.self_attn.attn_sub_norm.weight", "model.layers.0.mlp.ffn_layernorm.weight",
    "model.layers.0.self_attn.q_norm.weight", "model.layers.0.input_layernorm.bias",
    "model.norm.bias", "lm_head.bias", "model.layers.0.mlp.experts.0.gate_proj.weight",
    "vision_tower.patches.weight", "score.weight", f"{Q}qweight", "model.layers.7.mtp.weight",
    "model.embed_positions.weight",
])  # fmt: skip
def test_a_tensor_that_is_not_read_is_named(name, folder):
    path = folder({name: np.ones(16, np.float32)})
    with pytest.raises((NotImplementedError, ValueError), match=name.replace(".", r"\.")) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value)


def test_what_is_computed_anew_does_not_matter(folder):
    path = folder({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert len(open_checkpoint(path).names) == 21


@pytest.mark.parametrize("name", [
    f"{Q}weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight",
    "model.layers.1.mlp.up_proj.weight", "model.layers.1.post_attention_layernorm.weight",
])  # fmt: skip
def test_a_tensor_that_is_missing_is_named(name, folder):
    with pytest.raises(ValueError, match=r"has no (attn_q|output|token_embd|ffn_up|ffn_norm)"):
        open_checkpoint(folder(without=[name]))


def test_a_head_is_tied_where_the_config_says_so(folder):
    path = folder(config={"tie_word_embeddings": True}, without=["lm_head.weight"])
    assert open_checkpoint(path).layout.head == "token_embd"
    config = {**CONFIG, "model_type": "smollm3"}
    config.pop("tie_word_embeddings")  # which it is by default
    (path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).layout.head == "token_embd"


def test_experts_are_in_the_layers_that_the_config_says():
    named = {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    rules = Rules.of("qwen3moe", named, named)
    assert [rules.is_mixed(layer) for layer in range(6)] == [False, False, False, True, False, True]
    d = Description.of_config(CONFIG | {"model_type": "qwen3_moe", "num_experts": 4,
                                        "num_experts_per_tok": 2})  # fmt: skip
    parts = (
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_norm",
        "ffn_norm",
        "attn_q_norm",
        "attn_k_norm",
        "ffn_gate_inp",
        "ffn_gate_exps",
        "ffn_up_exps",
        "ffn_down_exps",
    )
    names = {f"blk.{layer}.{part}.weight" for layer in range(2) for part in parts}
    names |= {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert ModelLayout.of(d, names, Rules.of("qwen3moe", {}, {})).layers[1].router
    with pytest.raises(ValueError, match=r"says that blk\.1 has no experts"):
        ModelLayout.of(d, names, Rules.of("qwen3moe", {"mlp_only_layers": [1]}, {}))


def test_biases_are_those_that_the_config_says(folder):
    bias = {f"{Q}bias": np.ones(16, np.float32)}
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.bias is there.*there is none"):
        open_checkpoint(folder(bias))
    folder({f"{Q}bias": np.zeros(16, np.float32)})  # as AutoGPTQ wrote them
    with pytest.raises(ValueError, match=r"blk\.0 of llama has no attn_k\.bias, attn_output\.bias"):
        open_checkpoint(folder(bias, {"attention_bias": True}))


@pytest.mark.parametrize(("changes", "message"), [
    ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0"), ({"attn_temperature_tuning": True}, "attn_temp"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3}}, r"rope_scaling\.alpha"),
    ({"is_causal": False}, "is_causal = False"), ({"rope_interleaved": True}, "rope_interleaved"),
    ({"quantization": {"bits": 4}}, "quantization = "),
    ({"quantization_config": {"quant_method": "awq", "bits": 4, "dynamic": {"x": 1}}},
     "quantization_config .*dynamic"),
    ({"model_type": "gemma", "hidden_act": "gelu"}, "gemma with hidden_act 'gelu'"),
    ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
])  # fmt: skip
def test_a_key_that_is_not_read_is_named(changes, message, folder):
    path = folder(config=changes)
    with pytest.raises(NotImplementedError, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0},
      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "both say"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is 10000"),
])  # fmt: skip
def test_keys_that_contradict_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        Description.of_config(CONFIG | changes)


@pytest.mark.parametrize("changes", [
    {"sliding_window": 8}, {"layer_types": ["sliding_attention"] * 2}, {"logits_scaling": 8.0},
    {"residual_multiplier": 0.2}, {"query_pre_attn_scalar": 3}, {"no_rope_layers": [0, 1]},
    {"final_logit_softcapping": 3.0}, {"partial_rotary_factor": 0.5},
])  # fmt: skip
def test_keys_of_other_architectures_are_left_out(changes):
    with pytest.warns(UserWarning, match=next(iter(changes))):
        described = Description.of_config(CONFIG | changes)
    assert described == Description.of_config(CONFIG)


@pytest.mark.parametrize("changes", [
    {"sliding_window": None}, {"use_sliding_window": False}, {"residual_multiplier": 1.0},
    {"layer_types": ["full_attention"] * 2}, {"max_window_layers": 28}, {"foo": None},
    {"unsloth_version": "2025.1"}, {"use_mrope": False}, {"id2label": {"0": "a"}},
])  # fmt: skip
def test_what_says_nothing_is_no_error(changes):
    assert Description.of_config(CONFIG | changes) == Description.of_config(CONFIG)


@pytest.mark.parametrize("key", [
    "attention.causal", "attention.clamp_kqv", "attention.temperature_scale", "logit_scale",
    "attention.sliding_window", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    "attention.max_alibi_bias", "attn_logit_softcapping", "use_parallel_residual",
    "rope.dimension_sections", "expert_gating_func", "a_key_of_tomorrow",
])  # fmt: skip
def test_a_key_of_gguf_that_is_not_read_is_named(key):
    value = {"attention.causal": False, "use_parallel_residual": True,
             "rope.dimension_sections": [8, 8]}.get(key, 3)  # fmt: skip
    with pytest.raises(NotImplementedError, match=key.replace(".", r"\.")):
        Description.of_gguf(PLAIN | {f"llama.{key}": value})


@pytest.mark.parametrize(("key", "value"), [
    ("split.count", 2), ("general.type", "adapter"), ("adapter.lora.alpha", 3.0),
    ("general.quantization_version", 1), ("qwen2.attention.sliding_window", 8),
    ("llama.attention.value_length", 8), ("llama.rope.dimension_count_swa", 8),
])  # fmt: skip
def test_another_key_of_gguf_that_matters_is_named(key, value):
    with pytest.raises(NotImplementedError, match=key.removeprefix("llama.").replace(".", r"\.")):
        Description.of_gguf(PLAIN | {key: value})


def test_keys_of_gguf_that_change_nothing():
    more = {
        "llama.attention.causal": True, "llama.attention.clamp_kqv": 0.0, "split.count": 1,
        "llama.feed_forward_length": 9, "llama.attention.value_length": 16, "split.no": 0,
        "general.file_type": 2, "general.quantization_version": 2, "quantize.imatrix.file": "x",
        "llama.rope.scaling.finetuned": True, "tokenizer.ggml.tokens": ["a"],
        "general.sampling.temp": 0.5,
    }  # fmt: skip
    assert Description.of_gguf(PLAIN | more) == Description.of_gguf(PLAIN)


def test_defaults_are_those_of_the_architecture():
    few = {key: value for key, value in CONFIG.items() if key in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "max_position_embeddings")}  # fmt: skip
    mixtral, mistral, granite, gemma = (
        Description.of_config(few | {"model_type": name})
        for name in ("mixtral", "mistral", "granite", "gemma2")
    )
    assert (mixtral.base, mixtral.epsilon, mixtral.windows) == (1e6, 1e-5, ())
    assert mistral.windows == (4096, 4096)
    assert granite.attention_scale == 1.0
    assert (gemma.windows, gemma.attention_cap, gemma.logit_cap) == ((4096, 0), 50.0, 30.0)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_is_an_error(name, folder):
    path = folder()
    (path / name).write_text("{}")
    with pytest.raises(NotImplementedError, match=f"adapter.*{name}"):
        open_checkpoint(path)


def test_other_files_of_weights_are_none_of_the_models(folder):
    path = folder()
    held = {name: value + 1 for name, value in tensors().items()}
    safetensors.numpy.save_file(held, path / "pytorch_old.safetensors")
    want = tensors()["model.norm.weight"]
    assert (open_checkpoint(path).vector("output_norm.weight") == want).all()
    sharded(path, tensors())
    safetensors.numpy.save_file(held, path / "model.safetensors")  # the index comes first
    assert (open_checkpoint(path).vector("output_norm.weight") == want).all()


def test_an_index_and_its_files(tmp_path):
    held = tensors()
    first, second = sharded(tmp_path, held)
    assert open_checkpoint(tmp_path).layout.head == "output"
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]

    def wrong(kind, message, **changes):
        index.write_text(json.dumps({"weight_map": places | changes}))
        with pytest.raises(kind, match=message):
            open_checkpoint(tmp_path)

    wrong(ValueError, r"'other' has no place in .*00002-of.*index\.json has it", other=second)
    wrong(ValueError, r"'model\.norm\.weight' is not in .*index\.json", **{
        "model.norm.weight": second})  # fmt: skip
    wrong(ValueError, "'../x' is no file of this folder", other="../x")
    wrong(ValueError, "is no index", other=3)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is no index"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / second).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{second} is missing.*lm_head\.weight"):
        open_checkpoint(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=f"holds no model.safetensors.*it holds {first}"):
        open_checkpoint(tmp_path)


def test_two_names_of_one_tensor(folder):
    path = folder({"language_model.model.norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight and .* are one tensor"):
        open_checkpoint(path)


def test_float8_without_a_scale(folder):
    import ml_dtypes

    from lowbit.weights.tensor_file import StoredTensor, TensorFile

    path = folder()
    held = {name: StoredTensor.of(value) for name, value in tensors().items()}
    value = tensors()[f"{Q}weight"].astype(ml_dtypes.float8_e4m3fn)
    held[f"{Q}weight"] = StoredTensor.of(value)
    TensorFile("pt", "file", "1").write(path / "model.safetensors", {}, held)
    with pytest.raises(ValueError, match=r"q_proj\.weight is of float8"):
        open_checkpoint(path)


def written(path, without=(), more=(), keys=()):
    """A small llama as GGUF."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    for key, value in PLAIN.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int) and key != "llama.block_count":
            writer.add_uint32(key, value)
    for key, value in keys:
        writer.add_uint32(key, value)
    shapes = {"token_embd": (300, 64), "output_norm": (64,), "output": (300, 64)}
    for layer in range(2):
        parts = {"attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_norm": (64,),
                 "attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64),
                 "ffn_down": (64, 96), "ffn_norm": (64,)}  # fmt: skip
        shapes |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
    held = {f"{stem}.weight": shape for stem, shape in shapes.items()} | dict(more)
    for name, shape in held.items():
        if name not in without:
            writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", [
    "blk.0.attn_sinks.weight", "blk.1.attn_sub_norm.weight", "blk.0.attn_q.scale", "output.bias",
    "blk.0.attn_q.weight.lora_a", "blk.0.attn_q_norm.weight", "blk.1.ffn_gate_inp_shexp.weight",
    "blk.0.attn_qkv.bias", "per_layer_model_proj.weight",
])  # fmt: skip
def test_a_tensor_of_gguf_that_is_not_read_is_named(name, tmp_path):
    path = written(tmp_path / "model.gguf", more=[(name, (64,))])
    with pytest.raises(NotImplementedError, match=rf"model\.gguf.*{name}"):
        open_checkpoint(path)


def test_a_bias_of_some_layers_is_an_error(tmp_path):
    path = written(tmp_path / "model.gguf", more=[("blk.0.attn_q.bias", (64,))])
    with pytest.raises(ValueError, match=r"attn_q\.bias is in some layers and not in blk\.1"):
        open_checkpoint(path)


def test_a_part_of_gguf_is_an_error(tmp_path):
    path = written(tmp_path / "model.gguf", ["output.weight"], keys=[("split.count", 2)])
    with pytest.raises(NotImplementedError, match=r"model\.gguf.*split\.count = 2"):
        open_checkpoint(path)


def test_olmo_3_in_gguf_scales_only_layers_without_windows():
    described = Description.of_gguf(of("olmo2") | {
        "olmo2.block_count": 8, "olmo2.attention.sliding_window": 9, "olmo2.rope.freq_base": 5e5,
        "olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 8.0,
    })  # fmt: skip
    assert described.local_base == 5e5
    assert [i for i in range(8) if not described.window(i)] == [3, 7]
    assert Description.of_gguf(of("olmo2")).local_base == 0
