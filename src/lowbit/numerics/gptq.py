"""Reading a linear layer of a GPTQ checkpoint.

GPTQ is Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers". The layout is that of the AutoGPTQ and GPTQModel libraries, for four bits. Their
configuration files name two formats: "gptq" stores each zero point less 1, "gptq_v2" stores it
as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lowbit.numerics.affine import check_finite
from lowbit.numerics.formats import first_index, int_format
from lowbit.numerics.nibbles import PER_WORD, from_int32
from lowbit.numerics.qtensor import QTensor

CheckpointFormat = Literal["gptq", "gptq_v2"]


@dataclass(frozen=True, eq=False)
class GPTQLayer:
    """A 4-bit weight whose groups are consecutive rows.

    - weight: uint4 [K, N], with scale and zero_point [G, N] (axis=1, group_axis=0).
    - permutation: int64 [K], or None if the rows are in the layer's own order. Row j of `weight`
      is row permutation[j] of the layer, so y = x[:, permutation] @ weight for x [M, K].
    """

    weight: QTensor
    permutation: npt.NDArray[np.int64] | None


def read_gptq(
    qweight: npt.ArrayLike,
    qzeros: npt.ArrayLike,
    scales: npt.ArrayLike,
    g_idx: npt.ArrayLike | None = None,
    *,
    checkpoint_format: CheckpointFormat,
    group_size: int | None = None,
) -> GPTQLayer:
    """The 4-bit weight [K, N] of a layer y = x @ W, from the four arrays of a GPTQ checkpoint.

        W[k, n] = scales[g, n] · (q[k, n] − z[g, n])        g = g_idx[k]

    - qweight: int32 [K/8, N]; nibble i of word [w, n] is q[8w + i, n].
    - qzeros: int32 [G, N/8]; nibble i of word [g, w] belongs to z[g, 8w + i].
    - scales: float16, bfloat16 or float32 [G, N], positive.
    - g_idx: integers [K], the group of each row; None: row k is in group k // group_size. Where it
      is anything else (act-order), the rows are sorted by group; the order within a group stays.
    - checkpoint_format: "gptq" stores z − 1 in qzeros, "gptq_v2" stores z.
    - group_size: rows in a group, −1 for all; the last group may have fewer. None: from g_idx, or
      K / G if that is an integer.

    Raises TypeError for a wrong dtype; ValueError if shapes, the group size and g_idx do not fit
    together, if a scale is not positive and finite (naming the first), or if a zero point is stored
    as 15 in the format "gptq": some readers take that for 16 and some for 0, and some writers
    borrowed from the next nibble (AutoGPTQ's pull request 640 discusses it).
    """
    qweight, qzeros = np.asarray(qweight), np.asarray(qzeros)
    scales = _checked_parts(qweight, qzeros, np.asarray(scales), checkpoint_format)
    rows, groups = PER_WORD * qweight.shape[0], scales.shape[0]
    if g_idx is not None:
        g_idx = _checked_g_idx(np.asarray(g_idx), rows, groups)
    size = _group_size(group_size, rows, groups, g_idx)
    permutation = None if g_idx is None else _permutation(g_idx, size)
    values = from_int32(qweight, axis=0)
    if permutation is not None:
        values = values[permutation]
    zero_point = _zero_points(qzeros, checkpoint_format)
    weight = QTensor(
        values, scales, zero_point, int_format("uint4"), axis=1, group_size=size, group_axis=0
    )
    return GPTQLayer(weight, permutation)


def _checked_parts(
    qweight: npt.NDArray[Any], qzeros: npt.NDArray[Any], scales: npt.NDArray[Any], name: str
) -> npt.NDArray[np.float32]:
    """The scales as float32, once dtypes and shapes are known to be good."""
    if name not in get_args(CheckpointFormat):
        raise ValueError(
            f"unknown checkpoint_format {name!r}; pass 'gptq' or 'gptq_v2', as the checkpoint's "
            "quantization config says ('gptq' where it says nothing)"
        )
    for part, array in (("qweight", qweight), ("qzeros", qzeros)):
        if array.dtype != np.int32:
            raise TypeError(f"expected {part} of dtype int32, got {array.dtype}")
    if scales.dtype.kind in "biu" or not np.can_cast(scales.dtype, np.float32):
        raise TypeError(
            f"expected scales of dtype float16, bfloat16 or float32, got {scales.dtype}"
        )
    if qweight.ndim != 2 or 0 in qweight.shape or qweight.shape[1] % PER_WORD:
        raise ValueError(
            f"expected qweight of shape [K/8, N], N a multiple of 8, got {qweight.shape}"
        )
    columns = qweight.shape[1]
    if scales.ndim != 2 or scales.shape[0] == 0 or scales.shape[1] != columns:
        raise ValueError(
            f"expected scales of shape [G, N] with N = {columns}, the columns of qweight, "
            f"got {scales.shape}"
        )
    expected = (scales.shape[0], columns // PER_WORD)
    if qzeros.shape != expected:
        raise ValueError(f"expected qzeros of shape [G, N/8] = {expected}, got {qzeros.shape}")
    check_finite(scales)
    if not (scales > 0).all():
        index = first_index(~(scales > 0))
        raise ValueError(f"expected positive scales, found {float(scales[index])} at index {index}")
    return scales.astype(np.float32)


def _checked_g_idx(g_idx: npt.NDArray[Any], rows: int, groups: int) -> npt.NDArray[np.int64]:
    if g_idx.dtype.kind not in "iu":
        raise TypeError(f"expected g_idx of an integer dtype, got {g_idx.dtype}")
    if g_idx.shape != (rows,):
        raise ValueError(
            f"expected g_idx of shape ({rows},), one per row of the weight, got {g_idx.shape}"
        )
    outside = (g_idx < 0) | (g_idx >= groups)
    if outside.any():
        (first,) = first_index(outside)
        raise ValueError(
            f"expected g_idx within 0 to {groups - 1}, the rows of scales, found "
            f"{int(g_idx[first])} at index {first}"
        )
    return g_idx.astype(np.int64)


def _group_size(
    given: int | None, rows: int, groups: int, g_idx: npt.NDArray[np.int64] | None
) -> int:
    if given is None:
        if g_idx is not None:
            # Only the last group may be shorter than the others.
            size = int((g_idx == 0).sum())
        elif rows % groups == 0:
            size = rows // groups
        else:
            raise ValueError(
                f"{rows} rows in {groups} groups leave the group size open; pass group_size"
            )
    elif isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"expected group_size to be None or an int, got {given!r}")
    else:
        size = rows if given == -1 else given
    if size < 1 or -(-rows // size) != groups:
        raise ValueError(
            f"groups of {size} rows do not cut {rows} rows into the {groups} groups of scales"
        )
    return size


def _permutation(g_idx: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64] | None:
    """The rows by group; None if they are in that order already."""
    plain = np.arange(g_idx.size) // size
    if (g_idx == plain).all():
        return None
    permutation = np.argsort(g_idx, kind="stable").astype(np.int64)
    if (g_idx[permutation] != plain).any():
        counts = np.bincount(g_idx).tolist()
        raise ValueError(
            f"expected g_idx with {size} rows in every group but the last, got groups of {counts}; "
            "leave g_idx out if the rows are in groups in order"
        )
    return permutation


def _zero_points(qzeros: npt.NDArray[np.int32], name: str) -> npt.NDArray[np.int32]:
    stored = from_int32(qzeros, axis=1).astype(np.int32)
    if name == "gptq_v2":
        return stored
    if (stored == 15).any():
        index = first_index(stored == 15)
        raise ValueError(
            f"the zero point at index {index} is stored as 15, which readers of the format 'gptq' "
            "take for 16 or for 0; convert the checkpoint to 'gptq_v2' with the library that wrote "
            "it, or pass checkpoint_format='gptq_v2' if it is in that format"
        )
    return stored + 1
