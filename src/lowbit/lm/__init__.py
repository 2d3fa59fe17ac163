"""Language models on the CPU, without PyTorch."""

from lowbit.lm.model import LanguageModel

__all__ = ["LanguageModel"]
