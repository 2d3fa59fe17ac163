"""Products with weights: Linear, Conv, ConvTranspose, of 8-bit integers or of rows quantized on the
way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, channels_last, lowerings
from lowbit.graph.lowering.elementwise import converted, plain
from lowbit.graph.lowering.floats import float_conv, float_linear, float_transposed
from lowbit.graph.operators.convolution import convolution_windows, transposed_windows
from lowbit.graph.step import Place, View
from lowbit.kernels.cpu.shared.layout import FLIP
from lowbit.kernels.cpu.shared.post_op import WithNumbers
from lowbit.numerics import QTensor
from lowbit.numerics.float32 import moderate
from lowbit.product import requests
from lowbit.product.convolution import prepare_convolution, with_weight
from lowbit.product.geometry import Geometry
from lowbit.product.output import OutputSpec
from lowbit.product.prepare import panel_bytes
from lowbit.product.prepared import Prepared
from lowbit.product.product import Convolution
from lowbit.weights.convolution import pack_convolution, refusal
from lowbit.weights.panels import PackedMatrix, pack, padded


@dataclass(frozen=True)
class _Numbered(WithNumbers):
    """A post-operation with its numbers."""

    name: str  # type: ignore[misc]
    given: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.given


def launch(lowering: Lowering, prepared: Prepared, operands: Mapping[str, Any]) -> None:
    """Add the launches of what was prepared; what comes next is, for now, the same again."""
    operands = {**operands, "next_bytes": panel_bytes(prepared.request.b)}
    for program, words in prepared.steps(operands, lowering.scratch(prepared.scratch)):
        lowering.add(program, words)


class _Epilogue:
    """What follows a product: the output's memory, post-operations, and their operands."""

    def __init__(self, lowering: Lowering, node: Node, order: tuple[int, ...] | None) -> None:
        self._lowering = lowering
        _, _, bias, residual = (*node.inputs, "", "")[:4]
        tensor = lowering.graph.tensors[node.outputs[0]]
        self.residual: Place | None = None
        steps: list[str | WithNumbers] = ["bias"] if bias else []
        for name, *numbers in node.get("post_ops", ()):
            if name == "residual":
                name, numbers = self._beside(lowering.view(residual), order)
            steps.append(_Numbered(name, tuple(numbers)) if numbers else name)
        self.spec = (bool(bias), bool(residual), tuple(steps), tensor.dtype, tensor.scale,
                     tensor.zero_point)  # fmt: skip
        self.bias = lowering.constant_bias(bias)
        self.out = lowering.output(node.outputs[0], order)

    def _beside(self, view: View, order: tuple[int, ...] | None) -> tuple[str, list[float]]:
        """The residual where the kernels can read it, and the step that adds it."""
        tensor = view.tensor
        if tensor.scale is None:
            view = converted(self._lowering, view, Tensor("float32", view.shape), order)
            self.residual = view.place
            return "residual", []
        self.residual = plain(self._lowering, view, order).place
        name = "residual_u8" if tensor.dtype == "uint8" else "residual_s8"
        return name, [tensor.scale, tensor.zero_point]

    def parameters(self, spec: OutputSpec) -> Place | None:
        if spec.parameters is None:
            return None
        return self._lowering.known(spec.parameters)


def _affine(lowering: Lowering, tensor: Tensor) -> tuple[Place, Place]:
    """Where the scale and the zero point of all rows are, as the kernels take them."""
    shift = FLIP if tensor.dtype == "int8" else 0
    scale = lowering.known(np.array([tensor.scale], np.float32))
    return scale, lowering.known(np.array([tensor.zero_point + shift], np.int32))


def _pack_linear(weight: QTensor) -> PackedMatrix:
    return pack(weight.T)


