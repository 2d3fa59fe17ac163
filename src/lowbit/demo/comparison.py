"""The course of the demo: load, quantize, embed, time, save, print."""

from __future__ import annotations

import copy
import math
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from lowbit import __version__, isa
from lowbit.bench.core.case import Call
from lowbit.bench.core.clock import Elsewhere, Limits, interleave
from lowbit.demo.apart import PREPARE_SECONDS, Apart
from lowbit.demo.encoder import BATCH, Batch, load_encoder, tokenize
from lowbit.demo.measure import Latency, latency, quality
from lowbit.demo.progress import Steps
from lowbit.demo.result import DemoResult, Implementation
from lowbit.demo.rivals import rivals
from lowbit.demo.sentences import manual_sentences
from lowbit.product.dispatch import active_kernel
from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    QuantizeConfig,
    quantize_,
    save,
)

_TIMED_SENTENCES = 16  # different ones that the runs at one sentence go through
# Timing stops early after these seconds, if there are enough runs.
_SECONDS = 15.0
_FEWEST_RUNS = {1: 20, BATCH: 6}
_TRIALS = {1: 5, BATCH: 2}  # runs by which the fastest of a family is chosen

FP32 = "fp32"
GROUP = 32  # the model's rows are short, 384 and 1536; the default of 128 costs it accuracy
CONFIGS: dict[str, QuantizeConfig] = {
    "lowbit int8": Int8DynamicConfig(),
    "lowbit W4A8": Int4DynamicConfig(GROUP),
    "lowbit W4A32": Int4WeightOnlyConfig(GROUP),
}


@dataclass(frozen=True)
class _Runner:
    """Whatever embeds sentences. call: makes a call for a batch, by its size and index. vectors:
    of all sentences, [sentences, width]."""

    detail: str
    bytes_on_disk: int
    call: Callable[[int, int], Call]
    vectors: Tensor


def compare(
    *,
    sentences: int,
    repeats: int,
    threads: int | None,
    peers: bool,
    seed: int,
) -> DemoResult:
    """See `lowbit.demo.run`."""
    steps = Steps(Console(stderr=True))
    texts = manual_sentences(sentences)
    with ExitStack() as stack:
        stack.enter_context(_torch_threads(threads))
        stack.enter_context(torch.inference_mode())
        processes, notes = _start(sentences, peers, stack)
        with steps.step("Loading the encoder"):
            batches = {size: tokenize(texts, size) for size in (1, BATCH)}
        runners = _own(batches, steps)
        found = _rivals(processes, batches, notes, steps)
        runners |= _fastest(found, batches, notes)
        notes.append(f"W4: 4-bit weights, a scale and a zero point for {GROUP} of a row")
        timed = _time(runners, batches, repeats, seed, steps)
        exact = runners[FP32].vectors
        rows = tuple(
            Implementation(
                name=name,
                detail=one.detail,
                bytes_on_disk=one.bytes_on_disk,
                one=timed[1][name],
                batch=timed[BATCH][name],
                quality=quality(one.vectors, exact),
            )
            for name, one in runners.items()
        )
        return _result(rows, len(texts), seed, notes)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(sentences: int, peers: bool, stack: ExitStack) -> tuple[list[Apart], list[str]]:
    """A process for each rival that can run here, and of the others why not."""
    processes: list[Apart] = []
    notes: list[str] = []
    for name in rivals.names():
        one = rivals.get(name)
        if one.peer and not peers:
            continue
        reason = one.unavailable()
        if reason is None:
            processes.append(Apart(name, sentences, torch.get_num_threads()))
            stack.callback(processes[-1].close)
        else:
            notes.append(f"{name} is not in the table: {reason}")
    return processes, notes


def _own(batches: Mapping[int, list[Batch]], steps: Steps) -> dict[str, _Runner]:
    """The encoder in float, and quantized by lowbit."""
    encoder = load_encoder()
    models: dict[str, nn.Module] = {FP32: encoder}
    for name, config in CONFIGS.items():
        with steps.step(f"Quantizing the encoder: {name}"):
            models[name] = quantize_(copy.deepcopy(encoder), config)
    found: dict[str, _Runner] = {}
    with steps.step("Embedding all sentences", len(models) * len(batches[BATCH])) as done:
        for name, model in models.items():
            parts = []
            for batch in batches[BATCH]:
                parts.append(model(*batch))
                done()
            detail = type(CONFIGS[name]).__name__ if name in CONFIGS else "PyTorch"
            vectors = torch.cat(parts)
            found[name] = _Runner(detail, _size_on_disk(model), _caller(model, batches), vectors)
    return found


