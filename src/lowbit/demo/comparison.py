"""The course of the demo: load, quantize, embed, time, save, print."""

from __future__ import annotations

import copy
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from lowbit import __version__, isa
from lowbit.demo.encoder import Batch, SentenceEncoder, load_encoder, tokenize
from lowbit.demo.measure import Latency, interleaved, quality
from lowbit.demo.progress import Steps
from lowbit.demo.result import DemoResult, Implementation
from lowbit.demo.sentences import manual_sentences
from lowbit.demo.torch_int8 import Trial, dynamic_int8, engines, try_engine, using
from lowbit.product.dispatch import active_kernel
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    quantize_,
    save,
)

BATCH = 32
_TIMED_SENTENCES = 32  # different ones that the runs at one sentence go through
_SECONDS = 25.0  # after which timing stops early, if there are enough runs
_FEWEST_RUNS = {"one": 50, "batch": 15}

FP32, TORCH = "fp32", "PyTorch int8"
GROUP = 32  # the model's rows are short, 384 and 1536; the default of 128 costs it accuracy
CONFIGS: dict[str, QuantizeConfig] = {
    "lowbit int8": Int8DynamicConfig(),
    "lowbit W4A8": Int4DynamicConfig(GROUP),
    "lowbit W4A32": Int4WeightOnlyConfig(GROUP),
}


def compare(
    *,
    sentences: int,
    repeats: int,
    threads: int | None,
    json_path: str | Path | None,
    seed: int,
    console: Console | None,
) -> DemoResult:
    """See `lowbit.demo.run`."""
    console = console or Console()
    steps = Steps(Console(stderr=True))
    texts = manual_sentences(sentences)
    with ExitStack() as stack:
        stack.enter_context(_torch_threads(threads))
        stack.enter_context(torch.inference_mode())
        with steps.step("Loading the encoder"):
            encoder = load_encoder()
            singles, batches = tokenize(texts, 1), tokenize(texts, BATCH)
        with steps.step("Quantizing it with lowbit"):
            models: dict[str, nn.Module] = {FP32: encoder}
            for name, config in CONFIGS.items():
                models[name] = quantize_(copy.deepcopy(encoder), config)
        best, notes = _best_engine(encoder, singles, batches, steps)
        notes.append(f"W4: 4-bit weights, a scale and a zero point for {GROUP} of a row")
        details = {name: type(config).__name__ for name, config in CONFIGS.items()}
        details |= {FP32: "PyTorch", TORCH: f"dynamic, {best}"}
        if best is not None:
            stack.enter_context(using(best))
            models[TORCH] = dynamic_int8(encoder, best)
        vectors = _embed(models, batches, steps)
        timed = _time(models, singles, batches, repeats, random.Random(seed), steps)
        with steps.step("Saving each model to see its size"):
            sizes = {name: _size_on_disk(name, model) for name, model in models.items()}
        rows = tuple(
            Implementation(
                name=name,
                detail=details[name],
                bytes_on_disk=sizes[name],
                one=timed["one"][name],
                batch=timed["batch"][name],
                quality=quality(vectors[name], vectors[FP32]),
            )
            for name in models
        )
        result = _result(rows, len(texts), seed, notes)
    _show(result, console, json_path)
    return result


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best_engine(
    encoder: SentenceEncoder, singles: list[Batch], batches: list[Batch], steps: Steps
) -> tuple[str | None, list[str]]:
    """PyTorch's fastest engine that works here, and what to say about the choice."""
    rows = [_middle(singles), _middle(batches)]
    names = engines()
    trials: list[Trial] = []
    with steps.step("Trying PyTorch's int8 engines, each in its own process", len(names)) as done:
        for name in names:
            trials.append(try_engine(name, encoder, rows, torch.get_num_threads()))
            done()
    notes = [f"PyTorch engine {t.engine} left out: {t.failure}" for t in trials if t.failure]
    working = [trial for trial in trials if not trial.failure]
    if not working:
        return None, [*notes, f"{TORCH} is not in the table: no engine of it works here"]
    best = min(working, key=lambda trial: trial.figure).engine
    others = ", ".join(trial.engine for trial in working)
    return best, [
        *notes,
        f"PyTorch engine {best}: the fastest here of {others}; weights per channel",
    ]


def _middle(batches: list[Batch]) -> int:
    """The median number of tokens, padding included."""
    return sorted(tokens.numel() for tokens, _ in batches)[len(batches) // 2]


def _embed(models: dict[str, nn.Module], batches: list[Batch], steps: Steps) -> dict[str, Tensor]:
    vectors: dict[str, Tensor] = {}
    with steps.step("Embedding all sentences", len(models) * len(batches)) as done:
        for name, model in models.items():
            parts = []
            for batch in batches:
                parts.append(model(*batch))
                done()
            vectors[name] = torch.cat(parts)
    return vectors


def _time(
    models: dict[str, nn.Module],
    singles: list[Batch],
    batches: list[Batch],
    repeats: int,
    rng: random.Random,
    steps: Steps,
) -> dict[str, dict[str, Latency]]:
    calls = {name: _caller(model) for name, model in models.items()}
    some = singles[:: max(1, len(singles) // _TIMED_SENTENCES)]
    whole = [batch for batch in batches if len(batch[0]) == BATCH] or batches
    found: dict[str, dict[str, Latency]] = {}
    for kind, title, inputs, rounds in (
        ("one", "Timing one sentence", some, repeats),
        ("batch", f"Timing {BATCH} sentences", whole, max(1, repeats * 3 // 10)),
    ):
        with steps.step(title, rounds) as done:
            found[kind] = interleaved(
                calls,
                inputs,
                rounds=rounds,
                fewest=_FEWEST_RUNS[kind],
                seconds=_SECONDS,
                rng=rng,
                on_round=done,
            )
    return found


def _caller(model: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: model(*batch)


def _size_on_disk(name: str, model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        if name == TORCH:
            torch.save(model.state_dict(), path)  # its packed weights know no other format
        else:
            save(model, path)
        return path.stat().st_size


def _result(
    rows: tuple[Implementation, ...], sentences: int, seed: int, notes: list[str]
) -> DemoResult:
    kernel, instruction_set = active_kernel()
    packages = ("torch", "transformers", "numpy", "llvmlite")
    return DemoResult(
        model="all-MiniLM-L6-v2",
        sentences=sentences,
        sentence_source=f"the manual of Python {platform.python_version()} (pydoc_data.topics)",
        batch_size=BATCH,
        timed="the model's forward pass with pooling, without tokenization",
        cpu=isa.report()["cpu"],
        kernel=kernel,
        instruction_set=instruction_set,
        threads=torch.get_num_threads(),
        versions={"lowbit": __version__} | {name: version(name) for name in packages},
        seed=seed,
        implementations=rows,
        notes=tuple(notes),
    )


def _show(result: DemoResult, console: Console, json_path: str | Path | None) -> None:
    console.print(result.table(), "")
    for line in result.context():
        console.print(line, highlight=False, soft_wrap=True)
    if json_path is not None:
        Path(json_path).write_text(result.to_json() + "\n", encoding="utf-8")
        console.print(f"Written to {json_path}", highlight=False, soft_wrap=True)
    command = f"{_command()} bench gemm 256x512:512x256 --peers"
    console.print(f"\nNext, see the kernel alone: [bold]{command}[/bold]", soft_wrap=True)


def _command() -> str:
    """How to call lowbit from here: by the script beside this Python, if there is one."""
    script = Path(sys.executable).with_name("lowbit")
    if not script.exists():
        return "lowbit"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
