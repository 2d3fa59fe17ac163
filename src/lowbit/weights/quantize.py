"""`numerics.quantize`, by the kernel where it can be: the same numbers, many times as fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit import numerics
from lowbit.jit import threads as thread_runtime
from lowbit.jit.workspace import workspace
from lowbit.kernels.cpu.quantization.groups import MOST, quantize_groups, scratch_floats
from lowbit.kernels.cpu.quantization.search import leaves
from lowbit.numerics import IntDtype, IntFormat, QTensor, Range, int_format
from lowbit.numerics.affine import check_finite
from lowbit.numerics.qtensor import Axis, Sharing, axis_like, float_array
from lowbit.numerics.ranges import check_range

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Zeros = npt.NDArray[np.int32]

_WORTH_THREADS = 1 << 17  # elements
_FLOAT32 = np.dtype(np.float32)


def quantize(
    array: npt.ArrayLike,
    dtype: IntDtype | IntFormat = "int8",
    *,
    axis: Axis = None,
    group_size: int | None = None,
    group_axis: int | None = None,
    symmetric: bool = True,
    range: Range = "minmax",
) -> QTensor:
    """Quantize floating-point numbers to integers of the format `dtype`.

    `array` is a NumPy array of any shape, of float16, float32, float64 or a small float type
    such as ml_dtypes.bfloat16, or what converts to one, such as a PyTorch tensor on the CPU.
    Which values share a scale and a zero point:

    - axis=None: one for the whole array;
    - axis=i: one per index of axis i (a weight [out, in], per output channel: axis=0; an
      activation [M, K], per token: axis=0); a tuple of axes: one per combination of indices;
    - group_size=g: in addition, one per g consecutive elements of the last axis, or of
      `group_axis`. Where g does not divide the axis, the last group is shorter. (A weight
      [K, N] in groups of 128 along K: axis=1, group_size=128, group_axis=0.)

    With `symmetric` the zero point is the middle of the format (0 for int8, 128 for uint8).
    What these are chosen from is the `range`:

    - "minmax": the least and greatest value, as `affine_parameters` says. No value is off by more
      than half a step.
    - "mse": a range, mostly narrower, that is searched for to lower the squared error of what
      shares a scale, which is never above that of "minmax". Values outside of the range saturate.
      Of normal data in 4 bits with zero points it is 10 % less in groups of 32, 40 % in rows of
      4096.

    A kernel does it, and NumPy, much slower, for float64 and for groups of more than 32,768
    elements; the result is the same.

    Raises TypeError if `array` is not of such a float type, `axis`, `group_size` or `group_axis`
    is not an integer or `range` no string; ValueError for NaN or infinity (naming the first),
    values beyond float32, an unknown format or range, an axis that the array does not have, or a
    group size or axis that does not fit.
    """
    check_range(range)
    fmt, given = int_format(dtype), float_array(array)
    sharing = Sharing.of(given.shape, axis, group_size, group_axis)
    if given.dtype.itemsize <= _FLOAT32.itemsize and given.size:
        x = np.asarray(given, _FLOAT32, order="C")  # of no dimension, too
        values = np.empty(x.shape, fmt.storage)
        scale, zero = np.empty(sharing.scales, np.float32), np.empty(sharing.scales, np.int32)
        parts = list(_matrices(sharing, x, values, scale, zero))
        if all(_fits(part[0], x) for part in parts):
            if not all(quantize_into(*part, fmt, symmetric, range) for part in parts):
                check_finite(given)
            kept = axis_like(axis, sharing.kept)
            return QTensor(values, scale, zero, fmt, kept, group_size, sharing.cut)
    return numerics.quantize(
        given, fmt, axis=axis, group_size=group_size, group_axis=group_axis, symmetric=symmetric,
        range=range,
    )  # fmt: skip


def quantize_into(
    x: Floats,
    values: Array,
    scale: Floats,
    zero: Zeros,
    fmt: IntFormat,
    symmetric: bool = True,
    range: Range = "minmax",
    isa: str | None = None,
) -> bool:
    """Quantize x, float32 [groups, elements], to `values`, with a scale and a zero point a group.

    x and values have the same strides, in elements, one of which is 1; scale and zero are
    contiguous. Returns whether x is finite; if not, what was written means nothing.
    """
    groups, size = x.shape
    row, step = (stride // _FLOAT32.itemsize for stride in x.strides)
    along = "elements" if step == 1 or size == 1 else "groups"
    plan = _plan(size)
    threads = thread_runtime.max_threads() if x.size > _WORTH_THREADS else 1
    floats = scratch_floats(size)
    memory, address = workspace.reserve(threads * floats * _FLOAT32.itemsize)
    bad = np.zeros(1, np.int32)
    program = quantize_groups.program(
        instruction_sets.active(isa), fmt=fmt, symmetric=symmetric, searched=range == "mse",
        along=along,
    )  # fmt: skip
    program(
        threads, x, row, step, groups, size, scale, zero, values, address, floats, plan,
        len(plan), bad,
    )  # fmt: skip
    del memory
    return not bad[0]


@lru_cache(maxsize=64)
def _plan(size: int) -> npt.NDArray[np.int64]:
    return np.array(leaves(size), np.int64)


def _fits(part: Floats, whole: Floats) -> bool:
    """Whether the kernel takes these groups: not too long, and views."""
    steps = [stride for stride, n in zip(part.strides, part.shape, strict=True) if n > 1]
    contiguous = not steps or min(steps) == _FLOAT32.itemsize
    return part.shape[1] <= MOST and contiguous and np.may_share_memory(part, whole)


def _matrices(
    sharing: Sharing, x: Floats, values: Array, scale: Floats, zero: Zeros
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """All of these as matrices [groups, elements] and vectors [groups] to be written to."""
    for (part, where), (out, _) in zip(sharing.parts(x), sharing.parts(values), strict=True):
        arrays: tuple[Array, ...] = part, out, scale[(*where, ...)], zero[(*where, ...)]
        ndim = arrays[2].ndim
        together = part.flags.c_contiguous and arrays[2].flags.c_contiguous
        for index in [()] if together else np.ndindex(part.shape[: max(ndim - 1, 0)]):
            a, b, s, z = (array[(*index, ...)] for array in arrays)
            shape = s.size, math.prod(part.shape[ndim:])
            yield a.reshape(shape), b.reshape(shape), s.reshape(-1), z.reshape(-1)
