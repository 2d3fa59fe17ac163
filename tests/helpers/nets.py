"""Small networks for tests, written as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lowbit.graph.evaluate import evaluate
from lowbit.graph.graph import Constant, Graph, Node, Tensor
from lowbit.graph.passes.infer import inferred
from lowbit.numerics import QTensor, affine_parameters, int_format, quantize


class Net:
    """Collects nodes. Values are named as they are made."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[Node] = []
        self.constants: dict[str, Constant] = {}
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[str] = []

    def input(self, *shape: int | str, dtype: str = "float32") -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(name)
        self.tensors[name] = Tensor(dtype, shape)
        return name

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value if isinstance(value, QTensor) else np.asarray(value)
        return name

    def weight(self, *shape: int, bits: int | None = 8) -> str:
        """Random numbers, one scale for each of the first axis; float32 for no bits."""
        values = self.random.normal(0, 1, shape).astype(np.float32)
        if bits is None:
            return self.constant(values)
        return self.constant(quantize(values, int_format(f"int{bits}"), symmetric=True, axis=0))

    def bias(self, count: int) -> str:
        return self.constant(self.random.normal(0, 1, count).astype(np.float32))

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(Node(op, inputs, (name,), attributes, name))
        return name

    def graph(self, *outputs: str) -> Graph:
        names = outputs or (self.nodes[-1].outputs[0],)
        return Graph(tuple(self.inputs), names, tuple(self.nodes), self.constants, self.tensors)


