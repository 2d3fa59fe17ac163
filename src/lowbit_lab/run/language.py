"""What Triton's compiler makes of `and`, `or`, `not`, `if` and `range`, for its interpreter.

The interpreter leaves them to Python, which asks a block of lanes for one truth value, and counts
with its own integers. The compiler takes `and` and `or` of tensors lane by lane, computes both
sides, and refuses a block as a condition; what a loop counts is a tensor, of 32 bits unless a bound
is wider (triton/compiler/code_generator.py, visit_BoolOp, visit_If and visit_For).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray


class Transformer(ast.NodeTransformer):
    """Rewrites these operators into calls of `logic`, then lets `after` rewrite the tree."""

    def __init__(self, after: ast.NodeTransformer) -> None:
        self._after = after

    def visit_Module(self, node: ast.Module) -> Any:
        return self._after.visit(self.generic_visit(node))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        first, *others = [self.visit(value) for value in node.values]
        name = "_lowbit_both" if isinstance(node.op, ast.And) else "_lowbit_either"
        for other in others:
            later = ast.Lambda(_NO_ARGUMENTS, other)
            first = ast.Call(ast.Name(name, ast.Load()), [first, later], [])
        return ast.copy_location(first, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        called = ast.Call(ast.Name("_lowbit_opposite", ast.Load()), [node.operand], [])
        return ast.copy_location(called, node)


def logic(tensor: type[Any]) -> Mapping[str, Any]:
    """The functions, by name, that the rewritten text calls; `tensor` is Triton's class."""

    def both(left: Any, right: Callable[[], Any]) -> Any:
        return left.logical_and(right()) if isinstance(left, tensor) else left and right()

    def either(left: Any, right: Callable[[], Any]) -> Any:
        return left.logical_or(right()) if isinstance(left, tensor) else left or right()

    def opposite(value: Any) -> Any:
        return value == 0 if isinstance(value, tensor) else not value

    return {f"_lowbit_{function.__name__}": function for function in (both, either, opposite)}


def counting(tl: Any, interpreter: Any) -> Callable[..., Iterator[Any]]:
    """What stands for `range` and `tl.range`: `tl` is triton.language."""

    def count(first: Any, end: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
        bounds = (0, first, step) if end is None else (first, end, step)
        plain = [getattr(bound, "value", bound) for bound in bounds]
        wide = any(getattr(bound, "dtype", None) in (tl.int64, tl.uint64) for bound in plain)
        numbers = range(*(int(bound) for bound in plain))
        dtype = tl.int64 if wide else tl.int32
        stored = np.dtype(np.int64 if wide else np.int32)
        for number in numbers:
            handle = interpreter.TensorHandle(np.array([number], stored), dtype)
            yield tl.tensor(handle, dtype)

    return count


# One of the names that only rewritten texts have among their globals.
_OF_REWRITTEN = "_lowbit_both"
_NO_ARGUMENTS = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])


def truth(machinery: tuple[str, ...], front_end: str) -> Callable[[Any], bool]:
    """The truth value of a tensor: that of its only lane. Of a block a ValueError, if the text of a
    kernel asks; `machinery` are the folders whose frames are no such text.

    front_end: the folder of Triton's language. Its own functions (`other.handle if other else None`
    in `load`) are written for the compiler, where a tensor has no value yet: they ask whether there
    is a tensor at all. Jitted functions of that folder are the text of a kernel like any other.
    """

    def value(tensor: Any) -> bool:
        caller = sys._getframe(1)
        file = caller.f_code.co_filename
        if file.startswith(front_end) and _OF_REWRITTEN not in caller.f_globals:
            return True
        lanes = tensor.handle.data
        if lanes.size == 1:
            return bool(lanes.reshape(-1)[0])
        if not file.startswith(machinery):
            raise ValueError(
                f"a block of {lanes.size} lanes is no condition; use mask= or tl.where instead"
            )
        return True

    return value


# bfloat16 in Triton's interpreter, which keeps it as uint16, as a GPU computes with it.
#
# The interpreter cuts a float32 off where a GPU rounds it to the nearest, ties to even (PTX ISA,
# cvt.rn.bf16.f32), and takes the bits for integers in all other conversions and in arithmetic.

_NAN = 0x7FFF


def rounded_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Numbers of any dtype as the bits of the nearest bfloat16, by way of float32, and with the
    one NaN that a GPU makes."""
    with np.errstate(all="ignore"):
        nearest = np.asarray(values).astype(np.float32).astype(bfloat16)
    return np.where(np.isnan(nearest), np.uint16(_NAN), nearest.view(np.uint16))


class Bfloat16:
    """What replaces methods of the interpreter's builder."""

    def __init__(self, builder: Any, interpreter: Any) -> None:
        self._interpreter, self._narrow = interpreter, interpreter.tl.bfloat16
        self._cast, self._convert = builder.cast_impl, builder.create_fp_to_fp
        self._binary, self._unary = builder.binary_op, builder.unary_op

    def methods(self) -> dict[str, Callable[..., Any]]:
        """By their names in the builder."""
        return {
            "cast_impl": self._converted,
            "create_fp_to_fp": self._rounded_as_told,
            "binary_op": self._combined,
            "unary_op": self._applied,
            # Triton 3.6 has none.
            "get_bf16": self._number,
        }

    def wide(self, handle: Any) -> Any:
        """A handle of bfloat16 as one of float32; others as they are."""
        if handle.dtype.scalar != self._narrow:
            return handle
        return self._interpreter.TensorHandle(
            handle.data.view(bfloat16).astype(np.float32), self._interpreter.tl.float32
        )

    def _number(self, value: float) -> Any:
        return self._interpreter.TensorHandle(rounded_bits(np.array([value])), self._narrow)

    def _rounded(self, handle: Any) -> Any:
        return self._interpreter.TensorHandle(rounded_bits(handle.data), self._narrow)

    def _converted(self, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == dtype.scalar:
            return source
        made = self.wide(source)
        return self._rounded(made) if dtype.scalar == self._narrow else self._cast(made, dtype)

    def _rounded_as_told(self, source: Any, dtype: Any, mode: Any) -> Any:
        towards_zero = str(mode).rpartition(".")[2] == "RTZ"
        if self._narrow not in (source.dtype.scalar, dtype.scalar) or towards_zero:
            return self._convert(source, dtype, mode)
        return self._converted(source, dtype)

    def _combined(self, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        if left.dtype.scalar != self._narrow:
            return self._binary(left, right, op)
        made = self._binary(self.wide(left), self.wide(right), op)
        # What a comparison makes is no number.
        return made if made.data.dtype.kind == "b" else self._rounded(made)

    def _applied(self, operand: Any, op: Callable[..., Any]) -> Any:
        if operand.dtype.scalar != self._narrow:
            return self._unary(operand, op)
        return self._rounded(self._unary(self.wide(operand), op))
