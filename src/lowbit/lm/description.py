"""What a decoder is, as data: one description for Llama and its relatives.

What tensors say by being there (biases, norms of heads, norms behind a block, fused matrices) is
not repeated here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.lm.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture,
    config_name,
    keys_of_others,
)
from lowbit.lm.keys import CONFIG, GGUF, GGUF_OTHERS, IMAGES, Keys, refuse, unknown
from lowbit.registry.printable import printable

# Where config.json names the function of the gated unit, and how.
_FUNCTIONS = {"silu": ("hidden_act", "silu"),
              "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh")}  # fmt: skip
_MOST_LAYERS = 1 << 16
# Of GGUF: files hold rows of queries and keys so that neighbours are turned together.
_INTERLEAVED = ("llama", "granite", "smollm3")
_EXPERTS = ("expert_count", "num_local_experts", "num_experts")
# Of GGUF, by depth: those whose queries are scaled by the width that a head would have.
_WIDE_HEADS = {"gemma2": 46, "gemma3": 62}
# What GGUF calls the parts of a scaling of positions, by transformers' names.
_SCALINGS = {
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "attention_factor": "attn_factor", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
}  # fmt: skip
# What transformers says of a scaling of positions besides.
_CONFIG_SCALINGS = (*_SCALINGS, "mscale", "mscale_all_dim", "truncate", "short_factor",
                    "long_factor")  # fmt: skip
_GGUF_KEYS = (
    "block_count", "embedding_length", "context_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_swa", "attention.value_length_swa",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.dimension_count_swa",
    "rope.freq_base", "rope.scaling.type", *(f"rope.scaling.{key}" for key in _SCALINGS.values()),
)  # fmt: skip


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
        """Of GGUF's metadata.

        NotImplementedError: it says what is not served, or what no part reads."""
        name = str(metadata.get("general.architecture", ""))
        row = architecture(name)
        every = {
            key.removeprefix(f"{name}."): value
            for key, value in metadata.items()
            if key.startswith(f"{name}.")
        }
        _check(name, every)
        given = Keys(every, readable=(*_GGUF_KEYS, *row.gguf_keys))
        layers, width = _wanted(given, "block_count"), _wanted(given, "embedding_length")
        heads = _wanted(given, "attention.head_count")
        head_dim = given.get("attention.key_length", width // heads)
        rotated = given.get("rope.dimension_count", head_dim)
        _check_same(given, head_dim, "attention.value_length", "attention.key_length_swa",
                    "attention.value_length_swa")  # fmt: skip
        _check_same(given, rotated, "rope.dimension_count_swa")
        scaling = {
            ours: given[f"rope.scaling.{key}"] for ours, key in _SCALINGS.items()
            if f"rope.scaling.{key}" in given
        }  # fmt: skip
        kind = given.get("rope.scaling.type", "linear" if "factor" in scaling else "none")
        base = given.get("rope.freq_base", 10000.0)
        windows, scale = _gguf_windows(given, row, layers), given.get("attention.scale")
        if _WIDE_HEADS.get(name) == layers:
            scale = (width // heads) ** -0.5
        vocabulary = given.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
        local = given.get("rope.freq_base_swa", 1e4 if name == "gemma3" else base)
        description = cls(
            name, layers, width, heads, given.get("attention.head_count_kv", heads), head_dim,
            vocabulary, _wanted(given, "context_length"),
            _wanted(given, "attention.layer_norm_rms_epsilon"),
            rotated, base, scaling | ({} if kind == "none" else {"rope_type": kind}),
            embedding_scale=_embedding_scale(name, width, given.get("embedding_scale")),
            residual_scale=given.get("residual_scale", 1.0), attention_scale=scale,
            logit_scale=1 / given.get("logit_scale", 1.0),
            logit_cap=given.get("final_logit_softcapping", 0.0),
            attention_cap=given.get("attn_logit_softcapping", 0.0), windows=windows,
            local_base=local if row.plain_windows and any(windows) else 0.0,
            interleaved=name in _INTERLEAVED, function=row.function, straight=row.straight,
            experts=given.get("expert_count", 0), experts_used=given.get("expert_used_count", 0),
            experts_normalized=given.get("expert_weights_norm", name != "qwen2moe"),
        )  # fmt: skip
        rest = {key: every[key] for key in every.keys() - given.keys()} | given.unread()
        refuse(f"the description of {name}", unknown(rest, GGUF))
        others = {key: metadata[key] for key in metadata if not key.startswith(f"{name}.")}
        refuse("the file", unknown(others, GGUF_OTHERS))
        return description

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Description:
        """Of a config.json. Keys of other architectures are left out, with a warning, as
        transformers leaves them out.

        NotImplementedError: it says what is not served, or what no part reads."""
        outside = config
        config = config.get("text_config", config)  # of models that see, too
        name = config_name(config)
        row = architecture(name)
        _check(name, config)
        given = Keys(config, row.defaults, row.config_keys)
        heads, width = _wanted(given, "num_attention_heads"), _wanted(given, "hidden_size")
        layers = _wanted(given, "num_hidden_layers")
        head_dim = given.get("head_dim") or width // heads
        positions = _Positions.of(given, row)
        _check_function(name, row, given)
        experts = given.get("num_local_experts", given.get("num_experts", 0)) or 0
        experts_used = given.get("num_experts_per_tok", 0)
        scalar, scale = given.get("query_pre_attn_scalar"), given.get("attention_multiplier")
        windows, straight = _windows(name, given), _straight(row, given)
        description = cls(
            name, layers, width, heads,
            given.get("num_key_value_heads") or heads, head_dim, _wanted(given, "vocab_size"),
            positions.context, given.get("rms_norm_eps", 1e-6), int(head_dim * positions.part),
            positions.base, positions.scaling,
            embedding_scale=_embedding_scale(name, width, given.get("embedding_multiplier")),
            residual_scale=given.get("residual_multiplier", 1.0),
            attention_scale=scalar**-0.5 if scalar else scale,
            logit_scale=1 / given.get("logits_scaling", 1.0),
            logit_cap=given.get("final_logit_softcapping") or 0.0,
            attention_cap=given.get("attn_logit_softcapping") or 0.0, windows=windows,
            experts=experts, experts_used=experts_used if experts else 0,
            experts_normalized=given.get("norm_topk_prob", name == "mixtral"),
            local_base=positions.local_base if any(windows) else 0.0,
            function=row.function, norm_offset=row.norm_offset, straight=straight,
        )  # fmt: skip
        _refuse_config(name, row, given, config, outside)
        return description

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
        if divisors is not None and kind in ("linear", "yarn"):
            raise NotImplementedError(f"tensors of frequencies that are scaled by {kind!r} besides")
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


def _gguf_windows(given: Keys, row: Architecture, layers: int) -> tuple[int, ...]:
    """Of GGUF, by layer."""
    window = given.get("attention.sliding_window", 0)
    pattern = given.get("attention.sliding_window_pattern", row.period)
    if not isinstance(pattern, list):
        pattern = _every(pattern, min(layers, _MOST_LAYERS))  # more are refused
    return tuple(window if limited else 0 for limited in pattern) if window else ()


def _windows(name: str, given: Keys) -> tuple[int, ...]:
    """Of a config.json, by layer."""
    window, layers = given.get("sliding_window"), given["num_hidden_layers"]
    used = given.get("use_sliding_window", True)
    kinds, first = given.get("layer_types"), given.get("max_window_layers", 0)
    period = given.get("sliding_window_pattern", given.get("_sliding_window_pattern"))
    if not window or not used:
        return ()
    limited = _every(period or ARCHITECTURES[name].period, layers)
    if name in ("qwen2", "qwen3"):
        limited = [layer >= first for layer in range(layers)]
    if name == "qwen2moe":
        limited = [layer < first and layer % 2 == 0 for layer in range(layers)]
    if name == "smollm3":
        limited = [not turns for turns in _turning(given)]
    if kinds:
        _check_kinds(kinds)
        limited = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if one else 0 for one in limited)


def _check_kinds(kinds: Any) -> None:
    """NotImplementedError: attention of another kind."""
    if unknown_kinds := sorted(set(map(str, kinds)) - {"sliding_attention", "full_attention"}):
        raise NotImplementedError(f"layers of {unknown_kinds[0]!r} are not served")


def _turning(given: Keys) -> list[int]:
    """Whether each layer turns by positions, 1 or 0."""
    every = given.get("no_rope_layer_interval", 4)
    layers = range(given["num_hidden_layers"])
    return given.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]


def _straight(row: Architecture, given: Keys) -> int:
    """Every so many layers one does not turn by positions; 0: all do."""
    if not row.straight:
        return 0
    every, layers = given.get("no_rope_layer_interval", row.straight), given["num_hidden_layers"]
    if _turning(given) != [int((layer + 1) % every != 0) for layer in range(layers)]:
        raise NotImplementedError("layers without positions that are not each so many")
    return every


def _check_function(name: str, row: Architecture, given: Keys) -> None:
    """NotImplementedError: a gated unit with another function than the architecture's."""
    key, known = _FUNCTIONS[row.function]
    usual = given.get("hidden_act")
    if key == "hidden_act":
        value = usual
    else:  # gemma's first files have only the other key; those after it have both
        value = given.get(key)
        key, value = (key, value) if value is not None or name != "gemma" else ("hidden_act", usual)
    if value not in (None, known):
        raise NotImplementedError(f"{name} with {key} {value!r} is not served")


