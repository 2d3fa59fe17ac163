"""What a kernel is tried on: sizes, data and layouts, all from the annotations."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.numerics import bfloat16
from lowbit.spec.typed import LARGEST, Array, Operation, Sizes, TensorType

Layout = Literal["contiguous", "padded", "transposed"]
SPECIAL: Mapping[str, tuple[float, ...]] = {
    "largest": (1.0, -1.0),
    "inf": (np.inf,),
    "neg_inf": (-np.inf,),
    "nan": (np.nan,),
}
"""The fills with a few special values among normal ones: the largest that the dtype holds, in
multiples of it, infinities of one sign, and NaN. Each fill is of one kind, so that a sum does not
always end as NaN."""
FILLS = ("normal", "zeros", "negative", "large", "low", "tiny", *SPECIAL)
"""Standard normal values; half of them zeros of both signs; all negative; 200 times as large, so
that exp overflows; all below -200, so that exp of each is zero; subnormal ones; special ones.
Integers: any bits; half zeros; all bits one; the two limits; all the lower limit; 0 and 1; any
bits."""

_PRIMES = ((7, 37, 13, 3, 2), (41, 5, 29, 7, 3), (3, 67, 2, 11, 5))
# The most steps of all loops together, for two sizes; the interpreter walks through them, and the
# more sizes there are, the fewer of them are lanes of a block.
_MOST_WORK = 100_000
_TINY = {"float16": 2.0**-20, "bfloat16": 2.0**-130, "float32": 2.0**-140, "float64": 2.0**-1040}
_LARGE = 200.0
# More than the blocks of nearly all kernels; prime.
_LONG = 1031
# One of so many elements is special, and at least two.
_SPECIAL_AMONG = 64


@dataclass(frozen=True)
class Case:
    """One run: sizes, kind of data, and how tensors lie where the kernel takes their strides."""

    sizes: Mapping[str, int]
    fill: str
    layout: Layout = "contiguous"

    def inputs(self, operation: Operation, seed: int) -> dict[str, Array]:
        """The input arrays, in storage dtypes (uint16 for bfloat16)."""
        key = repr((operation.name, sorted(self.sizes.items()), self.fill, seed))
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        return {t.name: draw(t, t.shape(self.sizes), self.fill, rng) for t in operation.inputs}


def cases_of(operation: Operation, blocks: Sequence[int], strided: bool, long: bool) -> list[Case]:
    """The cases of an operation for a kernel with these block sizes.

    The exercise's sizes with every fill; size one with the special ones, too; sizes of primes, one
    block, one less and one more, and each size one while the others are not, with two fills each in
    turn; if `long`, each size long.
    """
    first, *rest = size_sets(operation, blocks)
    # What an infinity is as an integer, no specification says.
    kept = operation.result.is_float or operation.result.dtype == "bool"
    floats = kept and any(t.is_float for t in operation.inputs)
    common = [fill for fill in FILLS if fill not in SPECIAL]

    def special(sizes: Sizes) -> list[str]:
        # A sum of several of the largest overflows on the way, in an order that is free.
        alone = operation.sum_length(sizes) == 1
        return [fill for fill in SPECIAL if floats and (alone or fill != "largest")]

    cases = [Case(first, fill) for fill in (*common, *special(first))]
    for number, sizes in enumerate(rest):
        cases += [Case(sizes, "normal"), Case(sizes, common[1 + number % (len(common) - 1)])]
    cases += [Case(sizes, fill) for sizes in rest[:1] for fill in special(sizes)]
    cases += [Case(sizes, "normal") for sizes in _long_sets(operation)] if long else []
    if strided:
        cases += [Case(s, "normal", lay) for s in (first, *rest[1:3]) for lay in _STRIDED]
    return cases


_STRIDED: tuple[Layout, ...] = ("padded", "transposed")


def size_sets(operation: Operation, blocks: Sequence[int]) -> list[dict[str, int]]:
    """Sizes worth trying, the exercise's first, without repetition."""
    names = operation.names
    exercise = dict(operation.exercise or dict.fromkeys(names, 40))
    wanted = [dict.fromkeys(names, 1)]
    wanted += [dict(zip(names, _cycled(primes, len(names)), strict=True)) for primes in _PRIMES]
    fitting = sorted({b for b in blocks if 2 <= b <= 256}) or [32]
    for block in fitting:
        wanted += [dict.fromkeys(names, size) for size in (block, block - 1, block + 1, 3 * block)]
    for name in names if len(names) > 1 else ():
        wanted.append({**dict.fromkeys(names, 19), name: 1})
        wanted.append({**dict.fromkeys(names, 2), name: 2 * fitting[-1] + 3})
    sets = [operation.complete(exercise), *(_legal(operation, sizes) for sizes in wanted)]
    return list({tuple(sizes.items()): sizes for sizes in sets}.values())