def _caller(model: nn.Module, batches: Mapping[int, list[Batch]]) -> Callable[[int, int], Call]:
    return lambda size, index: lambda: model(*batches[size][index])


def _rivals(
    processes: Sequence[Apart],
    batches: Mapping[int, list[Batch]],
    notes: list[str],
    steps: Steps,
) -> dict[str, _Runner]:
    """The rivals that work, having embedded all sentences; `notes` learn of the others."""
    found: dict[str, _Runner] = {}
    with steps.step("Preparing others' int8, each in its own process", len(processes)) as done:
        for one in processes:
            try:
                found[one.name] = _rival(one)
            except RuntimeError as error:
                notes.append(f"{one.name} is not in the table: {error}")
            done()
    return found


def _rival(one: Apart) -> _Runner:
    ready = one.answer(PREPARE_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vectors")
        one.ask(vectors=str(path))
        vectors = torch.load(path)

    def call(size: int, index: int) -> Call:
        return Elsewhere(lambda: one.ask(size=size, index=index)["seconds"])

    return _Runner(ready["detail"], ready["bytes_on_disk"], call, vectors)


def _fastest(
    found: Mapping[str, _Runner], batches: Mapping[int, list[Batch]], notes: list[str]
) -> dict[str, _Runner]:
    """Of each family the fastest, under the family's name."""
    families: dict[str, list[str]] = {}
    for name in found:
        families.setdefault(rivals.get(name).family, []).append(name)
    chosen: dict[str, _Runner] = {}
    for family, names in families.items():
        best = min(names, key=lambda name: _figure(found[name], batches))
        chosen[family] = found[best]
        if len(names) > 1:
            notes.append(f"{best}: the fastest here of {', '.join(names)}; weights per channel")
    return chosen


def _figure(runner: _Runner, batches: Mapping[int, list[Batch]]) -> float:
    """What is compared: the product over the sizes, so that each weighs alike."""
    medians = []
    for size, count in _TRIALS.items():
        middle = sorted(range(len(batches[size])), key=lambda i: batches[size][i][0].numel())
        call = runner.call(size, middle[len(middle) // 2])
        assert isinstance(call, Elsewhere)
        medians.append(statistics.median(call.seconds() for _ in range(count)))
    return math.prod(medians)


def _time(
    runners: Mapping[str, _Runner],
    batches: Mapping[int, list[Batch]],
    repeats: int,
    seed: int,
    steps: Steps,
) -> dict[int, dict[str, Latency]]:
    """Median and 95th percentile, by the number of sentences; everyone takes turns."""
    singles = range(0, len(batches[1]), max(1, len(batches[1]) // _TIMED_SENTENCES))
    whole = [i for i, (tokens, _) in enumerate(batches[BATCH]) if len(tokens) == BATCH] or [0]
    found: dict[int, dict[str, Latency]] = {}
    for size, title, indices, rounds in (
        (1, "Timing one sentence", singles, repeats),
        (BATCH, f"Timing {BATCH} sentences", whole[:2], max(1, repeats * 3 // 10)),
    ):
        calls = {n: [one.call(size, index) for index in indices] for n, one in runners.items()}
        least = min(_FEWEST_RUNS[size], rounds)
        limits = Limits(seconds=_SECONDS, least_rounds=least, most_rounds=rounds, whole=True)
        with steps.step(title, rounds) as done:
            for several in calls.values():  # what a first call finds out is not to be timed
                for call in several:
                    call()
            # Those of other processes have threads of their own.
            pools = {n: n for n, each in calls.items() if isinstance(each[0], Elsewhere)}
            taken = interleave(calls, limits, seed=seed, on_round=lambda share: done(), pools=pools)
        found[size] = {name: latency(samples) for name, samples in taken.items()}
    return found


def _size_on_disk(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        save(model, path)
        return path.stat().st_size


def _result(
    rows: tuple[Implementation, ...], sentences: int, seed: int, notes: list[str]
) -> DemoResult:
    kernel, instruction_set = active_kernel()
    packages = ["torch", "transformers", "numpy", "llvmlite"]
    shown = {row.name for row in rows}
    packages += [name for one in rivals if one.family in shown for name in one.packages]
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
