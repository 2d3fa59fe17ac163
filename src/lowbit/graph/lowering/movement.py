"""Operators that move numbers: what one means, run on addresses, says where its output lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from lowbit.graph.graph import Node, numbers
from lowbit.graph.lower import Lowering, channels_last, order_of, strides_of
from lowbit.graph.lowering.elementwise import compute, converted, plain, same_format
from lowbit.graph.operator import Array, operators
from lowbit.graph.step import View

_BASE = 1 << 46  # the address that stands for the first element of a view


class _Interface:
    """Elements of no bytes, at the addresses of a view's whose elements took a byte each."""

    def __init__(self, view: View) -> None:
        self.__array_interface__ = {
            "data": (_BASE, False), "shape": view.shape, "strides": view.strides,
            "typestr": "|V0", "version": 3,
        }  # fmt: skip


class Addresses(np.ndarray):
    """A view as NumPy moves it, which reads nothing: an element has no bytes. What cannot be
    reshaped where it lies is copied by a step."""

    lowering: Lowering
    view_of_base: View

    @classmethod
    def of(cls, lowering: Lowering, view: View) -> Addresses:
        made = np.asarray(_Interface(view)).view(cls)
        made.lowering, made.view_of_base = lowering, view
        return made

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, Addresses) and hasattr(source, "lowering"):
            self.lowering, self.view_of_base = source.lowering, source.view_of_base

    def reshape(self, *shape: Any, **how: Any) -> Addresses:  # type: ignore[override]
        try:
            made = super().reshape(*shape, copy=False).view(Addresses)
        except ValueError:
            copied = plain(self.lowering, self.located())
            whole = Addresses.of(self.lowering, copied)
            return np.ndarray.reshape(whole, *shape).view(Addresses)
        strides = [
            stride if size > 1 else 0 for size, stride in zip(made.shape, made.strides, strict=True)
        ]
        strides = strides if made.size else strides_of(made.shape)
        return Addresses.of(self.lowering, replace(made.located(), strides=tuple(strides)))

    def located(self) -> View:
        """Where the elements are."""
        first: SupportsIndex = self.__array_interface__["data"][0] - _BASE
        return self.view_of_base.part(self.shape, self.strides, int(first))


def moved(lowering: Lowering, node: Node) -> None:
    """An operator whose meaning only moves the elements of its first input."""
    view = lowering.view(node.inputs[0])
    others = [constant(lowering, node, number) for number in range(1, len(node.inputs))]
    made = operators.get(node.op).meaning(node, Addresses.of(lowering, view), *others)
    for name, one in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=False):
        if name:
            settled(lowering, node, one.located(), name)


def reshaped(lowering: Lowering, view: View, shape: tuple[int, ...]) -> View:
    """A view with other sizes, copied where strides do not allow it."""
    return Addresses.of(lowering, view).reshape(shape).located()


def settled(lowering: Lowering, node: Node, view: View, name: str = "") -> None:
    """Let an output, the first if no other is named, be a view of the input; copied where its
    format is another."""
    name = name or node.outputs[0]
    tensor = lowering.graph.tensors[name]
    made = view.part(tensor.sizes, view.strides)
    if same_format(made, View(tensor, view.place, view.strides)):
        lowering.views[name] = made
    else:
        compute(lowering, lowering.output(name, order_of(made)), [made], (0,))


def identity(lowering: Lowering, node: Node) -> None:
    """The same value; images that become 8 bits lie with channels last, as their readers ask."""
    view, name = lowering.view(node.inputs[0]), node.outputs[0]
    tensor = lowering.graph.tensors[name]
    image = len(view.shape) > 3 and view.tensor.scale is None and tensor.scale is not None
    if image:
        lowering.views[name] = converted(lowering, view, tensor, channels_last(len(view.shape)))
    else:
        settled(lowering, node, view)


def constant(lowering: Lowering, node: Node, number: int) -> Array | None:
    """The numbers of an input; None if it is left out. NotImplementedError: it is no constant."""
    name = node.inputs[number] if number < len(node.inputs) else ""
    if name and name not in lowering.graph.constants:
        raise NotImplementedError(f"{node.op} is served where {name!r} is a constant")
    return numbers(lowering.graph.constants[name]) if name else None