def _long_sets(operation: Operation) -> list[dict[str, int]]:
    """Each size long while the others are one."""
    ones = dict.fromkeys(operation.names, 1)
    return [_multiples(operation, {**ones, name: _LONG}) for name in operation.names]


def _cycled(values: Sequence[int], count: int) -> list[int]:
    return [values[i % len(values)] for i in range(count)]


def _legal(operation: Operation, sizes: Sizes) -> dict[str, int]:
    """The sizes rounded up to their multiples, and cut to what they may be at most; too much work
    is cut at the largest size."""
    rounded = dict(sizes)
    most = _MOST_WORK // 5 ** max(0, len(rounded) - 2)
    while math.prod(rounded.values()) > most:
        largest = max(rounded, key=lambda name: rounded[name])
        rounded[largest] = max(1, rounded[largest] // 2 + rounded[largest] % 2)
    # Small sizes stay small: 19 of something in steps of 64 is as good as one of it.
    return _multiples(operation, rounded)


def _multiples(operation: Operation, sizes: Sizes) -> dict[str, int]:
    steps = {name: operation.multiple_of.get(name, 1) for name in sizes}
    rounded = {name: -(-n // steps[name]) * steps[name] for name, n in sizes.items()}
    return operation.complete(
        {name: min(n, operation.at_most.get(name, n)) for name, n in rounded.items()}
    )


def draw(tensor: TensorType, shape: tuple[int, ...], fill: str, rng: np.random.Generator) -> Array:
    """Data of one of FILLS for a tensor."""
    if tensor.is_float:
        values = np.asarray(rng.standard_normal(shape))
        if fill == "zeros":
            _plant(values, (0.0, -0.0), -(-values.size // 2), rng)
        elif fill == "negative":
            values = -np.abs(values)
        elif fill == "large":
            values = values * _LARGE
        elif fill == "low":
            values = -_LARGE * (1 + np.abs(values))
        elif fill == "tiny":
            values = values * _TINY[tensor.dtype]
        elif fill in SPECIAL:
            numbers = np.array(SPECIAL[fill]) * LARGEST[tensor.dtype]
            _plant(values, numbers, 2 + values.size // _SPECIAL_AMONG, rng)
        return stored(values, tensor.dtype)
    dtype = np.dtype(tensor.dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    makers: dict[str, Callable[[], NDArray[Any]]] = {
        "zeros": lambda: (
            rng.integers(low, high, shape, dtype, True) * rng.integers(0, 2, shape, dtype)
        ),
        "negative": lambda: np.full(shape, -1 if low < 0 else high, dtype),
        "large": lambda: rng.choice(np.array([low, high], dtype), shape),
        "low": lambda: np.full(shape, low),
        "tiny": lambda: rng.integers(0, 2, shape),
    }
    if fill in makers:
        return np.asarray(makers[fill]()).astype(dtype)
    return np.asarray(rng.integers(low, high, shape, dtype, endpoint=True))


def _plant(
    values: Array, numbers: Sequence[float] | Array, count: int, rng: np.random.Generator
) -> None:
    """Put these numbers, in turn, at `count` places, or everywhere where there are fewer."""
    places = rng.permutation(values.size)[:count]
    values.reshape(-1)[places] = np.resize(numbers, places.size)


def stored(values: NDArray[np.float64], dtype: str) -> Array:
    """Floats as they are stored: bfloat16 as the upper half of a float32, rounded to even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    return bfloat16.rounded(values)


def widened(values: Array, dtype: str) -> Array:
    """What stored elements mean: float64, int64 or bool."""
    if dtype == "bfloat16":
        return bfloat16.widened(values).astype(np.float64)
    if values.dtype.kind == "b":
        return values
    return values.astype(np.float64 if values.dtype.kind == "f" else np.int64)


def strides_of(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Strides in elements. "padded": gaps between elements and rows; "transposed": the axes lie
    in reverse order, with a gap."""
    order = range(len(shape)) if layout == "transposed" else range(len(shape) - 1, -1, -1)
    strides = [0] * len(shape)
    step = 2 if layout == "padded" else 1
    for axis in order:
        strides[axis] = step
        step = step * shape[axis] + (0 if layout == "contiguous" else 3)
    return tuple(strides)
