"""Recurrent layers, each written as the operators of its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.operator import operators
from lowbit.graph.operators.composite import Composite
from lowbit.graph.operators.elementwise import Elementwise
from lowbit.graph.parts import Parts

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_OWN = {"scaledtanh": {"alpha": 1.0, "beta": 1.0}, "affine": {"alpha": 1.0, "beta": 0.0}}
"""Activations that are no operators, and the numbers they take."""


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


def _layer(parts: Parts, node: Node) -> bool:
    """X [steps, batch, K], W, R, B, sequence_lens, initial_h, and of an LSTM initial_c, P; Y, Y_h,
    and of an LSTM Y_c. Gates lie in ONNX's order; with layout = 1 the batch comes first."""
    x, w, r, b, lengths, *states, peepholes = (*node.inputs, *("",) * 8)[:8]
    sizes = Sizes.of(node, *(parts.tensor(name).sizes for name in (x, w, r)))
    turned = bool(node.get("layout", 0))
    if turned:
        x, *states = (one and parts.transpose(one, (1, 0, 2)) for one in (x, *states))
    made: list[list[str]] = []
    for number, backwards in enumerate(_DIRECTIONS[node.get("direction", "forward")]):
        at = parts.constant(np.array(number))
        own = [one and parts.gather(one, at) for one in (w, r, b, peepholes, *states)]
        cell = _CELLS[node.op](parts, node, sizes, number, own)
        made.append(_run(cell, x, sizes, lengths, backwards))
    outputs = [parts.concat([one[i] for one in made], 1 if i == 0 else 0) for i in range(3)]
    if turned:
        perms = ((2, 0, 1, 3), (1, 0, 2), (1, 0, 2))
        outputs = [parts.transpose(y, p) for y, p in zip(outputs, perms, strict=True)]
    for number, output in enumerate(outputs if node.op == "LSTM" else outputs[:2]):
        parts.end(output, number)
    return True


def _run(cell: Cell, x: str, sizes: Sizes, lengths: str, backwards: bool) -> list[str]:
    """The states of all steps [steps, 1, batch, hidden], and the last h and c [1, batch, hidden].

    Behind a sample's own length the output is 0, and the states stay as they are."""
    parts, h, c = cell.parts, cell.h, cell.c
    steps, batch, hidden = sizes.steps, sizes.batch, sizes.hidden
    products = cell.inputs(x)
    rows: dict[int, str] = {}
    if lengths:
        lengths = parts.reshape(parts.cast(lengths, "int32"), (batch, 1))
    for t in reversed(range(steps)) if backwards else range(steps):
        step = parts.reshape(parts.slice(products, 0, t, t + 1), (batch, -1))
        new_h, new_c = cell.step(step, h, c)
        if lengths:
            inside = parts.less(parts.constant(np.array(t, np.int32)), lengths)
            y = parts.where(inside, new_h, parts.float32(0))
            h, c = parts.where(inside, new_h, h), parts.where(inside, new_c, c)
        else:
            h, c, y = new_h, new_c, new_h
        rows[t] = parts.reshape(y, (1, 1, batch, hidden))
    none = np.zeros((0, 1, batch, hidden), np.float32)
    every = parts.concat([rows[t] for t in range(steps)], 0) if rows else parts.constant(none)
    return [every, *(parts.reshape(state, (1, batch, hidden)) for state in (h, c))]


class Cell(ABC):
    """A step of one direction. Products with x are made for all steps at once."""

    defaults: Sequence[str]

    def __init__(
        self, parts: Parts, node: Node, sizes: Sizes, number: int, own: Sequence[str]
    ) -> None:
        w, r, b, self.peepholes, h, c = own
        self.parts, self.node, self.hidden = parts, node, sizes.hidden
        zeros = parts.constant(np.zeros((sizes.batch, sizes.hidden), np.float32))
        self.h, self.c = h or zeros, c or zeros
        self.w, self.r = (parts.transpose(one, (1, 0)) for one in (w, r))
        rows = GATES[node.op] * sizes.hidden
        both = b or parts.constant(np.zeros(2 * rows, np.float32))
        self.w_bias, self.r_bias = (parts.slice(both, 0, i * rows, (i + 1) * rows) for i in (0, 1))
        self.functions = _functions(node, number, self.defaults)

    def inputs(self, x: str) -> str:
        """x [steps, batch, K] times W, and the biases of both products."""
        bias = self.parts.add(self.w_bias, self.r_bias)
        return self.parts.add(self.parts.matmul(x, self.w), bias)

    def gate(self, x: str, number: int, count: int = 1, axis: int = 1) -> str:
        """Some gates of all that lie side by side."""
        first = number * self.hidden
        return self.parts.slice(x, axis, first, first + count * self.hidden)

    def function(self, number: int, x: str) -> str:
        """An activation of what is limited first, if it is."""
        limit = self.node.get("clip", 0.0)
        if limit:
            x = self.parts.clip(x, self.parts.float32(-limit), self.parts.float32(limit))
        return self.functions[number](self.parts, x)

    @abstractmethod
    def step(self, x: str, h: str, c: str) -> tuple[str, str]:
        """The next states: of one step's products with W, and the states before."""


