"""Configurations: which arithmetic a layer is quantized to. Plain data, kept as JSON in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from lowbit.graph.passes.quantize import Choice, Setting
from lowbit.graph.passes.weights import METHODS, WeightSetting
from lowbit.numerics.methods import methods
from lowbit.numerics.observers import observers
from lowbit.numerics.ranges import Range, check_range
from lowbit.registry import Registry
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.panels import group_refusal

# A field with a value under this key of its metadata is newer than the first files; where it is
# missing from JSON, it has that value.
_BEFORE = "before"
_BY_MINMAX = {_BEFORE: "minmax"}
_NEAREST = {_BEFORE: "nearest"}
_NO_EMBEDDINGS = {_BEFORE: None}

Embeddings = Literal[8, 4] | None

configurations: Registry[type[QuantizeConfig]] = Registry("configuration kind")
"""All classes of them, by `kind`."""


@dataclass(frozen=True)
class QuantizeConfig:
    """Base of all configurations. A subclass is a frozen dataclass, names its `kind`, and has some
    of the fields `group_size`, `symmetric`, `symmetric_weight`, `weight_range` and those here.

    - embeddings: how many bits the tables of embeddings get, 8 (one scale for each row) or 4 (a
      scale and a zero point for each group of a row, or for each row where there are no groups);
      None: they stay in float. One that shares its weight with a linear layer is what that is.
    - method: how weights are rounded, by its name in `lowbit.numerics.methods`. "nearest" and "hqq"
      need no data; "gptq", "awq" and "smoothquant" need `quantize_(..., calibration=batches)`.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        configurations.add(kind, cls)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "weight_range":
                check_range(value, name)
            elif name == "method":
                self._check_method(value)
            elif name == "embeddings":
                if value not in get_args(get_args(Embeddings)[0]) and value is not None:
                    raise ValueError(f"embeddings must be 8, 4 or None, got {value!r}")
            elif name == "group_size":
                _check_group_size(value)
            elif not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")

    @property
    def weight_format(self) -> WeightFormat:
        """What the weight is quantized to: 8 bits, or 4 where there are groups."""
        own = vars(self)
        if "group_size" not in own:
            return INT8._replace(method=own.get("method", "nearest"))
        dtype = "int4" if own["symmetric_weight"] else "uint4"
        return WeightFormat(
            dtype, own["group_size"], own["weight_range"], own.get("method", "nearest")
        )

    @property
    def embedding_format(self) -> WeightFormat | None:
        """What the tables of embeddings are quantized to; None: they stay in float."""
        own = vars(self)
        if own.get("embeddings") == 4:
            return WeightFormat("uint4", own.get("group_size"), own.get("weight_range", "mse"))
        return INT8 if own.get("embeddings") else None

    @property
    def activations(self) -> str:
        """What becomes of activations: see `lowbit.product.requests.float_rows`."""
        if "symmetric" not in vars(self):
            return "float"
        return "symmetric" if vars(self)["symmetric"] else "dynamic"

    def _check_method(self, name: Any) -> None:
        if name not in methods.names():
            known = " or ".join(map(repr, methods.names()))
            raise ValueError(f"unknown method {name!r}; pass {known}")
        own = vars(self)
        if methods.get(name).real_zero_points and own.get("symmetric_weight", True):
            raise ValueError(
                f"method={name!r} finds zero points, which only 4-bit weights with "
                "symmetric_weight=False have"
            )

    def to_json(self) -> str:
        """The fields and the `kind` as one JSON object; `config_from_json` reads it back."""
        return json.dumps({"kind": self.kind, **asdict(self)}, sort_keys=True)


@dataclass(frozen=True)
class Int8DynamicConfig(QuantizeConfig, kind="int8_dynamic"):
    """Linear layers: int8 weight, 8-bit activations whose range is found on every call.

    The weight has one scale per output channel and no zero point. Activations are quantized
    row by row (per token): with a zero point, or without one if `symmetric` is True, which
    costs accuracy wherever activations are not centred on zero.
    """

    symmetric: bool = False
    embeddings: Embeddings = field(default=8, metadata=_NO_EMBEDDINGS)
    method: str = field(default="nearest", metadata=_NEAREST)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(QuantizeConfig, kind="int4_weight_only"):
    """Linear layers: 4-bit weight in groups, float activations.

    Activations are computed with as float32 or bfloat16 numbers, whichever they are
    (`lowbit.linear_weight_only`); float16 goes through float32. `group_size` neighbours of an
    output channel share a scale and a zero point: a multiple of 8, or None for the whole channel.
    With `symmetric_weight` there are no zero points, which costs accuracy. `weight_range` says what
    the scales and zero points are chosen from: "minmax", the least and greatest weight, or "mse",
    the range of least squared error (`lowbit.quantize` says more).
    """

    group_size: int | None = 128
    symmetric_weight: bool = False
    weight_range: Range = field(default="mse", metadata=_BY_MINMAX)
    embeddings: Embeddings = field(default=8, metadata=_NO_EMBEDDINGS)
    method: str = field(default="nearest", metadata=_NEAREST)


