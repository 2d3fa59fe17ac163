"""What Triton's front end makes anew at every operation, made once for each block type.

A tensor wraps every number of its shape, and an operator asks some twenty questions about its
operands: with few types in a kernel, and some hundred thousand operations in a check, that took
most of the interpreter's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

_OPERATORS = {
    "__add__": np.add, "__radd__": np.add, "__sub__": np.subtract, "__mul__": np.multiply,
    "__rmul__": np.multiply, "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater,
    "__ge__": np.greater_equal, "__eq__": np.equal, "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
}  # fmt: skip
# The dtypes of operands, and the numbers that become such a dtype.
_NUMBERS = {"fp32": (int, float), "int32": (int,), "int64": (int,)}
_ALL, _FIRST, _LAST = slice(None), -(1 << 31), (1 << 31) - 1


def replacements(tl: Any, interpreter: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace: of which class, by which name. tl: triton.language, made to be interpreted;
    interpreter: the module."""
    yield tl.tensor, "__init__", _tensor(tl.tensor.__init__)
    yield tl.tensor, "__getitem__", _indexing(tl.tensor, interpreter)
    semantic = type(interpreter.interpreter_semantic)
    yield semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value)
    for name in _OPERATORS:
        yield tl.tensor, name, _operator(name, tl.tensor, interpreter)


@cache
def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in known:
            original(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init_tensor


@cache
def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return left, right
        return original(self, left, right)

    return broadcast


@cache
def _learned(name: str) -> dict[Any, Any]:
    """The types of what Triton made, for the method of tensors, by the types of operands."""
    return {}


def _operator(name: str, tensor: Any, interpreter: Any) -> Callable[..., Any]:
    """The method of tensors that asks Triton for the type of its result once, where both operands
    have one dtype, or a number becomes it, or a pointer moves; NumPy broadcasts as Triton does."""
    original, known, combine = getattr(tensor, name), _learned(name), _OPERATORS[name]
    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    numbers: dict[str, tuple[type, ...]] = {"int1": ()} if name == "__and__" else _NUMBERS

    def alike(left: Any, right: Any, kind: type) -> bool:
        if left.is_ptr() and kind is tensor:
            return name == "__add__" and right.dtype.name in ("int32", "int64")
        if left.name not in numbers:
            return False
        return right.dtype.name == left.name if kind is tensor else kind in numbers[left.name]

    def apply(self: Any, other: Any, **more: Any) -> Any:
        kind = type(other)
        key = (self.type.name, other.type.name if kind is tensor else kind)
        if more or key not in known or (kind is int and not _FIRST <= other <= _LAST):
            made = original(self, other, **more)
            if alike(self.dtype, other, kind):
                known[key] = made.type, self.dtype.is_ptr()
            return made
        type_, moved = known[key]
        left = self.handle
        if kind is tensor:
            right = other.handle
        else:
            right = handle(np.array([other], left.data.dtype), left.dtype)
        if moved:
            return tensor(builder.create_addptr(left, right), type_)
        return tensor(builder.binary_op(left, right, combine), type_)

    return apply


def _indexing(tensor: Any, interpreter: Any) -> Callable[..., Any]:
    """Indexing by None and whole slices, which asks Triton for the type of its result once."""
    original, known, handle = tensor.__getitem__, _learned("[]"), interpreter.TensorHandle

    def index(self: Any, slices: Any, **more: Any) -> Any:
        if more or type(slices) is not tuple or any(x is not None and x != _ALL for x in slices):
            return original(self, slices, **more)
        key = (self.type.name, *(one is None for one in slices))
        if key not in known:
            made = original(self, slices)
            known[key] = made.type, made.handle.data.shape
            return made
        type_, shape = known[key]
        return tensor(handle(self.handle.data.reshape(shape), self.handle.dtype.scalar), type_)

    return index
