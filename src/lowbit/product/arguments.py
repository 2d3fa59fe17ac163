"""Checks of what users hand to the public functions; errors say what was given and expected."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit.jit.workspace import recycled_empty
from lowbit.kernels.cpu.shared.layout import FLIP, PANEL
from lowbit.numerics import longest_sum
from lowbit.numerics.float32 import BEYOND, float32_array, float32_number, moderate
from lowbit.numerics.formats import is_masked
from lowbit.weights.panels import PackedMatrix, padded

Array = npt.NDArray[Any]

_LARGE = 1 << 18  # bytes of an output that is worth beginning at a cache line
_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(bfloat16)
_INT8 = np.dtype(np.int8)
FLOATS = (_FLOAT32, _BFLOAT16)
Dtypes = tuple[np.dtype[Any], ...]
_LIMITS = {_INT8: (-128, 127), np.dtype(np.uint8): (0, 255)}


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def array(value: Any, name: str) -> Array:
    """A NumPy view of an array or a PyTorch CPU tensor, of any shape and type."""
    if _is_torch(value):
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}; move it with {name}.cpu()")
        value = viewed(value)
    if not isinstance(value, np.ndarray) or is_masked(value):
        raise TypeError(
            f"{name} must be a NumPy array or a PyTorch tensor, got {type(value).__name__}"
        )
    check_native(value.dtype, name)
    # No subclass, whose indexing may mean something else.
    return value if type(value) is np.ndarray else np.asarray(value)


def check_native(dtype: np.dtype[Any], name: str) -> None:
    """Bytes must be in this machine's order."""
    if not dtype.isnative:
        raise TypeError(f"{name} has bytes in foreign order ({dtype}); convert it first")


def viewed(tensor: Any) -> Array:
    """A PyTorch CPU tensor as an array; bfloat16 is ml_dtypes'."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    torch = sys.modules["torch"]
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(bfloat16)


def tensor_of(given: Array) -> Any:
    """An array as a PyTorch tensor of the same memory and type."""
    torch = sys.modules["torch"]
    if given.dtype != bfloat16:
        return torch.from_numpy(given)
    return torch.from_numpy(given.view(np.int16)).view(torch.bfloat16)


def matrix(value: Any, name: str) -> Array:
    """A two-dimensional NumPy view of an array or a PyTorch CPU tensor."""
    given = array(value, name)
    check_matrix(given.shape, name)
    return given


def check_matrix(shape: tuple[int, ...], name: str) -> None:
    """A shape must have two dimensions."""
    if len(shape) != 2:
        raise ValueError(f"{name} must have two dimensions, got shape {shape}")


def check_bytes(dtype: np.dtype[Any], name: str) -> None:
    """Only bytes will do."""
    if dtype not in _LIMITS:
        hint = (
            f"; quantize it first: lowbit.quantize({name})"
            if np.issubdtype(dtype, np.floating)
            else "; convert it with astype if its values fit"
        )
        raise TypeError(f"{name} must be of int8 or uint8, got {dtype}{hint}")


def bytes_matrix(value: Any, name: str) -> Array:
    """As `matrix`, for int8 and uint8 only."""
    given = matrix(value, name)
    check_bytes(given.dtype, name)
    return given


def bytes_array(value: Any, name: str) -> Array:
    """A stack of matrices of int8 or uint8: at least two dimensions."""
    given = array(value, name)
    check_bytes(given.dtype, name)
    if given.ndim < 2:
        raise ValueError(f"{name} must have at least two dimensions, got shape {given.shape}")
    return given


def float_matrix(value: Any, name: str, dtypes: Dtypes = (_FLOAT32,)) -> Array:
    """As `matrix`, for these types only."""
    if type(value) is np.ndarray and value.dtype == _FLOAT32 and value.ndim == 2:
        return value
    given = matrix(value, name)
    if given.dtype not in dtypes:
        known = " or ".join(dtype.name for dtype in dtypes)
        raise TypeError(f"{name} must be {known}, got {given.dtype}; convert it first")
    return given


def float_rows(value: Any, name: str, dtypes: Dtypes = (_FLOAT32,)) -> Array:
    """As `float_matrix`, with rows that are contiguous and whole elements apart: or a copy."""
    given = float_matrix(value, name, dtypes)
    if given.flags.c_contiguous:
        return given
    apart = given.strides[0] % given.itemsize == 0
    inner = given.shape[1] <= 1 or given.strides[1] == given.itemsize
    return given if apart and inner else np.ascontiguousarray(given)


def check_float(dtype: np.dtype[Any], name: str) -> None:
    """Only float32 and bfloat16 will do, in this machine's order."""
    check_native(dtype, name)
    if dtype not in FLOATS:
        raise TypeError(f"{name} must be float32 or bfloat16, got {dtype}; convert it first")


