"""Configurations: which arithmetic a layer is quantized to. Plain data, kept as JSON in files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from lowbit.numerics.ranges import Range, check_range
from lowbit.registry import Registry
from lowbit.weights.format import INT8, WeightFormat
from lowbit.weights.panels import group_refusal

# A field with a value under this key of its metadata is newer than the first files; where it is
# missing from JSON, it has that value.
_BEFORE = "before"
_BY_MINMAX = {_BEFORE: "minmax"}

_kinds: Registry[type[QuantizeConfig]] = Registry("configuration kind")


@dataclass(frozen=True)
class QuantizeConfig:
    """Base of all configurations. A subclass is a frozen dataclass, names its `kind`, and has some
    of the fields `group_size`, `symmetric`, `symmetric_weight` and `weight_range`."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        _kinds.add(kind, cls)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "weight_range":
                check_range(value, name)
            elif name == "group_size":
                _check_group_size(value)
            elif not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")

    @property
    def weight_format(self) -> WeightFormat:
        """What the weight is quantized to: 8 bits, or 4 where there are groups."""
        own = vars(self)
        if "group_size" not in own:
            return INT8
        dtype = "int4" if own["symmetric_weight"] else "uint4"
        return WeightFormat(dtype, own["group_size"], own["weight_range"])

    @property
    def activations(self) -> str:
        """What becomes of activations: see `lowbit.product.requests.float_rows`."""
        if "symmetric" not in vars(self):
            return "float"
        return "symmetric" if vars(self)["symmetric"] else "dynamic"

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


@dataclass(frozen=True)
class Int4DynamicConfig(QuantizeConfig, kind="int4_dynamic"):
    """Linear layers: 4-bit weight in groups, 8-bit activations whose range is found on every call.

    The weight is that of `Int4WeightOnlyConfig`, the activations those of `Int8DynamicConfig`.
    """

    group_size: int | None = 128
    symmetric: bool = False
    symmetric_weight: bool = False
    weight_range: Range = field(default="mse", metadata=_BY_MINMAX)


def _check_group_size(size: Any) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"group_size must be an integer or None, got {size!r}")
    if refusal := group_refusal("uint4", size):
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
    found = _kinds.get(kind := data.pop("kind"))
    known = fields(found)
    data = {f.name: f.metadata[_BEFORE] for f in known if _BEFORE in f.metadata} | data
    expected = {f.name for f in known}
    if data.keys() != expected:
        raise ValueError(
            f"configuration {kind!r} has the fields {sorted(expected)}, got {sorted(data)}"
        )
    return found(**data)
