"""What an engine is: an implementation of whole networks, in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.models.model import Array, Arrays, classified
from lowbit_lab.bench.core.case import READY, Implementation, Ready
from lowbit_lab.bench.core.clock import RemoteCall, settle, share_processor

INPUTS, CALIBRATION, REFERENCE = "inputs.npz", "calibration.npz", "reference.npy"
"""In the folder of a prepared network: samples, batches of one sample to calibrate with, and what
the float network makes of the samples."""
FLOAT_ONNX, STATIC_ONNX, DYNAMIC_ONNX = "float.onnx", "static.onnx", "dynamic.onnx"
FLOAT, STATIC, DYNAMIC = "float.safetensors", "static.safetensors", "dynamic.safetensors"

OUTPUTS, MEASURE, SECONDS = "outputs", "measure", "seconds"
"""What an engine's process is asked for: outputs of all samples, what else is measured of the
engine, and how long a call takes."""
_ANSWER_SECONDS = 60.0
_TURN_SECONDS = 0.03  # a turn has as many calls as fit, and gives their median
_MOST_CALLS = 50


@dataclass(frozen=True)
class NetworkWork:
    """What an engine is to run: a model of the registry with a checkpoint, as the files of `folder`
    hold it, `batch` samples at a time."""

    model: str
    weights: str | None
    folder: str
    batch: int
    threads: int

    def file(self, name: str) -> Path:
        return Path(self.folder, name)

    def arrays(self, name: str) -> Arrays:
        """The arrays of a file of `numpy.savez`, in their order."""
        with np.load(self.file(name)) as held:
            return tuple(held[f"arr_{index}"] for index in range(len(held.files)))

    def serve(self, opened: Opened) -> Mapping[str, Callable[..., Any]]:
        """What an engine's process answers, see `Implementation.serve`."""
        inputs = self.arrays(INPUTS)
        batch = _rows(inputs, np.arange(self.batch) % len(inputs[0]))
        opened.call(*batch)
        settle()
        if self.threads == 1:
            share_processor()
        return {
            READY: lambda: opened.detail,
            OUTPUTS: lambda: outputs(opened, inputs, self.batch),
            MEASURE: lambda: dict(opened.measure()),
            SECONDS: lambda: _seconds(opened, batch),
        }


@dataclass(frozen=True)
class Opened:
    """A network ready to be called. detail: a few words on what it runs on. measure: what else is
    measured of it, once nothing else runs."""

    call: Callable[..., Array]
    detail: str = ""
    measure: Callable[[], Mapping[str, Any]] = field(default=dict)


class Engine(Implementation):
    """A class below it is registered for the suite `networks`. Importing its file needs nothing
    that may be missing.

    config: how it is quantized: "static", "dynamic", or "" for floats. file: of the prepared
    network, the one that it reads, "" if it reads none. models: those that it runs, if not all.
    """

    models: tuple[str, ...] = ()

    def __init__(self, name: str, file: str = "", config: str = "") -> None:
        self.name, self.pool = name, name
        self.file, self.config = file, config

    def open(self, work: NetworkWork) -> Opened:
        """Make the network ready, inside of the engine's process."""
        raise NotImplementedError

    def serve(self, work: NetworkWork) -> Mapping[str, Callable[..., Any]]:
        return work.serve(self.open(work))

    def prepare(self, problem: Any, threads: int) -> Ready:
        """Ask its process, which the problem starts."""
        if self.file in problem.facts.missing:
            raise RuntimeError(problem.facts.missing[self.file])
        process = problem.process(self.name, threads)
        made = process.ask((OUTPUTS,), _ANSWER_SECONDS)
        extra = process.ask((MEASURE,), _ANSWER_SECONDS)
        if made.shape == problem.ideal.shape:
            extra |= _agreement(made, problem.ideal)
        call = RemoteCall(lambda: process.ask((SECONDS,), _ANSWER_SECONDS))
        note = problem.details[self.name]
        return Ready(call, read=lambda _: made, note=note, extra=extra)


def _agreement(made: Any, ideal: Any) -> dict[str, float]:
    """How near outputs are to those of the float network, and how often the largest is the same."""
    count = len(ideal)
    found = classified(made.reshape(count, -1), None, ideal.reshape(count, -1))
    return {name: one.value for name, one in found.items()}


def _seconds(opened: Opened, batch: Arrays) -> float:
    opened.call(*batch)  # another process has had the caches
    taken: list[float] = []
    while not taken or (sum(taken) < _TURN_SECONDS and len(taken) < _MOST_CALLS):
        begin = time.perf_counter()
        opened.call(*batch)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def outputs(opened: Opened, inputs: Arrays, batch: int) -> Any:
    """Of all samples, `batch` of them at a time."""
    count = len(inputs[0])
    made = [
        opened.call(*_rows(inputs, np.arange(start, start + batch) % count))
        for start in range(0, count, batch)
    ]
    return np.concatenate(made)[:count]


def _rows(arrays: Arrays, indices: Any) -> Arrays:
    return tuple(np.ascontiguousarray(one[indices]) for one in arrays)
