"""What type checkers are told of the public functions' arguments and results.

An operand is a NumPy array or a PyTorch CPU tensor; a result is of the kind of the left operand.
Without PyTorch a type checker does not know the second kind, and takes it for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = TypeVar("Kind", npt.NDArray[Any], "Tensor")
"""Of the left operand, of `out` and of the result: all are arrays, or all are tensors."""

Operand: TypeAlias = "npt.NDArray[Any] | Tensor"
"""A matrix, a stack of them, or a vector."""

Numbers: TypeAlias = "npt.ArrayLike | Tensor"
"""One number for all rows, or one for each."""

FloatDtype = Literal["float32", "bfloat16"]
"""What a product of floats is rounded to."""

FloatType: TypeAlias = "FloatDtype | type[Any] | np.dtype[Any] | torch.dtype"
"""The same, by its name or as a type of NumPy, ml_dtypes or PyTorch."""

OutDtype = Literal["float32", "bfloat16", "uint8", "int8"]
"""What a scaled product is rounded to."""

PaddingMode = Literal["constant", "reflect", "edge", "wrap"]
"""What lies outside of an image, as numpy.pad calls it."""
