"""What the records of configurations have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Protocol

_OPTIONS = {"num_warps", "num_stages", "maxnreg"}


class _Config(Protocol):
    def refusal(self) -> str | None: ...


def require(config: _Config) -> None:
    """ValueError if the configuration refuses itself, with its reason."""
    if refusal := config.refusal():
        raise ValueError(f"{config} is no configuration: {refusal}")


def not_powers(config: object, *names: str) -> str | None:
    """The complaint about the first of these fields that is no power of two."""
    for name in names:
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}; it must be a power of two"
    return None


def options_of(config: object) -> dict[str, int]:
    """What the compiler is told, of a configuration's fields."""
    names = {field.name for field in fields(config)} & _OPTIONS  # type: ignore[arg-type]
    found = {name: getattr(config, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
