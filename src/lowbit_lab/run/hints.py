"""Hints to Triton's compiler, held against the values that they speak of.

The compiler believes `multiple_of`, `max_contiguous` and `max_constancy`, and loads neighbours
where a hint says that lanes are neighbours. What they claim stands in its documentation of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit_lab.run.addresses import address_of, numbers_of
from lowbit_lab.run.memory import Memory

Claim = Callable[[NDArray[Any], int, int], NDArray[np.bool_]]
"""Of values [lines, lanes], a hint's number, and how far neighbours are apart: which lanes belie
it."""


def replacements(tl: Any, memory: Memory) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace: of which module, by which name. tl: triton.language, made to be
    interpreted; memory: is told of hints that are false."""
    for name, claim in _CLAIMS.items():
        for module in (tl, tl.core):
            if hasattr(module, name):
                yield module, name, _checked(getattr(module, name), name, claim, tl, memory)


def _checked(
    original: Callable[..., Any], name: str, claim: Claim, tl: Any, memory: Memory
) -> Callable[..., Any]:
    def hint(input: Any, values: Any, *rest: Any, **named: Any) -> Any:
        result = original(input, values, *rest, **named)
        # What a mask leaves undefined is poison in such a run, which no hint is meant for.
        if isinstance(input, tl.tensor) and not memory.poisoned:
            _hold(name, claim, input, _numbers(values), memory)
        return result

    return hint


def _numbers(values: Any) -> list[int]:
    several = values if isinstance(values, (list, tuple)) else [values]
    return [int(getattr(value, "value", value)) for value in several]


def _hold(name: str, claim: Claim, block: Any, numbers: Sequence[int], memory: Memory) -> None:
    """Tell the memory of the first lane that belies a hint along one of its axes."""
    values, step = _values(block, memory)
    for axis, number in enumerate(numbers):
        lines = np.moveaxis(values, axis, -1)  # [..., lanes along the axis]
        flat = lines.reshape(-1, lines.shape[-1])
        false = claim(flat, number, step) if number > 1 else np.zeros(0, bool)
        if false.any():
            line, lane = (int(place) for place in np.argwhere(false)[0])
            index = [int(place) for place in np.unravel_index(line, lines.shape[:-1] or (1,))]
            index = index[: lines.ndim - 1]
            index.insert(axis, lane)
            memory.false_hint(f"tl.{name}(..., {number})", _words(name, flat[line], lane, index))
            return


def _words(name: str, lanes: NDArray[Any], lane: int, index: Sequence[int]) -> str:
    """What belies a hint: a lane with its value, and the one before it if the two do."""
    here = f"lane {list(index)} is {lanes[lane]}" if len(lanes) > 1 else f"it is {lanes[0]}"
    return here if name == "multiple_of" else f"{here}, after {lanes[lane - 1]}"


def _values(block: Any, memory: Memory) -> tuple[NDArray[Any], int]:
    """The values of a block, with at least one axis, and how far neighbours are apart: for
    pointers bytes from the start of the memory that a tensor lies in."""
    data = np.asarray(block.handle.data)
    data = data.reshape(tuple(map(int, block.shape)) or (1,))
    if not block.dtype.is_ptr():
        return data, 1
    tensors, numbers = list(memory.tensors.values()), numbers_of(data.astype(np.uint64))
    places = data.astype(np.int64)
    for number in np.unique(numbers):
        if number < len(tensors):
            start = tensors[int(number)].start
            places = np.where(numbers == number, places - address_of(int(number)) + start, places)
    return places, max(1, block.dtype.element_ty.primitive_bitwidth // 8)


def _not_multiples(lines: NDArray[Any], number: int, step: int) -> NDArray[np.bool_]:
    """The first lanes of groups of neighbours that are no multiples."""
    group = lines.shape[1]
    while group > 1 and _not_neighbours(lines, group, step).any():
        group //= 2
    first = np.arange(lines.shape[1]) % group == 0
    return first & (lines % number != 0)


def _not_neighbours(lines: NDArray[Any], number: int, step: int) -> NDArray[np.bool_]:
    """Lanes that do not follow the one before in groups of so many."""
    return _within(lines, number) & (_differences(lines) != step)


def _not_constant(lines: NDArray[Any], number: int, step: int) -> NDArray[np.bool_]:
    """Lanes that differ from the one before in groups of so many."""
    return _within(lines, number) & (_differences(lines) != 0)


def _within(lines: NDArray[Any], number: int) -> NDArray[np.bool_]:
    """The lanes that are not the first of their group."""
    return np.arange(lines.shape[1]) % number != 0


def _differences(lines: NDArray[Any]) -> NDArray[Any]:
    """Of each lane from the one before; of the first from itself."""
    if lines.dtype.kind == "f":
        return np.diff(lines, axis=1, prepend=lines[:, :1])
    whole = lines.astype(np.int64)
    return np.diff(whole, axis=1, prepend=whole[:, :1])


_CLAIMS: dict[str, Claim] = {
    "multiple_of": _not_multiples,
    "max_contiguous": _not_neighbours,
    "max_constancy": _not_constant,
}
