"""Networks from ONNX files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph.graph import Attribute, Constant, Graph, Node, Tensor
from lowbit.graph.onnx_operators import DOMAIN, rule_of, with_more, without_functions, written_out
from lowbit.graph.operator import Array, operators
from lowbit.graph.passes import simplified
from lowbit.graph.unroll import unrolled
from lowbit.registry.extras import require

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

OPSETS = range(13, 24)
_DEFAULT = ("", "ai.onnx")
_CONTROL = ("If", "Loop", "Scan", "SequenceMap")
_DTYPES = "to", "dtype", "output_dtype"
_NARROW = "bfloat16"


def from_onnx(source: str | PathLike[str] | bytes | ModelProto) -> Graph:
    """The network of an ONNX file, of its bytes, or of a model in memory, simplified.

    Sizes that the file leaves open keep their names ("batch"); `Graph.bound` gives them numbers.
    Needs the extra `onnx`.

    ValueError: it is no ONNX file or was cut short, its opset is not supported, a value is missing,
    nodes are in a circle, shapes do not fit, or its data lies outside of its folder.
    NotImplementedError names all operators that are unknown; also for control flow, and where nodes
    would compute with bfloat16, which is only read where it is cast to float32.
    FileNotFoundError: there is no such file, or none with its data.
    """
    require("reading ONNX files", "onnx", "onnx")
    graph = simplified(imported(_loaded(source)))
    _check_narrow(graph)
    return graph


def imported(model: ModelProto) -> Graph:
    """The network as it is written in a model with all its data, node for node."""
    _check_opset(model)
    model = without_functions(model, {*_known(), *_CONTROL})
    unrolled(model.graph, _node)
    _check_operators(model.graph.node)
    graph = model.graph
    if graph.sparse_initializer:
        raise NotImplementedError("sparse constants of ONNX are not supported")
    constants = {one.name: _array(one, graph.name) for one in graph.initializer}
    inputs = {one.name: _tensor(one) for one in graph.input if one.name not in constants}
    made = [one.output[0] for one in graph.node if one.op_type == "Constant" and one.output]
    given = [one.name for one in graph.input if one.name in inputs]
    once = Counter([*given, *(one.name for one in graph.initializer), *made])
    for name, count in once.items():
        if count > 1:
            raise ValueError(f"two things make the value {name!r}: the file is damaged")
    nodes = []
    for each in graph.node:
        if each.op_type == "Constant":
            constants[each.output[0]] = _constant(each)
        elif each.domain == DOMAIN:
            nodes += written_out(_node(each))
        else:
            nodes.append(_node(each))
    outputs = tuple(one.name for one in graph.output)
    nodes = _of_inference(nodes, outputs, constants)
    return Graph(tuple(inputs), outputs, tuple(nodes), constants, inputs, graph.name)


def _of_inference(
    nodes: Sequence[Node], outputs: Sequence[str], constants: Mapping[str, Constant]
) -> list[Node]:
    """The nodes without outputs that nobody reads. NotImplementedError: a node means what it does
    in training, or one that has a single output here is asked for more."""
    read = {*outputs, *(name for node in nodes for name in node.inputs)}
    kept = []
    for node in nodes:
        told = node.inputs[2] if node.op == "Dropout" and len(node.inputs) > 2 else ""
        trains = bool(told) and np.any(np.asarray(constants.get(told, True)))
        if node.get("training_mode", 0) or trains:
            raise NotImplementedError(
                f"{node.op} {node.name!r} is, or can be, in training mode: export with the model "
                "in evaluation mode"
            )
        count = operators.get(node.op).outputs
        more = [name for name in node.outputs[count:] if name in read] if count else []
        if more:
            raise NotImplementedError(
                f"only the first output of {node.op} is supported, and {node.name!r} is asked for "
                f"{', '.join(more)}"
            )
        kept.append(node.replaced(outputs=node.outputs[:count]))
    return kept


def _loaded(source: str | PathLike[str] | bytes | ModelProto) -> ModelProto:
    """A model with all its data."""
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    folder, name = None, "the model"
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
    else:
        if not isinstance(source, bytes):
            path = Path(source)
            folder, name = path.parent, str(path)
            source = path.read_bytes()
        try:
            model = ModelProto.FromString(source)
        except DecodeError as error:
            raise ValueError(f"{name} is no ONNX file, or was cut short: {error}") from error
    if not model.graph.output or not model.opset_import:
        raise ValueError(f"{name} is no ONNX file, or was cut short: it has no outputs")
    if not all(isinstance(text, str) for text in _texts(model.graph)):
        raise ValueError(f"{name} is damaged: names in it are no text")
    for tensor in _tensors(model.graph):
        if tensor.external_data:
            _bring(tensor, folder)
    return model


def _texts(graph: GraphProto) -> Iterable[Any]:
    """The names in a graph: str, or bytes where they are no UTF-8."""
    for node in graph.node:
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        yield from (one.name for one in node.attribute)
    yield from (one.name for one in (*graph.input, *graph.output, *graph.initializer))


def _tensors(graph: GraphProto) -> Iterable[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        yield from (one.t for one in node.attribute if one.HasField("t"))


def _bring(tensor: TensorProto, folder: Path | None) -> None:
    """Read a tensor's data from the file beside the model in which it lies."""
    from onnx import TensorProto

    entries = {one.key: one.value for one in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ValueError(
            f"the data of {tensor.name!r} is in the file {location!r}: pass the path of the ONNX "
            "file that lies beside it"
        )
    root = folder.resolve()
    path = (root / location).resolve()
    if not path.is_relative_to(root) or path == root:
        raise ValueError(
            f"the data of {tensor.name!r} is in {location!r}, outside of the ONNX file's folder: "
            "this is refused"
        )
    places = [entries.get("offset", "0"), entries.get("length", "0")]
    if (path.exists() and not path.is_file()) or not all(one.isdecimal() for one in places):
        raise ValueError(f"the data of {tensor.name!r} is at no place in a file: {entries}")
    offset, length = map(int, places)
    if path.stat().st_size < offset + length:
        raise ValueError(f"{path} was cut short: the data of {tensor.name!r} is not all there")
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length if "length" in entries else -1)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.DEFAULT
    tensor.raw_data = data


