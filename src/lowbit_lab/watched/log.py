"""What was found in the launches of a program."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lowbit_lab.checks.result import coloured, plain
from lowbit_lab.run.findings import Finding


@dataclass
class Log:
    """The launches that were watched, and what is wrong with them.

    launches: how many there were of each kernel. findings: each kind once for a kernel, a tensor
    and a line, with who launched it first, and in how many more launches it was seen. bounds: for
    each kernel, tensor by tensor, whether no program of a launch can leave it, in words.
    """

    launches: Counter[str] = field(default_factory=Counter[str])
    notes: list[str] = field(default_factory=list[str])
    bounds: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    _found: dict[tuple[Any, ...], Finding] = field(default_factory=dict[tuple[Any, ...], Finding])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, errors first."""
        return tuple(sorted(self._found.values(), key=lambda one: one.severity != "error"))

    @property
    def watched(self) -> bool:
        """Whether there was a launch to watch; else nothing is known of the program's kernels."""
        return bool(self.launches)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error; warnings do not count."""
        return all(finding.severity != "error" for finding in self._found.values())

    def __bool__(self) -> bool:
        return self.ok

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all errors, each once."""
        return tuple(dict.fromkeys(f.kind for f in self.findings if f.severity == "error"))

    def add(self, finding: Finding) -> None:
        """Take down what was found in a launch."""
        key = (finding.kind, finding.kernel, finding.tensor, finding.place, finding.device)
        seen = self._found.get(key)
        self._found[key] = replace(seen, more=seen.more + 1) if seen else finding

    def note(self, text: str) -> None:
        """Take down what somebody should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        lines = [self._head]
        for finding in self.findings:
            lines.append(f"  {finding.severity}: {finding}")
            launched_at = ", ".join(map(str, finding.stack))
            lines += [f"      launched at {launched_at}"] if launched_at else []
            lines += [f"      and {finding.more} more times"] if finding.more else []
        for kernel, tensors in self.bounds.items():
            lines += [f"  {kernel}: {name}: {said}" for name, said in tensors.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    @property
    def _head(self) -> str:
        """The outcome in a line."""
        if not self.watched:
            none = "the program launched no kernel of Triton"
            return f"nothing was watched: {none}" if self.ok else f"wrong, although {none}"
        launched, kernels = sum(self.launches.values()), len(self.launches)
        outcome = "nothing wrong" if self.ok else "wrong"
        return (
            f"{outcome} in {launched} launch{'es' * (launched != 1)} "
            f"of {kernels} kernel{'s' * (kernels != 1)}"
        )

    def __rich__(self) -> Any:
        return coloured(str(self), self.ok and self.watched)

    def to_json(self) -> str:
        """Everything as JSON text; numbers that are not finite are written as strings."""
        found = {
            "ok": self.ok,
            "watched": self.watched,
            "launches": dict(self.launches),
            "findings": [asdict(finding) for finding in self.findings],
            "bounds": self.bounds,
            "notes": self.notes,
        }
        return json.dumps(plain(found), indent=2, allow_nan=False)
