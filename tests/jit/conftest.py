"""What the tests of the code generator share: running a text both ways, and a fresh Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowbit.isa import get
from lowbit.jit.kernel import Kernel

# (kernel, arguments, isa, threads, static arguments) -> the arrays after the run.
RunBoth = Callable[..., dict[str, np.ndarray]]

# (code, its arguments, environment variables by name) -> the finished process.
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> RunPython:
    """Run code in a Python of its own, which may end in any way."""

    def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def words(run_python: RunPython) -> Callable[..., list[str]]:
    """What code prints in a Python of its own, which must end well."""

    def run(code: str, *arguments: str, **variables: str) -> list[str]:
        done = run_python(code, *arguments, **variables)
        assert done.returncode == 0, (done.returncode, done.stderr)
        return done.stdout.split()

    return run


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


@pytest.fixture
def run_both() -> RunBoth:
    """Interpret a kernel, run it compiled for each number of threads; all must agree to the bit."""

    def run(
        kernel: Kernel,
        arguments: dict[str, Any],
        *,
        isa: str = "generic",
        threads: tuple[int, ...] = (1, 2),
        **static: Any,
    ) -> dict[str, np.ndarray]:
        interpreted = _copied(arguments)
        kernel.interpret(get(isa), interpreted, **static)
        program = kernel.program(get(isa), **static)
        for count in threads:
            compiled = _copied(arguments)
            values = (v.ctypes.data if isinstance(v, np.ndarray) else v for v in compiled.values())
            program(count, *values)
            for name, array in compiled.items():
                if isinstance(array, np.ndarray):
                    assert array.tobytes() == interpreted[name].tobytes(), (name, count, array)
        return {k: v for k, v in interpreted.items() if isinstance(v, np.ndarray)}

    return run
