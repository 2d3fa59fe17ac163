"""Configurations: what their records have in common, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from lowbit.kernels.triton.fast.launch import Gpu
from lowbit.registry import Registry

LEAST_DOT = 16
"""Of rows, columns and terms of a block, for the matrix units."""
_SHARED_BYTES = 227 << 10
"""Shared memory of a program on Hopper (CUDA C++ Programming Guide, compute capability 9.0)."""
_OPTIONS = {"num_warps", "num_stages", "maxnreg"}

C = TypeVar("C")

Table = Mapping[int, Mapping[Hashable, C]]
"""By compute capability, then by what the family tells cases apart by."""


@dataclass(frozen=True)
class Choice(Generic[C]):
    """Which kernel serves a call, how it is cut, and why; refused: others that come before it, and
    why they do not."""

    kernel: str
    config: C
    why: str
    refused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.why}"]
        if self.config is not None:
            lines.append(f"  {self.config}")
        return "\n".join([*lines, *(f"  not {name}: {reason}" for name, reason in self.refused)])


choices: Registry[Callable[..., Choice[Any]]] = Registry("operator", "lowbit.kernels.triton.fast")
"""By operator: the function of a Gpu, of the sizes by name, and of `itemsize`, the bytes of an
element, that chooses its kernel and configuration."""


def from_table(kernel: str, table: Table[C], gpu: Gpu, key: Hashable, fallback: C) -> Choice[C]:
    """The configuration of a table, else one that fits any GPU."""
    found = table.get(gpu.capability, {}).get(key)
    if found is not None:
        return Choice(kernel, found, f"the table has it for sm_{gpu.capability}, {key}")
    known = " and ".join(f"sm_{one}" for one in table)
    missing = f"it is for {known}, and says nothing of {key} on {gpu}"
    return Choice(kernel, fallback, "fits any GPU", (("the table's", missing),))


def require(config: Any, *facts: Any) -> None:
    """ValueError if the configuration refuses these facts of a call, with its reason."""
    if refusal := config.refusal(*facts):
        raise ValueError(f"{config} does not fit: {refusal}")


def not_powers(config: object, **least: int) -> str | None:
    """The complaint about the first of these fields that is no power of two, or below its least."""
    for name, lowest in least.items():
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} is {value}; it must be a power of two"
        if value < lowest:
            return f"{name} is {value}; it must be {lowest} or more"
    return None


def too_much_shared(held: int) -> str | None:
    """The complaint about blocks that take so many bytes, if they are too many."""
    if held <= _SHARED_BYTES:
        return None
    return f"its blocks take {held} bytes of shared memory, more than {_SHARED_BYTES}"


def options_of(config: object) -> dict[str, int]:
    """What the compiler is told, of a configuration's fields."""
    names = {field.name for field in fields(config)} & _OPTIONS  # type: ignore[arg-type]
    found = {name: getattr(config, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
