"""What an instruction set is, the table of all, and whether this machine can run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowbit.isa import host
from lowbit.registry import Registry


@dataclass(frozen=True, eq=False)
class InstructionSet:
    """Facts about one instruction set, as data.

    `features` are the LLVM features that code for it is compiled with and that the machine must
    therefore have. `fallback` names the set whose kernels serve where this one has none. An
    `extension` is no level of its own: kernels for it serve at the level that it falls back to, on
    machines that have it.
    `vector_bytes` is the size of its vector registers, `vector_registers` their number, `tiles`
    the number of its matrix registers. `permission` returns "" or why the operating system
    withholds it.
    """

    name: str
    features: tuple[str, ...]
    fallback: str | None
    vector_bytes: int
    vector_registers: int
    tiles: int = 0
    extension: bool = False
    architecture: str | None = "x86_64"
    permission: Callable[[], str] = str  # which returns ""

    def plus(self, name: str, *features: str, **facts: Any) -> InstructionSet:
        """A set with all instructions of this one, to which it falls back, and more."""
        known = {"name": name, "features": (*self.features, *features), "fallback": self.name}
        return replace(self, **{**known, **facts})

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to another architecture than this process."""
        return self.architecture not in (None, host.architecture())

    def missing(self) -> str:
        """ "" if this machine can run it, else the reason, fit for a message."""
        if self.is_foreign:
            machine = host.architecture()
            return f"{self.name} is an instruction set of {self.architecture}, this is {machine}"
        absent = [feature for feature in self.features if not host.has(feature)]
        if absent:
            return f"the CPU lacks {', '.join(absent)}"
        return self.permission()


# Each file of this package adds its own. By their fall-backs this is the chain as well.
TABLE: Registry[InstructionSet] = Registry("instruction set", "lowbit.isa")


def register(one: InstructionSet) -> InstructionSet:
    """Add a set to the table."""
    return TABLE.add(one.name, one)
