"""Checking the kernel of a Python file, which ties it to its operation by a few names.

    kernel   the kernel; may have any name if the file defines only one
    spec     the operation: an Operation, or an annotated function that is its reference
    grid     the number of programs, or a function that makes it from sizes and block sizes

and, only where they are needed, `constants` (a dict of block sizes and other parameters), `output`
and `initial`, as `check` takes them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lowbit.jit.kernel import Kernel
from lowbit.lab.check_cpu import CpuKernel
from lowbit.lab.check_numba import is_numba
from lowbit.lab.check_run import Tell, check
from lowbit.lab.check_triton import is_triton, triton_modules
from lowbit.lab.report import CheckResult
from lowbit.spec import Operation, Sizes

PRODUCT = "product:"
"""What the names of lowbit's products on CPUs begin with; the instruction set follows."""

_SIMULATOR = "NUMBA_ENABLE_CUDASIM"


def check_file(
    path: Path, device: str | None = None, *, stop: bool = False, tell: Tell | None = None
) -> CheckResult:
    """Check the kernel of a file; a Numba kernel in a process where the simulator is on.

    FileNotFoundError if there is no such file; ValueError if it does not define what is needed;
    otherwise as `check`, and whatever the file itself raises.
    """
    if needs_simulator(path):
        result = in_simulator(path, "check", {"device": device, "stop": stop}, tell)
        first = next(iter(result.findings), None)
        shown = (first.sizes, first.fill) if first and first.sizes else (None, "normal")
        return replace(result, viewer=partial(_view_of_file, path, *shown))
    return check_module(load(path), str(path), device, stop, tell)


def needs_simulator(path: Path) -> bool:
    """Whether a file has to be run in a process of its own, where Numba simulates.

    FileNotFoundError if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    return os.environ.get(_SIMULATOR) != "1" and "numba" in path.read_text(
        "utf-8", errors="replace"
    )


def _view_of_file(path: Path, sizes: Sizes | None, fill: str | None) -> Any:
    from lowbit.lab.view_run import view_file

    return view_file(path, sizes, fill or "normal")


def load(path: Path) -> ModuleType:
    """Run a file as a module. ValueError, with its line, for a syntax error."""
    name = f"lowbit_checked_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        with blamed(path):
            found.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno or 1}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from None
    except SystemExit:
        raise ValueError(f"{path} leaves Python (sys.exit) while it is imported") from None
    return module


@contextlib.contextmanager
def blamed(path: Path) -> Iterator[None]:
    """Within it, an error in which a file's own lines take part becomes a ValueError that says
    which line was the last; other errors are left alone."""
    try:
        yield
    except Exception as error:  # a file may raise anything, and so may its grid and its reference
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            triton_modules()  # which says what to install
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.absolute())]
        if not lines:
            raise
        message = f"{path}, line {lines[-1]}: {type(error).__name__}: {error}"
        raise ValueError(message) from error


def check_module(
    module: ModuleType, title: str, device: str | None, stop: bool, tell: Tell | None
) -> CheckResult:
    """Check the kernel of a module that has been run. Raises as `check_file`."""
    with blamed(Path(title)):
        return check(**arguments_of(module, title), device=device, stop=stop, tell=tell)


def arguments_of(module: ModuleType, title: str) -> dict[str, Any]:
    """What a module says about its kernel, by the names of the arguments of `check`.

    ValueError if it does not define what is needed.
    """
    names = vars(module)
    if "spec" not in names:
        raise ValueError(
            f"{title} defines no `spec`; import one: from lowbit.spec.exercises import ... as "
            "spec, or write a function with jaxtyping annotations"
        )
    own = names["kernel"] if "kernel" in names else _only_kernel(names, module.__name__, title)
    if "grid" not in names and not isinstance(own, (CpuKernel, Kernel, FunctionType)):
        raise ValueError(
            f"{title} defines no `grid`; write the number of programs, grid = 1, or a function of "
            "the sizes and block sizes: def grid(meta): return (meta['N0'],)"
        )
    constants = names.get("constants", {})
    if not isinstance(constants, dict):
        raise ValueError(f"{title}: constants is {constants!r}; it must be a dict, by parameter")
    return {
        "kernel": own,
        "spec": names["spec"],
        "grid": names.get("grid", 1),
        "output": names.get("output"),
        "initial": names.get("initial"),
        **constants,
    }


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


def in_simulator(
    path: Path, action: str, options: Mapping[str, Any], tell: Tell | None = None
) -> Any:
    """What an action of check_worker makes of a file, in a process where Numba simulates.

    Raises what the action raises; RuntimeError if the process stops.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result"
        command = [sys.executable, "-m", "lowbit.lab.check_worker", action]
        environment = {**os.environ, _SIMULATOR: "1"}
        said = Path(folder) / "stderr"
        with (
            said.open("wb") as errors,
            subprocess.Popen(
                [*command, str(path), str(answer), json.dumps(options)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if tell is not None:
                    tell(*json.loads(line))
        if not answer.exists():
            lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"the process that checks {path} stopped: {lines[-1]}")
        # Written by our own worker, in a folder that only this user can write to.
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def check_all(device: str | None = None, **how: Any) -> Iterator[CheckResult]:
    """Check the teaching kernel of each of the twelve operations; `how` as `check` takes it."""
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    for name in teaching_kernels():
        yield check_named(name, device, **how)


def check_named(name: str, device: str | None = None, **how: Any) -> CheckResult:
    """Check a kernel of lowbit; `how` as `check` takes it.

    ValueError, with the names that there are, for another name.
    """
    return check(**arguments_named(name), device=device, **how)


def arguments_named(name: str) -> dict[str, Any]:
    """A teaching kernel or a product on the CPU, its operation and its grid, by the names of the
    arguments of `check`.

    ValueError, with the names that there are, for another name.
    """
    if name.startswith("gpu:"):
        raise ValueError(
            f"{name} is a function that launches kernels; view one kernel: lowbit.lab.view(kernel, "
            "spec, grid=...)"
        )
    if name.startswith(PRODUCT):
        return _product_named(name)
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    kernels = teaching_kernels()
    if name not in kernels:
        listed = ", ".join([*kernels, f"{PRODUCT}ISA"])
        raise ValueError(f"no kernel {name!r}; there are {listed} and FILE.py")
    found = kernels[name]
    return {"kernel": found.kernel, "spec": found.operation, "grid": found.grid}


def _product_named(name: str) -> dict[str, Any]:
    from lowbit.lab.product_kernels import product_kernels

    products = product_kernels()
    if name not in products:
        raise ValueError(f"no kernel {name!r}; there are {', '.join(products)}")
    return products[name]
