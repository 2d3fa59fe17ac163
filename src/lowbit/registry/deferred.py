"""Modules that are imported when something of them is first used."""

from __future__ import annotations

import importlib
from typing import Any

from lowbit.registry.locks import importing


class Deferred:
    """Stands for a module that takes long to import and that many calls do without."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        with importing():
            value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found without this function from now on
        return value