def _check_same(given: Keys, value: Any, *keys: str) -> None:
    """NotImplementedError: a size of some layers, or of values, is another one."""
    for key in keys:
        if given.get(key, value) != value:
            raise NotImplementedError(f"{key} {given[key]!r} beside {value!r} is not served")


@dataclass(frozen=True)
class _Positions:
    """Of a config.json: how many positions a model was made for, the share of a head that turns,
    the base and the scaling of frequencies, and the base of layers with windows; 0: the same."""

    context: int
    part: float
    base: float
    scaling: dict[str, Any]
    local_base: float

    @classmethod
    def of(cls, given: Keys, row: Architecture) -> _Positions:
        """ValueError: two keys say two things."""
        context = _wanted(given, "max_position_embeddings")
        older, newer = given.get("rope_scaling") or {}, given.get("rope_parameters") or {}
        if older and newer:
            raise ValueError("rope_parameters and rope_scaling both say how positions turn")
        whole = newer or older
        rope, local = whole.get("full_attention", whole), whole.get("sliding_attention") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaling = {key: rope[key] for key in _CONFIG_SCALINGS if key in rope}
        nested = "full_attention" in whole
        original = None if nested else given.get("original_max_position_embeddings")
        usual = scaling.get("original_max_position_embeddings", context)
        scaling |= {"original_max_position_embeddings": original or usual, "rope_type": kind}
        base = _agreed(rope, given, "rope_theta", 10000.0)
        if local.get("rope_type", local.get("type", "default")) != "default":
            raise NotImplementedError("positions of layers with windows that are scaled")
        local_base = local.get("rope_theta", given.get("rope_local_base_freq", base))
        part = 1.0
        if "partial_rotary_factor" in row.config_keys:
            part = _agreed(rope, given, "partial_rotary_factor", 1.0)
        return cls(
            context, part, base, {} if kind == "default" else scaling,
            local_base if row.plain_windows else 0.0,
        )  # fmt: skip


