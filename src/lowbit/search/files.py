"""An index in a safetensors file: what its tensors and metadata are called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.search.codec import Codec
from lowbit.search.content import MOST, Content
from lowbit.search.storage import Arrays, Part
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

FILE = TensorFile("lowbit.vector_index", "vector index", "2")
_PARTS = ("panels", "column_sums", "scale")  # of a part, in a file
_FIELDS = ("dim", "bits", "scale", "metric", "counts")
_NAMED = "next_id"  # of an index whose vectors have ids of their own


def save(path: str | os.PathLike[str], codec: Codec, content: Content) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    if content.dimension_scale is not None:
        arrays["dimension_scale"] = content.dimension_scale
    for number, part in enumerate(content.parts):
        held = part.arrays
        if part.grows:  # another thread may write behind the vectors that are saved
            held = held.copy()
        arrays |= {f"{number}.{name}": getattr(held, name) for name in _PARTS}
        if held.bias is not None:
            arrays[f"{number}.bias"] = held.bias
        if held.ids is not None:
            arrays[f"{number}.ids"] = held.ids[: part.count]
    counts = [part.count for part in content.parts]
    values = (codec.dim, codec.bits, codec.scale, codec.metric, counts)
    fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    if content.named:
        fields[_NAMED] = content.next_id
    tensors = {name: StoredTensor.of(array) for name, array in arrays.items()}
    FILE.write(path, {"index": json.dumps(fields)}, tensors)


def load(
    path: str | os.PathLike[str], verify: bool, made: Callable[[dict[str, Any]], Content]
) -> Content:
    """The content of the index in a file; `made` gives an empty one for the parameters of an index.

    ValueError, FileNotFoundError: see `VectorIndex.load`.
    """
    metadata, tensors = FILE.read(path, verify=verify)
    try:
        fields = json.loads(metadata["index"])
        check_names(fields, _FIELDS, (_NAMED,))
        counts, next_id = fields.pop("counts"), fields.pop(_NAMED, None)
        empty = made(fields)
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
        return _content(empty, fields["scale"] == "dimension", counts, next_id, arrays)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None


def _content(
    empty: Content,
    trained: bool,
    counts: list[int],
    next_id: int | None,
    arrays: dict[str, npt.NDArray[Any]],
) -> Content:
    """The content that a file has as these arrays, of parts of so many vectors."""
    if not all(type(count) is int and 1 <= count <= MOST for count in counts):
        raise ValueError(f"parts have 1 to {MOST} vectors, got {counts}")
    named = next_id is not None
    names = (*_PARTS, *("bias",) * empty.biased, *("ids",) * named)
    one = ["dimension_scale"] if trained else []
    required = [f"{number}.{name}" for number in range(len(counts)) for name in names]
    check_names(arrays, required + (one if counts else []), one)
    parts: list[Part] = []
    for number, count in enumerate(counts):
        panels, sums, scale, bias, ids = (
            arrays.get(f"{number}.{name}") for name in (*_PARTS, "bias", "ids")
        )
        assert panels is not None
        assert sums is not None
        assert scale is not None
        PackedMatrix(panels, sums, empty.dim, count, empty.dtype, scale)  # which checks them
        held = Arrays(panels, sums, scale, _shaped(bias, len(sums), np.float32, "bias"),
                      _shaped(ids, count, np.int64, "ids"))  # fmt: skip
        parts.append(Part(empty.dim, empty.dtype, count, held, grows=False))
    scales = _shaped(arrays.get("dimension_scale"), empty.dim, np.float32, "dimension_scale")
    total = sum(counts)
    if named and (type(next_id) is not int or not 0 <= next_id < 1 << 63):
        raise ValueError(f"next_id must be an integer from 0 on, got {next_id!r}")
    content = replace(empty, parts=tuple(parts), dimension_scale=scales, named=named,
                      next_id=total if next_id is None else next_id)  # fmt: skip
    ascending = np.sort(content.ids)
    if named and ((ascending[1:] == ascending[:-1]).any() or content.ids.min(initial=0) < 0):
        raise ValueError("its ids are not numbers from 0 on that differ")
    return content


def _shaped(
    array: npt.NDArray[Any] | None, length: int, dtype: type, name: str
) -> npt.NDArray[Any] | None:
    if array is not None and (array.shape != (length,) or array.dtype != dtype):
        raise ValueError(
            f"{name} must be {np.dtype(dtype)} of shape ({length},), got {array.dtype} "
            f"{array.shape}"
        )
    return array
