"""Where a kernel comes from: a Python file, or a name that lowbit knows.

A file ties its kernel to an operation by a few names:

    kernel   the kernel; may have any name if the file defines only one
    spec     the operation: an Operation, or an annotated function that is its reference; may be
             called anything that ends in _spec if the file defines only one
    grid     the number of programs, or a function that makes it from sizes and block sizes; of a
             Triton kernel it may be left out where names say it: a block of B0 along a size N0

and, only where they are needed, `constants` (a dict of block sizes and other parameters), `output`
and `initial`, as `check` takes them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lowbit.registry.conflicts import conflict
from lowbit.spec import Operation
from lowbit_lab.backends.backend import Request, backend_of, backends
from lowbit_lab.bench.core.remote import RemoteError, run_remote
from lowbit_lab.report import OnProgress
from lowbit_lab.run.triton import triton_modules

PRODUCT, OPERATOR, FUNCTION = "product:", "gpu:", "cpu:"
"""What names begin with: of lowbit's products on CPUs, of operators on tensors, of functions on
CPUs."""


def request_of_file(path: Path) -> Request:
    """Run a file and look up what it says about its kernel.

    ValueError if it does not define what is needed, or cannot be run, with the line.
    """
    module = load(path)
    names = vars(module)
    spec = names["spec"] if "spec" in names else _only_spec(module, path)
    kernel = names["kernel"] if "kernel" in names else _only_kernel(module, path)
    with blamed(path):
        needs_grid = backend_of(kernel).needs_grid
    if "grid" not in names and needs_grid:
        raise ValueError(
            f"{path} defines no `grid`; write the number of programs, grid = 1, or a function of "
            "the sizes and block sizes: def grid(meta): return (meta['N0'],)"
        )
    constants = names.get("constants", {})
    if not isinstance(constants, dict):
        raise ValueError(f"{path}: constants is {constants!r}; it must be a dict, by parameter")
    stated = {name: names[name] for name in ("grid", "output", "initial") if name in names}
    return Request(kernel, spec, **stated, given=constants)


class _Source(SourceFileLoader):
    """Compiles the text anew: bytecode that is kept is found by the second of the last change and
    the size, which stay where someone changes a figure and checks again at once."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load(path: Path) -> ModuleType:
    """Run a file as a module. ValueError, with its line, if it cannot be run."""
    name = f"lowbit_checked_{path.stem}"
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file")
    file = str(path.absolute())
    found = importlib.util.spec_from_file_location(name, file, loader=_Source(name, file))
    assert found is not None
    assert found.loader is not None
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


def _only_spec(module: ModuleType, path: Path) -> Any:
    """The one function that is called as a specification: `add_spec`."""
    found = [n for n, value in vars(module).items() if n.endswith("_spec") and callable(value)]
    if len(found) != 1:
        listed = f"; it defines {', '.join(found)}" if found else ""
        raise ValueError(
            f"{path} defines no `spec`; import one: from lowbit.spec.exercises import ... as spec, "
            f"or write a function with jaxtyping annotations{listed}"
        )
    return getattr(module, found[0])


def _only_kernel(module: ModuleType, path: Path) -> Any:
    def own(value: Any) -> bool:
        if isinstance(value, (Operation, type, ModuleType, FunctionType)):
            return False
        known = any(backend.takes(value) for backend in backends)
        return known and getattr(value, "__module__", module.__name__) == module.__name__

    found = {name: value for name, value in vars(module).items() if own(value)}
    if len(found) != 1:
        listed = ", ".join(found) or "none"
        raise ValueError(
            f"{path} has to define one kernel, or one that is called `kernel`; it defines {listed}"
        )
    return next(iter(found.values()))


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
        said = conflict(error) or f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, line {lines[-1]}: {said}") from error


def request_named(name: str) -> Request:
    """A teaching kernel, or a product on the CPU, its operation and its grid.

    ValueError, with the names that there are, for another name.
    """
    if name.startswith(OPERATOR):
        raise ValueError(
            f"{name} is a function that launches kernels; view one kernel: lowbit_lab.view(kernel, "
            "spec, grid=...)"
        )
    if name.startswith(PRODUCT):
        from lowbit_lab.product_kernels import product_kernels

        products = {f"{PRODUCT}{isa}": one for isa, one in product_kernels().items()}
        if name not in products:
            raise ValueError(f"no kernel {name!r}; there are {', '.join(products)}")
        return products[name]
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    kernels = teaching_kernels()
    if name not in kernels:
        listed = ", ".join([*kernels, f"{PRODUCT}ISA"])
        raise ValueError(f"no kernel {name!r}; there are {listed} and FILE.py")
    found = kernels[name]
    return Request(found.kernel, found.operation, found.grid)


def needs_simulator(path: Path) -> bool:
    """Whether a file has to be run in a process of its own, where Numba simulates.

    FileNotFoundError if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    return os.environ.get("NUMBA_ENABLE_CUDASIM") != "1" and "numba" in path.read_text(
        "utf-8", errors="replace"
    )


def in_simulator(
    function: Callable[[Path], Any], path: Path, on_progress: OnProgress | None = None
) -> Any:
    """What a function makes of a file in a process where Numba simulates.

    Raises what the function raises; RuntimeError if the process stops.
    """
    try:
        return run_remote(function, path, on_progress=on_progress, NUMBA_ENABLE_CUDASIM="1")
    except RemoteError as error:
        if error.raised is None:
            raise RuntimeError(f"the process that checks {path} stopped: {error}") from None
        raise error.raised from None
