"""A quantized weight [N, K] as tensors of a folder of transformers', in plain rows.

In place of NAME.weight there are, of integers q that stand for scale · (q − zero point),

    NAME.weight_values       4 bits: uint8 [N, ceil(K / 2)], the first of two in the low half;
                             8 bits: int8 [N, K]
    NAME.weight_scale        float32 [N, groups]
    NAME.weight_zero_point   uint8, or int8 of 8 bits, or float32 where it is real, [N, groups];
                             missing: all are 0, and 4-bit integers have a sign
    NAME.weight_sizes        int64 [3]: N, K, how many neighbours along K share a scale, at most K
    NAME.weight_input_scale  float32 [K], by which inputs are divided; missing: by nothing
    NAME.weight_order        int64 [K], which input a column stands for; missing: each for its own.
                             config.json says `ORDERED_VERSION` then, so that who does not know of
                             orders reads nothing

So each weight says by itself what it is. config.json says `CONFIG` under "quantization_config", and
beside it, for transformers, which layers there are (see lowbit.torch.transformers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.numerics import int_format, pack_nibbles, unpack_nibbles
from lowbit.numerics.methods import QuantizedWeight

Array = npt.NDArray[Any]

VERSION, ORDERED_VERSION = 1, 2
CONFIG = {"quant_method": "lowbit", "format_version": VERSION}
PARTS = ("values", "scale", "zero_point", "sizes", "input_scale")
VALUES, SCALE, ZERO_POINT, SIZES, INPUT_SCALE = NAMES = tuple(f"weight_{one}" for one in PARTS)
ORDER = "weight_order"


def to_tensors(weight: QuantizedWeight) -> dict[str, Array]:
    """The tensors of a weight [N, K] of int8, int4 or uint4, by their names behind "NAME."."""
    q, rows, depth = weight.weight, *weight.weight.shape
    four_bits = q.format.bits == 4
    scale = np.ascontiguousarray(q.scale.reshape(rows, -1))
    size = q.group_size or depth
    tensors = {
        VALUES: pack_nibbles(q.values) if four_bits else np.ascontiguousarray(q.values),
        SCALE: scale,
        SIZES: np.array([rows, depth, min(size, depth)], np.int64),
    }
    zeros = weight.zero_point
    if zeros is None and (q.zero_point.any() or (four_bits and not q.format.signed)):
        zeros = q.zero_point.astype(np.uint8 if four_bits else np.int8)
    if zeros is not None:
        tensors[ZERO_POINT] = np.ascontiguousarray(zeros.reshape(scale.shape))
    if weight.input_scale is not None:
        tensors[INPUT_SCALE] = weight.input_scale
    return tensors


def from_tensors(
    tensors: Mapping[str, Array],
    which: slice = slice(None),
) -> QuantizedWeight:
    """The weight that `to_tensors` was given, or some of its rows. ValueError names the tensor that
    is missing or does not fit."""
    rows, depth, size = (int(n) for n in part(tensors, SIZES, ["int64"], 3))
    if not (rows > 0 and 0 < size <= depth):
        raise ValueError(f"{SIZES} must be N, K and a size up to K, got {[rows, depth, size]}")
    groups = -(-depth // size)
    values = part(tensors, VALUES, ("uint8", "int8"), rows, -1)
    four_bits = values.dtype == np.uint8
    part(tensors, VALUES, ["uint8" if four_bits else "int8"], rows,
         -(-depth // 2) if four_bits else depth)  # fmt: skip
    values = values[which]
    scale, zeros = part(tensors, SCALE, ["float32"], rows, groups)[which], None
    if ZERO_POINT in tensors:
        whole = "uint8" if four_bits else "int8"
        zeros = part(tensors, ZERO_POINT, (whole, "float32"), rows, groups)[which]
        if not np.isfinite(zeros).all():
            raise ValueError(f"{ZERO_POINT} must be finite")
    factors = None
    if INPUT_SCALE in tensors:
        factors = part(tensors, INPUT_SCALE, ["float32"], depth)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ValueError(f"{INPUT_SCALE} must be positive and finite")
    fmt = int_format("int8" if not four_bits else "int4" if zeros is None else "uint4")
    if four_bits:
        values = unpack_nibbles(values, depth, fmt.name)
    zeros = np.zeros(scale.shape, np.int32) if zeros is None else zeros
    if fmt.name == "int8" and groups == 1 and zeros.dtype.kind != "f":
        return QuantizedWeight.of(values, scale[:, 0], zeros[:, 0], fmt, None, factors)
    return QuantizedWeight.of(values, scale, zeros, fmt, size, factors)


def rows(tensors: Mapping[str, Array], which: Array) -> npt.NDArray[np.float32]:
    """Some rows of the weight that `from_tensors` makes, as numbers, float32 [rows, K]."""
    count, depth, size = (int(n) for n in part(tensors, SIZES, ["int64"], 3))
    values = part(tensors, VALUES, ("uint8", "int8"), count, -1)[which]
    if values.dtype == np.uint8:
        values = unpack_nibbles(values, depth, "uint4" if ZERO_POINT in tensors else "int4")

    def spread(name: str, *dtypes: str) -> npt.NDArray[np.float32]:
        each = part(tensors, name, dtypes, count, -(-depth // size))[which].astype(np.float32)
        return np.repeat(each, size, 1)[:, :depth]

    numbers = values.astype(np.float32)
    if ZERO_POINT in tensors:
        numbers -= spread(ZERO_POINT, "uint8", "int8", "float32")
    return numbers * spread(SCALE, "float32")


def part(tensors: Mapping[str, Array], name: str, dtypes: Collection[str], *shape: int) -> Array:
    """A tensor of one of these dtypes and of this shape, in which −1 stands for any size.

    ValueError: it is missing, or of another dtype or shape."""
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    array = tensors[name]
    sizes = tuple(n if m < 0 < n else m for n, m in zip(array.shape, shape, strict=False))
    if array.dtype.name not in dtypes or sizes != array.shape or len(shape) != array.ndim:
        raise ValueError(
            f"{name} must be {' or '.join(dtypes)} {list(shape)}, got {array.dtype.name} "
            f"{list(array.shape)}"
        )
    return array
