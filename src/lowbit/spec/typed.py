"""Operations that are Python functions: types in the annotations, the reference in the body.

    @operation(exercise={"N0": 4, "T": 200}, summed=("T",))
    def row_sum(x: Float32[np.ndarray, "N0 T"]) -> Float32[np.ndarray, "N0"]:
        return x.sum(axis=1)

The annotations are jaxtyping's (https://docs.kidger.site/jaxtyping/api/array/). A dimension is a
name, a fixed size, or an expression of names such as `MID//8`. The body is run in float64, or in
int64 for tensors of integers.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Sizes = Mapping[str, int]
Block = int | Callable[[Sizes], int]

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""The unit roundoff of each float format (Higham, Accuracy and Stability, section 2.1)."""
_SMALLEST_NORMAL = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-126,
    "float32": 2.0**-126,
    "float64": 2.0**-1022,
}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": float(np.finfo(np.float64).max),
}
"""The largest number of each float format."""
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
_TERM = re.compile(r"[A-Za-z_]\w*|\d+|//|[()+*-]")
# How many random perturbations the sensitivity of a reference is estimated from.
_PERTURBATIONS = 12
# Roundings of an element besides those of its sum: a product, exp2 with its argument, a division.
_OWN_ROUNDINGS = 8


@dataclass(frozen=True)
class TensorType:
    """A parameter or the result: its name, dtype (NumPy's name, or bfloat16) and dimensions."""

    name: str
    dtype: str
    dims: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{' '.join(self.dims)}]"

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return self.dtype in ROUNDOFF

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes that the dimensions are made of, in order of appearance."""
        found = (t for dim in self.dims for t in _TERM.findall(dim) if t[0].isalpha())
        return tuple(dict.fromkeys(found))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape at these sizes. KeyError if one is missing."""
        return tuple(_value(dim, sizes) for dim in self.dims)


def _is_expression(dim: str) -> bool:
    try:
        compile(dim, "", "eval")
    except SyntaxError:
        return False
    return dim[0].isalnum() or dim[0] in "_("


def _value(dim: str, sizes: Sizes) -> int:
    # Only names, numbers and arithmetic get here: TensorType's maker has looked at each term.
    return int(eval(dim, {"__builtins__": {}}, dict(sizes)))


