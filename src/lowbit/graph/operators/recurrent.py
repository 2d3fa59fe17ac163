"""Recurrent layers, each written as the operators of its steps.

The same writing is what a layer means, run on arrays, and what becomes of it where its sizes are
known (`_in_parts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import Array, Operator, operators, real
from lowbit.graph.operators.elementwise import Elementwise
from lowbit.graph.parts import Parts

T = TypeVar("T")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_OWN = {"scaledtanh": {"alpha": 1.0, "beta": 1.0}, "affine": {"alpha": 1.0, "beta": 0.0}}
"""Activations that are no operators, and the numbers they take."""


class Writer(ABC, Generic[T]):
    """What operators are written on: arrays, or the names of a graph's values."""

    @abstractmethod
    def __call__(self, op: str, *inputs: T, **attributes: Any) -> T:
        """The first output of an operator."""

    @abstractmethod
    def constant(self, value: Array) -> T:
        """A value that is known."""

    def number(self, value: float) -> T:
        return self.constant(np.array(value, np.float32))

    def part(self, x: T, axis: int, begin: int, end: int) -> T:
        """The elements of an axis from `begin` to `end`."""
        limits = (self.constant(np.array([one])) for one in (begin, end, axis))
        return self("Slice", x, *limits)

    def shaped(self, x: T, *shape: int) -> T:
        return self("Reshape", x, self.constant(np.array(shape, np.int64)))

    def joined(self, parts: Sequence[T], axis: int) -> T:
        return self("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]


class Arrays(Writer[Array]):
    """Operators on arrays, by what they mean."""

    def __call__(self, op: str, *inputs: Array, **attributes: Any) -> Array:
        return operators.get(op).compute(Node(op, (), ("",), attributes), *inputs)[0]

    def constant(self, value: Array) -> Array:
        return value


@dataclass(frozen=True)
class Sizes:
    """Of a layer: how many steps, samples, directions, and states of each."""

    steps: int
    batch: int
    directions: int
    hidden: int

    @staticmethod
    def of(node: Node, x: tuple[int, ...], w: tuple[int, ...], r: tuple[int, ...]) -> Sizes:
        """ValueError: the shapes of the inputs do not fit the node."""
        direction = node.get("direction", "forward")
        if direction not in _DIRECTIONS or len(x) != 3 or len(r) != 3:
            raise ValueError(f"a direction {direction!r}, x {list(x)} and R {list(r)} are no layer")
        directions, hidden = len(_DIRECTIONS[direction]), r[2]
        rows = directions, GATES[node.op] * hidden
        if node.get("hidden_size", hidden) != hidden:
            raise ValueError(f"hidden_size is {node.get('hidden_size')}, and R has {hidden}")
        if w != (*rows, x[2]) or r != (*rows, hidden):
            raise ValueError(
                f"expected W {[*rows, x[2]]} and R {[*rows, hidden]}, got {list(w)} and {list(r)}"
            )
        steps, batch = (x[1], x[0]) if node.get("layout", 0) else x[:2]
        return Sizes(steps, batch, directions, hidden)


def layer(write: Writer[T], node: Node, inputs: Sequence[T | None], sizes: Sizes) -> list[T]:
    """The outputs of a recurrent layer: Y, Y_h, and of an LSTM Y_c."""
    x, w, r, b, lengths, *rest = (*inputs, *(None,) * 8)[:8]
    peepholes = rest.pop()
    assert x is not None
    turned = bool(node.get("layout", 0))
    if turned:
        x = write("Transpose", x, perm=(1, 0, 2))
        rest = [None if one is None else write("Transpose", one, perm=(1, 0, 2)) for one in rest]
    states: list[list[T]] = []
    for number, backwards in enumerate(_DIRECTIONS[node.get("direction", "forward")]):
        at = write.constant(np.array(number))
        own = [
            None if one is None else write("Gather", one, at, axis=0)
            for one in (w, r, b, peepholes, *rest)
        ]
        cell = _CELLS[node.op](write, node, sizes, number, own)
        states.append(_run(write, cell, x, sizes, lengths, backwards))
    outputs = [write.joined([one[i] for one in states], 1 if i == 0 else 0) for i in range(3)]
    if turned:
        perms = ((2, 0, 1, 3), (1, 0, 2), (1, 0, 2))
        outputs = [write("Transpose", y, perm=p) for y, p in zip(outputs, perms, strict=True)]
    return outputs if node.op == "LSTM" else outputs[:2]


def _run(
    write: Writer[T], cell: Cell[T], x: T, sizes: Sizes, lengths: T | None, backwards: bool
) -> list[T]:
    """The states of all steps [steps, 1, batch, hidden], and the last h and c [1, batch, hidden].

    Behind a sample's own length the output is 0, and the states stay as they are."""
    steps, batch, hidden = sizes.steps, sizes.batch, sizes.hidden
    products = cell.inputs(x)
    h, c = cell.h, cell.c
    rows: dict[int, T] = {}
    if lengths is not None:
        lengths = write.shaped(write("Cast", lengths, to="int32"), batch, 1)
    for t in reversed(range(steps)) if backwards else range(steps):
        step = write.shaped(write.part(products, 0, t, t + 1), batch, -1)
        new_h, new_c = cell.step(step, h, c)
        if lengths is None:
            h, c, y = new_h, new_c, new_h
        else:
            inside = write("Less", write.constant(np.array(t, np.int32)), lengths)
            y = write("Where", inside, new_h, write.number(0))
            h, c = write("Where", inside, new_h, h), write("Where", inside, new_c, c)
        rows[t] = write.shaped(y, 1, 1, batch, hidden)
    none = np.zeros((0, 1, batch, hidden), np.float32)
    every = write.joined([rows[t] for t in range(steps)], 0) if rows else write.constant(none)
    return [every, *(write.shaped(state, 1, batch, hidden) for state in (h, c))]


class Cell(ABC, Generic[T]):
    """A step of one direction. Products with x are made for all steps at once."""

    def __init__(
        self, write: Writer[T], node: Node, sizes: Sizes, number: int, own: Sequence[T | None]
    ) -> None:
        w, r, b, self.peepholes, h, c = own
        assert w is not None
        assert r is not None
        self.write, self.node, self.hidden = write, node, sizes.hidden
        zeros = write.constant(np.zeros((sizes.batch, sizes.hidden), np.float32))
        self.h, self.c = zeros if h is None else h, zeros if c is None else c
        self.w, self.r = (write("Transpose", one, perm=(1, 0)) for one in (w, r))
        rows = GATES[node.op] * sizes.hidden
        none = write.constant(np.zeros(2 * rows, np.float32))
        both = none if b is None else b
        self.w_bias, self.r_bias = (write.part(both, 0, i * rows, (i + 1) * rows) for i in (0, 1))
        self.functions = _functions(node, number, self.defaults)

    defaults: Sequence[str]

    def inputs(self, x: T) -> T:
        """x [steps, batch, K] times W, and the biases of both products."""
        bias = self.write("Add", self.w_bias, self.r_bias)
        return self.write("Add", self.write("MatMul", x, self.w), bias)

    def gate(self, x: T, number: int, count: int = 1) -> T:
        """Some gates of all that lie side by side."""
        return self.write.part(x, 1, number * self.hidden, (number + count) * self.hidden)

    def function(self, number: int, x: T) -> T:
        """An activation of what is limited first, if it is."""
        limit = self.node.get("clip", 0.0)
        if limit:
            x = self.write("Clip", x, self.write.number(-limit), self.write.number(limit))
        return self.functions[number](self.write, x)

    def sum(self, a: T, b: T) -> T:
        return self.write("Add", a, b)

    def product(self, a: T, b: T) -> T:
        return self.write("Mul", a, b)

    @abstractmethod
    def step(self, x: T, h: T, c: T) -> tuple[T, T]:
        """The next states: of one step's products with W, and the states before."""


class _RNN(Cell[T]):
    defaults = ("Tanh",)

    def step(self, x: T, h: T, c: T) -> tuple[T, T]:
        return self.function(0, self.sum(x, self.write("MatMul", h, self.r))), c


class _GRU(Cell[T]):
    defaults = ("Sigmoid", "Tanh")

    def inputs(self, x: T) -> T:
        """The bias of the last gate's product with h is added by its step, which may scale it."""
        recurrent = self.write.part(self.r_bias, 0, 0, 2 * self.hidden)
        none = self.write.constant(np.zeros(self.hidden, np.float32))
        bias = self.sum(self.w_bias, self.write.joined([recurrent, none], 0))
        return self.sum(self.write("MatMul", x, self.w), bias)

    def step(self, x: T, h: T, c: T) -> tuple[T, T]:
        write, hidden = self.write, self.hidden
        last_bias = write.part(self.r_bias, 0, 2 * hidden, 3 * hidden)
        both, last = self.gate(self.r, 0, 2), self.gate(self.r, 2)
        gates = self.function(0, self.sum(self.gate(x, 0, 2), write("MatMul", h, both)))
        update, reset = self.gate(gates, 0), self.gate(gates, 1)
        if self.node.get("linear_before_reset", 0):
            made = self.product(reset, self.sum(write("MatMul", h, last), last_bias))
        else:
            made = self.sum(write("MatMul", self.product(reset, h), last), last_bias)
        new = self.function(1, self.sum(self.gate(x, 2), made))
        return self.sum(new, self.product(update, write("Sub", h, new))), c


class _LSTM(Cell[T]):
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def _seen(self, x: T, c: T, number: int) -> T:
        """A gate, with what it sees of the cell."""
        gate = self.gate(x, number)
        if self.peepholes is None:
            return gate
        weight = self.write.part(
            self.peepholes, 0, number * self.hidden, (number + 1) * self.hidden
        )
        return self.sum(gate, self.product(weight, c))

    def step(self, x: T, h: T, c: T) -> tuple[T, T]:
        gates = self.sum(x, self.write("MatMul", h, self.r))
        taken = self.function(0, self._seen(gates, c, 0))
        if self.node.get("input_forget", 0):
            kept = self.write("Sub", self.write.number(1), taken)
        else:
            kept = self.function(0, self._seen(gates, c, 2))
        fresh = self.function(1, self.gate(gates, 3))
        c = self.sum(self.product(kept, c), self.product(taken, fresh))
        shown = self.function(0, self._seen(gates, c, 1))
        return self.product(shown, self.functions[2](self.write, c)), c


_CELLS: dict[str, Callable[..., Cell[Any]]] = {"RNN": _RNN, "GRU": _GRU, "LSTM": _LSTM}
Function = Callable[[Writer[Any], Any], Any]


def _functions(node: Node, number: int, defaults: Sequence[str]) -> list[Function]:
    """The activations of a direction. alpha and beta are taken in turn by those that have them.
    ValueError: one is unknown."""
    directions = len(_DIRECTIONS[node.get("direction", "forward")])
    names = node.get("activations") or tuple(defaults) * directions
    numbers = {
        "alpha": list(node.get("activation_alpha", ())),
        "beta": list(node.get("activation_beta", ())),
    }
    functions = list[Function]()
    for name in names:
        op, values = _activation(name)
        taken = {k: numbers[k].pop(0) if numbers[k] else v for k, v in values.items()}
        functions.append(_function(op, taken))
    return functions[number * len(defaults) : (number + 1) * len(defaults)]


def _activation(name: str) -> tuple[str, dict[str, float]]:
    """The operator that an activation is, whatever the case of its letters, and its numbers."""
    op = next((op for op in (*_OWN, *operators.names()) if op.lower() == name.lower()), "")
    if op in _OWN:
        return op, _OWN[op]
    record = operators.get(op) if op else None
    if not isinstance(record, Elementwise) or record.required != 1:
        raise ValueError(f"the activation {name!r} is unknown")
    return op, {key: record.keywords[key] for key in ("alpha", "beta") if key in record.keywords}


def _function(op: str, values: dict[str, float]) -> Function:
    def apply(write: Writer[Any], x: Any) -> Any:
        if op not in _OWN:
            return write(op, x, **values)
        alpha, beta = (write.number(values[key]) for key in ("alpha", "beta"))
        if op == "affine":
            return write("Add", write("Mul", x, alpha), beta)
        return write("Mul", write("Tanh", write("Mul", x, beta)), alpha)

    return apply


def _layer(node: Node, *inputs: Array | None) -> tuple[Array, ...]:
    """X [steps, batch, K], W, R, B, sequence_lens, initial_h, and of an LSTM initial_c, P; Y, Y_h,
    and of an LSTM Y_c. Gates lie in ONNX's order; with layout = 1 the batch comes first."""
    x, w, r = inputs[:3]
    assert x is not None
    assert w is not None
    assert r is not None
    return tuple(layer(Arrays(), node, inputs, Sizes.of(node, x.shape, w.shape, r.shape)))


class _Recurrent(Operator):
    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        x, w, r = (one for one in tensors[:3] if one is not None)
        sizes = Sizes.of(node, x.sizes, w.sizes, r.sizes)
        if node.get("layout", 0):
            y = sizes.batch, sizes.steps, sizes.directions, sizes.hidden
            last = sizes.batch, sizes.directions, sizes.hidden
        else:
            y = sizes.steps, sizes.directions, sizes.batch, sizes.hidden
            last = sizes.directions, sizes.batch, sizes.hidden
        states = 2 if node.op == "LSTM" else 1
        return tuple(Tensor(real(x).name, shape) for shape in (y, *(last,) * states))


class _Names(Writer[str]):
    """Operators as nodes of a graph; those of nothing but constants are computed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        arrays = [array for name in inputs if (array := self._parts.numbers(name)) is not None]
        if len(arrays) < len(inputs):
            return self._parts.add(op, *inputs, **attributes)
        node = Node(op, inputs, ("",), attributes)
        return self.constant(operators.get(op).compute(node, *arrays)[0])

    def constant(self, value: Array) -> str:
        return self._parts.constant(value)


def _in_parts(parts: Parts, node: Node) -> bool:
    """A layer of a sequence whose length is known by now."""
    x, w, r = (parts.tensor(name).sizes for name in node.inputs[:3])
    inputs = [name or None for name in node.inputs]
    outputs = layer(_Names(parts), node, inputs, Sizes.of(node, x, w, r))
    for number, (name, made) in enumerate(zip(node.outputs, outputs, strict=False)):
        if name:
            parts.end("Identity", made, output=number)
    return True


_RECORD = _Recurrent(meaning=_layer, parts=_in_parts)
operators.add("RNN", _RECORD)
operators.add("GRU", _RECORD)
operators.add("LSTM", _RECORD)
