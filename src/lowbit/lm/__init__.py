"""Language models: on the CPU, without PyTorch, or on a GPU by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowbit.lm.batch import Batch
from lowbit.lm.generation import Stream
from lowbit.lm.sampling import Sampling
from lowbit.lm.tokenizer import Tokenizer
from lowbit.registry.locks import importing

if TYPE_CHECKING:
    from lowbit.lm.model import LanguageModel

__all__ = ["Batch", "LanguageModel", "Sampling", "Stream", "Tokenizer"]


def __getattr__(name: str) -> Any:
    """What brings the kernels is imported when it is first used."""
    if name != "LanguageModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing():
        from lowbit.lm.model import LanguageModel
    return LanguageModel
