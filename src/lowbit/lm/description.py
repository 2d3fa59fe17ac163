"""What a decoder is, as data: one description for Llama and its relatives.

What tensors say by being there (biases, norms of heads, norms behind a block, fused matrices) is
not repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_SERVED: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "phi3": {}, "granite": {},
    "smollm3": {"straight": 4}, "gemma": {"function": "gelu_tanh", "norm_offset": 1.0},
}  # fmt: skip
"""By the name in config.json and, mostly, in GGUF's `general.architecture`."""
# Of GGUF: files hold rows of queries and keys so that neighbours are turned together.
_INTERLEAVED = ("llama", "granite", "smollm3")
_LEFT_OUT = ("expert_count", "num_local_experts", "num_experts")


@dataclass(frozen=True)
class Description:
    """A decoder of layers x + attention(norm(x)), x + gated(norm(x)).

    - width: of x. heads of queries, key_heads of keys and values, of head_dim elements, of which
      `rotated` are turned by their position; context: how many positions it was made for.
    - function: of the gated unit, by its name among post-operations. epsilon: of norms.
    - embedding_scale, residual_scale, attention_scale, logit_scale: factors. logit_cap: logits are
      cap · tanh(logit / cap); 0: as they are.
    - base, scaling: of the frequencies at which positions turn, see `frequencies`. straight: every
      so many layers one does not turn; 0: all do.
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
    straight: int = 0
    norm_offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "key_heads", "head_dim", "vocabulary", "context"):
            size = getattr(self, name)
            if type(size) is not int or not 0 < size < 1 << 31:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_heads} of keys evenly")

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any]) -> Description:
        """Of GGUF's metadata. NotImplementedError: it says what is not served."""
        name = metadata.get("general.architecture", "")
        given = {
            key.removeprefix(f"{name}."): value
            for key, value in metadata.items()
            if key.startswith(f"{name}.")
        }
        _check(name, given)
        window = given.get("attention.sliding_window")
        heads, width = _wanted(given, "attention.head_count"), _wanted(given, "embedding_length")
        head_dim = given.get("attention.key_length", width // heads)
        kind = given.get("rope.scaling.type", "none")
        scaling = {} if kind == "none" else {"rope_type": kind} | {
            key.removeprefix("rope.scaling."): value
            for key, value in given.items()
            if key.startswith("rope.scaling.")
        }  # fmt: skip
        vocabulary = given.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
        context = _wanted(given, "context_length")
        scale = math.sqrt(width) if name == "gemma" else given.get("embedding_scale", 1.0)
        settings = {**_SERVED[name], "norm_offset": 0.0}  # which is in the file's weights
        return cls(
            name, _wanted(given, "block_count"), width, heads,
            given.get("attention.head_count_kv", heads), head_dim, vocabulary,
            min(context, window) if window else context,
            _wanted(given, "attention.layer_norm_rms_epsilon"),
            given.get("rope.dimension_count", head_dim), given.get("rope.freq_base", 10000.0),
            scaling, embedding_scale=scale, residual_scale=given.get("residual_scale", 1.0),
            attention_scale=given.get("attention.scale"),
            logit_scale=1 / given.get("logit_scale", 1.0), interleaved=name in _INTERLEAVED,
            **settings,
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Description:
        """Of a config.json. NotImplementedError: it says what is not served."""
        name = config.get("model_type", "")
        _check(name, config)
        window = config.get("sliding_window")
        if name.startswith("qwen") and not config.get("use_sliding_window"):
            window = None
        heads, width = _wanted(config, "num_attention_heads"), _wanted(config, "hidden_size")
        head_dim = config.get("head_dim") or width // heads
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        context = _wanted(config, "max_position_embeddings")
        scale = math.sqrt(width) if name == "gemma" else config.get("embedding_multiplier", 1.0)
        return cls(
            name, _wanted(config, "num_hidden_layers"), width, heads,
            config.get("num_key_value_heads") or heads, head_dim, _wanted(config, "vocab_size"),
            min(context, window) if window else context, config.get("rms_norm_eps", 1e-6),
            int(head_dim * part), rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            {} if kind == "default" else {**rope, "rope_type": kind},
            embedding_scale=scale, residual_scale=config.get("residual_multiplier", 1.0),
            attention_scale=config.get("attention_multiplier"),
            logit_scale=1 / config.get("logits_scaling", 1.0),
            **_SERVED[name],
        )  # fmt: skip

    def frequencies(self, divisors: npt.NDArray[Any] | None = None) -> npt.NDArray[np.float64]:
        """Of each pair of elements, the radians by which a position turns it, [rotated / 2].

        divisors: by pair, where a file holds them. NotImplementedError: an unknown scaling."""
        n = self.rotated // 2
        plain = self.base ** -(np.arange(n) / n)
        kind, given = self.scaling.get("rope_type"), self.scaling
        if divisors is not None:
            return plain / divisors
        if kind is None:
            return plain
        if kind == "linear":
            return plain / given["factor"]
        if kind == "llama3":
            length = 2 * np.pi / plain
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            whole = given["original_max_position_embeddings"] / length
            share = np.clip((whole - low) / (high - low), 0, 1)
            return plain * (share + (1 - share) / given["factor"])
        raise NotImplementedError(f"positions that are scaled by {kind!r} are not served")


def _check(name: str, given: Mapping[str, Any]) -> None:
    """NotImplementedError for what no description covers."""
    if name not in _SERVED:
        raise NotImplementedError(
            f"models of {name!r} are not served; those that are: {', '.join(_SERVED)}"
        )
    experts = [key for key in _LEFT_OUT if given.get(key)]
    if experts:
        raise NotImplementedError(f"mixtures of experts ({experts[0]}) are not served")


def _wanted(given: Mapping[str, Any], key: str) -> Any:
    if key not in given:
        raise ValueError(f"the model's description has no {key}")
    return given[key]
