"""Where kernels come from: a Python file, or a name that lowbit knows.

A file ties its kernels to an operation by a few names, the same for every command:

    kernel     the kernel; may have any name if the file defines only one
    variants   several, in their order, in a list or by name in a dict; all that the file defines
               where it says neither
    spec       the operation: an Operation, or an annotated function that is its reference; may be
               called anything that ends in _spec if the file defines only one
    grid       the number of programs, or a function that makes it from sizes and block sizes; of a
               Triton kernel it may be left out where names say it: a block of B0 along a size N0
    block      the threads of a block, where the language asks for it
    constants  a dict of block sizes and other parameters

`check` and `view`, which run one kernel, also read `output` and `initial`. `compare` and `anatomy`,
which compile all, also read

    peers      what else is timed, in a list or by name in a dict: functions of the inputs by name
               that return a call, or a pair of a call and a function that makes an array of its
               result. A peer that raises an error is left out
    base       the names of those that times are set against, instead of the first variant's
    sizes      those at which variants are timed and followed
    small      those at which they are checked
    inputs     instead of spec: a function of the sizes that makes all arrays by name, and
               `output` the name of the one that is the result
"""

from __future__ import annotations

import contextlib
import dis
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from numbers import Integral
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lowbit.registry import meant
from lowbit.registry.conflicts import conflict
from lowbit.registry.extras import installed
from lowbit.spec import Operation, from_function
from lowbit_lab.backends.backend import Request, Variant
from lowbit_lab.backends.language import Ability, language_of, languages_that_can
from lowbit_lab.bench.core.remote import RemoteError, run_remote
from lowbit_lab.checks.result import OnProgress
from lowbit_lab.compare.problem import Problem
from lowbit_lab.run.triton import triton_modules

PRODUCT, OPERATOR, FUNCTION = "product:", "gpu:", "cpu:"
"""What names begin with: of lowbit's products on CPUs, of operators on tensors, of functions on
CPUs."""


Peer = Callable[..., Any]

_BLOCK = ("threads", "threads_y", "threads_z")
"""What constants call the threads of a block."""


def request_of_file(path: Path) -> Request:
    """Run a file and look up what it says about its kernel.

    ValueError if it does not define what is needed, or cannot be run, with the line.
    """
    names = vars(load(path))
    spec = _spec(names)
    if spec is None:
        found = [name for name in names if name.endswith("_spec")]
        listed = f"; it defines {', '.join(found)}" if found else ""
        raise ValueError(
            f"{path} defines no `spec`; import one: from lowbit.spec.exercises import ... as spec, "
            f"or write a function with jaxtyping annotations{listed}"
        )
    with blamed(path):
        one = _complete(_only_variant(names, path), names, path, "interpret")
    return Request(one, spec, names.get("output"), names.get("initial"))


def _only_variant(names: Mapping[str, Any], path: Path) -> Variant:
    """The one that is called `kernel`, or the only one."""
    if "kernel" in names:
        return _variant(names["kernel"], "kernel", "interpret")
    found = _variants(names, "interpret")
    if len(found) != 1:
        listed = ", ".join(one.name for one in found) or "none"
        raise ValueError(
            f"{path} has to define one kernel, or one that is called `kernel`; it defines {listed}"
        )
    return found[0]


@dataclass(frozen=True)
class Comparison:
    """What a file holds. small: where variants are checked; large: where they are timed. kernel:
    the name of the variant that the file calls `kernel`, if one. peers, base: as the file has
    them."""

    path: Path
    variants: tuple[Variant, ...]
    small: Problem
    large: Problem
    kernel: str | None = None
    peers: Mapping[str, Peer] = field(default_factory=dict[str, Peer])
    base: tuple[str, ...] = ()


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
    variants = _variants(names, "compile")
    if not variants:
        listed = " or ".join(one.written for one in languages_that_can("compile"))
        raise ValueError(f"{path} defines no kernel; write {listed}")
    with blamed(path):
        small, large = _problems(names, path, sizes or {}, default)
    kernel = next((one.name for one in variants if one.kernel is names.get("kernel")), None)
    complete = tuple(_complete(one, names, path, "compile") for one in variants)
    peers, base = _peers(names, path), names.get("base", ())
    base = (base,) if isinstance(base, str) else tuple(base)
    known = [*(one.name for one in complete), *(name for name, _ in peers)]
    if doubled := [name for at, name in enumerate(known) if name in known[:at]]:
        raise ValueError(f"{path}: two variants or peers are called {doubled[0]}; rename one")
    if unknown := [name for name in base if name not in known]:
        raise ValueError(f"{path}: base names {unknown[0]!r}; there are {', '.join(known)}")
    return Comparison(path, complete, small, large, kernel, dict(peers), base)