def real_dtype(given: Any) -> np.dtype[Any]:
    """float32 or bfloat16, by its name, or as a type of NumPy, ml_dtypes or PyTorch."""
    name = getattr(given, "__name__", str(given).split(".")[-1])
    for dtype in FLOATS:
        if dtype.name == name:
            return dtype
    raise ValueError(f"out_dtype must be float32 or bfloat16, got {given!r}")


def factor(value: Any, name: str) -> float:
    """A float32 number."""
    known = type(value) is float and -BEYOND < value < BEYOND
    return value if known else float32_number(value, name)


def check_inner(a: tuple[int, ...], b: tuple[int, ...], name: str = "a") -> None:
    """The columns of a matrix of shape `a` must be the rows of one of shape `b`."""
    if a[1] != b[0]:
        raise ValueError(
            f"{name} is {a[0]}x{a[1]} and b is {b[0]}x{b[1]}: "
            f"the columns of {name} ({a[1]}) must equal the rows of b ({b[0]})"
        )


def check_scaled(b: Any) -> None:
    """b must be packed from a QTensor."""
    if not isinstance(b, PackedMatrix):
        raise TypeError(
            f"b must be packed, got {type(b).__name__}: lowbit.pack(lowbit.quantize(b, axis=1))"
        )
    if b.scale is None:
        raise ValueError("b has no scale: pack a QTensor, lowbit.pack(lowbit.quantize(b, axis=1))")


def check_k(
    k: int, a_dtype: str, b_dtype: str, centred: tuple[bool, bool] = (False, False)
) -> None:
    """K must be small enough that no sum of products can leave int32.

    `centred`: whether a zero point is taken from a's, from b's values first.
    """
    most = longest_sum(a_dtype, b_dtype, shifted=centred)
    if k > most:
        raise ValueError(
            f"K = {k} products of {a_dtype} and {b_dtype} could overflow int32; at most {most} "
            "cannot: split K and add the parts in int64"
        )


def allocation(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Any, tuple[Any, ...]]:
    """What makes a new output, and of which arguments."""
    large = math.prod(shape) * dtype.itemsize >= _LARGE
    return recycled_empty if large else np.empty, (shape, dtype)


def output(
    like: Any, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], inputs: tuple[Any, ...] = ()
) -> tuple[Array, Any]:
    """(where to write, what to return): `out`, or a new array of the kind of `like`.

    ValueError: `out` is of another shape or type, read-only, or shares memory with itself or with
    one of `inputs`, which are what the user gave. MemoryError: there cannot be such an array.
    """
    if out is None:
        make, arguments = allocation(shape, dtype)
        fresh = make(*arguments)
        if type(like) is not np.ndarray and _is_torch(like):
            return fresh, tensor_of(fresh)
        return fresh, fresh
    target = array(out, "out")
    if target.shape != shape or target.dtype != dtype:
        raise ValueError(f"out must be {dtype} {shape}, got {target.dtype} {target.shape}")
    flags = target.flags
    if not flags.writeable:
        raise ValueError("out is read-only")
    if not flags.c_contiguous:
        check_no_overlap(target.shape, target.strides, dtype.itemsize)
    for one in inputs:
        if type(one) in _WITHOUT_MEMORY:
            continue
        memory = viewed(one) if _is_torch(one) else one
        if isinstance(memory, np.ndarray) and shares_bytes(target, memory):
            raise ValueError(
                "out shares memory with an operand, which would be overwritten while read"
            )
    return target, out


_OVERLAP_STEPS = 1 << 16  # of NumPy's search, which two matrices beside each other take few of


def shares_bytes(first: Array, second: Array) -> bool:
    """Whether arrays have a byte in common; also where that would take long to find out.

    Arrays in one buffer need not have one, though each may begin before the other ends: two blocks
    of columns of a matrix do not."""
    if not np.may_share_memory(first, second):
        return False
    try:
        return np.shares_memory(first, second, max_work=_OVERLAP_STEPS)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def row_stride(out: Any) -> int:
    """Elements from row to row of an output [M, N] of which kernels can write whole rows; 0: rows
    are beside each other, or it is copied from an array where they are."""
    if out is None:
        return 0
    target = out if type(out) is np.ndarray else array(out, "out")
    if target.ndim != 2 or target.flags.c_contiguous:
        return 0
    (row, step), item = target.strides, target.itemsize
    return row // item if not row % item and (step == item or target.shape[1] == 1) else 0


