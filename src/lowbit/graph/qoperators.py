"""ONNX Runtime's own operators on 8-bit integers, of its format QOperator, in those of ONNX.

Each becomes its float operator between DequantizeLinear and QuantizeLinear, which passes/absorb.py
makes formats of. (Microsoft's domain, as onnxruntime/docs/ContribOperators.md defines it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lowbit.graph.graph import Node
from lowbit.graph.operator import operators

DOMAIN = "com.microsoft"


@dataclass
class _Parts:
    """The nodes that take the place of one."""

    node: Node
    nodes: list[Node] = field(default_factory=list)

    def add(self, op: str, *inputs: str, **attributes: int) -> str:
        made = f"{self.node.outputs[0]}.part{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (made,), attributes, made))
        return made

    def read(self, triples: Sequence[str]) -> list[str]:
        """What integers stand for, of inputs (x, scale, zero point), (x, scale, ...."""
        each = zip(triples[::3], triples[1::3], triples[2::3], strict=True)
        return [self.add("DequantizeLinear", *one) for one in each]

    def compute(self, op: str, inputs: Sequence[str], **attributes: float) -> str:
        """The float operator, under the name and with the attributes of the node."""
        made = f"{self.node.outputs[0]}.float"
        self.nodes.append(self.node.replaced(op=op, inputs=tuple(inputs), outputs=(made,)))
        self.nodes[-1] = self.nodes[-1].replaced(**attributes)
        return made

    def end(self, value: str, scale: str, zero: str) -> list[Node]:
        out = self.node.outputs
        self.nodes.append(Node("QuantizeLinear", (value, scale, zero), out, {}, out[0]))
        return self.nodes


Rule = Callable[[_Parts], list[Node]]


def _of(op: str, count: int) -> Rule:
    """An operator of `count` inputs with scales."""

    def rule(parts: _Parts) -> list[Node]:
        *triples, scale, zero = parts.node.inputs
        return parts.end(parts.compute(op, parts.read(triples[: 3 * count])), scale, zero)

    return rule


def _concat(parts: _Parts) -> list[Node]:
    scale, zero, *triples = parts.node.inputs
    return parts.end(parts.compute("Concat", parts.read(triples)), scale, zero)


def _where(parts: _Parts) -> list[Node]:
    condition, *triples, scale, zero = parts.node.inputs
    return parts.end(parts.compute("Where", [condition, *parts.read(triples)]), scale, zero)


def _gemm(parts: _Parts) -> list[Node]:
    """C, int32, has the scale of the product, α included; without a scale the output is float32."""
    a, a_scale, a_zero, b, b_scale, b_zero, c, scale, zero = (*parts.node.inputs, "", "", "")[:9]
    transposed = int(parts.node.get("transB", 0))
    inputs = parts.read((a, a_scale, a_zero))
    inputs.append(parts.add("DequantizeLinear", b, b_scale, b_zero, axis=1 - transposed))
    if c:
        both = parts.add("Mul", a_scale, b_scale)
        inputs.append(parts.add("DequantizeLinear", c, both, axis=0))
    made = parts.compute("Gemm", inputs, beta=float(parts.node.get("alpha", 1.0)))
    if scale:
        return parts.end(made, scale, zero)
    parts.nodes[-1] = parts.nodes[-1].replaced(outputs=parts.node.outputs)
    return parts.nodes


_RULES: dict[str, Rule] = {"QGemm": _gemm, "QLinearConcat": _concat, "QLinearWhere": _where}


def rule_of(name: str) -> Rule | None:
    """What becomes of one of ONNX Runtime's operators, if it is known."""
    own = operators.load().get(name.removeprefix("QLinear"))
    if own is not None and own.qlinear and name.startswith("QLinear"):
        return _of(name.removeprefix("QLinear"), own.required)
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
