"""A network as data: values by name, and the nodes that make them.

An operator has the meaning that ONNX gives the one of its name (operators/ says where it differs).
What a value means is a real number; how it is kept is its tensor's format. So a quantized network
is the float network with other formats: a node computes on what its inputs stand for, and its
result is rounded to the format of its output.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics import QTensor
from lowbit.numerics.formats import dtype_of
from lowbit.weights.panels import PackedMatrix

# What sizes of inputs must fulfil for a network to be right, as data that files can hold.

Expression = int | float | str | tuple[Any, ...]
"""A number, the name of a size, or an operator of `OPERATORS` and its operands."""

OPERATORS: Mapping[str, tuple[Callable[..., Any], str]] = {
    "add": (lambda *every: sum(every), " + "),
    "mul": (lambda *every: math.prod(every), " * "),
    "floordiv": (operator.floordiv, " // "),
    "div": (operator.truediv, " / "),
    "mod": (operator.mod, " % "),
    "pow": (operator.pow, " ** "),
    "trunc": (math.trunc, ""),
    "max": (lambda *every: max(every), ""),
    "min": (lambda *every: min(every), ""),
    "eq": (operator.eq, " == "),
    "ne": (operator.ne, " != "),
    "lt": (operator.lt, " < "),
    "le": (operator.le, " <= "),
    "gt": (operator.gt, " > "),
    "ge": (operator.ge, " >= "),
    "and": (lambda *every: all(every), " and "),
    "or": (lambda *every: any(every), " or "),
    "not": (operator.not_, ""),
}
"""By name: what it computes, and how it is written between operands; "": before them."""


def fulfilled(condition: Expression, sizes: Mapping[str, int]) -> bool:
    """Whether sizes, which are all known, fulfil it."""
    try:
        return bool(_value(condition, sizes))
    except ArithmeticError:  # as a division by a size that is 0
        return False


def _value(expression: Expression, sizes: Mapping[str, int]) -> Any:
    if isinstance(expression, str):
        return sizes[expression]
    if isinstance(expression, int | float):
        return expression
    name, *operands = expression
    return OPERATORS[name][0](*(_value(one, sizes) for one in operands))


def check(conditions: Any, names: Iterable[str]) -> None:
    """ValueError: they are no conditions on sizes of these names."""
    if not isinstance(conditions, tuple):
        raise ValueError(f"conditions are a list, not {conditions!r}")
    for one in conditions:
        try:
            fulfilled(one, dict.fromkeys(names, 2))
        except (LookupError, TypeError, OverflowError) as error:
            raise ValueError(f"{one!r} is no condition on sizes: {error}") from None


def told(condition: Expression) -> str:
    """The expression as Python would have it."""
    if not isinstance(condition, tuple):
        return str(condition)
    name, *operands = condition
    written = [f"({told(one)})" if isinstance(one, tuple) else told(one) for one in operands]
    between = OPERATORS[name][1]
    return between.join(written) if between else f"{name}({', '.join(written)})"


Attribute = bool | int | float | str | tuple[Any, ...]
Constant = npt.NDArray[Any] | QTensor | PackedMatrix
"""What is known: numbers, or what stands for them; a packed matrix [K, N] for a weight [N, K]."""


@dataclass(frozen=True)
class Tensor:
    """What a value is, and how it is kept.

    - dtype: NumPy's or ml_dtypes' name. shape: a name stands for a size that a run chooses.
    - scale, zero_point: of 8-bit integers that stand for scale · (stored − zero_point). Without a
      scale, numbers stand for themselves.
    """

    dtype: str
    shape: tuple[int | str, ...]
    scale: float | None = None
    zero_point: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape; ValueError if it is not all numbers yet."""
        named = [size for size in self.shape if isinstance(size, str)]
        if named:
            raise ValueError(f"the sizes {', '.join(named)} are not known yet: bind the graph")
        return tuple(size for size in self.shape if isinstance(size, int))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Node:
    """One operation. An input "" is left out; attributes are what JSON can hold."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    name: str = ""

    def get(self, attribute: str, default: Any = None) -> Any:
        return self.attributes.get(attribute, default)

    def replaced(self, **changes: Any) -> Node:
        """A copy in which fields, or where there is no such field attributes, are others."""
        fields = {key: changes.pop(key) for key in tuple(changes) if key in _FIELDS}
        return replace(self, **{"attributes": {**self.attributes, **changes}, **fields})


_FIELDS = ("op", "inputs", "outputs", "attributes", "name")


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run.

    - inputs, outputs: names of values. constants: the values that are known.
    - tensors: what values are, by name; of all inputs, and of every value that is kept otherwise
      than as what its node computes (float32 that is rounded to 8 bits). The rest is inferred.
    - ranges: of named sizes, the least and the greatest for which the network is right; None: any.
      conditions: what these sizes must fulfil besides.
    - source: the file that it comes from, which errors name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Constant]
    tensors: Mapping[str, Tensor]
    name: str = ""
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    conditions: tuple[Expression, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        known = {"", *self.inputs, *self.constants}
        for node in self.nodes:
            for value in node.inputs:
                if value not in known:
                    raise ValueError(
                        f"{node.op} {node.name!r} reads {value!r}, which nothing before it makes: "
                        "it is missing, or nodes are in a circle"
                    )
            for value in node.outputs:
                if value and value in known:
                    raise ValueError(f"two things make the value {value!r}")
            known.update(node.outputs)
        for value in self.outputs:
            if value not in known:
                raise ValueError(f"nothing makes the output {value!r}")
        for value in self.inputs:
            if value not in self.tensors:
                raise ValueError(f"nothing says what the input {value!r} is")

    def replaced(self, **changes: Any) -> Graph:
        """A copy in which some fields are others, without constants and facts nobody needs."""
        made = replace(self, **changes)
        used = {name for node in made.nodes for name in (*node.inputs, *node.outputs)}
        used.update(made.inputs, made.outputs)
        constants = {name: one for name, one in made.constants.items() if name in used}
        tensors = {name: one for name, one in made.tensors.items() if name in used}
        return replace(made, constants=constants, tensors=tensors)

    def described(self, node: Node) -> list[Tensor | Constant | None]:
        """What there is of the inputs of a node, each with a shape."""
        constants = self.constants
        return [self.tensors.get(name, constants.get(name)) for name in node.inputs]

    def producers(self) -> dict[str, Node]:
        """The node that makes a value, by the value's name."""
        return {value: node for node in self.nodes for value in node.outputs if value}

    def uses(self) -> Counter[str]:
        """How often each value is read, as an input of a node or as an output of the graph."""
        read = Counter(value for node in self.nodes for value in node.inputs if value)
        read.update(self.outputs)
        return read

    @property
    def open_sizes(self) -> tuple[str, ...]:
        """The names of sizes of inputs that a run chooses, in order."""
        sizes = (size for name in self.inputs for size in self.tensors[name].shape)
        return tuple(dict.fromkeys(size for size in sizes if isinstance(size, str)))

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Numbers for named sizes, of the inputs' shapes. ValueError: two say different ones, or a
        shape is not that of the input."""
        sizes: dict[str, int] = {}
        for name in self.inputs:
            wanted, given = self.tensors[name].shape, shapes[name]
            fits = len(wanted) == len(given) and all(
                isinstance(size, str) or size == have
                for size, have in zip(wanted, given, strict=True)
            )
            if not fits:
                shape = ", ".join(map(str, wanted))
                raise ValueError(f"{name} must have shape [{shape}], got {list(given)}")
            for size, have in zip(wanted, given, strict=True):
                if isinstance(size, str) and sizes.setdefault(size, have) != have:
                    raise ValueError(f"{size} is {sizes[size]} and, in {name}, {have}")
        return sizes

    def bound(self, sizes: Mapping[str, int]) -> Graph:
        """With numbers for named sizes. ValueError: one is not named, out of its range, or breaks a
        condition."""
        for size, (least, most) in self.ranges.items():
            have = sizes.get(size, least)
            if have < least or (most is not None and have > most):
                served = f"at least {least}" if most is None else f"{least} to {most}"
                raise ValueError(f"the size {size} is {have}; the network is for {served}")
        tensors = dict(self.tensors)
        for name in self.inputs:
            tensor = tensors[name]
            missing = [one for one in tensor.shape if isinstance(one, str) and one not in sizes]
            if missing:
                raise ValueError(f"the input {name!r} has the size {missing[0]!r}: give it a value")
            shape = tuple(sizes[one] if isinstance(one, str) else one for one in tensor.shape)
            tensors[name] = replace(tensor, shape=shape)
        for condition in self.conditions:
            if not fulfilled(condition, sizes):
                given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
                raise ValueError(f"the network is right where {told(condition)}, not for {given}")
        return replace(self, tensors=tensors, conditions=())


@contextmanager
def naming_source(source: str) -> Iterator[None]:
    """What goes wrong is said of this file, if there is one: as what it is, or as a ValueError
    where the file holds what no writer writes."""
    try:
        yield
    except (ValueError, NotImplementedError, MemoryError) as error:
        if not source or str(error).startswith(source):
            raise
        kind = next(
            k for k in (ValueError, NotImplementedError, MemoryError) if isinstance(error, k)
        )
        raise kind(f"{source}: {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError) as error:
        if not source:
            raise
        raise ValueError(f"{source} does not hold together: {error!r}") from error


def live(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[Node, ...]:
    """The nodes that the outputs depend on."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    return tuple(reversed(kept))


def numbers(constant: Constant) -> npt.NDArray[Any]:
    """What a constant stands for."""
    if isinstance(constant, PackedMatrix):
        return constant.dequantize().T
    return constant.dequantize() if isinstance(constant, QTensor) else np.asarray(constant)
