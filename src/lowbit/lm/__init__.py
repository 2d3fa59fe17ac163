"""Language models on the CPU, without PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

from lowbit.lm.generation import Stream
from lowbit.lm.sampling import Sampling
from lowbit.lm.tokenizer import Tokenizer

__all__ = ["Sampling", "Stream", "Tokenizer"]


def __getattr__(name: str) -> Any:
    if name == "LanguageModel":  # imported when it is used, as it brings what compiles kernels
        return importlib.import_module("lowbit.lm.model").LanguageModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
