"""Language models on the CPU, without PyTorch."""

from lowbit.lm.generation import Stream
from lowbit.lm.sampling import Sampling
from lowbit.lm.tokenizer import Tokenizer

__all__ = ["Sampling", "Stream", "Tokenizer"]
