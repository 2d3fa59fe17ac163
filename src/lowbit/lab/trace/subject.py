"""What is traced: text as a user gives it, and the call that comes of it."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.lab.trace.report import Operator
from lowbit.registry import Registry

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
RUN, EXPECTED, MULTIPLY_ADDS = "run", "arithmetic", "multiply_adds"
"""Names that a Python file may define."""


@dataclass(frozen=True)
class Asked:
    """`engine:name shape:shape key=value`, understood. `name` is a file where `engine` is FILE."""

    engine: str
    name: str
    shapes: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    threads: int = 1

    def take(self, name: str, default: Any) -> Any:
        """An option, which is used up; ValueError for a value of another kind."""
        value = self.options.pop(name, default)
        if default is not None and type(value) is not type(default):
            wanted = type(default).__name__
            raise ValueError(f"{name}={value}: give {name} as {wanted}, such as {name}={default}")
        return value

    def nothing_left(self) -> None:
        """ValueError if an option was not understood."""
        if self.options:
            raise ValueError(f"{self.engine}:{self.name} knows no {', '.join(self.options)}=...")


@dataclass(frozen=True)
class Opened:
    """A call that can be made again and again.

    arithmetic: what its products are expected to be made in, such as "int8"; "" if that is not
    known. multiply_adds: of one call, if known. operators: the engine's own table of a few calls.
    """

    call: Callable[[], object]
    title: str
    arithmetic: str = ""
    multiply_adds: int | None = None
    operators: Callable[[], list[Operator]] | None = None


FILE = "file"
engines: Registry[Callable[[Asked], Opened]] = Registry("engine", "lowbit.lab.trace.subjects")


def understood(text: str, threads: int = 1) -> Asked:
    """ValueError, with what is known, or FileNotFoundError, for what can be no subject."""
    first, *rest = text.split() or [""]
    engine, colon, name = first.partition(":")
    known = (
        f"known are {', '.join(f'{one}:...' for one in engines.names())} and FILE.py with a run()"
    )
    if first.endswith(".py"):
        if not Path(first).exists():
            raise FileNotFoundError(2, f"there is no such file; subjects that are {known}", first)
        try:
            Path(first).read_bytes()
        except OSError as error:
            raise ValueError(f"{first} cannot be read: {error.strerror}; {known}") from None
        engine, name = FILE, first
    elif not colon:
        raise ValueError(f"{first!r} is no subject; {known}")
    else:
        engines.get(engine)
    shapes = [part for part in rest if "=" not in part]
    options = dict(part.split("=", 1) for part in rest if "=" in part)
    sizes = tuple(_sizes(one) for part in shapes for one in part.split(":"))
    return Asked(engine, name, sizes, {k: _value(v) for k, v in options.items()}, threads)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(size) for size in text.split("x"))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"shape {text!r} is not understood; write 1024x2048, or MxK:KxN")
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text


def opened(asked: Asked) -> Opened:
    """ValueError for what cannot be made of it; whatever a file raises."""
    return _file(asked) if asked.engine == FILE else engines.get(asked.engine)(asked)


def product_sizes(asked: Asked, rows: int) -> tuple[int, int, int]:
    """M, K and N of `MxK:KxN`, or of a layer `KxN` that is given `rows` rows."""
    match asked.shapes:
        case ((k, n),):
            return rows, k, n
        case ((m, k), (other, n)) if k == other:
            return m, k, n
    raise ValueError(
        f"{asked.engine}:{asked.name} needs a shape: KxN, with rows=M if you like, or MxK:KxN"
    )


def matrix_product(shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Multiply-adds of the product of two stacks of matrices; None if that is none."""
    if len(shapes) != 2 or min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-2]:
        return None
    stack = max(math.prod(shape[:-2]) for shape in shapes)
    return stack * shapes[0][-2] * shapes[0][-1] * shapes[1][-1]


def refusal(asked: Asked, error: BaseException) -> str:
    """Why nothing comes of a subject that is named, and what is wanted."""
    said = str(error).splitlines()
    why = f"{type(error).__name__}{': ' + said[0] if said else ''}"
    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes) or "no shapes"
    return (
        f"{asked.engine}:{asked.name} cannot be called with {shapes}: {why}; give the shape of "
        "each operand, such as MxK:KxN, and what else it needs as name=value"
    )


def _file(asked: Asked) -> Opened:
    asked.nothing_left()
    path = Path(asked.name).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    call = getattr(module, RUN, None)
    if not callable(call):
        raise ValueError(f"{asked.name} defines no function {RUN}() to trace")
    arithmetic = str(getattr(module, EXPECTED, ""))
    return Opened(call, asked.name, arithmetic, getattr(module, MULTIPLY_ADDS, None))
