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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lowbit.lab.backends.backend import Request
from lowbit.lab.run.bind import Parameter
from lowbit.lab.run.outcome import Trial, judge
from lowbit.spec import Block, Case, Operation, Sizes
from lowbit.spec.exercises import next_power_of_2
from lowbit.spec.free_sizes import Extent, extents, named

_FEW, _MOST = 16, 64  # elements of a block, where the names say no more
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
    launched = {f"N{axis}" for axis in words.axes}
    used = [name for name in sizes if name in words.names or name in launched]
    unused = dict.fromkeys((name for name in sizes if name not in used), 1)
    # Solutions take the larger of two by a comparison, which drops a NaN where torch keeps it.
    request = replace(request, given={**unused, **request.given}, untried=("nan",))
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
    grid that it asks for, and the names that loops count by."""

    names: frozenset[str]
    axes: frozenset[int]
    steps: frozenset[str]

    @classmethod
    def of(cls, text: Callable[..., None]) -> _Text:
        names, axes, steps = set[str](), set[int](), set[str]()
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
                        steps |= {
                            n.id for a in given for n in ast.walk(a) if isinstance(n, ast.Name)
                        }
        return cls(frozenset(names), frozenset(axes), frozenset(steps))


def _is_size(parameter: Parameter, request: Request) -> bool:
    """Whether a parameter without a value is a number that no block is called like."""
    name = parameter.name
    if name in request.given or parameter.default is not None or name.endswith("_ptr"):
        return False
    tensors = {one.name for one in request.operation.stated}
    return name not in tensors and not (parameter.constant and name.startswith("B"))


def _result_named(request: Request, parameters: Sequence[Parameter]) -> Operation:
    """The operation, its result called as the only pointer that stands for nothing else."""
    operation = request.operation
    known = {one.name for one in operation.stated} | {"z", "out", "output"}
    pointers = [p.name for p in parameters if p.name.endswith("_ptr")]
    tensors = [name.removesuffix("_ptr") for name in pointers if name not in request.given]
    unknown = [name for name in tensors if name not in known]
    inputs = {one.name for one in operation.inputs}
    if request.output or len(unknown) != 1 or not set(tensors) <= {*inputs, *unknown}:
        return operation
    *given, result = operation.stated
    return replace(operation, stated=(*given, replace(result, name=unknown[0])))


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
    operation = named(request.operation, free)
    return replace(request, spec=operation, given={**fixed, **request.given})


def _wrong(request: Request) -> tuple[int, int]:
    """How much is wrong with one run, at sizes that all differ: findings of other kinds than wrong
    values, and wrong elements."""
    subject = request.bound()
    operation = subject.operation
    sizes = {name: size + n for n, (name, size) in enumerate(operation.exercise.items())}
    run = subject.run(Trial.of(Case(operation, sizes), request.seed))
    if run.crash:
        return 1 << 20, 0
    found = [one for one in (*run.memory.findings, *judge(run)) if one.severity == "error"]
    return sum(one.kind != "wrong-values" for one in found), int(run.wrong.sum())


def _launched(request: Request, words: _Text, parameters: Sequence[Parameter]) -> Request:
    """The request with block sizes and a grid, if it has none."""
    if request.grid is not None:
        return request
    operation = request.operation
    free = [p.name for p in parameters if p.constant and p.default is None]
    blocks: dict[str, Block] = {}
    for name in free:
        size = _along(name)
        if name not in request.given and size in operation.names:
            block = _block(name, size, words, operation.exercise.get(size))
            blocks |= {} if block is None else {name: block}
    operation = replace(operation, blocks={**blocks, **operation.blocks})
    axes = [_axis(axis, words, operation, request.given, parameters) for axis in range(3)]
    return replace(request, spec=operation, grid=partial(_grid, axes))


def _along(block: str) -> str:
    """The size that a block is along, by its name: B0 along N0, B_MID and BLOCK_MID along MID."""
    found = re.fullmatch(r"(?:B|BLOCK_?)(\d)|(?:B|BLOCK)_(\w+)", block)
    return "" if found is None else f"N{found[1]}" if found[1] else found[2]


def _block(name: str, size: str, words: _Text, exercise: int | None) -> Block | None:
    """The elements of a block along a size: all where neither grid nor loop goes on to others."""
    axis = name[-1]
    if axis.isdigit() and int(axis) not in words.axes and name not in words.steps:
        return partial(_whole, size)
    if exercise is not None and exercise < _FEW:
        return 1
    if exercise is not None and not axis.isdigit():
        return min(_MOST, next_power_of_2(exercise))
    return None


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
    blocks = [p.name for p in parameters if p.name in words.names and _along(p.name) == size]
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
