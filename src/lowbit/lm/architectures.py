"""What an architecture is besides what a file of it says: a row of data each.

Sources: the configuration classes of transformers, whose defaults these are, and llama.cpp's
`load_hparams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BEFORE, BEHIND = ("attn_norm", "ffn_norm"), ("post_attention_norm", "post_ffw_norm")
OF_HEADS = ("attn_q_norm", "attn_k_norm")
"""Names of norms in GGUF: before a block, behind it, and of queries and keys."""

_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier",
            "logits_scaling")  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "num_experts_per_tok", "norm_topk_prob")
_GGUF_WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern",
                 "rope.freq_base_swa")  # fmt: skip
_GGUF_EXPERTS = ("expert_count", "expert_used_count", "expert_weights_norm")

CONFIG_KEYS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta",
    "hidden_act",
)  # fmt: skip
"""Of a config.json, that transformers reads for each architecture."""


@dataclass(frozen=True)
class Biases:
    """Which products of a config.json have biases: True, False, or the key that says so."""

    qkv: bool | str = False
    output: bool | str = False
    gated: bool | str = False


_ATTENTION = Biases("attention_bias", "attention_bias")


@dataclass(frozen=True)
class Architecture:
    """A decoder of llama's family.

    - keys: of config.json, beside `CONFIG_KEYS`. gguf_keys: of GGUF, beside those that each has.
      defaults: of config.json, where it has no such key.
    - function: of the gated unit. norms: of each layer, by their names in GGUF. norm_offset: what
      is added to their weights. straight: every so many layers one has no positions; 0: none.
      period: every so many layers one has no window; 0: none.
    - biases: of products. tied: whether the table of embeddings is the head where config.json
      doesn't say. always_biased: whether a GGUF file, too, has biases of queries, keys and values.
    - mixed: whether there may be experts. shared: whether there is one for all tokens.
    - plain_windows: of layers with windows, positions turn without the scaling of others.
    """

    keys: tuple[str, ...] = ()
    gguf_keys: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    function: str = "silu"
    norms: tuple[str, ...] = BEFORE
    norm_offset: float = 0.0
    straight: int = 0
    period: int = 0
    biases: Biases = _ATTENTION
    tied: bool = False
    always_biased: bool = False
    mixed: bool = False
    shared: bool = False
    plain_windows: bool = False

    @property
    def config_keys(self) -> set[str]:
        """Of a config.json, that transformers reads for this architecture."""
        return {*CONFIG_KEYS, *self.keys, *self.tensor_keys}

    @property
    def tensor_keys(self) -> set[str]:
        """Those of them that say which tensors there are, and how they are stored."""
        biases = {self.biases.qkv, self.biases.output, self.biases.gated}
        keys = {key for key in biases if isinstance(key, str)}
        return {"tie_word_embeddings", "quantization_config", *keys}


_LLAMA = Biases("attention_bias", "attention_bias", "mlp_bias")
_GEMMA: dict[str, Any] = {"function": "gelu_tanh", "norm_offset": 1.0, "tied": True}
_GEMMA_HEADS = {"head_dim": 256}
_GEMMA_SIZES = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}

ARCHITECTURES = {
    "llama": Architecture(biases=_LLAMA, mixed=True, gguf_keys=_GGUF_EXPERTS),
    "mistral": Architecture(
        keys=("sliding_window",), defaults={"sliding_window": 4096}, biases=Biases()
    ),
    "qwen2": Architecture(
        keys=_WINDOWS, defaults=_QWEN, biases=Biases(qkv=True), always_biased=True
    ),
    "qwen3": Architecture(
        keys=_WINDOWS, defaults={**_QWEN, "head_dim": 128}, norms=BEFORE + OF_HEADS
    ),
    "olmo2": Architecture(
        gguf_keys=_GGUF_WINDOWS, defaults={"rms_norm_eps": 1e-5}, norms=BEHIND + OF_HEADS,
        period=4, plain_windows=True,
    ),
    "olmo3": Architecture(  # GGUF calls it olmo2
        keys=("sliding_window", "layer_types"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        norms=BEHIND + OF_HEADS, period=4, plain_windows=True,
    ),
    "phi3": Architecture(
        keys=("sliding_window", "partial_rotary_factor"), gguf_keys=("attention.sliding_window",),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        biases=Biases(),
    ),
    "granite": Architecture(
        keys=_FACTORS, gguf_keys=("embedding_scale", "residual_scale", "logit_scale",
                                  "attention.scale"),
        defaults={"attention_multiplier": 1.0}, biases=_LLAMA,
    ),
    "smollm3": Architecture(
        keys=(*_WINDOWS, "no_rope_layers", "no_rope_layer_interval"),
        defaults={"rope_theta": 2e6, "use_sliding_window": False}, straight=4, biases=_LLAMA,
        tied=True,
    ),
    "gemma": Architecture(
        keys=("hidden_activation",), defaults=_GEMMA_HEADS, **_GEMMA
    ),
    "gemma2": Architecture(
        keys=("hidden_activation", "sliding_window", "layer_types", "query_pre_attn_scalar",
              *_CAPS),
        gguf_keys=(*_GGUF_WINDOWS, *_CAPS, "attention.scale"),
        defaults={**_GEMMA_HEADS, "sliding_window": 4096, "query_pre_attn_scalar": 256,
                  "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        norms=BEFORE + BEHIND, period=2, **_GEMMA,
    ),
    "gemma3": Architecture(
        keys=("hidden_activation", "sliding_window", "layer_types", "query_pre_attn_scalar",
              "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq", *_CAPS),
        gguf_keys=(*_GGUF_WINDOWS, *_CAPS, "attention.scale"),
        defaults={**_GEMMA_SIZES, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        norms=BEFORE + BEHIND + OF_HEADS, period=6, plain_windows=True, **_GEMMA,
    ),
    "mixtral": Architecture(
        keys=("sliding_window", *_EXPERTS), defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        biases=Biases(), mixed=True, gguf_keys=_GGUF_EXPERTS,
    ),
    "qwen2moe": Architecture(
        keys=(*_WINDOWS, *_EXPERTS), gguf_keys=_GGUF_EXPERTS,
        defaults={**_QWEN, "qkv_bias": True}, biases=Biases(qkv="qkv_bias"), always_biased=True,
        mixed=True, shared=True,
    ),
    "qwen3moe": Architecture(
        keys=(*_WINDOWS, *_EXPERTS), gguf_keys=_GGUF_EXPERTS, defaults=_QWEN,
        norms=BEFORE + OF_HEADS, mixed=True,
    ),
}  # fmt: skip
"""By the name in config.json and, mostly, in GGUF's `general.architecture`."""

CONFIG_NAMES = {
    "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""Names in config.json that GGUF has others for."""


def architecture(name: str) -> Architecture:
    """NotImplementedError: there is none of this name."""
    if name not in ARCHITECTURES:
        raise NotImplementedError(
            f"models of {name!r} are not served; those that are: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def config_name(config: Mapping[str, Any]) -> str:
    """The name of an architecture here, of a config.json, or of the part that is of the text."""
    name = str(config.get("model_type", ""))
    return CONFIG_NAMES.get(name, name)


def keys_of_others(name: str) -> set[str]:
    """Keys of config.json that transformers reads for other architectures, and not for this one."""
    every = set[str]().union(*(row.config_keys for row in ARCHITECTURES.values()))
    return every - ARCHITECTURES[name].config_keys
