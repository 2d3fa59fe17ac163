"""What a check found, as data, as text and as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lowbit_lab.run.trace import Place, Program

Severity = Literal["error", "warning", "note"]
"""A note is no finding of a result; it stands among the result's notes."""

OnProgress = Callable[[str, int, int, str | None], None]
"""Is told the kernel's name, how many cases have been tried, of how many, and the first error."""

TITLES: Mapping[str, str] = {
    "out-of-bounds-load": "reads outside of a tensor",
    "out-of-bounds-store": "writes outside of a tensor",
    "input-written": "writes to an input",
    "offset-overflow": "offsets wrap in large tensors",
    "unwritten": "elements never written",
    "unwritten-read": "reads an element before it is written",
    "write-conflict": "two programs write different values to one element",
    "lane-conflict": "two lanes of one store write different values to one element",
    "written-twice": "two programs write the same value to one element",
    "read-of-other": "reads what another program writes",
    "wrong-values": "wrong values",
    "order-dependent": "results change with the order of the programs",
    "rounding-order": "rounding changes with the order of the programs",
    "undefined-lanes": "relies on lanes that a mask leaves undefined",
    "special-values": "special numbers come out as NaN or infinity, and should not",
    "nan-leak": "NaN or infinity reaches a result that does not depend on it",
    "nan-chosen": "the order of NaN and numbers is another one than the reference's",
    "cancellation": "off by roundings of numbers as large as the inputs",
    "block-sizes": "wrong with other block sizes",
    "wrong-result": "returns something else than the specification's result",
    "crash": "the kernel stops with an error",
    "not-compiled": "the kernel does not compile",
    "tuned-twice": "the launches of autotuning change the result",
    "endless": "the kernel does not end",
    "guard-overwritten": "wrote outside of a tensor on the GPU",
    "device-disagrees": "the GPU's result differs from the interpreter's",
}
"""What each kind of finding is called."""


@dataclass(frozen=True)
class Caller:
    """A line of the host that took part in a launch, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Finding:
    """One thing that was found, at the first place where it was seen.

    kind: a key of TITLES. index: of the element, or for an access outside of the tensor its
    distance from the first element, in elements. masked: whether the access has a mask. sizes,
    fill and layout: the case; more: in how many further cases the same was seen. device:
    "interpreter", "cuda", or for a function on a CPU the instruction set. kernel: the one that did
    it, where a function launches several; stack: who launched it, the innermost first, where no
    specification is checked.
    """

    kind: str
    message: str
    severity: Severity = "error"
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    program: Program | None = None
    place: Place | None = None
    masked: bool | None = None
    expected: float | None = None
    got: float | None = None
    count: int = 1
    sizes: Mapping[str, int] | None = None
    fill: str | None = None
    layout: str | None = None
    device: str = "interpreter"
    more: int = 0
    kernel: str | None = None
    stack: tuple[Caller, ...] = ()

    @property
    def title(self) -> str:
        """The kind in words."""
        return TITLES[self.kind]

    @property
    def case(self) -> str:
        """Where it was seen, in words."""
        sizes = ", ".join(f"{name}={size}" for name, size in (self.sizes or {}).items())
        parts = [sizes, f"{self.fill} data" if self.fill else "", self.layout or ""]
        known = "; ".join(part for part in parts if part)
        device = "" if self.device == "interpreter" else f"on {self.device}"
        cases = "case" if self.more == 1 else "cases"
        more = f"and in {self.more} more {cases}" if self.more else ""
        return " ".join(part for part in (device, f"with {known}" if known else "", more) if part)

    def __str__(self) -> str:
        where = f" in {self.kernel}" if self.kernel else ""
        where += f" at {self.place}" if self.place else ""
        return f"{self.title}{where}: {self.message}"


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