@dataclass(frozen=True)
class Operation:
    """An operation as its annotated function states it.

    exercise: the sizes of the exercise. summed: dimensions that the operation sums over although
    they may be in the result (a softmax does). multiple_of: sizes that must be multiples.
    blocks: what a block size is when nobody says, by its name, as a number or from the sizes.
    special: whether a result has to be infinite or NaN exactly where that of the reference is.
    at_most: the largest that a size may be. dtypes: what those tensors may be, `generic` by name,
    whose annotation leaves the float open; `with_dtype` chooses one. slack: what the error
    may be besides: a function of the inputs and of the unit roundoff of the result's dtype.
    """

    name: str
    doc: str
    inputs: tuple[TensorType, ...]
    result: TensorType
    reference: Callable[..., Array]
    exercise: Sizes = field(default_factory=dict[str, int])
    summed: tuple[str, ...] = ()
    multiple_of: Sizes = field(default_factory=dict[str, int])
    blocks: Mapping[str, Block] = field(default_factory=dict[str, Block])
    special: bool = False
    at_most: Sizes = field(default_factory=dict[str, int])
    dtypes: tuple[str, ...] = ()
    generic: tuple[str, ...] = ()
    slack: Callable[..., Array] | None = None

    def __str__(self) -> str:
        return self.name

    def with_dtype(self, dtype: str) -> Operation:
        """The operation of tensors of this dtype, where the annotations leave it open.

        ValueError for one that is not among `dtypes`.
        """
        if dtype not in self.dtypes:
            listed = ", ".join(self.dtypes) or "none but that of its annotations"
            raise ValueError(f"{self.name} has no dtype {dtype!r}; there are {listed}")

        def chosen(tensor: TensorType) -> TensorType:
            return replace(tensor, dtype=dtype) if tensor.name in self.generic else tensor

        inputs = tuple(chosen(tensor) for tensor in self.inputs)
        return replace(self, inputs=inputs, result=chosen(self.result))

    def __call__(self, *arguments: Array) -> Array:
        """The reference itself, on arrays of any dtype."""
        return self.reference(*arguments)

    @property
    def names(self) -> tuple[str, ...]:
        """Every size that is free, in order of appearance."""
        return tuple(dict.fromkeys(n for t in (*self.inputs, self.result) for n in t.names))

    def complete(self, sizes: Sizes) -> dict[str, int]:
        """These sizes, checked. ValueError if one is missing, unknown, too small or no multiple."""
        if set(sizes) != set(self.names):
            raise ValueError(
                f"{self.name} has the sizes {', '.join(self.names) or 'none'}; "
                f"got {', '.join(sizes) or 'none'}"
            )
        for name, size in sizes.items():
            step = self.multiple_of.get(name, 1)
            if size < 1 or size % step:
                raise ValueError(f"{self.name}: {name} is {size}; it must be a multiple of {step}")
            if size > self.at_most.get(name, size):
                most = self.at_most[name]
                raise ValueError(f"{self.name}: {name} is {size}; it must be at most {most}")
        return {name: int(sizes[name]) for name in self.names}

    def sum_length(self, sizes: Sizes) -> int:
        """How many terms the longest sum has: over `summed`, or what the result does not keep."""
        kept = self.result.names
        gone = [n for t in self.inputs for n in t.names if n not in kept]
        return math.prod(sizes[name] for name in dict.fromkeys((*self.summed, *gone)))

    def expect(self, inputs: Mapping[str, Array], sizes: Sizes, seed: int = 0) -> Expected:
        """The reference of these inputs, and the error allowed to each element.

        The error of a sum of L rounded terms grows with L·u·Σ|term| (Higham, section 4.2). What
        Σ|term| is for any reference: how far its result moves when every float input moves by one
        rounding of its own, the largest move of twelve random choices of signs. So the budget of
        an element z is (L + 8)·(move + u·|z|), with u the unit roundoff of float32 (or of the
        result, if that is float64); one rounding of the result's own dtype; and for
        underflow, which a GPU may flush to zero, (L + 8) smallest normal numbers. No move shows
        terms that cancel whatever the inputs are, nor what is rounded to fewer bits on the way:
        operations that have such state it as their `slack`. A result of integers or bools must be
        exact.
        """
        exact = {t.name: _wide(inputs[t.name]) for t in self.inputs}
        with np.errstate(all="ignore"):
            value = np.asarray(self.reference(*exact.values()))
            if value.shape != self.result.shape(sizes):
                raise ValueError(
                    f"the reference of {self.name} returned the shape {value.shape}; its "
                    f"annotation says {self.result.shape(sizes)}"
                )
            if not self.result.is_float:
                return Expected(value, np.zeros(value.shape), self.result)
            value = value.astype(np.float64)
            unit = min(ROUNDOFF[self.result.dtype], ROUNDOFF["float32"])
            move = self._largest_move(exact, value, unit, np.random.default_rng(seed))
            terms = self.sum_length(sizes) + _OWN_ROUNDINGS
            coarse = ROUNDOFF[self.result.dtype]
            own = coarse * np.abs(value)
            if self.slack is not None:
                own = own + self.slack(*exact.values(), coarse)
            least = terms * _SMALLEST_NORMAL[self.result.dtype]
            return Expected(value, terms * (move + unit * np.abs(value)) + own + least, self.result)

    def _largest_move(
        self, exact: Mapping[str, Array], value: Array, unit: float, rng: np.random.Generator
    ) -> Array:
        move = np.zeros(value.shape)
        for _ in range(_PERTURBATIONS):
            moved = [
                a * (1 + unit * rng.choice((-1.0, 1.0), a.shape)) if a.dtype.kind == "f" else a
                for a in exact.values()
            ]
            difference = np.abs(np.asarray(self.reference(*moved), np.float64) - value)
            move = np.maximum(move, np.where(np.isfinite(difference), difference, 0))
        return move


