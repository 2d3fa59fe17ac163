"""What the variants of a file compute: their data, what has to come out, and their arguments."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.registry.locks import cached_property
from lowbit.spec import Array, Case, Expected, Operation
from lowbit_lab.backends.backend import GridLike, Variant
from lowbit_lab.run.bind import Packed, Parameter, TensorArgument, bind
from lowbit_lab.run.tensor import strides_of

_UNWRITTEN = 0xA5
"""What the bytes of a result are before a run, so that nothing passes by luck."""


@dataclass(frozen=True)
class Checked:
    """Whether a result was right. ok: None where that is not known. against: what the result was
    compared with, None if with nothing. how: what ran the kernel, None if nothing did."""

    ok: bool | None
    against: str | None
    how: str | None
    message: str

    def __str__(self) -> str:
        verdict = {True: "right", False: "WRONG", None: "not judged"}[self.ok]
        against = f" against {self.against}" if self.against else ""
        how = f", by {self.how}" if self.how else ""
        nothing = "" if self.against else " (nothing was compared)"
        return f"{verdict}{against}{how}: {self.message}{nothing}"


@dataclass(frozen=True)
class Baseline:
    """The variant that others are compared with where there is no specification, and its result."""

    name: str
    result: Array

    def __str__(self) -> str:
        return f"the first result, of {self.name}"


@dataclass(frozen=True)
class Problem:
    """One set of sizes. operation: the specification, and fill the kind of its data; without one,
    `make` gives the arrays by name, of which `output` is the result."""

    sizes: Mapping[str, int]
    operation: Operation | None = None
    make: Callable[[Mapping[str, int]], Mapping[str, Array]] | None = None
    output: str | None = None
    fill: str = "normal"

    @cached_property
    def result(self) -> str:
        """The name of the result."""
        if self.output is not None:
            return self.output
        assert self.operation is not None
        return self.operation.result.name

    @cached_property
    def _case(self) -> Case:
        assert self.operation is not None
        return Case(self.operation, dict(self.sizes), self.fill)

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """All arrays as they are before a run, but for a result that is nobody's input."""
        if self.operation is not None:
            return dict(self._case.inputs(0))
        assert self.make is not None
        return {name: np.ascontiguousarray(one) for name, one in self.make(self.sizes).items()}

    @cached_property
    def expected(self) -> Expected | None:
        """What has to come out; None without a specification."""
        return None if self.operation is None else self._case.expect(self.inputs)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of all arrays."""
        found = {str(one.dtype) for one in self.inputs.values()}
        return frozenset(found if self.operation is None else found | {self.operation.result.dtype})

    @property
    def multiplied(self) -> str | None:
        """The dtype whose peak limits these products, "int8" or "float32"; None of others."""
        if self.operation is None or not self.operation.factors:
            return None
        formats = [self.operation.factor_format(name) for name in self.operation.factors]
        if all(one.name == "float32" for one in formats):
            return "float32"
        return None if any(one.is_float or one.bits > 8 for one in formats) else "int8"

    @property
    def operations(self) -> int | None:
        """Additions and multiplications; None if nobody said."""
        return None if self.operation is None else self._case.operations

    @property
    def least_bytes(self) -> int:
        """Bytes that have to be moved: each array once."""
        if self.operation is not None:
            return self._case.bytes_moved
        return sum(one.nbytes for one in self.inputs.values())

    def arrays(self, variant: Variant) -> dict[str, Array]:
        """Fresh arrays, those that are passed: the result holds nothing of use, and what the
        variant arranges lies as it says, under the parameter's name."""
        made = {name: np.array(one, order="C") for name, one in self.inputs.items()}
        if self.operation is not None and self.result not in made:
            type_ = self.operation.result
            made[self.result] = np.zeros(type_.shape(self.sizes), type_.format.storage)
        if self.operation is not None or self.output not in self.inputs:
            made[self.result].view(np.uint8)[...] = _UNWRITTEN
        packed = {n: one for n, one in variant.constants.items() if isinstance(one, Packed)}
        if unknown := [one.name for one in packed.values() if one.name not in made]:
            raise ValueError(f"there is no {unknown[0]!r} to arrange; there are {', '.join(made)}")
        return made | {n: np.ascontiguousarray(p.pack(made[p.name])) for n, p in packed.items()}

    def error(self, result: Array) -> float | None:
        """The largest distance from the specification's result, as a share of the largest of its
        elements; None without a specification, and where that is no number. ValueError for a
        result of another shape."""
        if self.expected is None:
            return None
        wanted = self.expected.reference
        if result.shape != wanted.shape:
            raise ValueError(f"the result has the shape {result.shape}; expected {wanted.shape}")
        with np.errstate(invalid="ignore"):
            off = np.where(result == wanted, 0, np.abs(result.astype(np.float64) - wanted))
            share = float(off.max(initial=0) / (np.abs(wanted).max(initial=0) or 1.0))
        return share if np.isfinite(share) else None

    def arguments(
        self, names: Sequence[str], arrays: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The argument of each parameter: an array, or a number. ValueError for a parameter that
        stands for nothing."""
        if self.operation is not None:
            given = {name: one for name, one in constants.items() if name in names}
            parameters = [Parameter(name) for name in names]
            output = self.output if self.output in self.inputs else None
            binding = bind(parameters, self.operation, given, output)
            strides = {name: strides_of(one.shape, "contiguous") for name, one in arrays.items()}
            made = binding.arguments(self.sizes, strides)
            return {
                n: arrays[v.name] if isinstance(v, TensorArgument) else v for n, v in made.items()
            }
        plain = {name: one for name, one in constants.items() if not isinstance(one, Packed)}
        known = {**arrays, **self.sizes, **plain}
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(
                f"the parameter {missing[0]!r} stands for nothing; inputs, sizes and constants are "
                f"{', '.join(known)}"
            )
        return {n: known[n](self.sizes) if callable(known[n]) else known[n] for n in names}

    def judge(self, result: Array, first: Baseline | None, how: str) -> Checked:
        """Compare a result with the specification, or with the first variant's."""
        expected = self.expected
        if expected is not None:
            verdict = expected.check(result)
            assert self.operation is not None
            return Checked(
                verdict.ok, f"the specification {self.operation.name}", how, verdict.message
            )
        if first is None:
            return Checked(None, None, how, "the first: others are compared with it")
        other, against = first.result, str(first)
        if result.dtype != other.dtype or result.shape != other.shape:
            return Checked(False, against, how, f"{result.dtype}{list(result.shape)}")
        off = np.abs(result.astype(np.float64) - other.astype(np.float64))
        same = np.array_equal(result, other, equal_nan=result.dtype.kind == "f")
        largest = float(np.nanmax(off)) if off.size else 0.0
        share = largest / (float(np.nanmax(np.abs(other.astype(np.float64)))) or 1.0)
        text = (
            "the same bits"
            if same
            else f"differs by {largest:.3g} at most, {share:.1e} of the largest"
        )
        whole = result.dtype.kind != "f"
        ok = same if whole or same or not np.isfinite(largest) else None
        if ok is None:
            text += "; how far floats may differ, only `spec` says"
        return Checked(ok, against, how, text)


# A variant of a kernel, as a file for `lowbit compare` states it.

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


def variant(
    kernel: Any,
    *,
    name: str = "",
    grid: GridLike | None = None,
    block: tuple[int, ...] | None = None,
    shared: int = 0,
    flat: bool = False,
    arrange: Mapping[str, Callable[[Array], Array]] | None = None,
    **constants: Any,
) -> Variant:
    """A kernel of any kind that `lowbit compare` takes, with a name, a grid, a block and constants
    of its own where they differ from the file's; the rest as in `Variant`.

    arrange: by the name of an input, what lays its elements out as the kernel takes them, before
    the kernel is called; a parameter that is called otherwise than the input is given a
    `lowbit_lab.Packed` instead.
    """
    packed = {name: Packed(name, pack) for name, pack in (arrange or {}).items()}
    return Variant(kernel, name, grid, block, {**packed, **constants}, shared, flat)


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


def idea_of(function: Callable[..., Any] | None) -> str:
    """The first line of its docstring, without its full stop."""
    text = inspect.getdoc(function) if function is not None else None
    return (text or "").partition("\n")[0].rstrip(".")


def bare_lines(lines: Sequence[str]) -> list[str]:
    """The lines of a kernel, in Python or CUDA C, with "kernel" where its name is defined, and
    nowhere else; without its docstring."""
    text, document = textwrap.dedent("\n".join(lines)), range(0)
    try:
        nodes = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)]
    except SyntaxError:
        spans = [found.span(1) for found in _KERNEL.finditer(_plain(text))]
    else:
        rows = text.splitlines(keepends=True)
        starts = [sum(map(len, rows[: one.lineno - 1])) + one.col_offset for one in nodes[:1]]
        spans = [found.span(1) for at in starts if (found := _DEFINED.match(text, at))]
        if nodes and ast.get_docstring(nodes[0]) is not None:
            first = nodes[0].body[0]
            document = range(first.lineno - 1, first.end_lineno or first.lineno)
    for start, end in reversed(spans):
        text = f"{text[:start]}kernel{text[end:]}"
    return [row for at, row in enumerate(text.splitlines()) if at not in document]
