"""The cases that operations are tried on: sizes one off those that kernels like, every choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from lowbit.spec.case import Case, Layout, fills_of
from lowbit.spec.data import FURTHER, OF_INTEGERS, SPECIAL
from lowbit.spec.operation import Operation, Sizes

T = TypeVar("T")

EDGE_SIZES = (1, 2, 3, 15, 17, 63, 65, 127, 129, 1000)
"""Sizes one off the widths that kernels like, and one that is large but not a power of two."""

_PRIMES = ((7, 37, 13, 3, 2), (41, 5, 29, 7, 3), (3, 67, 2, 11, 5))
# The most steps of all loops together, for two sizes; the interpreter walks through them, and the
# more sizes there are, the fewer of them are lanes of a block.
_MOST_WORK = 100_000
# Of a tensor of a case for what is compiled.
_MOST_ELEMENTS = 1 << 20
# Combinations that all fills are tried with, where there are not more dtypes.
_VARIANTS = 6
# More than the blocks of nearly all kernels; prime.
_LONG = 1031
_STRIDED: tuple[Layout, ...] = ("padded", "transposed", "rows", "expanded")
# Of all sizes together and of a tensor, where a kernel has blocks, and whose work is in blocks.
_MOST_POINTS, _MOST_IN_BLOCKS = 1 << 24, 1 << 20
_WIDE, _FEW = 256, 6
# The least block with which a tensor of more elements than 16 bits count is no work.
_LEAST_BLOCK, _BEYOND_16_BITS = 32, (1 << 16) + 1


def edge_cases(spec: Operation, *, rounds: int = 1, seed: int = 0) -> list[Case]:
    """Cases for what is compiled, in which every dimension takes every size of EDGE_SIZES once per
    round.

    The sizes are permuted for each dimension on its own; the dtypes take turns, and so do the
    combinations of absent inputs and static parameters. 10 cases a round, always the same for the
    same seed.
    """
    rng = np.random.default_rng(seed)
    signatures = _in_turn(spec.signatures, rng)
    switches = _in_turn(_switches(spec), rng)
    cases: list[Case] = []
    for _ in range(rounds):
        columns = [rng.permutation(EDGE_SIZES).tolist() for _ in spec.names]
        for sizes in zip(*columns, strict=True):
            without, static = next(switches)
            variant = spec.variant(dtypes=next(signatures), without=without, static=static)
            cases.append(Case(variant, _small(variant, dict(zip(spec.names, sizes, strict=True)))))
    return cases


def fill_cases(spec: Operation, *, seed: int = 0) -> list[Case]:
    """Cases for what is compiled: the exercise's sizes with all fills of all dtypes; combinations
    of absent inputs and static parameters take turns."""
    switches = _in_turn(_switches(spec), np.random.default_rng(seed))
    cases: list[Case] = []
    few = min(_VARIANTS, len(spec.subsets) * len(spec.switches))
    for number in range(max(few, len(spec.signatures))):
        dtypes, (without, static) = spec.signatures[number % len(spec.signatures)], next(switches)
        variant = spec.variant(dtypes=dtypes, without=without, static=static)
        cases += [Case(variant, spec.exercise, fill) for fill in fills_of(variant)]
    return cases


def _switches(spec: Operation) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    return list(itertools.product(spec.subsets, spec.switches))


def _small(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """The sizes fitted, the largest halved until no tensor has too many elements."""
    found = operation.fitted(sizes)
    for tensor in (*operation.inputs, operation.result):
        while math.prod(tensor.shape(found)) > _MOST_ELEMENTS:
            largest = max(tensor.names, key=lambda name: found[name])
            halved = operation.fitted({**found, largest: found[largest] // 2})
            if halved == found:  # it must be as large
                break
            found = halved
    return found


def _in_turn(choices: Sequence[T], rng: np.random.Generator) -> Iterator[T]:
    """The choices over and over, in an order of chance."""
    return itertools.cycle([choices[i] for i in rng.permutation(len(choices))])


def cases_of(
    operation: Operation,
    blocks: Sequence[int],
    strided: bool,
    long: bool,
    single: Collection[str] = (),
) -> list[Case]:
    """The cases of an operation for an interpreted kernel with these block sizes.

    The exercise's sizes with every fill; size one with the special ones, too; sizes of primes,
    blocks, one less and one more, and each size one while the others are not, with two fills each
    in turn; several blocks along one size, with data that rises and with ties; if `long`, each size
    long that has blocks, several along all of these, and a tensor of more elements than 16 bits
    count. single: the sizes for each index of which there is a program: along them there are no
    blocks, and what a few programs do, more do.
    """
    thin = partial(_thin, operation, single)
    first, *rest = size_sets(operation, blocks, single)
    fills = fills_of(operation)
    common = [fill for fill in fills if fill not in SPECIAL]

    def special(sizes: Sizes) -> list[str]:
        # A sum of several of the largest overflows on the way, in an order that is free.
        known = operation.budget is not None or operation.sum_length(sizes) == 1
        return [fill for fill in fills if fill in SPECIAL and (known or fill != "largest")]

    wide = tile_sets(operation, blocks, single) if long else []
    floats = any(tensor.is_float for tensor in operation.inputs)
    further = () if not floats else FURTHER if operation.result.is_float else OF_INTEGERS
    further = tuple(fill for fill in further if fill not in operation.excludes)
    whole = [fill for fill in (*common, *further, *special(first)) if fill != "normal"]
    cases = [Case(operation, first), *(Case(operation, thin(first), fill) for fill in whole)]
    for number, sizes in enumerate(rest):
        other = common[1 + number % (len(common) - 1)] if common[1:] else "normal"
        cases += [Case(operation, sizes), Case(operation, sizes, other)]
    cases += [Case(operation, sizes, fill) for sizes in rest[:1] for fill in special(sizes)]
    spread = [fill for fill in ("rising", "ties") if fill in further]
    rows = [_legal(operation, sizes) for sizes in _in_rows(operation, blocks)]
    cases += [Case(operation, sizes, fill) for sizes in rows for fill in spread]
    if long:
        ones = dict.fromkeys(operation.names, 1)
        cases += [Case(operation, thin({**ones, name: _LONG})) for name in ones]
        cases += [Case(operation, sizes) for sizes in (*wide, *_many(operation, blocks))]
    if strided:
        few = (first, *rest[1:3], *wide[:1])
        cases += [Case(operation, s, "normal", lay) for s in few for lay in _STRIDED]
    return cases


def _thin(operation: Operation, single: Collection[str], sizes: Sizes) -> dict[str, int]:
    """The sizes, few along those that have a program for each index; all where there is one."""
    few = {name: min(sizes[name], _FEW) for name in single if len(operation.names) > 1}
    return operation.fitted({**sizes, **few})


def _in_rows(operation: Operation, blocks: Sequence[int]) -> list[dict[str, int]]:
    """Sizes of several blocks along one dimension and few of the others, not fitted yet."""
    long = 2 * max((b for b in blocks if b > 1), default=_LEAST_BLOCK) + 3
    few = dict.fromkeys(operation.names, 2)
    return [{**few, name: long} for name in operation.names]


def tile_sets(
    operation: Operation, blocks: Sequence[int], single: Collection[str] = ()
) -> list[dict[str, int]]:
    """Sizes of several blocks along all dimensions, of which the first is first in `blocks` as
    well, perhaps; odd numbers of them, and such that no block is full at the end. single: as of
    `cases_of`."""
    known = [b for b in blocks if b > 1] or [_LEAST_BLOCK]
    names, found = operation.names, list[dict[str, int]]()
    for counts, more in (((5, 3, 2), 1), ((2, 4, 3), 0), ((3, 2, 4), -1)):
        pairs = zip(names, itertools.cycle(counts), itertools.cycle(known), strict=False)
        found.append(operation.fitted({name: n * b + more for name, n, b in pairs}))
    kept = [_in_blocks(operation, one) for one in found]
    return [_thin(operation, single, one) for one in kept if one]


def _in_blocks(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """The sizes, small ones in place of the first as long as there is too much; nothing if there
    still is."""
    for count in range(len(operation.names)):
        small = dict.fromkeys(operation.names[:count], 5)
        kept = operation.fitted({**sizes, **small})
        if (
            math.prod(kept.values()) <= _MOST_POINTS
            and _largest(operation, kept) <= _MOST_IN_BLOCKS
        ):
            return kept
    return {}


def _largest(operation: Operation, sizes: Sizes) -> int:
    """The elements of the largest tensor."""
    return max(math.prod(one.shape(sizes)) for one in (*operation.inputs, operation.result))


def _many(operation: Operation, blocks: Sequence[int]) -> list[dict[str, int]]:
    """Sizes with a tensor of more elements than 16 bits count, where blocks are large enough."""
    axes = max(len(one.names) for one in (*operation.inputs, operation.result))
    if max(blocks, default=_LEAST_BLOCK) < _LEAST_BLOCK or not axes:
        return []
    for more in (1, 1.5, 2):
        size = math.ceil(more * math.pow(_BEYOND_16_BITS, 1 / axes))
        sizes = operation.fitted(dict.fromkeys(operation.names, size))
        if _largest(operation, sizes) >= _BEYOND_16_BITS:
            return [sizes] if math.prod(sizes.values()) <= 2 * _MOST_POINTS else []
    return []


def size_sets(
    operation: Operation, blocks: Sequence[int], single: Collection[str] = ()
) -> list[dict[str, int]]:
    """Sizes worth trying, the exercise's first, without repetition; single: as of `cases_of`."""
    names = operation.names
    exercise = operation.exercise or operation.fitted(dict.fromkeys(names, 40))
    wanted = [dict.fromkeys(names, 1)]
    wanted += [dict(zip(names, itertools.cycle(primes), strict=False)) for primes in _PRIMES]
    fitting = sorted({b for b in blocks if b > 1}) or [_LEAST_BLOCK]
    for block in fitting:
        around = (block, block - 1, block + 1, 2 * block, 3 * block)
        if block <= _WIDE or len(names) < 2:
            wanted += [_thin(operation, single, dict.fromkeys(names, size)) for size in around]
        else:  # so that the others leave it as long
            wanted += [{**dict.fromkeys(names, 3), names[-1]: size} for size in around]
    rows = _in_rows(operation, blocks) if len(names) > 1 else []
    for name, row in zip(names, rows, strict=False):
        wanted += [{**dict.fromkeys(names, 19), name: 1}, row]
    wanted += [{**dict.fromkeys(names, 19), n: 0} for n in names if operation.at_least.get(n) == 0]
    sets = [operation.complete(exercise), *(_legal(operation, sizes) for sizes in wanted)]
    return list({tuple(sizes.items()): sizes for sizes in sets}.values())


def _legal(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """The sizes fitted; too much work is cut at the largest size."""
    rounded = dict(sizes)
    most = _MOST_WORK // 5 ** max(0, len(rounded) - 2)
    while math.prod(rounded.values()) > most:
        largest = max(rounded, key=lambda name: rounded[name])
        rounded[largest] = max(1, rounded[largest] // 2 + rounded[largest] % 2)
    # Small sizes stay small: 19 of something in steps of 64 is as good as one of it.
    return operation.fitted(rounded)
