"""Keys of a model's description, of which is remembered which were read.

What is read by no part, and may change what a model says, is an error that names it. What is known
to change nothing stands here as data, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Keys(Mapping[str, Any]):
    """Values by their keys, which remembers the keys that it was asked for; so do objects in it.

    defaults: of keys that it does not have. readable: the keys that it has at all; None: each."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        readable: Iterable[str] | None = None,
    ) -> None:
        names = values.keys() if readable is None else values.keys() & set(readable)
        self._values = {name: values[name] for name in names}
        self._defaults = defaults or {}
        self._read = set[str]()
        self._objects = dict[str, Keys]()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        if key not in self._values:
            return self._defaults[key]
        value = self._values[key]
        if not isinstance(value, Mapping):
            return value
        return self._objects.setdefault(key, Keys(value))

    def says(self, key: str) -> bool:
        """Whether it has a key itself, not by default."""
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.keys() | self._defaults.keys())

    def __len__(self) -> int:
        return len(self._values.keys() | self._defaults.keys())

    def unread(self) -> dict[str, Any]:
        """What was not asked for, by key; of an object in it that was, a.b."""
        rest = {key: value for key, value in self._values.items() if key not in self._read}
        for key, keys in self._objects.items():
            rest |= {f"{key}.{name}": value for name, value in keys.unread().items()}
        return rest


class Harmless(NamedTuple):
    """Keys, an expression for all of a name, that change nothing that a model computes."""

    keys: str
    reason: str

    def allows(self, key: str, value: Any) -> bool:
        """Whether this value of a key changes nothing."""
        return re.fullmatch(self.keys, key) is not None


class Neutral(NamedTuple):
    """A key, and its values that change nothing."""

    key: str
    values: tuple[Any, ...]

    def allows(self, key: str, value: Any) -> bool:
        """Whether this value of a key changes nothing."""
        return key == self.key and value in self.values


_OF_SHAPES = "the shapes of tensors say it, or which there are"
_OF_TRAINING = "it is of training"
_OF_TEXTS = "how texts are drawn is said by Sampling, and by the tokenizer's files"
_OF_MAKERS = "it says who made the file, and how"

CONFIG = (
    Harmless(r"(moe_|shared_expert_)?intermediate_size", _OF_SHAPES),
    Harmless(r"decoder_sparse_step|mlp_only_layers", "it is compared with the tensors"),
    Harmless(r"(initializer|attention|resid|embd|hidden|embedding|mlp|classifier)_(range|p?drop\w*)"
             r"|hidden_dropout_prob|router_(aux_loss_coef|jitter_noise)|output_router_logits"
             r"|pretraining_tp|gradient_checkpointing|tf_legacy_loss", _OF_TRAINING),
    Harmless(r"(bos|eos|pad|unk|sep|cls|mask|decoder_start|forced_[be]os)_token_id|tokenizer_class"
             r"|(begin_)?suppress_tokens|bad_words_ids|prefix|max_length|min_length|do_sample"
             r"|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_[kp]"
             r"|typical_p|(repetition|length)_penalty|(encoder_)?no_repeat_ngram_size"
             r"|num_return_sequences|output_scores|return_dict_in_generate|remove_invalid_values"
             r"|exponential_decay_length_penalty", _OF_TEXTS),
    Harmless(r"architectures|model_type|transformers_version|(torch_)?dtype|_?name_or_path|auto_map"
             r"|_commit_hash|unsloth_\w+|transformers\.js_config|model_name|is_llama_config",
             _OF_MAKERS),
    Harmless(r"use_cache|cache_implementation|_?(attn|attention)_implementation\w*|use_flash_attn"
             r"|_flash_attn_\w+|return_dict|use_return_dict|torchscript|use_bfloat16"
             r"|output_(hidden_states|attentions)|chunk_size_feed_forward|pruned_heads|is_decoder"
             r"|cross_attention_hidden_size|tie_encoder_decoder",
             "how another library runs it, to the same end"),
    Harmless(r"id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params",
             "it is of tasks that are none of a language model"),
    Harmless(r"max_sequence_length|model_max_length|max_window_layers",
             "a length that max_position_embeddings or sliding_window says"),
    Neutral("is_encoder_decoder", (False,)), Neutral("add_cross_attention", (False,)),
    Neutral("is_causal", (True,)), Neutral("use_bidirectional_attention", (False,)),
    Neutral("use_mrope", (False,)),
    Neutral("rope_interleaved", (False,)), Neutral("lm_head_bias", (False,)),
    Neutral("full_attn_mod", (1,)), Neutral("interpolate_factor", (1,)),
    Neutral("num_nextn_predict_layers", (0,)),
)  # fmt: skip
"""Of a config.json."""

