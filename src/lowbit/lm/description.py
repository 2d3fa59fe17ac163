"""What a decoder is, as data: one description for Llama and its relatives.

What tensors say by being there (biases, norms of heads, norms behind a block, fused matrices) is
not repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

_GEMMA = {"function": "gelu_tanh", "norm_offset": 1.0}
# Where config.json names the function of the gated unit, and how.
_FUNCTIONS = {"silu": ("hidden_act", "silu"),
              "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh")}  # fmt: skip
_SERVED: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "phi3": {}, "granite": {},
    "smollm3": {"straight": 4}, "gemma": _GEMMA, "gemma2": _GEMMA, "gemma3": _GEMMA,
    "mixtral": {}, "qwen2moe": {}, "qwen3moe": {},
}  # fmt: skip
"""By the name in config.json and, mostly, in GGUF's `general.architecture`."""
_MOST_LAYERS = 1 << 16
# Of GGUF: files hold rows of queries and keys so that neighbours are turned together.
_INTERLEAVED = ("llama", "granite", "smollm3")
_EXPERTS = ("expert_count", "num_local_experts", "num_experts")
_MIXED = ("llama", "mixtral", "qwen2moe", "qwen3moe")  # GGUF calls Mixtral llama
_CONFIGS = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_GLOBAL = {"gemma2": 2, "gemma3": 6}  # every so many layers one has no window
# Of Gemma 3: config.json leaves out what transformers knows.
_DEFAULTS: dict[str, dict[str, Any]] = {"gemma3": {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}}  # fmt: skip
# Of GGUF, by depth: those whose queries are scaled by the width that a head would have.
_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
# What GGUF calls the parts of a scaling of positions, by transformers' names.
_SCALINGS = {
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}  # fmt: skip


