"""A file of variants of one kernel, read for `lowbit compare`.

spec       the operation: an Operation, or an annotated function that is its reference
inputs     instead of it: a function of the sizes that makes all arrays by name, and
           `output` the name of the one that is the result
sizes      those at which the variants are timed and followed
small      those at which they are checked
grid       blocks, or a function of sizes and constants; `block` threads of a block
constants  other parameters
variants   the kernels in their order; all kernels that the file defines without it
"""

from __future__ import annotations

import contextlib
import dis
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from lowbit.registry.extras import installed
from lowbit.spec import Operation, from_function
from lowbit_lab.backends.backend import GridLike
from lowbit_lab.compare.kind import kind_of, kinds
from lowbit_lab.compare.problem import Problem, Variant
from lowbit_lab.source import blamed, load


@dataclass(frozen=True)
class Comparison:
    """What a file holds. small: where variants are checked; large: where they are timed. kernel:
    the name of the variant that the file calls `kernel`, if one."""

    path: Path
    variants: tuple[Variant, ...]
    small: Problem
    large: Problem
    kernel: str | None = None


def read(
    path: Path, sizes: Mapping[str, int] | None = None, default: int | None = None
) -> Comparison:
    """Run a file and look up what it says; `sizes` are instead of its own. default: about what
    sizes are that nobody gives.

    FileNotFoundError if there is no such file; ValueError if it cannot be run, with the line, or
    does not define what is needed; TypeError if it defines something else under a name.
    """
    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    with _without_gpu():
        module = load(path)
    names = vars(module)
    variants = _variants(module, path)
    with blamed(path):
        small, large = _problems(names, path, sizes or {}, default)
    kernel = next((one.name for one in variants if one.kernel is names.get("kernel")), None)
    complete = tuple(_complete(one, names, path) for one in variants)
    return Comparison(path, complete, small, large, kernel)


def _problems(
    names: Mapping[str, Any], path: Path, sizes: Mapping[str, int], default: int | None
) -> tuple[Problem, Problem]:
    spec: Any = names.get("spec")
    make, output = names.get("inputs"), names.get("output")
    stated = {**_sizes(names, "sizes", path), **sizes}
    small = _sizes(names, "small", path)
    if spec is None:
        if make is None or output is None or not (stated or small):
            raise ValueError(
                f"{path} defines neither `spec`, a specification, nor `inputs`, `output` and "
                "`sizes`: a function that makes all arrays by name, the result's name, and a dict"
            )
        large, few = {**small, **stated}, {**stated, **small}
        return Problem(few, None, make, output), Problem(large, None, make, output)
    if not (isinstance(spec, Operation) or callable(spec)):
        raise TypeError(
            f"{path}: spec is {spec!r}; it must be an Operation, or a function with annotations"
        )
    operation: Operation = spec if isinstance(spec, Operation) else from_function(names["spec"])
    exercise = dict(operation.exercise)
    missing = [n for n in operation.names if n not in {*exercise, *stated, *small}]
    if default is not None:
        stated |= operation.fitted(dict.fromkeys(missing, default))
    elif missing:
        listed = ", ".join(missing)
        raise ValueError(
            f"{path} gives no size {listed}; write sizes = {{...}}, at which variants are timed, "
            "and small = {...}, at which they are checked, or --shape"
        )
    # A size that one of them leaves open is the other's.
    few = operation.complete({**stated, **exercise, **small})
    large = operation.complete({**exercise, **small, **stated})
    return Problem(few, operation, None, output), Problem(large, operation, None, output)


def _sizes(names: Mapping[str, Any], which: str, path: Path) -> dict[str, int]:
    """The dict of sizes that a file gives, empty without one. TypeError if it is none."""
    given = names.get(which, {})
    if not isinstance(given, Mapping) or not all(
        isinstance(size, Integral) for size in given.values()
    ):
        raise TypeError(f"{path}: {which} is {given!r}; it must be a dict of whole numbers by name")
    return dict(given)


def _variants(module: ModuleType, path: Path) -> list[Variant]:
    names = vars(module)
    if "variants" in names:
        listed = names["variants"]
        pairs = listed.items() if isinstance(listed, dict) else [("", one) for one in listed]
        found = [_variant(one, name) for name, one in pairs]
    else:
        kernels = {
            name: value
            for name, value in names.items()
            if not isinstance(value, (Operation, type, ModuleType, FunctionType, Variant))
            and any(kind.takes(value) for kind in kinds)
            and getattr(value, "__dict__", {}).get("__module__", module.__name__) == module.__name__
        }
        # What another kernel calls is a part of that.
        called = {
            used
            for name, one in kernels.items()
            if (function := kind_of(one).function(one)) is not None
            for used in _globals_of(function) - {name}
        }
        # A kernel with two names in the file is one.
        own = {id(one): _variant(one, "") for name, one in kernels.items() if name not in called}
        found = [*own.values()]
    if not found:
        raise ValueError(
            f"{path} defines no kernel; write functions under numba.cuda.jit, triton.jit or "
            "numba.njit, lowbit kernels, or lowbit_lab.compare.cuda_c('...')"
        )
    return found


def _globals_of(function: FunctionType) -> set[str]:
    """The names of the file that a function uses."""
    loads = dis.get_instructions(function)
    return {str(one.argval) for one in loads if one.opname == "LOAD_GLOBAL"}


def _variant(one: Any, name: str) -> Variant:
    made = one if isinstance(one, Variant) else Variant(one)
    kind_of(made.kernel)
    return replace(made, name=made.name or name or kind_of(made.kernel).name_of(made.kernel))


def _complete(one: Variant, names: Mapping[str, Any], path: Path) -> Variant:
    kind = kind_of(one.kernel)
    grid: GridLike | None = names.get("grid") if one.grid is None else one.grid
    constants = {**names.get("constants", {}), **one.constants}
    block = names.get("block") if one.block is None else one.block
    if block is None and "threads" in constants:
        block = tuple(constants.get(name, 1) for name in ("threads", "threads_y", "threads_z"))
    if kind.needs_grid and grid is None:
        raise ValueError(f"{path}: {one.name} has no grid; define grid, or variant(..., grid=...)")
    if kind.needs_block and block is None:
        raise ValueError(f"{path}: {one.name} has no block; define block = (32, 32), the threads")
    block = (block,) if isinstance(block, int) else block
    return replace(one, grid=grid, block=block, constants=constants)


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Within it, numba.cuda.jit remembers a signature instead of compiling it for a GPU at once,
    of which there may be none."""
    if not installed("numba"):
        yield
        return
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        raise RuntimeError("NUMBA_ENABLE_CUDASIM is 1; unset it: compare compiles kernels")
    from lowbit_lab.compare.kinds.numba_cuda import remembered_signatures

    with remembered_signatures():
        yield
