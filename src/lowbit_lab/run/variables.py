"""The variables of a kernel that Python runs line by line: its scalars and small blocks, as they
are when a step begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.run.memory import Memory
from lowbit_lab.run.trace import Change, Place, Program, Recorder, Register

MOST = 256
"""The largest block that is drawn, in elements."""

Values = tuple[NDArray[Any], str] | None


class VariableWatch:
    """Tells a recorder, whenever a step begins, which variables of a kernel have changed since the
    program's last one. values: what a variable holds and of which dtype; None for what is not
    shown. file, name: of the function that is the kernel."""

    def __init__(
        self, memory: Memory, recorder: Recorder, kernel: CodeType, values: Callable[[Any], Values]
    ) -> None:
        self._memory, self._recorder, self._values = memory, recorder, values
        self._file, self._name = kernel.co_filename, kernel.co_name
        self._arguments = set(kernel.co_varnames[: kernel.co_argcount])
        self._registers: dict[str, int] = {}
        self._held: dict[Program, dict[str, NDArray[Any]]] = {}
        self._room = recorder.room

    def __call__(self) -> None:
        """A step begins: it is the event that will be added next."""
        program, event = self._memory.program, len(self._recorder.events)
        frame = sys._getframe(1)
        while frame is not None and not self._is_kernel(frame.f_code):
            frame = frame.f_back
        if frame is None or self._recorder.dropped:
            return
        held = self._held.setdefault(program, {})
        for name, value in frame.f_locals.items():
            found = None if name in self._arguments else self._values(value)
            if found is not None and found[0].size <= MOST:
                self._note(event, name, *found, held, Place(self._file, frame.f_lineno))

    def _is_kernel(self, code: CodeType) -> bool:
        return (code.co_filename, code.co_name) == (self._file, self._name)

    def _note(
        self,
        event: int,
        name: str,
        values: NDArray[Any],
        dtype: str,
        held: dict[str, NDArray[Any]],
        place: Place,
    ) -> None:
        known = held.get(name)
        alike = known is not None and known.shape == values.shape
        if alike and known is not None and known.tobytes() == values.tobytes():
            return
        if self._room is not None:
            self._room -= values.size
            if self._room < 0:
                return
        held[name] = values.copy()
        if name not in self._registers:
            self._registers[name] = len(self._recorder.registers)
            self._recorder.registers.append(Register(name, dtype, 0, place))
        self._recorder.changes.append(Change(event, self._registers[name], held[name], dtype))


def plain(value: Any) -> Values:
    """A number of Python's or NumPy's as an array without dimensions; None for all else."""
    if isinstance(value, bool | int | float | np.generic):
        array = np.asarray(value)
        return (array, str(array.dtype)) if array.dtype.kind in "biuf" else None
    return None