@lowerings.register("Linear")
def linear(lowering: Lowering, node: Node) -> None:
    """x [..., K] times weight [N, K]."""
    weight = lowering.graph.constants.get(node.inputs[1])
    x = lowering.view(node.inputs[0])
    activations = node.get("activations")
    dynamic = activations is not None
    quantized = dynamic or x.tensor.scale is not None
    if not isinstance(weight, QTensor) or not quantized or weight.axis not in (None, 0):
        float_linear(lowering, node)
        return
    packed = lowering.packed(weight, _pack_linear)
    panels = requests.panel_format(packed, lowering.isa.name)
    if dynamic:
        x = converted(lowering, x, Tensor("float32", x.shape))
    x = plain(lowering, x)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    dtype = np.dtype(x.tensor.dtype)
    left = (m, k), (k * dtype.itemsize, dtype.itemsize), dtype
    isa, threads = lowering.isa.name, lowering.threads
    epilogue = _Epilogue(lowering, node, None)
    scale = zero = None
    if dynamic:
        prepared, spec = requests.floats(left, panels, threads, isa, activations, 0, *epilogue.spec)
    else:
        shifted = x.tensor.zero_point != 0
        prepared, spec = requests.scaled(left, panels, threads, isa, shifted, True,
                                         moderate(x.tensor.scale), 0, *epilogue.spec)  # fmt: skip
        scale, zero = _affine(lowering, x.tensor)
    bias = None if epilogue.bias is None else lowering.known(padded(epilogue.bias))
    launch(lowering, prepared, {
        **prepared.weight(packed), "a": x.place, "row_scale": scale, "row_zero": zero, "bias": bias,
        "residual": epilogue.residual, "parameters": epilogue.parameters(spec),
        "out": epilogue.out.place,
    })  # fmt: skip


@lowerings.register("Conv")
@lowerings.register("ConvTranspose")
def convolution(lowering: Lowering, node: Node) -> None:
    """Of images [N, C, *size], which lie with channels last, and so does the output."""
    weight = lowering.graph.constants.get(node.inputs[1])
    x = lowering.view(node.inputs[0])
    transposed = node.op == "ConvTranspose"
    how = {"groups": node.get("group", 1), "transposed": transposed}
    if (
        not isinstance(weight, QTensor)
        or weight.format.name != "int8"
        or x.tensor.scale is None
        or refusal(weight, **how)
    ):  # it stands for floats
        (float_transposed if transposed else float_conv)(lowering, node)
        return
    rank = len(x.shape)
    order = channels_last(rank)
    x = plain(lowering, x, order)
    where, groups = _geometry(node, x.shape, weight.shape)
    packed = lowering.packed(weight, pack_convolution, **how)
    epilogue = _Epilogue(lowering, node, order)
    spec = OutputSpec.of(*epilogue.spec)
    asked = Convolution(
        x.shape[0], where, x.shape[1], groups, x.tensor.dtype == "int8", x.tensor.zero_point != 0,
        packed.matrices[0].format, lowering.isa.name, lowering.threads, spec.post_ops, spec.out,
        moderate(x.tensor.scale) and spec.moderate,
    )  # fmt: skip
    prepared = prepare_convolution(with_weight(asked, packed))
    lowering.kept.append(prepared)
    scale, zero = _affine(lowering, x.tensor)
    bias = None if epilogue.bias is None else lowering.known(packed.biased(epilogue.bias))
    launch(lowering, prepared, {
        **prepared.weight(packed), "a": x.place, "row_scale": scale, "row_zero": zero, "bias": bias,
        "residual": epilogue.residual, "parameters": epilogue.parameters(spec),
        "out": epilogue.out.place,
    })  # fmt: skip


def _geometry(node: Node, image: tuple[int, ...], weight: tuple[int, ...]) -> tuple[Geometry, int]:
    """What a Conv or ConvTranspose asks for, and its groups."""
    if node.op == "Conv":
        return convolution_windows(node, image, weight)
    over, groups = transposed_windows(node, image, weight)
    return over.turned(image[2:]), groups
