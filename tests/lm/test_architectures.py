"""Every architecture against transformers: logits of random models, in prompts and in steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from lowbit.lm import LanguageModel
from lowbit.lm.description import Description
from lowbit.weights.format import WeightFormat

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "attention_multiplier": 0.015625,
}  # fmt: skip
LOCAL = {"max_position_embeddings": 256, "sliding_window": 13}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 64}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.7] * 2,
        "long_factor": [1.0, 1.5, 2.5, 4.0] * 2}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 48, "num_hidden_layers": 7, **LOCAL}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
CASES = {
    "llama": ("Llama", {}),
    "llama with biases, tied": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "linear positions": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                                       "rope_theta": 1e4}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen 2": ("Qwen2", {}),
    "qwen 3": ("Qwen3", {"head_dim": 32}),
    "olmo 2": ("Olmo2", {}),
    "granite": ("Granite", GRANITE),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma 3": ("Gemma3Text", GEMMA),
    "gemma 3 with scaled positions": ("Gemma3Text", {**GEMMA, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }}),
    "phi 3": ("Phi3", {}),
    "phi 3 with a window": ("Phi3", LOCAL),
    "phi 3, many positions": ("Phi3", {"rope_parameters": LONG,
                                       "original_max_position_embeddings": 32}),
    "phi 3, few positions": ("Phi3", {"rope_parameters": {**LONG, "factor": 4.0},
                                      "original_max_position_embeddings": 256}),
    "mistral with a window": ("Mistral", LOCAL),
    "qwen 2 with windows in some layers": ("Qwen2", {**LOCAL, "use_sliding_window": True,
                                                     "max_window_layers": 2}),
    "qwen 3 with yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "smollm 3": ("SmolLM3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen 2, experts": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 96,
                                     "decoder_sparse_step": 2}),
    "qwen 3, experts": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
}  # fmt: skip


def random_model(name, folder, **more):
    """A random model of transformers, saved; norms and biases are no ones and zeros."""
    kind, own = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | own | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for key, value in model.named_parameters():
        if "norm" in key:
            value.data.add_(torch.randn_like(value) * 0.2)
        if "bias" in key:
            value.data.normal_()
    model.save_pretrained(folder)
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.deep("llama")
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = random_model(name, tmp_path)
    ids = np.random.default_rng(1).integers(0, 300, 50).tolist()
    want = logits(model, ids)
    lm = LanguageModel.load(tmp_path, cache="float32", threads=2)
    most = np.abs(want).max()
    assert np.abs(lm.logits(ids) - want).max() <= 1e-5 * most
    with lm.sequence() as sequence:
        rows = [sequence.feed(ids[:20]), *(sequence.feed([token]) for token in ids[20:])]
    assert np.abs(np.stack(rows) - want[19:]).max() <= 1e-5 * most


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma_3_that_sees_is_read_as_text(prefix, tmp_path):
    """Its tensors have other names, and its config another one inside."""
    model = random_model("gemma 3", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = safetensors.numpy.load_file(file)
    renamed = {name.replace("model.", prefix, 1): one for name, one in tensors.items()}
    safetensors.numpy.save_file(renamed, file)
    inside = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": inside}))
    ids = [5, 17, 123, 9]
    want = logits(model, ids)
    lm = LanguageModel.load(tmp_path, cache="float32")
    assert np.abs(lm.logits(ids) - want).max() <= 1e-5 * np.abs(want).max()


def test_gemma_3_leaves_out_what_is_known():
    config = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
              "num_hidden_layers": 34, "sliding_window": 1024,
              "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    d = Description.of_config({"model_type": "gemma3", "text_config": config})
    assert (d.heads, d.key_heads, d.head_dim, d.vocabulary) == (8, 4, 256, 262208)
    assert (d.base, d.local_base, d.attention_scale) == (1e6, 1e4, 1 / 16)
    assert [i for i in range(34) if not d.window(i)] == [5, 11, 17, 23, 29]
    np.testing.assert_allclose(d.frequencies(4096)[0][0], 1 / 8)


@pytest.mark.deep
def test_greedy_text_is_that_of_transformers(tmp_path):
    model = random_model("llama", tmp_path)
    ids = [5, 17, 123, 9]
    made = model.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False,
                          eos_token_id=None)[0].tolist()  # fmt: skip
    lm = LanguageModel.load(tmp_path, cache="float32")
    with lm.sequence() as sequence:
        row, ours = sequence.feed(ids), list(ids)
        for _ in range(30):
            ours.append(int(row.argmax()))
            row = sequence.feed(ours[-1:])
    assert ours == made


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen 2, experts"])
def test_weights_of_4_bits_are_what_they_stand_for(name, tmp_path):
    """Against the float model with the weights that were made."""
    model, form = random_model(name, tmp_path), WeightFormat("int4", 32)
    lm = LanguageModel.load(tmp_path, weights="int4", activations="float", cache="float32")
    for key, value in model.named_parameters():
        if ("proj" in key or "lm_head" in key) and value.ndim > 1:
            rows = value.detach().numpy().reshape(-1, value.shape[-1])
            made = form.quantize(rows).dequantize().reshape(value.shape)
            value.data.copy_(torch.from_numpy(made))
    ids = np.random.default_rng(1).integers(0, 300, 50).tolist()
    want = logits(model, ids)
    assert np.abs(lm.logits(ids) - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.deep
def test_eight_bits_are_nearer_than_four(tmp_path):
    model = random_model("llama", tmp_path)
    ids = np.random.default_rng(1).integers(0, 300, 50).tolist()
    want = logits(model, ids)
    errors = [
        np.linalg.norm(LanguageModel.load(tmp_path, weights=weights).logits(ids) - want)
        for weights in (None, "int8", "int4")
    ]
    assert errors == sorted(errors)
    assert 2 * errors[1] < errors[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' are not served.*llama"),
        ({"model_type": "phi3", "num_local_experts": 8}, "mixtures of experts.*phi3"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attend to later"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq'"),
    ],
)
def test_what_is_not_served_is_named(changes, message, tmp_path):
    random_model("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(NotImplementedError, match=message):
        LanguageModel.load(tmp_path)


def test_a_description_that_lacks_or_contradicts():
    with pytest.raises(ValueError, match="no num_attention_heads"):
        Description.of_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="share 3"):
        Description.of_config({"model_type": "llama", **COMMON, "num_key_value_heads": 3})
    with pytest.raises(ValueError, match="4 layers have the windows"):
        Description.of_config({"model_type": "gemma2", **COMMON, "sliding_window": 9,
                               "layer_types": ["sliding_attention"]})  # fmt: skip
    with pytest.raises(ValueError, match="3 of 2 experts"):
        Description.of_config({"model_type": "mixtral", **COMMON, "num_local_experts": 2,
                               "num_experts_per_tok": 3})  # fmt: skip
    with pytest.raises(ValueError, match="layers must be"):
        Description.of_config({"model_type": "llama", **COMMON, "num_hidden_layers": -1})
