"""Types of blocks, which Triton's front end makes anew at every operation, made once each.

A block type checks its shape, and each tensor wraps every number of its shape: with few shapes in a
kernel, and some hundred thousand operations in a check, that took half of the interpreter's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any


def replacements(tl: Any, semantic: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What to replace: of which class, by which name. tl: triton.language; semantic: the class that
    checks operands."""
    yield tl.block_type, "__init__", _block(tl.block_type.__init__, tl)
    yield tl.tensor, "__init__", _tensor(tl.tensor.__init__)
    yield semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value)


@cache
def _block(original: Callable[..., None], tl: Any) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = shape.values if isinstance(shape, tl.tuple) else shape
        # 4.0 and True would find what belongs to 4 and 1; other kinds are for Triton to refuse.
        if not isinstance(element_ty, tl.dtype) or any(type(n) is not int for n in lengths):
            original(self, element_ty, shape)
            return
        key = (element_ty.name, *lengths)
        if key not in known:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    return init_block_type


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
