"""Whole networks, as lowbit and the engines that people use run them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import RenderableType

from lowbit.models.model import models
from lowbit.models.quantize import CONFIGS, check_config
from lowbit.registry.extras import require
from lowbit.registry.locks import cached_property
from lowbit_lab.bench.core import table
from lowbit_lab.bench.core.case import OURS, Case, Implementation, Problem
from lowbit_lab.bench.core.clock import Limits
from lowbit_lab.bench.core.cpu import Processes
from lowbit_lab.bench.core.record import Record, Row
from lowbit_lab.bench.core.remote import Remote, run_remote
from lowbit_lab.bench.core.suite import Suite, best_of, named, numbers, option, suite
from lowbit_lab.bench.core.table import Column
from lowbit_lab.bench.networks.engine import REFERENCE, Engine, NetworkWork
from lowbit_lab.bench.networks.prepare import Facts, Preparation, prepare_quietly

_SAMPLES = 16  # by which outputs are judged
_DEFAULT = ("resnet34", "vit_b_16")
_FLOAT = "torch fp32"
_PREPARE_SECONDS, _OPEN_SECONDS = 400.0, 150.0
_MOSTLY_LINEAR = 0.5


@dataclass(eq=False)
class Network(Problem):
    """A prepared network. configs: the ways to quantize it that are timed. several: the engines
    that take part; those that are running are for so many `threads`. details: what they say."""

    case: Case
    folder: Path
    facts: Facts
    weights: str | None
    clock: Processes
    configs: tuple[str, ...]
    several: list[Engine] = field(default_factory=list)
    threads: int = 0
    details: dict[str, str] = field(default_factory=dict)

    @cached_property
    def ideal(self) -> Any:
        return np.load(self.folder / REFERENCE)

    @cached_property
    def operations(self) -> int:
        return 2 * self.facts.multiply_adds * self.case.sizes["batch"]

    @cached_property
    def bytes(self) -> int:
        return self.facts.float_bytes

    def process(self, name: str, threads: int) -> Remote:
        """An engine's; the first that is asked for starts all. RuntimeError: it cannot run."""
        if threads != self.threads:
            batch = self.case.sizes["batch"]
            work = NetworkWork(self.case.work, self.weights, str(self.folder), batch, threads)
            self.clock.tidy()
            names = [one.name for one in self.several]
            self.clock.start(names, work)
            self.details = {name: self.clock.ready(name, _OPEN_SECONDS) for name in names}
            self.threads = threads
        return self.clock.process(name)