def _check_opset(model: ModelProto) -> None:
    opsets = [one.version for one in model.opset_import if one.domain in _DEFAULT]
    if not opsets or opsets[0] not in OPSETS:
        raise ValueError(
            f"opset {opsets[0] if opsets else 'none'} of ONNX is not supported, only "
            f"{OPSETS[0]} to {OPSETS[-1]}: export with one of these, or convert the file with "
            "onnx.version_converter.convert_version"
        )


def _known() -> set[str]:
    """The operators of ONNX that are read."""
    return {"Constant", *(name for name, one in operators.load().items() if one.onnx)}


def _check_operators(nodes: Iterable[NodeProto]) -> None:
    """NotImplementedError that names all operators that are not supported."""
    known, unknown = _known(), Counter[str]()
    for node in nodes:
        name = node.op_type if node.domain in _DEFAULT else f"{node.domain}.{node.op_type}"
        if with_more(node):
            name = "Attention with a cache or with softcap"
        if node.domain == DOMAIN and rule_of(node.op_type) and not _channels_last(node):
            continue
        if name not in known:
            unknown[name] += 1
    if not unknown:
        return
    listed = ", ".join(f"{name} ({count})" for name, count in sorted(unknown.items()))
    control = sorted(set(_CONTROL) & set(unknown))
    advice = (
        f"{', '.join(control)} decides on data what is computed: export the model for one case, "
        "with fixed sizes where sizes are what is asked"
        if control
        else "export the model so that it is written in others (PyTorch: another opset_version), "
        "or cut these parts off and run them outside; docs/graph.md lists what is supported"
    )
    raise NotImplementedError(f"operators that are not supported: {listed}. {advice}.")


