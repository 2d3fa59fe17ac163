"""What a run of a kernel shows to be wrong: one finding, and the kinds that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lowbit_lab.run.trace import Place, Program

Severity = Literal["error", "warning", "note"]
"""A note is no finding of a result; it stands among the result's notes."""

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
    "false-hint": "a hint to the compiler is false",
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
