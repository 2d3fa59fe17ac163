"""The command `lowbit bench demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli.application import JsonFile, Seed, Threads, command, output
from lowbit_lab.cli.bench import bench


@command("demo", example="bench demo --threads 1 --json result.json", within=bench)
def demo(
    sentences: Annotated[int, typer.Option(help="How many sentences to embed.")] = 384,
    repeats: Annotated[int, typer.Option(help="How often to time one sentence.")] = 200,
    threads: Threads = None,
    peers: Annotated[
        bool,
        typer.Option(help="Whether to run torchao, ONNX Runtime and OpenVINO, where installed."),
    ] = True,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Quantize a pretrained sentence encoder and compare it with fp32 and others' int8; then let a
    small language model answer.

    Prints size, latency and quality side by side, and tokens a second beside PyTorch's. Takes two
    minutes; with torchao, ONNX Runtime and OpenVINO installed, up to two more.
    """
    from lowbit_lab.demo import run

    with output(json_file) as show:
        result = run(sentences=sentences, repeats=repeats, threads=threads, peers=peers, seed=seed)
        show(result.text(), result.to_json())
