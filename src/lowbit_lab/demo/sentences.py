"""What the demo has engines of the suite `networks` do: embed real sentences, of any length."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.models.data import manual_sentences
from lowbit.models.model import Arrays
from lowbit.models.networks import BATCH, tokenize
from lowbit.registry.locks import cached_property
from lowbit_lab.bench.core.case import READY
from lowbit_lab.bench.networks.engine import MEASURE, OUTPUTS, SECONDS, NetworkWork, Opened


@dataclass(frozen=True)
class Sentences(NetworkWork):
    """Some sentences of Python's manual. SECONDS is asked with a batch's size and its index."""

    sentences: int

    @cached_property
    def batches(self) -> dict[int, list[Arrays]]:
        """Tokens and mask [size, length], by how many sentences each holds."""
        texts = manual_sentences(self.sentences)
        return {
            size: [(tokens.numpy(), mask.numpy()) for tokens, mask in tokenize(texts, size)]
            for size in (1, BATCH)
        }

    def arrays(self, name: str) -> Arrays:
        """The first batch: an example."""
        return self.batches[BATCH][0]

    def serve(self, opened: Opened) -> Mapping[str, Callable[..., Any]]:
        def seconds(size: int, index: int) -> float:
            begin = time.perf_counter()
            opened.call(*self.batches[size][index])
            return time.perf_counter() - begin

        return {
            READY: lambda: opened.detail,
            OUTPUTS: lambda: np.concatenate([opened.call(*one) for one in self.batches[BATCH]]),
            MEASURE: lambda: dict(opened.measure()),
            SECONDS: seconds,
        }
