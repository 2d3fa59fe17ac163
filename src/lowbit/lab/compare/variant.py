"""A variant of a kernel, as a file for `lowbit compare` states it."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.lab.backends.backend import GridLike

_KERNEL = re.compile(r"__global__[^(;{]*?\b(\w+)\s*\(([^)]*)\)", re.DOTALL)

_DEFINED = re.compile(r"def\s+(\w+)")


@dataclass(frozen=True)
class CudaC:
    """A kernel in CUDA C: its text, its name, the names of its parameters, and the file and line
    where the text begins."""

    source: str
    name: str
    parameters: tuple[str, ...]
    file: str
    first_line: int


@dataclass(frozen=True)
class Variant:
    """A kernel with what its launch needs besides the file's own. grid: blocks, or a function of
    sizes and constants; block: threads of a block; shared: bytes of dynamic shared memory; flat:
    whether arrays are passed with one dimension (of Numba, which passes shapes)."""

    kernel: Any
    name: str = ""
    grid: GridLike | None = None
    block: tuple[int, ...] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    shared: int = 0
    flat: bool = False


def variant(
    kernel: Any,
    *,
    name: str = "",
    grid: GridLike | None = None,
    block: tuple[int, ...] | None = None,
    shared: int = 0,
    flat: bool = False,
    **constants: Any,
) -> Variant:
    """A kernel of any kind that `lowbit compare` takes, with a name, a grid, a block and constants
    of its own where they differ from the file's; the rest as in `Variant`."""
    return Variant(kernel, name, grid, block, constants, shared, flat)


def cuda_c(source: str, name: str | None = None) -> CudaC:
    """A kernel in CUDA C, compiled by NVRTC or nvcc: the only one of the text, or `name`.

    ValueError if the text has no such kernel.
    """
    kernels = {found[1]: found[2] for found in _KERNEL.finditer(_plain(source))}
    if name is None and len(kernels) == 1:
        name = next(iter(kernels))
    if name is None or name not in kernels:
        listed = ", ".join(kernels) or "none"
        raise ValueError(f"cuda_c needs one __global__ kernel, or its name; the text has {listed}")
    given = [one.strip() for one in kernels[name].split(",") if one.strip()]
    parameters = tuple(re.findall(r"\w+", one.partition("[")[0])[-1] for one in given)
    file = sys._getframe(1).f_code.co_filename
    return CudaC(source, name, parameters, file, _line_of(source, file))


def _plain(source: str) -> str:
    """The text with blanks for comments and launch bounds, which look like a function."""
    unneeded = r"//[^\n]*|/\*.*?\*/|__launch_bounds__\s*\([^)]*\)"
    return re.sub(unneeded, lambda one: " " * len(one[0]), source, flags=re.DOTALL)


def _line_of(source: str, file: str) -> int:
    """The line of the file on which the text begins; 1 if it is not found there."""
    try:
        whole = Path(file).read_text("utf-8")
    except OSError:
        return 1
    at = whole.find(source)
    return whole.count("\n", 0, at) + 1 if at >= 0 else 1


def without_name(lines: Sequence[str]) -> list[str]:
    """The lines of a kernel, in Python or CUDA C, with "kernel" where its name is defined, and
    nowhere else."""
    text = textwrap.dedent("\n".join(lines))
    try:
        nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)]
    except SyntaxError:
        spans = [found.span(1) for found in _KERNEL.finditer(_plain(text))]
    else:
        rows = text.splitlines(keepends=True)
        starts = [sum(map(len, rows[: one.lineno - 1])) + one.col_offset for one in nodes[:1]]
        spans = [found.span(1) for at in starts if (found := _DEFINED.match(text, at))]
    for start, end in reversed(spans):
        text = f"{text[:start]}kernel{text[end:]}"
    return text.splitlines()
