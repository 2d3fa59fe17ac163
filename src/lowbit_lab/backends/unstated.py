"""What a Triton kernel and its specification leave unsaid, as exercises do: what the result is
called, which annotated numbers its sizes are, block sizes, and the grid.

    def add_spec(x: Float32[Tensor, "200"]) -> Float32[Tensor, "200"]:
        return x + 10

    @triton.jit
    def add_kernel(x_ptr, z_ptr, N0, B0: tl.constexpr): ...

The names say it: a program works on a block of B0 elements along a size N0, B1 along N1; the one
pointer that is no input is the result.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowbit.spec import Block, Case, Operation, Sizes
from lowbit.spec.free_sizes import Extent, extents, named
from lowbit.spec.operation import next_power_of_2
from lowbit_lab.backends.backend import Request, Way
from lowbit_lab.backends.language import bound
from lowbit_lab.run.bind import Parameter
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.outcome import Trial, judge

_FEW, _USUAL, _MOST = 16, 32, 64  # elements of a block, where the names say no more
_MOST_READINGS = 120


def completed(
    request: Request, text: Callable[..., None], parameters: Sequence[Parameter]
) -> Request:
    """The request of a kernel with all that can be told from its text and its parameters.

    ValueError if nobody says how many programs there are and the names do not either.
    """
    words = _Text.of(text)
    operation = _result_named(request, parameters)
    request = replace(request, spec=operation)
    sizes = [p.name for p in parameters if _is_size(p, request)]
    if operation.names or not sizes:
        return _launched(request, words, parameters)
    used = [name for name in sizes if words.needs(name)]
    unused = dict.fromkeys((name for name in sizes if name not in used), 1)
    # Solutions take the larger of two by a comparison, which drops a NaN where torch keeps it.
    given = {**unused, **request.variant.constants}
    request = replace(request.launched(constants=given), untried=("nan",))
    readings = (_read(request, one) for one in _readings(extents(operation), used))
    tried = itertools.islice(readings, _MOST_READINGS)
    best: tuple[tuple[int, int], Request] | None = None
    for reading in tried:
        made = _launched(reading, words, parameters)
        wrong = _wrong(made)
        if best is None or wrong < best[0]:
            best = wrong, made
        if wrong == (0, 0):
            break
    return _launched(request, words, parameters) if best is None else best[1]


@dataclass(frozen=True)
class _Text:
    """What the text of a kernel, and of functions that it calls, mentions: names, the axes of the
    grid that it asks for, and of each loop the names that it counts by."""

    names: frozenset[str]
    axes: frozenset[int]
    loops: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, text: Callable[..., None]) -> _Text:
        names, axes, loops = set[str](), set[int](), list[frozenset[str]]()
        left, seen = [text], set[Any]()
        while left:
            function = left.pop()
            if function in seen:
                continue
            seen.add(function)
            try:
                source = inspect.getsource(function)
            except (OSError, TypeError):
                continue
            for node in ast.walk(ast.parse(textwrap.dedent(source))):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                    called = getattr(function.__globals__.get(node.id), "fn", None)
                    left += [called] if inspect.isfunction(called) else []
                elif isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    given = [*node.args, *(keyword.value for keyword in node.keywords)]
                    if name == "program_id":
                        numbers = (a.value for a in given if isinstance(a, ast.Constant))
                        axes |= {axis for axis in numbers if isinstance(axis, int)}
                    elif name in ("range", "static_range"):
                        inside = (node for one in given for node in ast.walk(one))
                        loops.append(frozenset(n.id for n in inside if isinstance(n, ast.Name)))
        return cls(frozenset(names), frozenset(axes), tuple(loops))

    def needs(self, size: str) -> bool:
        """Whether a size, or what its name says of the grid and of a whole block, is asked for."""
        axis = size.removeprefix("N")
        asked = axis in {str(one) for one in self.axes}
        whole = f"B{axis}" in self.names and not any(f"B{axis}" in loop for loop in self.loops)
        return size in self.names or (size != axis and (asked or whole))

    def along(self, block: str, sizes: Collection[str]) -> str:
        """The size that a block is along: by its name, as B0 along N0 or B_MID and BLOCK_MID along
        MID, else by a loop that counts by both; "" for none."""
        found = re.fullmatch(r"(?:B|BLOCK_?)(\d)|(?:B|BLOCK)_(\w+)", block)
        named = "" if found is None else f"N{found[1]}" if found[1] else found[2]
        if named in sizes:
            return named
        together = [size for loop in self.loops if block in loop for size in sizes if size in loop]
        return together[0] if together else ""

    def walks(self, block: str) -> bool:
        """Whether a loop goes on by this block, or the grid has an axis for it."""
        axis = block[-1]
        return any(block in loop for loop in self.loops) or (
            not axis.isdigit() or int(axis) in self.axes
        )


def _is_size(parameter: Parameter, request: Request) -> bool:
    """Whether a parameter without a value is a number that no block is called like."""
    name = parameter.name
    if name in request.variant.constants or parameter.default is not None or name.endswith("_ptr"):
        return False
    tensors = {one.name for one in request.operation.stated}
    return name not in tensors and not (parameter.constant and name.startswith("B"))


def _result_named(request: Request, parameters: Sequence[Parameter]) -> Operation:
    """The operation, its result called as the only pointer that stands for nothing else."""
    operation = request.operation
    known = {one.name for one in operation.stated} | {"z", "out", "output"}
    pointers = [p.name for p in parameters if p.name.endswith("_ptr")]
    given = request.variant.constants
    tensors = [name.removesuffix("_ptr") for name in pointers if name not in given]
    unknown = [name for name in tensors if name not in known]
    inputs = {one.name for one in operation.inputs}
    if request.output or len(unknown) != 1 or not set(tensors) <= {*inputs, *unknown}:
        return operation
    *others, result = operation.stated
    return replace(operation, stated=(*others, replace(result, name=unknown[0])))


def _readings(known: Sequence[Extent], sizes: Sequence[str]) -> Iterator[dict[str, Extent]]:
    """Which extent each size may be, in the order in which the annotations mention them first."""
    seen = set[tuple[Any, ...]]()
    for chosen in itertools.permutations(known, len(sizes)):
        key = tuple((one.number, one.axes if one.free else None) for one in chosen)
        if key not in seen:
            seen.add(key)
            yield dict(zip(sizes, chosen, strict=True))


def _read(request: Request, sizes: Mapping[str, Extent]) -> Request:
    free = {name: one for name, one in sizes.items() if one.free}
    fixed = {name: one.number for name, one in sizes.items() if not one.free}
    given = {**fixed, **request.variant.constants}
    return replace(request.launched(constants=given), spec=named(request.operation, free))


def _wrong(request: Request) -> tuple[int, int]:
    """How much is wrong at sizes that all differ: what the programs at the corners of the grid do
    besides wrong values; if that is nothing, all kinds of findings, and wrong elements."""
    subject = bound(request)
    operation = subject.operation
    exercise = operation.exercise.items()
    sizes = operation.fitted(
        {name: n + i * operation.step(name) for i, (name, n) in enumerate(exercise)}
    )
    trial = Trial.of(Case(operation, sizes), request.seed)
    corners = subject.run(trial, Way(corners=True))
    found = _errors(corners.memory.findings) + (corners.crash is not None)
    if found:
        return found, corners.wrong.size
    run = subject.run(trial)
    return _errors((*run.memory.findings, *judge(run))), int(run.wrong.sum())


def _errors(findings: Sequence[Finding]) -> int:
    return sum(one.severity == "error" and one.kind != "wrong-values" for one in findings)


def _launched(request: Request, words: _Text, parameters: Sequence[Parameter]) -> Request:
    """The request with block sizes and a grid, if it has none."""
    if request.variant.grid is not None:
        return request
    operation, given = request.operation, request.variant.constants
    free = [p.name for p in parameters if p.constant and p.default is None]
    fixed = {n: v for n, v in given.items() if isinstance(v, int) and words.needs(n)}
    numbers = {**fixed, **operation.exercise}
    blocks: dict[str, Block] = {}
    multiples, most = dict[str, int](), dict[str, int]()
    for name in free:
        size = words.along(name, {*operation.names, *numbers})
        if not size or name in given or name in operation.blocks:
            continue
        number = numbers.get(size)
        if not words.walks(name):
            whole = partial(_whole, size) if size in operation.names else None
            blocks[name] = whole or next_power_of_2(numbers[size])
        elif number is not None:
            blocks[name] = _block(name, number)
        if request.untried and size in operation.names and number is not None:
            # A kernel may rely on a number that its block divides.
            block = blocks[name]
            step = next_power_of_2(number) if callable(block) else block
            if number % step == 0:
                multiples[size] = step
                most |= {size: number} if callable(block) else {}
    operation = replace(
        operation,
        blocks={**blocks, **operation.blocks},
        multiple_of={**operation.multiple_of, **multiples},
        at_most={**operation.at_most, **most},
    )
    axes = [_axis(axis, words, operation, given, parameters) for axis in range(3)]
    return replace(request.launched(grid=partial(_grid, axes)), spec=operation)


def _block(name: str, number: int) -> int:
    """The elements of a block along a size of which the annotation has so many: 32, fewer where
    that would be all; 1 along a few; along a size with a name, all up to 64."""
    if number < _FEW:
        return 1
    if not name[-1].isdigit():
        return min(_MOST, next_power_of_2(number))
    return _FEW if number <= _USUAL else _USUAL


def _whole(size: str, sizes: Sizes) -> int:
    return next_power_of_2(sizes[size])


def _axis(
    axis: int,
    words: _Text,
    operation: Operation,
    given: Mapping[str, Any],
    parameters: Sequence[Parameter],
) -> tuple[str, str | None] | None:
    """The size along an axis of the grid and its block, if it has one; None for an axis that is
    not asked for. Where tensors have one axis, and all of them the same, no name is needed."""
    if axis not in words.axes:
        return None
    size = f"N{axis}"
    named = (f"B{axis}", f"BLOCK{axis}", f"BLOCK_{axis}")
    blocks = [p.name for p in parameters if p.name in words.names and p.name in named]
    if {one.dims for one in operation.stated} == {operation.names[:1]} and words.axes == {0}:
        size = operation.names[0]
        blocks = [p.name for p in parameters if p.constant and p.name.startswith("B")]
    if size not in operation.names and size not in given:
        raise ValueError(
            f"nobody says how many programs there are along axis {axis} of the grid: a program "
            f"asks for tl.program_id({axis}), and there is no size {size}; give `grid`, a number "
            "or a function of the sizes and block sizes: def grid(meta): return (meta['N0'],)"
        )
    return size, blocks[0] if len(blocks) == 1 else None


def _grid(axes: Sequence[tuple[str, str | None] | None], meta: Mapping[str, Any]) -> list[int]:
    counts = list[int]()
    for one in axes:
        size, block = (1, None) if one is None else (meta[one[0]], one[1])
        counts.append(-(-size // (1 if block is None else meta[block])))
    return counts
