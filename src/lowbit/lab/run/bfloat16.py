"""bfloat16 in Triton's interpreter, which keeps it as uint16, as a GPU computes with it.

The interpreter cuts a float32 off where a GPU rounds it to the nearest, ties to even (PTX ISA,
cvt.rn.bf16.f32), and takes the bits for integers in all other conversions and in arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

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
