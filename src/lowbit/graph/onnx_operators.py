"""Operators of ONNX that become others: quantized ones, and those that ONNX itself defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from lowbit.graph.graph import Node
from lowbit.graph.operator import operators
from lowbit.graph.unroll import MOST_NODES
from lowbit.graph.writer import Writer

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


# ONNX Runtime's own operators on 8-bit integers, of its format QOperator, in those of ONNX.
#
# Each becomes its float operator between DequantizeLinear and QuantizeLinear, which
# passes/fold_qdq.py makes formats of. (Microsoft's domain, as onnxruntime/docs/ContribOperators.md
# defines it.)

DOMAIN = "com.microsoft"


class _Parts(Writer):
    """The nodes that take the place of one."""

    def __init__(self, node: Node) -> None:
        self.node, self.nodes = node, list[Node]()

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        made = f"{self.node.outputs[0]}.part{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (made,), attributes, made))
        return made

    def constant(self, value: Any) -> str:
        raise NotImplementedError("what takes the place of ONNX Runtime's operators has none")

    def read(self, triples: Sequence[str]) -> list[str]:
        """What integers stand for, of inputs (x, scale, zero point), (x, scale, ...."""
        each = zip(triples[::3], triples[1::3], triples[2::3], strict=True)
        return [self.dequantize(*one) for one in each]

    def compute(self, prefix: str, inputs: Sequence[str], **attributes: float) -> str:
        """The float operator, with the attributes of the node, and its name but for a prefix."""
        made = f"{self.node.outputs[0]}.float"
        op = self.node.op.removeprefix(prefix)
        self.nodes.append(self.node.replaced(op=op, inputs=tuple(inputs), outputs=(made,)))
        self.nodes[-1] = self.nodes[-1].replaced(**attributes)
        return made

    def end(self, value: str, *format: str) -> list[Node]:
        """The nodes, of which the last rounds to a format, or makes the value."""
        last = self.quantize(value, *format) if format else value
        out = self.node.outputs
        name = out[0] if format else self.nodes[-1].name
        assert self.nodes[-1].outputs == (last,)
        self.nodes[-1] = self.nodes[-1].replaced(outputs=out, name=name)
        return self.nodes


Rule = Callable[[_Parts], list[Node]]


def _of(count: int) -> Rule:
    """An operator of `count` inputs with scales."""

    def rule(parts: _Parts) -> list[Node]:
        *triples, scale, zero = parts.node.inputs
        return parts.end(parts.compute(_PREFIX, parts.read(triples[: 3 * count])), scale, zero)

    return rule


def _concat(parts: _Parts) -> list[Node]:
    scale, zero, *triples = parts.node.inputs
    return parts.end(parts.compute(_PREFIX, parts.read(triples)), scale, zero)


def _where(parts: _Parts) -> list[Node]:
    condition, *triples, scale, zero = parts.node.inputs
    return parts.end(parts.compute(_PREFIX, [condition, *parts.read(triples)]), scale, zero)


def _gemm(parts: _Parts) -> list[Node]:
    """C, int32, has the scale of the product, α included; without a scale the output is float32."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, *format = (*parts.node.inputs, "")[:9]
    transposed = int(parts.node.get("transB", 0))
    inputs = parts.read((a, a_scale, a_zero))
    inputs.append(parts.dequantize(b, b_scale, b_zero, axis=1 - transposed))
    if c:
        inputs.append(parts.dequantize(c, parts.mul(a_scale, b_scale), axis=0))
    made = parts.compute("Q", inputs, beta=float(parts.node.get("alpha", 1.0)))
    return parts.end(made, *filter(None, format))


_PREFIX = "QLinear"
_RULES: dict[str, Rule] = {"QGemm": _gemm, "QLinearConcat": _concat, "QLinearWhere": _where}


def rule_of(name: str) -> Rule | None:
    """What becomes of one of ONNX Runtime's operators, if it is known."""
    own = operators.load().get(name.removeprefix(_PREFIX))
    if own is not None and own.qlinear and name.startswith(_PREFIX):
        return _of(own.required)
    return _RULES.get(name)


def written_out(node: Node) -> list[Node]:
    """The nodes that mean what one does that has a rule. ValueError: it is not as it should be."""
    rule = rule_of(node.op)
    assert rule is not None
    try:
        return rule(_Parts(node))
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(
            f"{node.op} {node.name!r}: inputs or attributes are wrong: {error}"
        ) from error


# Operators that ONNX itself defines by others, and what only its Attention has.

_ATTENTION = {"scale", "is_causal", "qk_matmul_output_mode"}
"""The attributes of Attention that ours has too; the last says what its fourth output is."""
_HEADS = "q_num_heads", "kv_num_heads"  # where the axes are three
_TURN = 0, 2, 1, 3
_DEFAULT = ("", "ai.onnx")


def without_functions(model: ModelProto, known: Set[str]) -> ModelProto:
    """The model with its own functions written out, and operators that are not `known` but that
    ONNX defines by others. What can't be written out stays."""
    from onnx import helper, inliner

    if model.functions:
        _check_count(model)
        model = inliner.inline_local_functions(model)
    _with_axis_of_heads(model.graph)
    if _defined(model, known):  # definitions depend on types, also on those of constants
        model.graph.value_info.extend(
            helper.make_tensor_value_info(one.name, one.data_type, one.dims)
            for one in model.graph.initializer
        )
    while schemas := _defined(model, known):
        names = [("", name) for name in schemas]
        for node in model.graph.node:
            own = {one.name for one in node.attribute}
            values = schemas[node.op_type].attributes.values() if node.op_type in schemas else ()
            node.attribute.extend(
                one.default_value for one in values
                if one.name not in own and one.default_value.name
            )  # fmt: skip
        try:
            made = inliner.inline_selected_functions(model, names, inline_schema_functions=True)
        except RuntimeError:  # a type that the definition depends on is not known
            return model
        if _defined(made, known).keys() == schemas.keys():
            return model
        model = made
    return model


def _check_count(model: ModelProto) -> None:
    """ValueError: functions call each other so often that there is no room to write them out."""
    functions = {(one.domain, one.name): one.node for one in model.functions}
    counts: dict[tuple[str, str], int] = {}

    def count(nodes: Iterable[NodeProto], callers: Set[tuple[str, str]]) -> int:
        total = 0
        for node in nodes:
            key = node.domain, node.op_type
            if key in callers:
                raise ValueError(f"the function {node.op_type} of the file calls itself")
            if key in functions and key not in counts:
                counts[key] = count(functions[key], {*callers, key})
            total += counts.get(key, 1)
            for attribute in node.attribute:
                total += count(attribute.g.node, callers)
        return total

    try:
        whole = count(model.graph.node, frozenset())
    except RecursionError:
        raise ValueError("functions of the file call each other too deeply") from None
    if whole > MOST_NODES:
        raise ValueError(
            f"written out, its functions are {whole:,} nodes, more than {MOST_NODES:,}: export it "
            "without functions"
        )


def _with_axis_of_heads(graph: GraphProto) -> None:
    """Write out, in place, Attention of three axes, in which heads lie beside each other."""
    from onnx import NodeProto, helper, numpy_helper

    def add(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    nodes = list[Any]()
    for node in graph.node:
        heads = {one.name: one.i for one in node.attribute if one.name in _HEADS}
        made = NodeProto()
        made.CopyFrom(node)
        del made.attribute[:]
        made.attribute.extend(one for one in node.attribute if one.name not in heads)
        if node.op_type != "Attention" or not heads or with_more(made):
            nodes.append(node)
            continue
        name, shapes = node.output[0], [(0, 0, heads[one], -1) for one in _HEADS] + [(0, 0, -1)]
        for index, shape in enumerate(shapes):
            array = numpy_helper.from_array(np.array(shape), f"{name}/shape{index}")
            graph.initializer.append(array)
        for index, source in enumerate(node.input[:3]):
            split = add("Reshape", [source, f"{name}/shape{index > 0:d}"], f"{name}/split{index}")
            made.input[index] = add("Transpose", [split], f"{name}/input{index}", perm=_TURN)
        made.output[0] = f"{name}/heads"
        nodes.append(made)
        turned = add("Transpose", [made.output[0]], f"{name}/turned", perm=_TURN)
        add("Reshape", [turned, f"{name}/shape2"], name)
    del graph.node[:]
    graph.node.extend(nodes)


def _defined(model: ModelProto, known: Set[str]) -> dict[str, Any]:
    """What ONNX says of the operators in a model that are not known and that it defines."""
    from onnx import defs

    opset = next((one.version for one in model.opset_import if one.domain in _DEFAULT), 1)
    found = {
        node.op_type for node in model.graph.node
        if node.domain in _DEFAULT and (node.op_type not in known or with_more(node))
    }  # fmt: skip
    schemas: list[Any] = [defs.get_schema(name, opset) for name in found if defs.has(name, opset)]
    return {
        one.name: one for one in schemas
        if one.has_function or one.has_context_dependent_function
    }  # fmt: skip


def with_more(node: NodeProto) -> bool:
    """Whether an Attention has what ours has not."""
    if node.op_type != "Attention":
        return False
    more = any(node.input[4:]) or any(node.output[1:])
    return more or not {one.name for one in node.attribute} <= _ATTENTION