class _RNN(Cell):
    defaults = ("Tanh",)

    def step(self, x: str, h: str, c: str) -> tuple[str, str]:
        return self.function(0, self.parts.add(x, self.parts.matmul(h, self.r))), c


class _GRU(Cell):
    defaults = ("Sigmoid", "Tanh")

    def inputs(self, x: str) -> str:
        """The bias of the last gate's product with h is added by its step, which may scale it."""
        parts, recurrent = self.parts, self.gate(self.r_bias, 0, 2, axis=0)
        none = parts.constant(np.zeros(self.hidden, np.float32))
        bias = parts.add(self.w_bias, parts.concat([recurrent, none], 0))
        return parts.add(parts.matmul(x, self.w), bias)

    def step(self, x: str, h: str, c: str) -> tuple[str, str]:
        parts, last_bias = self.parts, self.gate(self.r_bias, 2, axis=0)
        both, last = self.gate(self.r, 0, 2), self.gate(self.r, 2)
        gates = self.function(0, parts.add(self.gate(x, 0, 2), parts.matmul(h, both)))
        update, reset = self.gate(gates, 0), self.gate(gates, 1)
        if self.node.get("linear_before_reset", 0):
            made = parts.mul(reset, parts.add(parts.matmul(h, last), last_bias))
        else:
            made = parts.add(parts.matmul(parts.mul(reset, h), last), last_bias)
        new = self.function(1, parts.add(self.gate(x, 2), made))
        return parts.add(new, parts.mul(update, parts.sub(h, new))), c


class _LSTM(Cell):
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def _seen(self, x: str, c: str, number: int) -> str:
        """A gate, with what it sees of the cell."""
        gate = self.gate(x, number)
        if not self.peepholes:
            return gate
        weight = self.gate(self.peepholes, number, axis=0)
        return self.parts.add(gate, self.parts.mul(weight, c))

    def step(self, x: str, h: str, c: str) -> tuple[str, str]:
        parts = self.parts
        gates = parts.add(x, parts.matmul(h, self.r))
        taken = self.function(0, self._seen(gates, c, 0))
        if self.node.get("input_forget", 0):
            kept = parts.sub(parts.float32(1), taken)
        else:
            kept = self.function(0, self._seen(gates, c, 2))
        fresh = self.function(1, self.gate(gates, 3))
        c = parts.add(parts.mul(kept, c), parts.mul(taken, fresh))
        shown = self.function(0, self._seen(gates, c, 1))
        return parts.mul(shown, self.functions[2](parts, c)), c


_CELLS: dict[str, Callable[..., Cell]] = {"RNN": _RNN, "GRU": _GRU, "LSTM": _LSTM}
Function = Callable[[Parts, str], str]


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


def _function(op: str, values: dict[str, Any]) -> Function:
    def apply(parts: Parts, x: str) -> str:
        if op not in _OWN:
            return parts.op(op, x, **values)
        alpha, beta = (parts.float32(values[key]) for key in ("alpha", "beta"))
        if op == "affine":
            return parts.add(parts.mul(x, alpha), beta)
        return parts.mul(parts.op("Tanh", parts.mul(x, beta)), alpha)

    return apply


def _shape(node: Node, *inputs: tuple[int, ...] | None) -> tuple[int, ...]:
    sizes = Sizes.of(node, *(one for one in inputs[:3] if one is not None))
    if node.get("layout", 0):
        return sizes.batch, sizes.steps, sizes.directions, sizes.hidden
    return sizes.steps, sizes.directions, sizes.batch, sizes.hidden


def _states(node: Node, tensors: Sequence[Tensor | None], y: Tensor) -> Sequence[Tensor]:
    """As the outputs of one step."""
    steps = int(bool(node.get("layout", 0)))
    last = replace(y, shape=y.shape[:steps] + y.shape[steps + 1 :])
    return (last,) * (2 if node.op == "LSTM" else 1)


_RECORD = Composite(parts=_layer, shape=_shape, further=_states)
operators.add("RNN", _RECORD)
operators.add("GRU", _RECORD)
operators.add("LSTM", _RECORD)