_WITHOUT_MEMORY = {type(None), float, int}  # to ask for these alone takes less time


def check_no_overlap(shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
    """ValueError if elements of `out` may lie in each other's bytes: if an axis steps less far than
    all that lies inside of it."""
    extent = item
    axes = [(abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1]
    for stride, count in sorted(axes):
        if stride < extent and 0 not in shape:
            raise ValueError(
                f"out shares memory with itself: {shape} elements of {item} bytes, "
                f"{strides} bytes apart"
            )
        extent += stride * (count - 1)


def plain_number(value: Any) -> Any:
    """A number of NumPy or PyTorch as Python's, which rounds nothing; anything else as it is."""
    if type(value) in _WITHOUT_MEMORY:
        return value
    alone = type(value) is np.ndarray or _is_torch(value)
    return value.item() if isinstance(value, np.number) or (alone and not value.ndim) else value


def moderate_number(value: Any) -> bool:
    """Whether it is one of Python's numbers, and moderate as a scale."""
    return type(value) in (int, float) and moderate(abs(value))


def per_row(value: Any, rows: int, name: str) -> Array:
    """One real number, or one for each row, as float32 [rows], C-contiguous."""
    if type(value) is np.ndarray and value.dtype == _FLOAT32 and value.shape == (rows,):
        return np.ascontiguousarray(value)
    each = np.empty(rows, _FLOAT32)
    if type(value) is float and -BEYOND < value < BEYOND:
        each.fill(value)
    elif isinstance(value, float | int):
        each.fill(float32_number(value, name))
    else:
        each[...] = float32_array(_numbers(value, name, "iuf", rows), name)
    return each


_flips: Array = np.full(1, FLIP, np.int32)


def flips(left: Array, rows: int) -> Array | None:
    """The zero points, int32 [rows] at least, that rows of int8 have once they are stored as uint8;
    None for other rows."""
    global _flips
    if left.dtype != _INT8:
        return None
    found = _flips
    if len(found) < rows:
        found = _flips = np.full(rows, FLIP, np.int32)
    return found


def zero_points(value: Any, rows: int, dtype: np.dtype[Any], name: str, shift: int) -> Array:
    """One zero point of `dtype`, or one for each row, plus `shift`, as int32 [rows]."""
    low, high = _LIMITS[dtype]
    each = np.empty(rows, np.int32)
    if isinstance(value, int):
        if low <= value <= high:
            each.fill(value + shift)
            return each
        least = greatest = value
    else:
        value = _numbers(value, name, "iu", rows)
        least, greatest = (int(value.min()), int(value.max())) if value.size else (low, high)
    if not low <= least <= greatest <= high:
        raise ValueError(f"{name} must lie between {low} and {high}, got {least} to {greatest}")
    each[...] = value
    if shift:
        each += shift
    return each


def _numbers(value: Any, name: str, kinds: str, rows: int) -> Array:
    given = _plain(value, name, kinds)
    if given.shape not in ((), (1,), (rows,)):
        raise ValueError(f"{name} must be one number or have shape ({rows},), got {given.shape}")
    return given


def per_column(value: Any, columns: int, name: str) -> Array | None:
    """Real numbers for each column as float32, padded with zeros to whole panels; None for None."""
    if value is None:
        return None
    given = _plain(value, name, "iuf")
    if given.shape != (columns,):
        raise ValueError(f"{name} must have shape ({columns},), got {given.shape}")
    if columns % PANEL == 0 and given.dtype == _FLOAT32 and given.flags.c_contiguous:
        return given
    values = float32_array(given, name)
    return padded(values) if columns % PANEL else values


def _plain(value: Any, name: str, kinds: str) -> Array:
    """Numbers of the given kinds as an array. TypeError: they are others, or some are masked."""
    given = viewed(value) if _is_torch(value) else np.asarray(value)
    if given.dtype == bfloat16 and "f" in kinds:
        given = given.astype(_FLOAT32)
    if given.dtype.kind not in kinds or is_masked(value):
        what = "real numbers" if "f" in kinds else "integers"
        kind = type(value).__name__ if is_masked(value) else given.dtype
        raise TypeError(f"{name} must be of {what}, got {kind}")
    return given


def per_element(
    value: Any, shape: tuple[int, ...], name: str, dtype: np.dtype[Any] = _FLOAT32
) -> Array | None:
    """Of a given shape and type, C-contiguous; None for None."""
    if value is None:
        return None
    given = array(value, name)
    if given.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {given.dtype}; convert it first")
    if given.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {given.shape}")
    return np.ascontiguousarray(given)
