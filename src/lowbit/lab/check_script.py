"""Checking the kernel of a Python file, which ties it to its operation by a few names.

    kernel   the kernel; may have any name if the file defines only one
    spec     the operation: an Operation, or an annotated function that is its reference
    grid     the number of programs, or a function that makes it from sizes and block sizes

and, only where they are needed, `constants` (a dict of block sizes and other parameters), `output`
and `initial`, as `check` takes them.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lowbit.lab.check_cpu import CpuKernel
from lowbit.lab.check_numba import is_numba
from lowbit.lab.check_run import check
from lowbit.lab.check_triton import is_triton, triton_modules
from lowbit.lab.report import CheckResult
from lowbit.spec.typed import Operation

_SIMULATOR = "NUMBA_ENABLE_CUDASIM"


def check_file(path: Path, device: str | None = None) -> CheckResult:
    """Check the kernel of a file; a Numba kernel in a process where the simulator is on.

    FileNotFoundError if there is no such file; ValueError if it does not define what is needed;
    otherwise as `check`, and whatever the file itself raises.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    if os.environ.get(_SIMULATOR) != "1" and "numba" in path.read_text(encoding="utf-8"):
        return _in_simulator(path, device)
    return check_module(load(path), str(path), device)


def load(path: Path) -> ModuleType:
    """Run a file as a module. ValueError, with its line, for a syntax error."""
    name = f"lowbit_checked_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    return module


def check_module(module: ModuleType, title: str, device: str | None) -> CheckResult:
    """Check the kernel of a module that has been run."""
    names = vars(module)
    if "spec" not in names:
        raise ValueError(
            f"{title} defines no `spec`; import one: from lowbit.spec.ladder import ... as spec, "
            "or write a function with jaxtyping annotations"
        )
    return check(
        names["kernel"] if "kernel" in names else _only_kernel(names, module.__name__, title),
        names["spec"],
        grid=names.get("grid", 1),
        output=names.get("output"),
        initial=names.get("initial"),
        device=device,
        **names.get("constants", {}),
    )


def _only_kernel(names: dict[str, Any], module: str, title: str) -> Any:
    def own(value: Any) -> bool:
        if isinstance(value, (FunctionType, Operation, type, ModuleType)):
            return False
        known = isinstance(value, CpuKernel) or is_triton(value) or is_numba(value)
        return known and getattr(value, "__module__", module) == module

    found = {name: value for name, value in names.items() if own(value)}
    if len(found) != 1:
        listed = ", ".join(found) or "none"
        raise ValueError(
            f"{title} has to define one kernel, or one that is called `kernel`; it defines {listed}"
        )
    return next(iter(found.values()))


def _in_simulator(path: Path, device: str | None) -> CheckResult:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result"
        command = [sys.executable, "-m", "lowbit.lab.check_worker", str(path), str(answer)]
        environment = {**os.environ, _SIMULATOR: "1"}
        done = subprocess.run(
            [*command, *([device] if device else [])],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not answer.exists():
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"the process that checks {path} stopped: {lines[-1]}")
        # Written by our own worker, in a folder that only this user can write to.
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def check_all(device: str | None = None) -> list[CheckResult]:
    """Check the teaching kernel of each of the twelve operations."""
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    found = teaching_kernels().values()
    return [check(t.kernel, t.operation, grid=t.grid, device=device) for t in found]


def check_named(name: str, device: str | None = None) -> CheckResult:
    """Check one teaching kernel. ValueError, with the names that there are, for another name."""
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    kernels = teaching_kernels()
    if name not in kernels:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(kernels)}, FILE.py and all")
    found = kernels[name]
    return check(found.kernel, found.operation, grid=found.grid, device=device)
