"""Networks in files: safetensors, with the nodes as JSON in the metadata.

A file holds what a network is, not how it runs: it serves every instruction set and every shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, check
from lowbit.numerics import IntFormat, QTensor, int_format, pack_nibbles, unpack_nibbles
from lowbit.numerics.formats import dtype_of
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

K = TypeVar("K")
_FILE = TensorFile("lowbit.network", "network", "1")
_FIELDS = ("name", "inputs", "outputs", "nodes", "tensors", "constants")
_NODE = ("op", "inputs", "outputs", "attributes", "name")
_PARTS = ("values", "scale", "zero_point")


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a network to the file `path`, whole or not at all.

    OSError if that cannot be done; a file that was there before is then as it was.
    """
    tensors: dict[str, StoredTensor] = {}
    constants: dict[str, Any] = {}
    for number, (name, value) in enumerate(graph.constants.items()):
        if isinstance(value, QTensor):
            constants[name] = [number, value.format.name, value.axis, value.group_size,
                               value.group_axis, value.shape]  # fmt: skip
            parts = _small(value)
            tensors |= {f"{number}.{part}": StoredTensor.of(parts[part]) for part in _PARTS}
        else:
            constants[name] = [number]
            tensors[str(number)] = StoredTensor.of(np.asarray(value))
    described = {
        "name": graph.name,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "nodes": [{field: getattr(node, field) for field in _NODE} for node in graph.nodes],
        "tensors": {
            name: [one.dtype, one.shape, one.scale, one.zero_point]
            for name, one in graph.tensors.items()
        },
        "constants": constants,
        "ranges": graph.ranges,
        "conditions": graph.conditions,
    }
    _FILE.write(path, {"network": json.dumps(described, default=dict)}, tensors)


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Graph:
    """The network in a file, whose numbers are memory-mapped: read when they are first needed, but
    for 4-bit weights, which become a byte each.

    The header is checked in any case. With `verify` the whole file is read and compared with its
    digest; without, numbers that were damaged on the disk are not noticed. Nothing in it is code.

    ValueError, naming the file, if it is of another kind or version, truncated, damaged, or does
    not hold together. FileNotFoundError if there is none.
    """
    metadata, stored = _FILE.read(path, verify=verify)
    try:
        fields = json.loads(metadata["network"])
        check_names(fields, _FIELDS, ("ranges", "conditions"))
        for node in fields["nodes"]:
            check_names(node, _NODE, ())
        made = Graph(
            name=_is(str, fields["name"]),
            inputs=_names(fields["inputs"]),
            outputs=_names(fields["outputs"]),
            nodes=tuple(_node(node) for node in fields["nodes"]),
            constants={name: _constant(one, stored) for name, one in fields["constants"].items()},
            tensors={name: _tensor(name, entry) for name, entry in fields["tensors"].items()},
            ranges={
                name: (int(least), None if most is None else int(most))
                for name, (least, most) in fields.get("ranges", {}).items()
            },
            conditions=_tuples(fields.get("conditions", [])),
            source=os.fspath(path),
        )
        check(made.conditions, made.open_sizes)
        return made
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold together: {error}") from None


def _small(value: QTensor) -> dict[str, Any]:
    """The parts of a QTensor, as small as they can be kept: two 4-bit integers to a byte."""
    nibbles = _in_nibbles(value.format, value.shape)
    return {
        "values": pack_nibbles(value.values) if nibbles else value.values,
        "scale": value.scale,
        "zero_point": value.zero_point.astype(value.format.storage),
    }


def _in_nibbles(fmt: IntFormat, shape: Sequence[int]) -> bool:
    return fmt.bits == 4 and len(shape) > 0


def _constant(entry: list[Any], stored: Mapping[str, StoredTensor]) -> Constant:
    if len(entry) == 1:
        return np.asarray(stored[str(entry[0])].numpy())
    number, name, axis, group_size, group_axis, *shape = entry
    values, scale, zero = (np.asarray(stored[f"{number}.{part}"].numpy()) for part in _PARTS)
    fmt = int_format(name)
    if shape and _in_nibbles(fmt, shape[0]):  # files without a shape have a byte for each
        values = unpack_nibbles(values, shape[0][-1], fmt)
    zero = zero.astype(np.int32, copy=False)
    return QTensor(values, scale, zero, fmt, _tuples(axis), group_size, group_axis)


def _node(fields: dict[str, Any]) -> Node:
    name = _is(str, fields["name"])
    attributes = {key: _tuples(value) for key, value in fields["attributes"].items()}
    for key, value in attributes.items():
        if not _is_attribute(value):
            raise ValueError(f"the attribute {key!r} of the node {name!r} is {value!r}")
    outputs = _names(fields["outputs"])
    if not any(outputs):
        raise ValueError(f"the node {name!r} has no outputs")
    return Node(_is(str, fields["op"]), _names(fields["inputs"]), outputs, attributes, name)


def _is_attribute(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_attribute, value))
    return isinstance(value, bool | int | float | str)


def _tensor(name: str, entry: Any) -> Tensor:
    dtype, shape, scale, zero_point = entry
    sizes = _tuples(shape)
    known = isinstance(dtype, str) and dtype_of(dtype).kind in "biufV"
    if not known or not isinstance(sizes, tuple) or not all(map(_is_size, sizes)):
        raise ValueError(f"the tensor {name!r} is {dtype!r} of shape {shape!r}")
    if scale is not None:
        limits = int_format(dtype)
        if not (_is_number(scale) and 0 < scale < float("inf")):
            raise ValueError(f"the scale of the tensor {name!r} is {scale!r}")
        if not _is_integer(zero_point) or not limits.qmin <= zero_point <= limits.qmax:
            raise ValueError(f"the zero point of the tensor {name!r} is {zero_point!r}")
    return Tensor(dtype, sizes, scale, zero_point)


def _is_size(size: Any) -> bool:
    return isinstance(size, str) or (_is_integer(size) and size >= 0)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(_is(str, name) for name in _is(list, value))


def _is(kind: type[K], value: Any) -> K:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} stands where a {kind.__name__} is expected")
    return value


def _tuples(value: Any) -> Any:
    """What JSON made lists of."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
