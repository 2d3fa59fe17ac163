"""What a run of the demo found, as data, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from lowbit.demo.measure import Latency, Quality


@dataclass(frozen=True)
class Implementation:
    """One column of the table; every figure was measured in the run that made it."""

    name: str
    detail: str
    bytes_on_disk: int
    one: Latency
    batch: Latency
    quality: Quality


@dataclass(frozen=True)
class DemoResult:
    """A whole run. `implementations` begins with fp32, which the others are compared with."""

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
    implementations: tuple[Implementation, ...]
    notes: tuple[str, ...] = field(default=())

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
        )
        table.add_column("", no_wrap=True)
        for one in self.implementations:
            table.add_column(f"{one.name}\n[dim]{one.detail}[/dim]", justify="right")
        for label, show in self._rows():
            table.add_row(label, *(show(one) for one in self.implementations))
        return table

    def _rows(self) -> list[tuple[str, Callable[[Implementation], str]]]:
        exact = self.implementations[0]

        def against(value: float, reference: float) -> str:
            return f"{reference / value:.2f}×  {_milliseconds(value)}"

        return [
            ("size on disk", lambda i: f"{i.bytes_on_disk / 1e6:.1f} MB"),
            ("1 sentence: median", lambda i: against(i.one.median_ms, exact.one.median_ms)),
            ("            p95", lambda i: _milliseconds(i.one.p95_ms)),
            (
                f"{self.batch_size} sentences: median",
                lambda i: against(i.batch.median_ms, exact.batch.median_ms),
            ),
            ("              p95", lambda i: _milliseconds(i.batch.p95_ms)),
            ("cosine to fp32: mean", lambda i: f"{i.quality.mean_cosine:.5f}"),
            ("                lowest", lambda i: f"{i.quality.min_cosine:.5f}"),
            ("10 nearest neighbours", lambda i: f"{i.quality.neighbours:.1%} same"),
        ]

    def context(self) -> list[str]:
        """The lines below the table: what ran, on what."""
        exact = self.implementations[0]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"Latency: {self.timed}; {exact.one.runs} and {exact.batch.runs} runs of each, "
            f"in random order; × is the median of {exact.name} divided by that of the column.",
            f"lowbit ran the kernel {self.kernel} on the instruction set {self.instruction_set}; "
            f"CPU {self.cpu}, threads: {self.threads}.",
            f"{versions}. Sentences: {self.sentence_source}.",
            *(f"{note}." for note in self.notes),
        ]


def _milliseconds(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} ms"