@dataclass(frozen=True)
class Int4DynamicConfig(QuantizeConfig, kind="int4_dynamic"):
    """Linear layers: 4-bit weight in groups, 8-bit activations whose range is found on every call.

    The weight is that of `Int4WeightOnlyConfig`, the activations those of `Int8DynamicConfig`.
    """

    group_size: int | None = 128
    symmetric: bool = False
    symmetric_weight: bool = False
    weight_range: Range = field(default="mse", metadata=_BY_MINMAX)
    embeddings: Embeddings = field(default=8, metadata=_NO_EMBEDDINGS)
    method: str = field(default="nearest", metadata=_NEAREST)


@dataclass(frozen=True)
class StaticInt8Config:
    """Whole networks in 8 bits: every activation's format is known before a call.

    - observer: what finds the ranges of activations in calibration data, by name: "minmax",
      "moving_average", "percentile", "entropy" or "mse"; with `observer_options`, its parameters.
    - activations: "uint8" or "int8", one scale for each value, and a zero point unless `symmetric`.
    - weights: how weights, int8 with a scale for each output channel, are rounded: "nearest", or
      "gptq", which makes up for each error in what is rounded after it. weight_range: as in
      `lowbit.quantize`.
    - linear: "static", as convolutions, or "dynamic": rows of their input are quantized one by one
      when they come, which suits transformers.
    - equalize: give neighbouring layers equal ranges of each channel's weights, before all else.
    - smooth: the share, from 0 to 1, of outliers that move from the outputs of layer norms into the
      weights that read them (SmoothQuant's α); None: none do.
    - correct_bias: add to each bias what makes up for the mean error of the rounded weights.
    - mask: the name of an input [batch, length] that is 0 at positions which only fill; what is
      there is not calibrated with.
    - choices: what single layers are to be instead, by name: "int8", "float", and for linear ones
      "dynamic" or "int4", which is a 4-bit weight in groups of 128 and float activations.
      `lowbit.torch.mixed` finds such choices.
    """

    observer: str = "minmax"
    observer_options: Mapping[str, Any] = field(default_factory=dict)
    activations: Literal["uint8", "int8"] = "uint8"
    symmetric: bool = False
    weights: str = "nearest"
    weight_range: Range = "minmax"
    linear: Literal["static", "dynamic"] = "static"
    equalize: bool = False
    smooth: float | None = None
    correct_bias: bool = False
    mask: str | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range(self.weight_range, "weight_range")
        for name, known in (
            ("observer", observers.names()),
            ("activations", ("uint8", "int8")),
            ("weights", METHODS),
            ("linear", ("static", "dynamic")),
        ):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {given!r}; pass {' or '.join(map(repr, known))}")
        for name in ("symmetric", "equalize", "correct_bias"):
            if not isinstance(given := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {given!r}")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth must be None or from 0 to 1, got {self.smooth!r}")
        for name, choice in self.choices.items():
            if choice not in get_args(Choice):
                known = " or ".join(map(repr, get_args(Choice)))
                raise ValueError(f"unknown choice {choice!r} for {name!r}; pass {known}")
        observers.get(self.observer)(**self.observer_options)  # whose errors name the option

    @property
    def setting(self) -> Setting:
        """The same for `lowbit.graph.passes.quantize`."""
        weights = WeightSetting(method=self.weights, range=self.weight_range)
        return Setting(dtype=self.activations, symmetric=self.symmetric, weights=weights)


def _check_group_size(size: Any) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"group_size must be an integer or None, got {size!r}")
    if refusal := group_refusal(size):
        raise ValueError(f"{refusal}; None is a scale per output channel")


def config_from_json(text: str) -> QuantizeConfig:
    """The configuration that `QuantizeConfig.to_json` wrote, also that of an earlier version.

    Raises ValueError for text that is not a JSON object, an unknown kind or unknown or missing
    fields; TypeError for a field of the wrong type.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"expected a configuration as JSON, got {text!r}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError(f"expected a JSON object with a string 'kind', got {text!r}")
    found = configurations.get(kind := data.pop("kind"))
    known = fields(found)
    data = {f.name: f.metadata[_BEFORE] for f in known if _BEFORE in f.metadata} | data
    expected = {f.name for f in known}
    if data.keys() != expected:
        raise ValueError(
            f"configuration {kind!r} has the fields {sorted(expected)}, got {sorted(data)}"
        )
    return found(**data)
