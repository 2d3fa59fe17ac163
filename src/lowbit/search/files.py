"""An index in a safetensors file: what its tensors and metadata are called."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.search.codec import Codec
from lowbit.search.content import MOST, Content
from lowbit.search.frame import Frame
from lowbit.search.storage import Arrays, Part
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

FILE = TensorFile("lowbit.vector_index", "vector index", "3", earlier=("2",))
UNCENTRED = "2"  # the version in which vectors have no frame but scales of dimensions
_PARTS = ("panels", "column_sums", "scale")  # of a part, in a file
_FIELDS = ("dim", "bits", "scale", "metric", "counts")
_FRAMED = ("biased", "reach")  # since there are frames
_BIASES = {"l2": "bias", "dot": "product", "cosine": "product"}  # −|v − c|²/2, (v − c) · c
_NAMED = "next_id"  # of an index whose vectors have ids of their own


def save(path: str | os.PathLike[str], codec: Codec, content: Content) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}
    frame = content.frame
    if frame is not None:
        arrays["centre"] = frame.centre
        if frame.weight is not None:
            arrays["weight"] = frame.weight
    if content.early is not None:
        arrays["early"] = content.early
    for number, part in enumerate(content.parts):
        held = part.arrays
        if part.grows:  # another thread may write behind the vectors that are saved
            held = held.copy()
        arrays |= {f"{number}.{name}": getattr(held, name) for name in _PARTS}
        if held.bias is not None:
            arrays[f"{number}.{_BIASES[codec.metric]}"] = held.bias
        if held.ids is not None:
            arrays[f"{number}.ids"] = held.ids[: part.count]
    counts = [part.count for part in content.parts]
    values = (codec.dim, codec.bits, codec.scale, codec.metric, counts)
    fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    fields["biased"] = content.biased
    fields["reach"] = frame.reach if frame is not None and math.isfinite(frame.reach) else None
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
    framed = metadata["format_version"] != UNCENTRED
    try:
        fields = json.loads(metadata["index"])
        check_names(fields, (*_FIELDS, *_FRAMED) if framed else _FIELDS, (_NAMED,))
        counts, next_id = fields.pop("counts"), fields.pop(_NAMED, None)
        reach = fields.pop("reach", None)
        biased = fields.pop("biased", fields["metric"] == "l2")
        if type(biased) is not bool or (fields["metric"] == "l2" and not biased):
            raise ValueError(f"biased is {biased!r}, of metric {fields['metric']!r}")
        empty = replace(made(fields), biased=biased)
        arrays = {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}
        weighted = fields["scale"] == "dimension"
        names = _frame_names(framed, weighted, bool(counts))
        common = {name: arrays.pop(name) for name in (*names[0], *names[1]) if name in arrays}
        check_names(common, names[0], names[1])
        content = _content(empty, _BIASES[fields["metric"]], counts, next_id, arrays)
        return replace(content, **_frame(content, framed, weighted, reach, common))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None


def _frame_names(
    framed: bool, weighted: bool, filled: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the arrays of all vectors are called: those that are there, and those that may be."""
    if framed:
        names = ("centre", "weight") if weighted else ("centre",)
    else:
        names = ("dimension_scale",) if weighted else ()
    optional = ("early",) if framed else ()
    return (names, optional) if filled else ((), (*names, *optional))


def _frame(
    content: Content, framed: bool, weighted: bool, reach: Any, arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """The frame of a content and its early vectors, by the names of its fields."""
    floats = {
        name: _shaped(array, content.dim, np.float32, name)
        for name, array in arrays.items()
        if name != "early"
    }
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError(f"of {', '.join(arrays)} some are not finite")
    if reach is None:
        reach = math.inf
    if type(reach) is not float or not reach >= 0:
        raise ValueError(f"reach must be a number from 0 on, got {reach!r}")
    early = arrays.get("early")
    if early is not None and (early.shape != (content.count, content.dim) or
                              early.dtype != np.float32):  # fmt: skip
        raise ValueError(f"early must be float32 [{content.count}, {content.dim}]")
    if framed:
        centre, weight = floats.get("centre"), floats.get("weight")
    else:
        weight = floats.get("dimension_scale")
        is_made = bool(content.count) or weight is not None
        centre = np.zeros(content.dim, np.float32) if is_made else None
    if weight is not None and not (weight > 0).all():
        raise ValueError("scales of dimensions must be above 0")
    if centre is None or (weighted and weight is None):
        if centre is not None or weight is not None or early is not None:
            raise ValueError(f"a frame has more than {', '.join(arrays)}")
        return {}
    return {"frame": Frame(centre, weight, reach), "early": early}


def _content(
    empty: Content,
    bias_name: str,
    counts: list[int],
    next_id: int | None,
    arrays: dict[str, npt.NDArray[Any]],
) -> Content:
    """The content that a file has as these arrays, of parts of so many vectors."""
    if not all(type(count) is int and 1 <= count <= MOST for count in counts):
        raise ValueError(f"parts have 1 to {MOST} vectors, got {counts}")
    named = next_id is not None
    names = (*_PARTS, *(bias_name,) * empty.biased, *("ids",) * named)
    required = [f"{number}.{name}" for number in range(len(counts)) for name in names]
    check_names(arrays, required, ())
    parts: list[Part] = []
    for number, count in enumerate(counts):
        panels, sums, scale, bias, ids = (
            arrays.get(f"{number}.{name}") for name in (*_PARTS, bias_name, "ids")
        )
        assert panels is not None
        assert sums is not None
        assert scale is not None
        PackedMatrix(panels, sums, empty.dim, count, empty.dtype, scale)  # which checks them
        held = Arrays(panels, sums, scale, _shaped(bias, len(sums), np.float32, bias_name),
                      _shaped(ids, count, np.int64, "ids"))  # fmt: skip
        parts.append(Part(empty.dim, empty.dtype, count, held, grows=False))
    total = sum(counts)
    if named and (type(next_id) is not int or not 0 <= next_id < 1 << 63):
        raise ValueError(f"next_id must be an integer from 0 on, got {next_id!r}")
    content = replace(empty, parts=tuple(parts), named=named,
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