IMAGES = Harmless(
    r"(vision|audio)_config|\w*(image|video|audio|boi|eoi)\w*_(index|id)|mm_tokens_per_image"
    r"|text_config|projector_hidden_act|vision_feature_\w+|multimodal_projector_bias",
    "the model is read as text",
)
"""Of a config.json with one of the text inside."""

GGUF = (
    Harmless(r"(expert_|expert_shared_)?feed_forward_length|expert_shared_count"
             r"|leading_dense_block_count", _OF_SHAPES),
    Harmless(r"tensor_data_layout|rope\.scaling\.finetuned", _OF_MAKERS),
    Harmless(r"pooling_type", "it is of embeddings"),
    Neutral("attention.causal", (True,)), Neutral("attention.clamp_kqv", (0,)),
    Neutral("attention.max_alibi_bias", (0,)), Neutral("attention.temperature_scale", (0,)),
    Neutral("attention.shared_kv_layers", (0,)), Neutral("use_parallel_residual", (False,)),
    Neutral("expert_weights_scale", (0, 1)), Neutral("expert_gating_func", (1,)),
    Neutral("expert_group_count", (0, 1)), Neutral("expert_group_used_count", (0, 1)),
    Neutral("nextn_predict_layers", (0,)), Neutral("router_logit_softcapping", (0,)),
    Neutral("rope.scaling.yarn_log_multiplier", (0,)),
    Neutral("rope.scaling.yarn_attn_factor", (1,)), Neutral("rope.scaling.yarn_ext_factor", (1,)),
)  # fmt: skip
"""Of an architecture's keys in GGUF, without its name."""

GGUF_OTHERS = (
    Neutral("general.type", ("model",)), Neutral("general.quantization_version", (2,)),
    Harmless(r"general\.(?!type$|quantization_version$).*", _OF_MAKERS),
    Harmless(r"(quantize|mradermacher)\..*", _OF_MAKERS),
    Harmless(r"tokenizer\..*", "the tokenizer reads it"),
    Harmless(r"split\.(no|tensors\.count)", "split.count says it"), Neutral("split.count", (0, 1)),
)  # fmt: skip
"""Of GGUF's other keys."""

TOKENIZER = (
    Harmless(r"ggml\.(seperator|separator|padding|mask|cls|prefix|suffix|middle|fim_\w+)_(token_)?id"
             r"|ggml\.token_type_count", "no text has it, unless somebody writes it"),
    Harmless(r"ggml\.(remove_extra_whitespaces|precompiled_charsmap)",
             "it is of tokenizers that are not read"),
    Harmless(r"ggml\.(pre|merges|scores|unknown_token_id|add_space_prefix)",
             "it is of tokenizers of the other kind"),
    Harmless(r"huggingface\.json|rwkv\.world", "the other keys say it"),
    Harmless(r"chat_templates?(\..*)?", "templates by name; the one without is taken"),
    Neutral("ggml.add_eos_token", (False,)), Neutral("ggml.add_sep_token", (False,)),
)  # fmt: skip
"""Of GGUF's keys of tokenizers, without "tokenizer."."""


def unknown(unread: Mapping[str, Any], known: Iterable[Harmless | Neutral]) -> dict[str, Any]:
    """What of keys that nobody read may change a result."""
    known = list(known)
    return {
        key: value
        for key, value in unread.items()
        if not _says_nothing(value) and not any(entry.allows(key, value) for entry in known)
    }


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def refuse(place: str, keys: Mapping[str, Any]) -> None:
    """NotImplementedError: there are keys that nobody reads."""
    if not keys:
        return
    named = ", ".join(f"{key} = {value!r:.60}" for key, value in sorted(keys.items()))
    raise NotImplementedError(
        f"{place} says what no part of lowbit reads, and what may change the result: {named}. "
        "Where it changes nothing, take it out"
    )
