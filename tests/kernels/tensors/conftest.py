"""Running a kernel over tensors every way there is; all must agree to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.isa import available, get
from lowbit.jit.kernel import Kernel

# (kernel, arguments, interpret it as well, arrays that may differ, static arguments) -> the arrays
# after the run.
RunAll = Callable[..., dict[str, np.ndarray]]


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """With copies of all memory; arrays that share memory, or lie in larger ones, still do."""
    copies: dict[int, np.ndarray] = {}
    made = dict(arguments)
    for name, one in arguments.items():
        if isinstance(one, np.ndarray):
            base = _base(one)
            copy = copies.setdefault(id(base), base.copy(order="K"))
            offset = one.__array_interface__["data"][0] - base.__array_interface__["data"][0]
            made[name] = np.ndarray(one.shape, one.dtype, copy, offset, one.strides)
    return made


@pytest.fixture
def run_all() -> RunAll:
    """Interpret a kernel, run it compiled on every instruction set that this machine has, in one
    thread and in three."""

    def run(
        kernel: Kernel,
        arguments: dict[str, Any],
        *,
        interpret: bool = True,
        apart: tuple[str, ...] = (),
        **static: Any,
    ) -> dict[str, np.ndarray]:
        runs: list[tuple[Any, dict[str, Any]]] = []
        for name in available():
            program = kernel.program(get(name), **static)
            for threads in (1, 3):
                runs.append(((name, threads), copied := _copied(arguments)))
                program.bind(threads, (), **copied)()
        if interpret:
            for name in (available()[0], "generic"):
                runs.append(((name, "interpreted"), copied := _copied(arguments)))
                kernel.interpret(get(name), copied, **static)
        first = {k: v for k, v in runs[0][1].items() if isinstance(v, np.ndarray)}
        first = {name: array for name, array in first.items() if name not in apart}
        for how, result in runs[1:]:
            for name, array in first.items():
                assert _base(array).tobytes() == _base(result[name]).tobytes(), (how, name)
        return first

    return run
