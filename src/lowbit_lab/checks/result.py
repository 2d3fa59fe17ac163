"""What a check found, as data, as text and as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lowbit_lab.run.findings import Finding

OnProgress = Callable[[str, int, int, str | None], None]
"""Is told the kernel's name, how many cases have been tried, of how many, and the first error."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check. `ok`: no finding is an error. bounds: of each parameter that is a
    tensor, whether no program leaves it at any sizes, in words; empty where that was not asked.
    `viewer` makes the View of a run: the first one in which something was found, else that of the
    exercise."""

    kernel: str
    operation: str
    backend: str
    findings: tuple[Finding, ...]
    cases: int
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    bounds: Mapping[str, str] = field(default_factory=dict[str, str])
    viewer: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # The viewer holds the kernel, and a kernel cannot be pickled.
        return {**vars(self), "viewer": None}

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings do not count."""
        return all(finding.severity != "error" for finding in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all errors, each once."""
        return tuple(dict.fromkeys(f.kind for f in self.findings if f.severity == "error"))

    def __str__(self) -> str:
        cases = f"{self.cases} case{'' if self.cases == 1 else 's'}"
        outcome = f"right in {cases}" if self.ok else f"wrong; {cases} tried"
        where = f"{' and '.join(self.devices)}, {self.backend}"
        lines = [f"{self.kernel} ({self.operation}): {outcome} on {where}"]
        for finding in self.findings:
            lines.append(f"  {finding.severity}: {finding}")
            if finding.case:
                lines.append(f"      {finding.case}")
        lines += [f"  {name}: {said}" for name, said in self.bounds.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def __rich__(self) -> Any:
        return coloured(str(self), self.ok)

    def _repr_html_(self) -> str:
        colour = "#1a7f37" if self.ok else "#cf222e"
        head, _, body = html.escape(str(self)).partition("\n")
        view = self.viewer()._repr_html_() if self.viewer is not None else ""
        return f'<p style="color:{colour}"><b>{head}</b></p><pre>{body}</pre>{view}'

    def to_json(self) -> str:
        """Everything as JSON text; numbers that are not finite are written as strings."""
        whole = {"ok": self.ok, **asdict(replace(self, viewer=None))}
        del whole["viewer"]
        return json.dumps(plain(whole), indent=2, allow_nan=False)


def coloured(report: str, ok: bool) -> Any:
    """The text of a report for a terminal."""
    from rich.text import Text

    head, *rest = report.splitlines()
    text = Text(head, "bold green" if ok else "bold red")
    for line in rest:
        start = line.lstrip().partition(":")[0]
        text.append(f"\n{line}", {"error": "red", "warning": "yellow"}.get(start, "dim"))
    return text


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