@dataclass(frozen=True)
class Description:
    """A decoder of layers x + attention(norm(x)), x + gated(norm(x)).

    - width: of x. heads of queries, key_heads of keys and values, of head_dim elements, of which
      `rotated` are turned by their position; context: how many positions it was made for.
    - function: of the gated unit, by its name among post-operations. epsilon: of norms.
    - embedding_scale, residual_scale, attention_scale, logit_scale: factors. logit_cap: logits are
      cap · tanh(logit / cap); 0: as they are.
    - attention_cap: the same of the scores of attention. windows: by layer, how many tokens each
      attends to, 0: to all; (): all to all.
    - base, scaling: of the frequencies at which positions turn, see `frequencies`; local_base: of
      layers with windows, without a scaling; 0: they turn as others. straight: every so many
      layers one does not turn; 0: all do.
    - experts_used: of a mixture of `experts`, for each token; experts_normalized: whether their
      weights sum to 1, or are parts of a softmax over all.
    - norm_offset: what is added to the weights of norms.
    - interleaved: rows of queries and keys are stored in pairs.
    """

    architecture: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    context: int
    epsilon: float
    rotated: int
    base: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    function: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    attention_cap: float = 0.0
    windows: tuple[int, ...] = ()
    local_base: float = 0.0
    straight: int = 0
    experts: int = 0
    experts_used: int = 0
    experts_normalized: bool = True
    norm_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for part in fields(self):
            value, least = getattr(self, part.name), int(part.default is MISSING)
            most = _MOST_LAYERS if part.name == "layers" else (1 << 31) - 1
            if part.type == "int" and (type(value) is not int or not least <= value <= most):
                raise ValueError(f"{part.name} must be from {least} to {most}, got {value!r}")
            if part.type == "float" and not (type(value) in (int, float) and abs(value) < 3e38):
                raise ValueError(f"{part.name} must be a finite number, got {value!r}")
        if self.rotated > self.head_dim or self.rotated % 2:
            raise ValueError(f"{self.rotated} of {self.head_dim} elements of a head cannot turn")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_heads} of keys evenly")
        for key, value in self.scaling.items():
            number = type(value) in (int, float) and 0 < value < 3e38
            if key in _SCALINGS and value is not None and not number:
                raise ValueError(f"{key} must be a positive number, got {value!r}")
        wrong = any(type(one) is not int or one < 0 for one in self.windows)
        if self.windows and (len(self.windows) != self.layers or wrong):
            raise ValueError(f"{self.layers} layers have the windows {self.windows}")
        if not 0 <= self.experts_used <= self.experts or bool(self.experts) > self.experts_used:
            raise ValueError(f"a token is sent to {self.experts_used} of {self.experts} experts")

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any]) -> Description:
        """Of GGUF's metadata. NotImplementedError: it says what is not served."""
        name = str(metadata.get("general.architecture", ""))
        given = {
            key.removeprefix(f"{name}."): value
            for key, value in metadata.items()
            if key.startswith(f"{name}.")
        }
        _check(name, given)
        layers, width = _wanted(given, "block_count"), _wanted(given, "embedding_length")
        heads = _wanted(given, "attention.head_count")
        head_dim = given.get("attention.key_length", width // heads)
        scaling = {
            ours: given[f"rope.scaling.{key}"] for ours, key in _SCALINGS.items()
            if f"rope.scaling.{key}" in given
        }  # fmt: skip
        kind = given.get("rope.scaling.type", "linear" if "factor" in scaling else "none")
        pattern = given.get("attention.sliding_window_pattern", _GLOBAL.get(name, 0))
        if not isinstance(pattern, list):
            pattern = _every(pattern, min(layers, _MOST_LAYERS))  # more are refused
        window, scale = given.get("attention.sliding_window", 0), given.get("attention.scale")
        if _WIDE_HEADS.get(name) == layers:
            scale = (width // heads) ** -0.5
        vocabulary = given.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
        local = given.get("rope.freq_base_swa", 1e4 if name == "gemma3" else 0.0)
        return cls(
            name, layers, width, heads, given.get("attention.head_count_kv", heads), head_dim,
            vocabulary, _wanted(given, "context_length"),
            _wanted(given, "attention.layer_norm_rms_epsilon"),
            given.get("rope.dimension_count", head_dim), given.get("rope.freq_base", 10000.0),
            scaling | ({} if kind == "none" else {"rope_type": kind}),
            embedding_scale=_embedding_scale(name, width, given.get("embedding_scale")),
            residual_scale=given.get("residual_scale", 1.0), attention_scale=scale,
            logit_scale=1 / given.get("logit_scale", 1.0),
            logit_cap=given.get("final_logit_softcapping", 0.0),
            attention_cap=given.get("attn_logit_softcapping", 0.0),
            windows=tuple(window if limited else 0 for limited in pattern) if window else (),
            local_base=local, interleaved=name in _INTERLEAVED,
            experts=given.get("expert_count", 0), experts_used=given.get("expert_used_count", 0),
            experts_normalized=given.get("expert_weights_norm", name != "qwen2moe"),
            **{**_SERVED[name], "norm_offset": 0.0},  # which is in the file's weights
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Description:
        """Of a config.json. NotImplementedError: it says what is not served."""
        config = config.get("text_config", config)  # of models that see, too
        name = str(config.get("model_type", ""))
        name = _CONFIGS.get(name, name)
        _check(name, config)
        config = {**_DEFAULTS.get(name, {}), **config}
        heads, width = _wanted(config, "num_attention_heads"), _wanted(config, "hidden_size")
        head_dim = config.get("head_dim") or width // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        local = rope.get("sliding_attention", {}).get("rope_theta")
        rope = rope.get("full_attention", rope)
        kind = rope.get("rope_type", rope.get("type", "default"))
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        context = _wanted(config, "max_position_embeddings")
        original = config.get("original_max_position_embeddings", context)
        scaling = {"original_max_position_embeddings": original, **rope, "rope_type": kind}
        experts = config.get("num_local_experts", config.get("num_experts", 0)) or 0
        scalar, scale = config.get("query_pre_attn_scalar"), config.get("attention_multiplier")
        layers, served = _wanted(config, "num_hidden_layers"), dict(_SERVED[name])
        known = _FUNCTIONS[served.get("function", "silu")]
        if config.get(known[0], known[1]) not in (None, known[1]):
            raise NotImplementedError(f"{name} with {known[0]} {config[known[0]]!r} is not served")
        if "straight" in served:
            every = served["straight"] = config.get("no_rope_layer_interval", served["straight"])
            turn = [int(bool((layer + 1) % every)) for layer in range(layers)]
            if (config.get("no_rope_layers") or turn) != turn:
                raise NotImplementedError("layers without positions that are not each so many")
        return cls(
            name, layers, width, heads,
            config.get("num_key_value_heads") or heads, head_dim, _wanted(config, "vocab_size"),
            context, config.get("rms_norm_eps", 1e-6), int(head_dim * part),
            rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            {} if kind == "default" else scaling,
            embedding_scale=_embedding_scale(name, width, config.get("embedding_multiplier")),
            residual_scale=config.get("residual_multiplier", 1.0),
            attention_scale=scalar**-0.5 if scalar else scale,
            logit_scale=1 / config.get("logits_scaling", 1.0),
            logit_cap=config.get("final_logit_softcapping") or 0.0,
            attention_cap=config.get("attn_logit_softcapping") or 0.0,
            windows=_windows(name, config),
            experts=experts, experts_used=config.get("num_experts_per_tok", 0) if experts else 0,
            experts_normalized=config.get("norm_topk_prob", name == "mixtral"),
            local_base=local or config.get("rope_local_base_freq", 0.0),
            **served,
        )  # fmt: skip

    @classmethod
    def of_own(cls, held: Any) -> Description:
        """Of what `dataclasses.asdict` made of one and JSON has kept. ValueError: it is damaged."""
        if not isinstance(held, dict) or held.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("the model's description has other fields than this lowbit knows")
        _check(held["architecture"], {})
        try:
            return cls(**{**held, "windows": tuple(held["windows"])})
        except TypeError as error:
            raise ValueError(f"the model's description: {error}") from None

    def window(self, layer: int) -> int:
        """How many tokens each attends to in a layer; 0: to all."""
        return self.windows[layer] if self.windows else 0

    def frequencies(
        self, context: int, divisors: npt.NDArray[Any] | None = None
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Of each pair of elements, the radians by which a position turns it, [rotated / 2], and
        what cosines and sines are multiplied by.

        context: how many positions there are to be. divisors: by pair, where a file holds them.
        NotImplementedError: an unknown scaling."""
        n, given = self.rotated // 2, self.scaling
        plain, kind = self.base ** -(np.arange(n) / n), given.get("rope_type")
        if divisors is not None:
            return plain / divisors, given.get("attention_factor") or 1.0
        if kind is None:
            return plain, 1.0
        if kind == "linear":
            return plain / _wanted(given, "factor"), 1.0
        original = given.get("original_max_position_embeddings", self.context)
        factor = given.get("factor") or self.context / original
        if kind == "llama3":
            low, high = (_wanted(given, f"{part}_freq_factor") for part in ("low", "high"))
            share = np.clip((original * plain / (2 * np.pi) - low) / (high - low), 0, 1)
            return plain * (share + (1 - share) / factor), 1.0
        if kind == "yarn":
            return _yarn(plain, self.base, factor, original, given)
        if kind in ("longrope", "su"):
            long = _wanted(given, "long_factor" if context > original else "short_factor")
            more = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
            return plain / np.array(long), given.get("attention_factor") or more
        raise NotImplementedError(f"positions that are scaled by {kind!r} are not served")


def _yarn(
    plain: npt.NDArray[np.float64], base: float, factor: float, original: int,
    given: Mapping[str, Any],
) -> tuple[npt.NDArray[np.float64], float]:  # fmt: skip
    """Pairs that turn often in the original context stay, those that turn seldom are stretched.
    (Peng et al. 2023, arXiv:2309.00071.)"""
    n = len(plain)

    def pair(turns: float) -> float:
        return n * math.log(original / (turns * 2 * math.pi)) / math.log(base)

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0

    low, high = pair(given.get("beta_fast") or 32), pair(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    share = np.clip((np.arange(n) - low) / max(high - low, 1e-3), 0, 1)
    one, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    more = grown(one) / grown(all_dim) if one and all_dim else grown(1)
    return plain * (1 - share + share / factor), given.get("attention_factor") or more


def _every(period: int, layers: int) -> list[bool]:
    """Which layers have a window: all but every so many; 0: all."""
    return [not period or (i + 1) % period != 0 for i in range(layers)]


def _windows(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of a config.json, by layer."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if not window or not config.get("use_sliding_window", not name.startswith("qwen")):
        return ()
    period = config.get("sliding_window_pattern", _GLOBAL.get(name, 0))
    limited = _every(period, layers)
    if name in ("qwen2", "qwen3"):
        limited = [i >= config.get("max_window_layers", 0) for i in range(layers)]
    if kinds := config.get("layer_types"):
        limited = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if one else 0 for one in limited)


def _embedding_scale(name: str, width: int, given: float | None) -> float:
    return math.sqrt(width) if name.startswith("gemma") else given or 1.0


def _check(name: str, given: Mapping[str, Any]) -> None:
    """NotImplementedError for what no description covers."""
    if name not in _SERVED:
        raise NotImplementedError(
            f"models of {name!r} are not served; those that are: {', '.join(_SERVED)}"
        )
    if given.get("use_bidirectional_attention"):
        raise NotImplementedError("models whose tokens attend to later ones are not served")
    experts = [key for key in _EXPERTS if given.get(key)]
    if experts and name not in _MIXED:
        raise NotImplementedError(f"mixtures of experts ({experts[0]}) are not served of {name!r}")


def _wanted(given: Mapping[str, Any], key: str) -> Any:
    if key not in given:
        raise ValueError(f"the model's description has no {key}")
    return given[key]
