"""Language models on the CPU, without PyTorch."""

from lowbit.lm.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
