"""Operators that ONNX itself defines by others, and what only its Attention has."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_ATTENTION = {"scale", "is_causal", "qk_matmul_output_mode"}
"""The attributes of Attention that ours has too; the last says what its fourth output is."""
_DEFAULT = ("", "ai.onnx")


def without_functions(model: ModelProto, known: Set[str]) -> ModelProto:
    """The model with its own functions written out, and operators that are not `known` but that
    ONNX defines by others. What can't be written out stays."""
    from onnx import helper, inliner

    if model.functions:
        model = inliner.inline_local_functions(model)
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