def random_inputs(graph: Graph, seed: int = 1, **sizes: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    bound = graph.bound(sizes)
    made = {}
    for name in graph.inputs:
        tensor = bound.tensors[name]
        if tensor.dtype.startswith("int"):
            made[name] = random.integers(0, 5, tensor.sizes).astype(tensor.dtype)
        else:
            made[name] = random.normal(0, 1, tensor.sizes).astype(np.float32)
    return made


def with_formats(graph: Graph, *names: str, dtype: str = "uint8", **sizes: int) -> Graph:
    """The graph with these values (all of float32 but outputs, if none is named) kept in 8 bits, of
    ranges seen on random inputs. What a pool or a Concat reads and gives has one format."""
    inputs = random_inputs(graph, seed=2, **sizes)
    ranges: dict[str, tuple[float, float]] = {}

    def watch(name: str, value: np.ndarray) -> None:
        if value.dtype == np.float32 and value.size:
            ranges[name] = float(value.min()), float(value.max())

    evaluate(graph.bound(sizes), inputs, watch)
    wanted = names or [name for name in ranges if name not in graph.outputs]
    tensors = dict(inferred(graph.bound(sizes)).tensors)
    for name in wanted:
        scale, zero = affine_parameters(*ranges[name], int_format(dtype), False)
        tensors[name] = Tensor(dtype, tensors[name].shape, float(scale), int(zero))
    for node in graph.nodes:
        if node.op == "MaxPool" and node.outputs[0] in wanted:
            source = tensors[node.inputs[0]]
            shape = tensors[node.outputs[0]].shape
            tensors[node.outputs[0]] = Tensor(dtype, shape, source.scale, source.zero_point)
    kept = {name: tensors[name] for name in (*graph.inputs, *wanted)}
    for name in graph.inputs:  # named sizes stay
        one = kept[name]
        kept[name] = Tensor(one.dtype, graph.tensors[name].shape, one.scale, one.zero_point)
    return graph.replaced(tensors=kept)


def basic_block() -> Graph:
    net = Net()
    x = net.input("batch", 3, 17, 13)
    stem = net("Conv", x, net.weight(24, 3, 7, 7), net.bias(24), strides=(2, 2), pads=(3,) * 4,
               post_ops=(("relu",),))  # fmt: skip
    pooled = net("MaxPool", stem, kernel_shape=(3, 3), strides=(2, 2), pads=(1,) * 4)
    first = net("Conv", pooled, net.weight(64, 24, 3, 3), net.bias(64), pads=(1,) * 4,
                post_ops=(("relu",),))  # fmt: skip
    beside = net("Conv", pooled, net.weight(64, 24, 1, 1), net.bias(64))
    second = net("Conv", first, net.weight(64, 64, 3, 3), net.bias(64), beside, pads=(1,) * 4,
                 post_ops=(("residual",), ("relu",)))  # fmt: skip
    mean = net("GlobalAveragePool", second)
    net("Linear", net("Flatten", mean), net.weight(10, 64), net.bias(10))
    return net.graph()


def mobile_block() -> Graph:
    net = Net(1)
    x = net.input("batch", 16, 9, 9)
    wide = net("Conv", x, net.weight(48, 16, 1, 1), net.bias(48), post_ops=(("hardswish",),))
    deep = net("Conv", wide, net.weight(48, 1, 3, 3), net.bias(48), group=48, pads=(1,) * 4,
               post_ops=(("clamp", 0.0, 6.0),))  # fmt: skip
    weights = net("GlobalAveragePool", deep)
    gate = net("Conv", weights, net.weight(48, 48, 1, 1), "", post_ops=(("sigmoid",),))
    scaled = net("Mul", deep, gate)
    narrow = net("Conv", scaled, net.weight(16, 48, 1, 1), net.bias(16))
    net("Add", narrow, x)
    return net.graph()


def u_net() -> Graph:
    net = Net(2)
    x = net.input(2, 5, 12, 8)
    left = net("Conv", x, net.weight(12, 5, 3, 3), net.bias(12), pads=(1,) * 4,
               post_ops=(("relu",),))  # fmt: skip
    down = net("Conv", left, net.weight(20, 12, 2, 2), "", strides=(2, 2), post_ops=(("relu",),))
    values = net.random.normal(0, 1, (20, 12, 2, 2)).astype(np.float32)
    up_weight = net.constant(quantize(values, "int8", symmetric=True, axis=1))
    up = net("ConvTranspose", down, up_weight, net.bias(12), strides=(2, 2))
    both = net("Concat", left, up, axis=1)
    net("Conv", both, net.weight(3, 24, 3, 3), "", pads=(1,) * 4)
    return net.graph()


def video() -> Graph:
    net = Net(3)
    x = net.input("batch", 4, 5, 8, 6)
    deep = net("Conv", x, net.weight(9, 4, 3, 3, 3), net.bias(9), pads=(1,) * 6,
               post_ops=(("silu",),))  # fmt: skip
    pooled = net("AveragePool", deep, kernel_shape=(1, 2, 2), strides=(1, 2, 2))
    net("GlobalAveragePool", net("Conv", pooled, net.weight(7, 9, 2, 1, 1), ""))
    return net.graph()


def perceptron() -> Graph:
    """Rows quantized on the way, in float32 between."""
    net = Net(4)
    x = net.input("batch", 7, 40)
    first = net("Linear", x, net.weight(70, 40), net.bias(70), activations="dynamic",
                post_ops=(("gelu",),))  # fmt: skip
    second = net("Linear", first, net.weight(40, 70), "", x, activations="dynamic",
                 post_ops=(("residual",),))  # fmt: skip
    swapped = net("Transpose", second, perm=(0, 2, 1))
    square = net("MatMul", second, swapped)
    net("ReduceMean", square, net.constant(np.array([-1])), keepdims=0)
    return net.graph()


def floats() -> Graph:
    """A network that nobody quantized."""
    net = Net(5)
    x = net.input("batch", 3, 11, 10)
    conv = net("Conv", x, net.weight(8, 3, 3, 3, bits=None), net.bias(8), pads=(0, 1, 2, 1),
               strides=(2, 1), dilations=(1, 2), post_ops=(("relu",),))  # fmt: skip
    grouped = net("Conv", conv, net.weight(6, 4, 1, 1, bits=None), "", group=2)
    flat = net("Reshape", grouped, net.constant(np.array([0, -1])))
    cut = net("Slice", flat, *(net.constant(np.array([i])) for i in (1, 90, 1, 3)))
    net("Linear", cut, net.weight(5, 30, bits=None), net.bias(5))
    return net.graph()


NETS: list[Callable[[], Graph]] = [basic_block, mobile_block, u_net, video, perceptron, floats]
QUANTIZED = [basic_block, mobile_block, u_net, video]