@dataclass(frozen=True, eq=False)
class Expected:
    """A reference result (float64 or int64) and the error allowed to each of its elements."""

    value: Array
    budget: Array
    type: TensorType

    def wrong(self, got: Array) -> NDArray[np.bool_]:
        """Which elements of a result are outside of the budget. `got` is float64 or int64."""
        if not self.type.is_float:
            return got != self.value
        with np.errstate(all="ignore"):
            error = np.abs(got - self.value)
            # NaN and infinities are right where the reference has the same.
            same = (got == self.value) | (np.isnan(got) & np.isnan(self.value))
            # So is an infinity where the reference, within its budget, is too large for the dtype.
            overflow = np.abs(self.value) + self.budget >= LARGEST[self.type.dtype]
            same |= overflow & (got == np.copysign(np.inf, self.value))
            return ~same & ~((error <= self.budget) & np.isfinite(self.value))


def _wide(array: Array) -> Array:
    if array.dtype.kind == "b":
        return array
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def operation(
    *,
    exercise: Sizes | None = None,
    summed: tuple[str, ...] = (),
    result: str = "z",
    multiple_of: Sizes | None = None,
    blocks: Mapping[str, Block] | None = None,
    special: bool = False,
    at_most: Sizes | None = None,
    dtypes: tuple[str, ...] = (),
    slack: Callable[..., Array] | None = None,
) -> Callable[[Callable[..., Array]], Operation]:
    """Make an Operation of an annotated function; see Operation for the arguments.

    TypeError or ValueError, with what to write instead, if an annotation is not understood.
    """

    def make(function: Callable[..., Array]) -> Operation:
        made = replace(
            from_function(function, result, dtypes),
            exercise=dict(exercise or {}),
            summed=summed,
            multiple_of=dict(multiple_of or {}),
            blocks=dict(blocks or {}),
            special=special,
            at_most=dict(at_most or {}),
            slack=slack,
        )
        if exercise:
            made.complete(made.exercise)
        return made

    return make


def from_function(
    function: Callable[..., Array], result: str = "z", dtypes: tuple[str, ...] = ()
) -> Operation:
    """The Operation of a function that has nothing but its annotations.

    Of several dtypes, which an annotation like Float leaves open, it gets the first.
    """
    name = getattr(function, "__name__", "operation")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # annotations that are text may hold anything
        raise TypeError(f"{name}: its annotations cannot be read: {error}") from error
    parameters = inspect.signature(function).parameters
    missing = [p for p in (*parameters, "return") if p not in hints]
    if missing:
        raise TypeError(
            f"{name}: {missing[0]} has no annotation; write one in jaxtyping's form, for example "
            'Float32[np.ndarray, "N0 T"]'
        )
    made = [_tensor_type(p, hints[p], name, dtypes) for p in parameters]
    made.append(_tensor_type(result, hints["return"], name, dtypes))
    *inputs, last = (tensor for tensor, _ in made)
    generic = tuple(tensor.name for tensor, is_open in made if is_open)
    doc = inspect.getdoc(function) or ""
    return Operation(name, doc, tuple(inputs), last, function, dtypes=dtypes, generic=generic)


def _tensor_type(
    name: str, annotation: Any, function: str, choice: tuple[str, ...]
) -> tuple[TensorType, bool]:
    """What an annotation says, and whether it leaves the dtype to a choice."""
    dtypes, text = getattr(annotation, "dtypes", None), getattr(annotation, "dim_str", None)
    if dtypes is None or text is None:
        raise TypeError(
            f"{function}: the annotation of {name} is {annotation!r}; write it in jaxtyping's "
            'form, for example Float32[np.ndarray, "N0 T"]'
        )
    # jaxtyping's Bool is NumPy's of both names.
    dtypes = [d for d in dtypes if d != "bool_"]
    known = [d for d in dtypes if d in ROUNDOFF or d in _INTEGERS]
    is_open = len(dtypes) > 1 and bool(choice) and set(choice) <= set(known)
    if not is_open and (len(dtypes) != 1 or not known):
        raise TypeError(
            f"{function}: {name} has the dtypes {', '.join(map(str, dtypes))}; give one of "
            f"{', '.join((*ROUNDOFF, *_INTEGERS))}, as in Float32"
        )
    dims = tuple(text.split())
    for dim in dims:
        if _TERM.sub("", dim) or not _is_expression(dim):
            raise ValueError(
                f"{function}: the dimension {dim!r} of {name} is not understood; write a name, a "
                "number, or a sum, product or // of these"
            )
    return TensorType(name, choice[0] if is_open else known[0], dims), is_open
