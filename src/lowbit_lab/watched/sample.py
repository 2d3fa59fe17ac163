"""A sample of the programs of a launch on a GPU: interpreted on copies of its tensors, and compared
with what the GPU has made of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.spec import DTYPES
from lowbit_lab.backends.host import is_reinterpreted
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.tensor import CheckedTensor, widened
from lowbit_lab.run.trace import Grid, Program, programs_of

MOST_BYTES = 1 << 26
"""Of all tensors of a launch that is sampled."""
_PROGRAMS = 16
# Of the largest number that a program wrote to a tensor: what differs by less may be rounding.
_ROUNDING = 2.0**-6


class Copies:
    """The memory of tensors, copied to the CPU, and the same arguments in it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._memory: dict[int, Tensor] = {}
        self.arguments = {name: self._copied(one) for name, one in arguments.items()}

    @property
    def bytes(self) -> int:
        """How many were copied."""
        return sum(one.numel() for one in self._memory.values())

    def _copied(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._copied, value))
        if is_reinterpreted(value) or hasattr(value, "block_shape"):
            made = copy.copy(value)
            made.base = self._copied(value.base)
            return made
        return self._like(value) if isinstance(value, Tensor) else value

    def _like(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._memory[storage._cdata] = whole.to("cpu", copy=True)
        memory = self._memory[storage._cdata]
        return torch.empty(0, dtype=tensor.dtype).set_(
            memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def size_of(arguments: Mapping[str, Any]) -> int:
    """The bytes of memory behind arguments."""
    found: dict[int, int] = {}
    for value in arguments.values():
        for one in value if isinstance(value, tuple) else (value,):
            tensor = getattr(one, "base", one)
            if isinstance(tensor, Tensor):
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def chosen(grid: Grid) -> list[Program]:
    """The first and the last program, and some between them, drawn but always the same."""
    programs = programs_of(grid)
    if len(programs) <= _PROGRAMS:
        return programs
    drawn = np.random.default_rng(0).choice(len(programs), _PROGRAMS - 2, replace=False)
    return [programs[i] for i in sorted({0, len(programs) - 1, *map(int, drawn)})]


def disagreeing(
    memory: Memory, interpreted: Sequence[CheckedTensor], launched: Sequence[CheckedTensor]
) -> list[Finding]:
    """Of each tensor the first element that the GPU left otherwise than the one program of the
    sample that wrote it; for floats, by more than rounding explains. What other programs have
    written besides is not known, so that is a warning."""
    findings, seen = list[Finding](), set[Any]()
    for ours, theirs in zip(interpreted, launched, strict=True):
        written = np.flatnonzero(ours.writer >= 0)
        if not written.size or ours.type.dtype not in DTYPES or ours.key in seen:
            continue
        got, wanted = _values(theirs)[written], _values(ours)[written]
        wrong = _differing(wanted, got, ours.writer[written])
        if wrong.any():
            seen.add(ours.key)
            first = int(np.argmax(wrong))
            element = int(written[first])
            program, index = memory.begun[int(ours.writer[element])].program, ours.index(element)
            message = (
                f"{ours.name}{list(index)} is {got[first]:.9g}; program {list(program)} of the "
                f"sample, interpreted, writes {wanted[first]:.9g}"
            )
            findings.append(
                Finding(
                    "device-disagrees", message, "warning", tensor=ours.name, index=index,
                    program=program, place=memory.place_of(ours, element), device="cuda",
                    count=int(wrong.sum()),
                )
            )  # fmt: skip
    return findings


def _values(tensor: CheckedTensor) -> NDArray[Any]:
    """All elements of the memory that a tensor lies in, as numbers."""
    stored = tensor.storage[: tensor.elements.owner.size].view(tensor.dtype)
    return widened(np.ascontiguousarray(stored[tensor.slots]), tensor.type.dtype)


def _differing(
    wanted: NDArray[Any], got: NDArray[Any], writers: NDArray[np.int64]
) -> NDArray[np.bool_]:
    if wanted.dtype.kind != "f":
        return wanted != got
    finite = np.isfinite(wanted)
    with np.errstate(all="ignore"):
        largest = np.zeros(int(writers.max()) + 1)
        np.maximum.at(largest, writers[finite], np.abs(wanted[finite]))
        near = np.abs(wanted - got) <= _ROUNDING * largest[writers]
    same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    return ~(same | (finite & near))
