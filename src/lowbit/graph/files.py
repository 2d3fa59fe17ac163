"""Networks in files: safetensors, with the nodes as JSON in the metadata.

A file holds what a network is, not how it runs: it serves every instruction set and every shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lowbit.graph.graph import Constant, Graph, Node, Tensor, check
from lowbit.numerics import IntFormat, QTensor, int_format, pack_nibbles, unpack_nibbles
from lowbit.weights.tensor_file import StoredTensor, TensorFile, check_names

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
            name=fields["name"],
            inputs=_tuples(fields["inputs"]),
            outputs=_tuples(fields["outputs"]),
            nodes=tuple(_node(node) for node in fields["nodes"]),
            constants={name: _constant(one, stored) for name, one in fields["constants"].items()},
            tensors={
                name: Tensor(dtype, _tuples(shape), scale, zero_point)
                for name, (dtype, shape, scale, zero_point) in fields["tensors"].items()
            },
            ranges={
                name: (int(least), None if most is None else int(most))
                for name, (least, most) in fields.get("ranges", {}).items()
            },
            conditions=_tuples(fields.get("conditions", [])),
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
    attributes = {name: _tuples(value) for name, value in fields["attributes"].items()}
    inputs, outputs = _tuples(fields["inputs"]), _tuples(fields["outputs"])
    return Node(fields["op"], inputs, outputs, attributes, fields["name"])


def _tuples(value: Any) -> Any:
    """What JSON made lists of."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