def _agreed(rope: Mapping[str, Any], given: Keys, key: str, default: float) -> Any:
    """What rope_parameters say, or config.json itself. ValueError: they say two things."""
    value = given.get(key, default)
    if key not in rope:
        return value
    if given.says(key) and value not in (None, rope[key]):
        raise ValueError(f"{key} is {value!r} in config.json and {rope[key]!r} in rope_parameters")
    return rope[key]


def _refuse_config(
    name: str, row: Architecture, given: Keys, config: Mapping[str, Any], outside: Mapping[str, Any]
) -> None:
    """NotImplementedError: there are keys that nobody reads. Those of other architectures that are
    set to something are named in a warning."""
    foreign = {key: config[key] for key in config.keys() & keys_of_others(name)}
    foreign = {key: value for key, value in unknown(foreign, CONFIG).items() if _is_set(value)}
    if foreign:
        named = ", ".join(f"{key} = {value!r:.60}" for key, value in sorted(foreign.items()))
        warnings.warn(
            f"config.json has keys of other architectures, which {name} leaves out, as "
            f"transformers does: {printable(named)}",
            stacklevel=2,
        )
    rest = {key: config[key] for key in config if key not in row.config_keys | keys_of_others(name)}
    unread = {key: value for key, value in given.unread().items() if key not in row.tensor_keys}
    refuse("config.json", unknown(rest | unread, CONFIG))
    if outside is not config:
        around = {key: outside[key] for key in outside.keys() - row.tensor_keys - {"model_type"}}
        refuse("config.json", unknown(around, (*CONFIG, IMAGES)))


def _is_set(value: Any) -> bool:
    """Whether a key says more than that something is not used."""
    if isinstance(value, list):
        return any(part != "full_attention" for part in value)
    return value not in (False, 0, 1)


def _embedding_scale(name: str, width: int, given: float | None) -> float:
    return math.sqrt(width) if name.startswith("gemma") else given or 1.0


def _check(name: str, given: Mapping[str, Any]) -> None:
    """NotImplementedError for what no description covers."""
    row = architecture(name)
    if given.get("use_bidirectional_attention"):
        raise NotImplementedError("models whose tokens attend to later ones are not served")
    experts = [key for key in _EXPERTS if given.get(key)]
    if experts and not row.mixed:
        raise NotImplementedError(f"mixtures of experts ({experts[0]}) are not served of {name!r}")


def _wanted(given: Mapping[str, Any], key: str) -> Any:
    if key not in given:
        raise ValueError(f"the model's description has no {key}")
    return given[key]