@suite
@dataclass(frozen=True)
class Networks(Suite):
    """Time whole networks in lowbit, PyTorch, ONNX Runtime and OpenVINO: floats and 8 bits.

    A network is quantized once by each library's tools, with the same few samples. Then every
    engine runs in a process of its own; they take turns in random order. Outputs are compared with
    PyTorch's in float32. Weights are random without --weights, where no package brings any.
    """

    model: tuple[str, ...] = option(
        (), "Networks, by name.", shown=" ".join(_DEFAULT), argument=True
    )
    batch: str = option("1", "Samples together, or several numbers: 1,16.")
    config: tuple[str, ...] = option(
        (),
        "How to quantize: static or dynamic; may be repeated.",
        shown="static; both where linear layers do most",
    )
    engines: str = option("", "Parts of names of engines: lowbit,openvino.", shown="all")
    seconds: float = option(30.0, "To time each network for, with all its batches.")
    weights: str | None = option(None, "A checkpoint of the network.", shown="none")

    name: ClassVar[str] = "networks"
    example: ClassVar[str] = "resnet34 vit_b_16 --batch 1,16 --threads 1 --json networks.json"
    distribution: ClassVar[str] = "the model's examples; images N(0, 1)"
    ceiling: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in self.model:
            models.get(name)
        for name in self.config:
            check_config(name)
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")
        if self.weights and len(self.model) != 1:
            raise ValueError("weights are for one model; name it")
        if self.weights and not os.path.isfile(self.weights):
            raise FileNotFoundError(f"there is no file {self.weights!r}")
        _ = self._engines, self.batches

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of samples together, each once. ValueError: they are none."""
        return numbers("batch", self.batch)

    @property
    def limits(self) -> Limits:
        seconds = self.seconds / len(self.batches)
        return Limits(seconds=seconds, least_rounds=3, whole=True)

    @cached_property
    def _clock(self) -> Processes:
        return Processes(self.name)

    @cached_property
    def _prepared(self) -> dict[str, tuple[tempfile.TemporaryDirectory[str], Facts]]:
        """By model. Folders are gone when nothing holds them any more."""
        return {}

    def clock(self) -> Processes:
        require("lowbit bench networks", "torch", "torch")
        return self._clock

    def settings(self) -> dict[str, Any]:
        facts = {name: asdict(found) for name, (_, found) in self._prepared.items()}
        return {"networks": facts, "weights": self.weights, "seconds": self.seconds}

    def cases(self, seed: int = 0) -> Sequence[Case]:
        return [
            Case("network", f"{name} batch {batch}", work=name, sizes={"batch": batch})
            for name in self.model or _DEFAULT
            for batch in self.batches
        ]

    def make(self, case: Case, seed: int) -> Network:
        if case.work not in self._prepared:
            if reason := models.get(case.work).absent():
                raise RuntimeError(reason)
            self._prepared[case.work] = self._prepare(case.work)
        folder, facts = self._prepared[case.work]
        both = facts.linear_share >= _MOSTLY_LINEAR
        configs = self.config or (CONFIGS if both else CONFIGS[:1])
        return Network(case, Path(folder.name), facts, self.weights, self._clock, tuple(configs))

    def _prepare(self, name: str) -> tuple[tempfile.TemporaryDirectory[str], Facts]:
        folder = tempfile.TemporaryDirectory(prefix="lowbit-networks-")
        files = {one.file for one in self._engines if one.file and not one.available(None)}
        samples = max(_SAMPLES, *self.batches)
        task = Preparation(name, self.weights, folder.name, samples, tuple(sorted(files)))
        return folder, run_remote(prepare_quietly, task, seconds=_PREPARE_SECONDS)

    @cached_property
    def _engines(self) -> list[Engine]:
        """Those that are asked for. ValueError if a part is in no name."""
        return named("engine", self.engines, self.name, Engine)

    def implementations(self) -> Sequence[Implementation]:
        return self._engines

    def taking_part(
        self, problem: Network, chosen: Sequence[Implementation]
    ) -> list[Implementation]:
        engines = [one for one in chosen if isinstance(one, Engine)]
        taking = [one for one in engines if one.config in ("", *problem.configs)]
        taking = [one for one in taking if problem.case.work in (one.models or [problem.case.work])]
        problem.several = [one for one in taking if one.file not in problem.facts.missing]
        return list(taking)

    def references(self, several: Sequence[Implementation]) -> list[str]:
        """lowbit's quantized network, and the float one of PyTorch."""
        ours = [one for one in several if isinstance(one, Engine) and one.config and not one.models]
        ours = [one.name for one in ours if one.kind == OURS]
        floats = [one.name for one in several if one.name == _FLOAT]
        return [*ours[:1], *floats]

    def summary(self, rows: Sequence[Row]) -> Sequence[dict[str, Any]]:
        return best_of(rows)

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        return (
            table.IMPLEMENTATION,
            table.TIME,
            table.SPREAD,
            table.GOPS,
            Column("× torch fp32", _speedup),
            table.figure("SQNR", "sqnr_db", "{:.1f} dB"),
            table.figure("same top-1", "agreement", "{:.0%}"),
            table.figure("outside kernels", "outside_kernels", "{:.1%}"),
            Column("first result", _first),
            table.figure("arena", "arena_bytes", "{:.1f} MB", 1e-6),
            table.figure("file", "file_bytes", "{:.1f} MB", 1e-6),
        )

    def ending(self, record: Record) -> Iterable[RenderableType]:
        return table.best_lines(record)


def _speedup(row: Row) -> str:
    ratio = row.ratios.get(_FLOAT)
    return (
        "1" if row.implementation == _FLOAT else "" if ratio is None else f"{1 / ratio.median:.2f}"
    )


def _first(row: Row) -> str:
    seconds = row.extra.get("first_result_seconds")
    return "" if seconds is None else table.format_seconds(seconds)