def _peers(names: Mapping[str, Any], path: Path) -> list[tuple[str, Peer]]:
    """With their names, in their order. TypeError for what is no function."""
    given = names.get("peers", {})
    if not isinstance(given, Mapping):
        if nameless := [one for one in given if not hasattr(one, "__name__")]:
            raise TypeError(f"{path}: peers has {nameless[0]!r}; name it: peers = {{'...': ...}}")
        return [(one.__name__, one) for one in given]
    for name, one in given.items():
        if not callable(one):
            raise TypeError(f"{path}: the peer {name} is {one!r}; it must be a function")
    return list(given.items())


def _problems(
    names: Mapping[str, Any], path: Path, sizes: Mapping[str, int], default: int | None
) -> tuple[Problem, Problem]:
    spec: Any = _spec(names)
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
    function: Any = spec
    operation: Operation = spec if isinstance(spec, Operation) else from_function(function)
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


def _spec(names: Mapping[str, Any]) -> Any:
    """`spec`, or the one function that is called as a specification, `add_spec`; else None."""
    if "spec" in names:
        return names["spec"]
    found = [one for name, one in names.items() if name.endswith("_spec") and callable(one)]
    return found[0] if len(found) == 1 else None


def _variants(names: Mapping[str, Any], ability: Ability) -> list[Variant]:
    """Those that the file lists; without a list, its own kernels, but for what others call."""
    if "variants" in names:
        listed = names["variants"]
        pairs = listed.items() if isinstance(listed, dict) else [("", one) for one in listed]
        return [_variant(one, name, ability) for name, one in pairs]
    home, able = names["__name__"], languages_that_can(ability)
    kernels = {
        name: value
        for name, value in names.items()
        if not isinstance(value, (Operation, type, ModuleType, FunctionType, Variant))
        and any(language.takes(value) for language in able)
        and getattr(value, "__dict__", {}).get("__module__", home) == home
    }
    # What another kernel calls is a part of that.
    called = {
        used
        for name, one in kernels.items()
        if (function := language_of(one, ability).function(one)) is not None
        for used in _globals_of(function) - {name}
    }
    # A kernel with two names in the file is one.
    own = {
        id(one): _variant(one, "", ability) for name, one in kernels.items() if name not in called
    }
    return [*own.values()]


def _globals_of(function: FunctionType) -> set[str]:
    """The names of the file that a function uses."""
    loads = dis.get_instructions(function)
    return {str(one.argval) for one in loads if one.opname == "LOAD_GLOBAL"}


def _variant(one: Any, name: str, ability: Ability) -> Variant:
    made = one if isinstance(one, Variant) else Variant(one)
    language = language_of(made.kernel, ability)
    return replace(made, name=made.name or name or language.name_of(made.kernel))


def _complete(one: Variant, names: Mapping[str, Any], path: Path, ability: Ability) -> Variant:
    """With the grid, the block and the constants of the file, where it has none of its own."""
    language = language_of(one.kernel, ability)
    stated = names.get("constants", {})
    if not isinstance(stated, dict):
        raise ValueError(f"{path}: constants is {stated!r}; it must be a dict, by parameter")
    grid = names.get("grid") if one.grid is None else one.grid
    constants = {**stated, **one.constants}
    block = names.get("block") if one.block is None else one.block
    if block is None and "threads" in constants:
        block = tuple(constants.get(name, 1) for name in _BLOCK)
    if language.needs_grid and grid is None:
        raise ValueError(
            f"{path}: {one.name} has no grid; write the number of programs, grid = 1, or a "
            "function of the sizes and block sizes: def grid(meta): return (meta['N0'],)"
        )
    if language.needs_block and block is None and ability == "compile":
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
    from lowbit_lab.languages.numba_cuda import remembered_signatures

    with remembered_signatures():
        yield


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
        from lowbit_lab.explain.kernels import product_kernels

        products = {f"{PRODUCT}{isa}": one for isa, one in product_kernels().items()}
        if name not in products:
            near = meant(name, products)
            listed = ", ".join(products)
            raise ValueError(f"no kernel {name!r}{near}; there are {listed}")
        return products[name]
    from lowbit.kernels.triton.registry import teaching_kernels

    triton_modules()
    kernels = teaching_kernels()
    if name not in kernels:
        listed = ", ".join([*kernels, f"{PRODUCT}ISA"])
        near = meant(name, kernels)
        raise ValueError(f"no kernel {name!r}{near}; there are {listed} and FILE.py")
    found = kernels[name]
    return Request(Variant(found.kernel, grid=found.grid), found.operation)


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
