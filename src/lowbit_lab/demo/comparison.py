"""The course of the demo: load, quantize, embed, time, save, print."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import torch

from lowbit import __version__, isa
from lowbit.models.model import Array
from lowbit.models.networks import BATCH
from lowbit.product.dispatch import active_kernel
from lowbit.registry.locks import cached_property
from lowbit_lab.bench.core.case import READY, Call, find
from lowbit_lab.bench.core.clock import Limits, RemoteCall, interleave
from lowbit_lab.bench.core.cpu import Processes
from lowbit_lab.bench.core.progress import Progress, progress
from lowbit_lab.bench.networks.engine import MEASURE, OUTPUTS, SECONDS
from lowbit_lab.bench.peers.encoders import CONFIGS, GROUP
from lowbit_lab.demo.answer import Answer, answer
from lowbit_lab.demo.measure import Latency, latency, quality
from lowbit_lab.demo.result import DemoResult, DemoRow
from lowbit_lab.demo.sentences import Sentences

_TIMED_SENTENCES = 16  # different ones that the runs at one sentence go through
# Timing stops early after these seconds, if there are enough runs.
_SECONDS = 15.0
_FEWEST_RUNS = {1: 20, BATCH: 6}
_PREPARE_SECONDS, _ANSWER_SECONDS = 240.0, 60.0  # that an engine may take
_TRIALS = {1: 5, BATCH: 2}  # runs by which the fastest of a family is chosen

FP32 = "fp32"
# Rows that are computed here: engines of the suite `networks`.
OWN = {
    FP32: "torch fp32",
    **{f"lowbit {name}": f"lowbit torch {name}" for name in CONFIGS},
}
# Others' int8: engines of the suite `networks`. Of those of one name the fastest is shown.
TORCH = "PyTorch int8"
ENGINES: dict[str, dict[str, str]] = {
    "ONNX Runtime int8": {"": "ONNX Runtime any length"},
    "OpenVINO int8": {"": "OpenVINO int8 weights"},
    # qnnpack is made for phones; elsewhere it is no rival.
    TORCH: {name: f"torch dynamic {name}" for name in ("x86", "fbgemm", "onednn")},
    "torchao int8": {"": "torchao int8"},
}


@dataclass(frozen=True)
class _Runner:
    """Whatever embeds sentences. call: makes a call for a batch, by its size and index. vectors:
    of all sentences, [sentences, width]."""

    detail: str
    bytes_on_disk: int
    call: Callable[[int, int], Call]
    vectors: Array


def compare(
    sentences: int, repeats: int, threads: int | None, peers: bool, seed: int
) -> DemoResult:
    """See `lowbit_lab.demo.run`."""
    with ExitStack() as stack:
        on_progress = stack.enter_context(progress())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads or torch.get_num_threads())
        one = Comparison(sentences, on_progress)
        stack.callback(one.processes.tidy)
        one.start(peers)
        runners = one.own() | one.fastest()
        one.notes.append(
            "lowbit: quantize_, then compile, so that a call is one for the whole network; "
            "lowbit int8 layers: quantize_ alone"
        )
        one.notes.append(f"W4: 4-bit weights, a scale and a zero point for {GROUP} of a row")
        timed, answered = one.time(runners, repeats, seed), one.answer()
        return replace(one.result(runners, timed, seed), answer=answered)


class Comparison:
    """The sentences of one run, and the notes that its result will have."""

    def __init__(self, sentences: int, on_progress: Progress = lambda what, share: None) -> None:
        self.sentences = sentences
        self.on_progress = on_progress
        self.notes: list[str] = []
        self.processes = Processes("networks")

    @cached_property
    def work(self) -> Sentences:
        return Sentences("minilm", None, "", BATCH, torch.get_num_threads(), self.sentences)

    def start(self, peers: bool) -> None:
        """A process for each engine that can run here."""
        for family, engines in ENGINES.items():
            for variant, name in engines.items() if peers or family == TORCH else ():
                if reason := find("networks", name).available(None):
                    self._left_out(family, variant, reason)
                else:
                    self.processes.start([name], self.work)

    def _left_out(self, family: str, variant: str, reason: object) -> None:
        self.notes.append(f"{_shown(family, variant)} is not in the table: {reason}")

    def own(self) -> dict[str, _Runner]:
        """The encoder in float, and quantized by lowbit."""
        rows: dict[str, _Runner] = {}
        for name, engine in OWN.items():
            self.on_progress(f"Preparing the encoder, embedding all sentences: {name}", 0)
            answers = find("networks", engine).serve(self.work)
            rows[name] = _Runner(
                answers[READY]() or "PyTorch",
                answers[MEASURE]()["file_bytes"],
                partial(partial, answers[SECONDS]),
                answers[OUTPUTS](),
            )
        return rows

    def fastest(self) -> dict[str, _Runner]:
        """Of each family the fastest engine of those that embed all sentences."""
        chosen: dict[str, _Runner] = {}
        running, done = list(self.processes.running), 0
        for family, engines in ENGINES.items():
            found: dict[str, _Runner] = {}
            for variant, name in engines.items():
                if name not in running:
                    continue
                text = "Preparing others' int8, each in its own process"
                self.on_progress(text, done / len(running))
                done += 1
                try:
                    found[_shown(family, variant)] = self._runner(name, f"dynamic, {variant}")
                except RuntimeError as error:
                    self._left_out(family, variant, error)
            if not found:
                continue
            best = min(found, key=lambda name: self._figure(found[name]))
            chosen[family] = found[best]
            if len(found) > 1:
                several = ", ".join(found)
                self.notes.append(f"{best}: the fastest here of {several}; weights per channel")
        return chosen

    def _runner(self, name: str, detail: str) -> _Runner:
        """An engine's. RuntimeError: it does not embed the sentences."""
        said = self.processes.ready(name, _PREPARE_SECONDS)
        process = self.processes.process(name)
        vectors = process.ask((OUTPUTS,), _ANSWER_SECONDS)
        size = process.ask((MEASURE,), _ANSWER_SECONDS)["file_bytes"]

        def call(size: int, index: int) -> Call:
            return RemoteCall(lambda: process.ask((SECONDS, size, index), _ANSWER_SECONDS))

        return _Runner(said or detail, size, call, vectors)

    def _figure(self, runner: _Runner) -> float:
        """What is compared: the product over the sizes, so that each weighs alike."""
        medians = []
        for size, count in _TRIALS.items():
            batches = self.work.batches[size]
            middle = sorted(range(len(batches)), key=lambda i: batches[i][0].size)
            call = runner.call(size, middle[len(middle) // 2])
            assert isinstance(call, RemoteCall)
            medians.append(statistics.median(call.seconds() for _ in range(count)))
        return math.prod(medians)

    def time(
        self, runners: Mapping[str, _Runner], repeats: int, seed: int
    ) -> dict[int, dict[str, Latency]]:
        """Median and 95th percentile, by the number of sentences; everyone takes turns."""
        batches = self.work.batches
        singles = range(0, len(batches[1]), max(1, len(batches[1]) // _TIMED_SENTENCES))
        whole = [i for i, (tokens, _) in enumerate(batches[BATCH]) if len(tokens) == BATCH] or [0]
        found: dict[int, dict[str, Latency]] = {}
        for size, title, indices, rounds in (
            (1, "Timing one sentence", singles, repeats),
            (BATCH, f"Timing {BATCH} sentences", whole[:2], max(1, repeats * 3 // 10)),
        ):
            self.on_progress(title, 0)
            calls = {n: [one.call(size, index) for index in indices] for n, one in runners.items()}
            least = min(_FEWEST_RUNS[size], rounds)
            limits = Limits(seconds=_SECONDS, least_rounds=least, most_rounds=rounds, whole=True)
            for several in calls.values():  # what a first call finds out is not to be timed
                for call in several:
                    call()
            # Those of other processes have threads of their own.
            pools = {n: n for n, each in calls.items() if isinstance(each[0], RemoteCall)}
            on_round = partial(self.on_progress, title)
            taken = interleave(calls, limits, seed=seed, on_round=on_round, pools=pools)
            found[size] = {name: latency(samples) for name, samples in taken.items()}
        return found

    def answer(self) -> Answer | None:
        """The language model's."""
        try:
            return answer(torch.get_num_threads(), self.on_progress)
        except ModuleNotFoundError as error:
            self.notes.append(str(error))
            return None

    def result(
        self, runners: Mapping[str, _Runner], timed: Mapping[int, Mapping[str, Latency]], seed: int
    ) -> DemoResult:
        """All of it, with where it ran."""
        exact = torch.from_numpy(runners[FP32].vectors)
        rows = tuple(
            DemoRow(
                name=name,
                detail=one.detail,
                bytes_on_disk=one.bytes_on_disk,
                one=timed[1][name],
                batch=timed[BATCH][name],
                quality=quality(torch.from_numpy(one.vectors), exact),
            )
            for name, one in runners.items()
        )
        kernel, instruction_set = active_kernel()
        packages = ["torch", "transformers", "numpy", "llvmlite"]
        for family, engines in ENGINES.items():
            package = find("networks", next(iter(engines.values()))).package
            packages += [package[1]] if package and family in runners else []
        return DemoResult(
            model="all-MiniLM-L6-v2",
            sentences=self.sentences,
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
            notes=tuple(self.notes),
        )


def _shown(family: str, variant: str) -> str:
    return f"{family} {variant}".strip()
