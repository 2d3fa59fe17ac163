"""Configurations: which arithmetic a layer is quantized to. Plain data, kept as JSON in files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

_KINDS: dict[str, type[QuantizeConfig]] = {}


@dataclass(frozen=True)
class QuantizeConfig:
    """Base of all configurations. A subclass is a frozen dataclass and names its `kind`."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        if kind in _KINDS:
            raise ValueError(f"configuration kind {kind!r} is taken by {_KINDS[kind].__name__}")
        cls.kind = kind
        _KINDS[kind] = cls

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

    def __post_init__(self) -> None:
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"symmetric must be True or False, got {self.symmetric!r}")


def config_from_json(text: str) -> QuantizeConfig:
    """The configuration that `QuantizeConfig.to_json` wrote.

    Raises ValueError for text that is not a JSON object, an unknown kind or unknown or missing
    fields; TypeError for a field of the wrong type.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"expected a configuration as JSON, got {text!r}: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError(f"expected a JSON object with a string 'kind', got {text!r}")
    kind = data.pop("kind")
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"unknown configuration kind {kind!r}; known: {known}")
    expected = {field.name for field in fields(_KINDS[kind])}
    if data.keys() != expected:
        raise ValueError(
            f"configuration {kind!r} has the fields {sorted(expected)}, got {sorted(data)}"
        )
    return _KINDS[kind](**data)