def _check_narrow(graph: Graph) -> None:
    """NotImplementedError: a node computes with bfloat16, to which results would be rounded. One
    that says what its result is, as a cast does, only reads it."""
    narrow = {name for name in graph.inputs if graph.tensors[name].dtype == _NARROW}
    for node in graph.nodes:
        if any(node.get(attribute) == _NARROW for attribute in _DTYPES):
            narrow.update(node.outputs)
    for name, constant in graph.constants.items():
        if isinstance(constant, np.ndarray) and constant.dtype.name == _NARROW:
            narrow.add(name)
    computing = [node for node in graph.nodes if node.get("to") is None]
    read = [name for node in computing for name in node.inputs if name in narrow]
    read += [name for name in graph.outputs if name in graph.inputs and name in narrow]
    if read:
        listed = ", ".join(repr(name) for name in dict.fromkeys(read))
        raise NotImplementedError(
            f"no kernel computes on tensors of bfloat16, as {listed} would be: export the model in "
            "float32; what is cast to float32 before may be bfloat16"
        )


def _channels_last(node: NodeProto) -> bool:
    """Whether a pool of ONNX Runtime's was turned around by its optimizer."""
    return any(one.name == "channels_last" and one.i for one in node.attribute)


def _array(tensor: TensorProto, where: str) -> Array:
    from onnx import numpy_helper

    try:
        if min(tensor.dims, default=0) < 0:
            raise ValueError(f"a size is negative: {list(tensor.dims)}")
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"the data of {tensor.name or where!r} is damaged: {error}") from error


def _tensor(value: ValueInfoProto) -> Tensor:
    if not value.type.HasField("tensor_type"):
        raise NotImplementedError(f"the input {value.name!r} is no tensor: that is not supported")
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        raise ValueError(f"the input {value.name!r} has no shape: give it one, names for sizes")
    shape = tuple(
        size.dim_value if size.HasField("dim_value") else size.dim_param or f"{value.name}_{axis}"
        for axis, size in enumerate(kind.shape.dim)
    )
    return Tensor(_dtype(kind.elem_type), shape)


def _dtype(number: int) -> str:
    from onnx import helper

    try:
        return np.dtype(helper.tensor_dtype_to_np_dtype(number)).name
    except KeyError:
        raise ValueError(f"the type {number} of ONNX is unknown: the file is damaged") from None


def _constant(node: NodeProto) -> Array:
    """The array of a Constant."""
    if len(node.attribute) != 1 or not node.output:
        raise ValueError(f"the Constant {node.name!r} has no value or no output: it is damaged")
    (attribute,) = node.attribute
    if attribute.name == "value":
        return _array(attribute.t, node.name)
    if attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
        dtype = np.float32 if "float" in attribute.name else np.int64
        return np.asarray(_value(node, attribute), dtype)
    raise NotImplementedError(f"the attribute {attribute.name} of Constant is not supported")


def _node(node: NodeProto) -> Node:
    attributes: dict[str, Attribute] = {}
    for one in node.attribute:
        if one.name in _DTYPES:
            if one.i:
                attributes[one.name] = _dtype(one.i)
        elif node.op_type == "ConstantOfShape":
            value = _array(one.t, node.name)
            attributes.update(value=value.item(), dtype=value.dtype.name)
        else:
            attributes[one.name] = _value(node, one)
    if attributes.get("is_causal"):
        attributes["diagonal"] = 0
    inputs, name = tuple(node.input), node.name or next(iter(node.output), "")
    return Node(node.op_type, inputs, tuple(node.output), attributes, name)


def _value(node: NodeProto, attribute: AttributeProto) -> Attribute:
    from onnx import AttributeProto as Kinds
    from onnx import helper

    value: Any = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, int | float):
        return value
    if attribute.type in (Kinds.INTS, Kinds.FLOATS):
        return tuple(value)
    if attribute.type == Kinds.STRINGS:
        return tuple(one.decode() for one in value)
    raise NotImplementedError(
        f"the attribute {attribute.name!r} of {node.op_type} {node.name!r} is of a kind that is "
        "not supported"
    )
