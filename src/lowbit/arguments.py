"""Checks of what users hand to the public functions; errors say what was given and expected."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.kernels.cpu.layout import PANEL, blocks
from lowbit.spec import longest_sum

Array = npt.NDArray[Any]

_SHORT_NAMES = {np.dtype(np.int8): "s8", np.dtype(np.uint8): "u8"}


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _array(value: Any, name: str) -> Array:
    """A NumPy view of an array or a PyTorch CPU tensor."""
    if _is_torch(value):
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}; move it with {name}.cpu()")
        value = value.detach().resolve_conj().resolve_neg().numpy()
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be a NumPy array or a PyTorch tensor, got {type(value).__name__}"
        )
    if not value.dtype.isnative:
        raise TypeError(f"{name} has bytes in foreign order ({value.dtype}); convert it first")
    return value


def matrix(value: Any, name: str) -> Array:
    """A two-dimensional NumPy view of an array or a PyTorch CPU tensor."""
    array = _array(value, name)
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, got shape {array.shape}")
    return array


def _check_bytes(array: Array, name: str) -> Array:
    if array.dtype not in _SHORT_NAMES:
        hint = (
            f"; quantize it first: lowbit.quantize({name})"
            if np.issubdtype(array.dtype, np.floating)
            else "; convert it with astype if its values fit"
        )
        raise TypeError(f"{name} must be of int8 or uint8, got {array.dtype}{hint}")
    return array


def bytes_matrix(value: Any, name: str) -> Array:
    """As `matrix`, for int8 and uint8 only."""
    return _check_bytes(matrix(value, name), name)


def bytes_array(value: Any, name: str) -> Array:
    """A stack of matrices of int8 or uint8: at least two dimensions."""
    array = _check_bytes(_array(value, name), name)
    if array.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {array.shape}")
    return array


def float_matrix(value: Any, name: str) -> Array:
    """As `matrix`, for float32 only."""
    array = matrix(value, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {array.dtype}; convert it first")
    return array


def check_inner(a: Array, b_shape: tuple[int, ...], name: str = "a") -> None:
    """a's columns must be b's rows."""
    if a.shape[1] != b_shape[0]:
        raise ValueError(
            f"{name} is {a.shape[0]}x{a.shape[1]} and b is {b_shape[0]}x{b_shape[1]}: "
            f"the columns of {name} ({a.shape[1]}) must equal the rows of b ({b_shape[0]})"
        )


def check_depth(
    k: int,
    a_dtype: np.dtype[Any],
    b_dtype: np.dtype[Any],
    centred: tuple[bool, bool] = (False, False),
) -> None:
    """K must be small enough that no sum of products can leave int32.

    `centred`: whether a zero point is taken from a's, from b's values first.
    """
    most = longest_sum(_SHORT_NAMES[a_dtype], _SHORT_NAMES[b_dtype], shifted=centred)
    if k > most:
        raise ValueError(
            f"K = {k} products of {a_dtype} and {b_dtype} could overflow int32; at most {most} "
            "cannot: split K and add the parts in int64"
        )


def output(
    like: Any, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: tuple[Any, ...] = ()
) -> tuple[Array, Any]:
    """(where to write, what to return): `out`, or a new array of the kind of `like`."""
    if out is None:
        if _is_torch(like):
            torch = sys.modules["torch"]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.name))
            return tensor.numpy(), tensor
        array = np.empty(shape, dtype)
        return array, array
    array = _array(out, "out")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"out must be {dtype} {shape}, got {array.dtype} {array.shape}")
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    if any(isinstance(i, np.ndarray) and np.may_share_memory(array, i) for i in inputs):
        raise ValueError("out shares memory with an operand, which would be overwritten while read")
    return array, out


def per_row(
    value: Any, rows: int, dtype: np.dtype[Any], name: str, limits: tuple[int, int] | None = None
) -> Array:
    """One number, or one for each row, as an array of one for each row.

    `limits`: the least and the greatest that an integer may be.
    """
    if isinstance(value, float | int) and (limits is None or isinstance(value, int)):
        least = greatest = value
        array = np.full(rows, value if limits is None else 0, dtype)
    else:
        given = np.asarray(value)
        if given.dtype.kind not in ("iu" if limits else "iuf"):
            what = "integers" if limits else "real numbers"
            raise TypeError(f"{name} must be of {what}, got {given.dtype}")
        if given.shape not in ((), (1,), (rows,)):
            raise ValueError(
                f"{name} must be one number or have shape ({rows},), got {given.shape}"
            )
        array = np.empty(rows, dtype)
        if limits is None:
            array[...] = given
            return array
        least, greatest = (int(given.min()), int(given.max())) if given.size else limits
    if limits is not None:
        if not limits[0] <= least <= greatest <= limits[1]:
            raise ValueError(
                f"{name} must lie between {limits[0]} and {limits[1]}, got {least} to {greatest}"
            )
        array[...] = value
    return array


def per_column(value: Any, columns: int, name: str) -> Array | None:
    """float32 for each column, padded with zeros to whole panels; None stays None."""
    if value is None:
        return None
    array = np.asarray(value.detach() if _is_torch(value) else value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be of real numbers, got {array.dtype}")
    array = array.astype(np.float32)
    if array.shape != (columns,):
        raise ValueError(f"{name} must have shape ({columns},), got {array.shape}")
    return padded(array)


def padded(array: Array) -> Array:
    """A copy of a vector over the columns, filled with zeros to whole panels."""
    result = np.zeros(blocks(len(array), PANEL) * PANEL, array.dtype)
    result[: len(array)] = array
    return result
