"""What a run of the demo found, as data, as JSON and as a table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from lowbit_lab.demo.answer import Answer
    from lowbit_lab.demo.measure import Latency, Quality


@dataclass(frozen=True)
class DemoRow:
    """One row of the table; every figure was measured in the run that made it."""

    name: str
    detail: str
    bytes_on_disk: int
    one: Latency
    batch: Latency
    quality: Quality


@dataclass(frozen=True)
class DemoResult:
    """A whole run. `implementations` begins with fp32, which the others are compared with. answer:
    of the language model, None where that is not installed."""

    model: str
    sentences: int
    sentence_source: str
    batch_size: int
    timed: str
    cpu: str
    kernel: str
    instruction_set: str
    threads: int
    versions: dict[str, str]
    seed: int
    implementations: tuple[DemoRow, ...]
    notes: tuple[str, ...] = field(default=())
    answer: Answer | None = None

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def table(self) -> Table:
        """The table that the demo prints."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(
            title=f"{self.model}, {self.sentences} sentences, threads: {self.threads}",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
            leading=1,
        )
        table.add_column("", no_wrap=True)
        for heading in (
            "on disk",
            "1 sentence\nmedian\np95",
            f"{self.batch_size} sentences\nmedian\np95",
            "cosine\nmean\nlowest",
            "10 nearest\nthe same",
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        exact = self.implementations[0]
        for i in self.implementations:
            table.add_row(
                f"{i.name}\n[dim]{i.detail}[/dim]",
                f"{i.bytes_on_disk / 1e6:.1f} MB",
                _latency(i.one, exact.one),
                _latency(i.batch, exact.batch),
                f"{i.quality.mean_cosine:.5f}\n{i.quality.min_cosine:.5f}",
                f"{i.quality.neighbours:.1%}",
            )
        return table

    def text(self) -> RenderableType:
        """The table, what is to be known of it, and what to try next."""
        from rich.console import Group
        from rich.text import Text

        command = f"{_command()} bench matmul 256x512:512x256 --peers"
        text = [*self.context(), "", *(self.answer.lines() if self.answer else ())]
        lines = (Text(line, overflow="ignore", no_wrap=True) for line in text)
        return Group(self.table(), "", *lines, "", f"Next, see the kernel alone: [bold]{command}")

    def context(self) -> list[str]:
        """The lines below the table: what ran, on what."""
        exact = self.implementations[0]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            "First line of a row: the median time, and the mean cosine. Second line: p95, the time "
            "within which 95 % of the runs were done, and the lowest cosine of any sentence.",
            f"Latency: {self.timed}; {exact.one.runs} and {exact.batch.runs} runs of each, "
            f"in random order; × is the median of {exact.name} divided by that of the row.",
            f"Cosine: of embeddings to those of {exact.name}; nearest: of each sentence's ten "
            "nearest others, those that are the same.",
            f"lowbit ran the kernel {self.kernel} on the instruction set {self.instruction_set}; "
            f"CPU {self.cpu}, threads: {self.threads}.",
            f"{versions}. Sentences: {self.sentence_source}.",
            *(f"{note}." for note in self.notes),
        ]


def _command() -> str:
    """How to call lowbit from here: by the script beside this Python, if there is one."""
    script = Path(sys.executable).with_name("lowbit")
    if not script.exists():
        return "lowbit"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def _latency(latency: Latency, exact: Latency) -> str:
    ratio = exact.median_ms / latency.median_ms
    return f"{ratio:.2f}× {_milliseconds(latency.median_ms)}\n{_milliseconds(latency.p95_ms)}"


def _milliseconds(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} ms"
