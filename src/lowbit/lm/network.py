"""A description and its tensors as graphs: a chunk of one sequence, a step of several, the head."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Constant, Graph, Node, Tensor
from lowbit.graph.lowering.products import is_short
from lowbit.graph.writer import Writer
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.attention.cached import rotation_table
from lowbit.kernels.cpu.attention.chunks import SCALE_BYTES
from lowbit.lm.checkpoint import Checkpoint
from lowbit.lm.description import Description
from lowbit.lm.layout import GatedLayout
from lowbit.lm.matrix_rows import MatrixRows, UnderWay, below, columns, packed, rows_of
from lowbit.numerics.methods import QuantizedWeight
from lowbit.weights.format import WeightFormat
from lowbit.weights.panels import PackedMatrix


@dataclass
class Weights:
    """A model's tensors as kernels read them.

    - activations: of products with weights in groups: "grouped", 8 bits with a scale for each group
      of a token, "dynamic", one for each token, or "float", as good as float32.
    - format: what floats are quantized to; None: not at all.
    - constants: by name, for all graphs, which share them. quantized: weights to be taken in place
      of the checkpoint's. shapes: of matrices read, by name. factors: of constants, what their
      products are multiplied by.
    """

    checkpoint: Checkpoint
    activations: str
    format: WeightFormat | None
    constants: dict[str, Constant] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._under_way = UnderWay(self.checkpoint.nbytes)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return name in self.checkpoint.names

    def vector(self, name: str, *shape: int) -> str:
        """The constant of a tensor of floats of this shape, which are not quantized."""
        value = self.checkpoint.vector(name)
        _fit(name, value.squeeze().shape, *(size for size in shape if size > 1))
        self.constants.setdefault(name, value.reshape(shape))
        return name

    def matrices(
        self, stems: Sequence[str], rows: Sequence[int], depth: int, scale: float = 1.0,
        experts: int = 1,
    ) -> list[tuple[str, str, str]]:  # fmt: skip
        """The constants, weight, bias and order of the inputs ("": none), of layers that read the
        same: of all in one where they are of one kind and order. rows: how many each has for an
        expert. depth: of inputs; 0: any. scale: what
        weights and biases are multiplied by."""
        names = [f"{stem}.weight" for stem in stems]
        parts = [([stem], self._reader(name)) for stem, name in zip(stems, names, strict=True)]
        for name, count, (_, weight) in zip(names, rows, parts, strict=True):
            self.shapes[name] = weight.shape
            _fit(name, weight.shape, count * experts, depth or weight.shape[1])
        orders = [self.checkpoint.order(name) for name in names]
        if len({None if order is None else order.tobytes() for order in orders}) == 1:
            whole = below([weight for _, weight in parts], experts)
            parts = parts if whole is None else [(stems, whole)]
        return [
            (
                self._packed(some, weight, scale),
                self._bias(some, scale),
                self._order(some[0], order),
            )
            for (some, weight), order in zip(parts, orders, strict=False)
        ]

    def _reader(self, name: str) -> MatrixRows:
        quantized = self.quantized.get(name)
        return self.checkpoint.reader(name) if quantized is None else rows_of(quantized)

    def _order(self, stem: str, order: npt.NDArray[np.int64] | None) -> str:
        if order is None:
            return ""
        self.constants[f"{stem}.order"] = order
        return f"{stem}.order"

    def _bias(self, stems: Sequence[str], scale: float) -> str:
        if not any(self.has(f"{stem}.bias") for stem in stems):
            return ""
        name = f"{'+'.join(stems)}.bias"
        value = np.concatenate([self.checkpoint.bias(stem) for stem in stems])
        _fit(name, value.shape, sum(self.shapes[f"{stem}.weight"][0] for stem in stems))
        self.constants[name] = value * np.float32(scale)
        return name

    def _packed(self, stems: Sequence[str], rows: MatrixRows, scale: float) -> str:
        """The constant of a weight, multiplied by a number: in panels, or floats: by columns
        [N, K], of experts [experts, K, N], where they are of 16 bits in these."""
        name = "+".join(stems)
        with self._under_way(rows.bytes_under_way):
            if not rows.dtype or self.format is not None:
                quantize = None if self.format is None else self.format.quantize
                self.constants[name] = packed(rows, scale, quantize)
                return name
            experts = self.checkpoint.description.experts if "_exps" in name else 0
            short = is_short(rows.dtype, rows.shape[0] // max(experts, 1))
            matrices = columns(rows, scale, max(experts, 1), short)
        if short and scale != 1:
            self.factors[name] = scale
        self.constants[name] = matrices if experts else matrices[0].T
        return name


def _fit(name: str, shape: tuple[int, ...], *expected: int) -> None:
    """ValueError: a tensor has another shape."""
    if shape != expected:
        raise ValueError(f"{name} has the shape {list(shape)}; {list(expected)} is expected")


class Networks:
    """The graphs of a model, which share their constants.

    chunk: inputs x [rows, width], positions [rows], cache [1, layers, 2, key heads, capacity,
    head_dim], of int8 with a scale behind each row; output y [rows, width]. head: x [rows, width]
    to logits [rows, vocabulary]. step: both, with a cache of several slots, and slots [rows], of
    which each row belongs to another.
    """

    def __init__(
        self, description: Description, weights: Weights, cache: str, slots: int, context: int,
        capacity: int,
    ) -> None:  # fmt: skip
        d = description
        with ThreadPoolExecutor(max_threads()) as pool:  # NumPy lets others run
            packed = pool.submit(_HeadConstants, d, weights)  # the longest
            layers = list(pool.map(partial(LayerConstants, d, weights), range(d.layers)))
            head = packed.result()
        add_rotations(d, weights, context, capacity)  # of a size that tensors have
        row = d.head_dim + (SCALE_BYTES if cache == "int8" else 0)
        sizes = d.layers, 2, d.key_heads, capacity, row
        self.chunk = _Nodes(d, weights).graph(layers, Tensor(cache, (1, *sizes)))
        step = Tensor(cache, (slots, *sizes))
        self.step = _Nodes(d, weights).graph(layers, step, ("slots",), head)
        self.head = _Nodes(d, weights).graph(head=head)


def layer_graph(
    d: Description, weights: Weights, number: int, capacity: int
) -> tuple[Graph, dict[str, str]]:
    """A layer by itself, over a sequence of up to so many rows: its graph, with inputs and output
    as a chunk's, and of each product with matrices the input, by the weight's name."""
    layer, nodes = LayerConstants(d, weights, number), _Nodes(d, weights)
    add_rotations(d, weights, capacity, capacity)
    cache = Tensor("float32", (1, d.layers, 2, d.key_heads, capacity, d.head_dim))
    return nodes.graph([layer], cache), nodes.products


def add_rotations(d: Description, weights: Weights, context: int, capacity: int) -> None:
    """The tables of positions' cosines and sines."""
    frequencies, factor = d.frequencies(context, _divisors(d, weights, context))
    weights.constants["rotation"] = rotation_table(capacity, frequencies, factor)
    if d.straight:
        weights.constants["no rotation"] = rotation_table(capacity, 0 * frequencies)
    if d.local_base:
        local = replace(d, base=d.local_base, scaling={}).frequencies(context)[0]
        weights.constants["local rotation"] = rotation_table(capacity, local)


def _divisors(d: Description, weights: Weights, context: int) -> Any:
    """What a file holds of the frequencies of positions; None: nothing."""
    original = d.scaling.get("original_max_position_embeddings", d.context)
    names = "rope_freqs", f"rope_factors_{'long' if context > original else 'short'}"
    held = [f"{name}.weight" for name in names if weights.has(f"{name}.weight")]
    return weights.checkpoint.vector(held[0]) if held else None


class LayerConstants:
    """The constants of a layer: packed once."""

    def __init__(self, d: Description, weights: Weights, number: int) -> None:
        layout = weights.checkpoint.layout.layers[number]
        self.number = number
        width, size, keys = d.width, d.heads * d.head_dim, d.key_heads * d.head_dim
        sizes = [size, keys, keys] if len(layout.qkv) == 3 else [size + 2 * keys]
        self.qkv = weights.matrices(layout.qkv, sizes, width)
        self.out = weights.matrices([layout.out], [width], size, d.residual_scale)[0]
        self.mixed = bool(layout.router)
        self.router, self.shared = "", None
        self.gated = GatedConstants(d, weights, layout.gated, d.experts if self.mixed else 1)
        if self.mixed:
            self.router = weights.vector(f"{layout.router}.weight", d.experts, width)
        if layout.shared is not None:
            self.shared = GatedConstants(d, weights, layout.shared)
            self.shared_gate = weights.vector(f"{layout.shared_gate}.weight", 1, width)
        self.norms = {
            norm: _norm(d, weights, f"{layout.name}.{norm}.weight") for norm in layout.norms
        }


def _norm(d: Description, weights: Weights, name: str) -> str:
    """The constant of a norm: of rows, or of the queries or keys of each head or of all of them."""
    count = d.width
    if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
        heads = d.heads if "attn_q" in name else d.key_heads
        each = weights.checkpoint.vector(name).size == d.head_dim
        count = d.head_dim if each else heads * d.head_dim
    return weights.vector(name, count)


class GatedConstants:
    """The constants of a gated unit, or of one of each expert."""

    def __init__(
        self, d: Description, weights: Weights, layout: GatedLayout, experts: int = 1
    ) -> None:
        self.down = weights.matrices([layout.down], [d.width], 0, d.residual_scale, experts)[0]
        inputs = weights.shapes[f"{layout.down}.weight"][1]
        rows = [inputs * 2 // len(layout.up)] * len(layout.up)
        self.up = weights.matrices(layout.up, rows, d.width, experts=experts)


class _HeadConstants:
    """The constants of what makes logits."""

    def __init__(self, d: Description, weights: Weights) -> None:
        self.norm = weights.vector("output_norm.weight", d.width)
        last = weights.checkpoint.rows("token_embd.weight", [d.vocabulary - 1])
        _fit("token_embd.weight", last.shape, 1, d.width)
        stem = weights.checkpoint.layout.head
        self.linear = weights.matrices([stem], [d.vocabulary], d.width, d.logit_scale)[0]


class _Nodes(Writer):
    """Nodes, one after another. products: of those with matrices the input, by the weight."""

    def __init__(self, d: Description, weights: Weights) -> None:
        self._d, self._weights = d, weights
        self._nodes: list[Node] = []
        self.products: dict[str, str] = {}

    def graph(
        self, layers: Sequence[LayerConstants] = (), cache: Tensor | None = None,
        slots: tuple[str, ...] = (), head: _HeadConstants | None = None,
    ) -> Graph:  # fmt: skip
        d, x = self._d, "x"
        for layer in layers:
            x = self.layer(layer, x, slots)
        if head is not None:
            x = self.product(self.norm(x, head.norm), *head.linear)
        tensors, inputs = {"x": Tensor("float32", ("rows", d.width))}, ("x",)
        if cache is not None:
            positions = Tensor("int64", ("rows",))
            tensors |= {"positions": positions, "cache": cache, "slots": positions}
            inputs = ("x", "positions", "cache", *slots)
        constants, name = self._weights.constants, d.architecture
        graph = Graph(inputs, (x,), tuple(self._nodes), constants, tensors, name)
        return graph.replaced()  # without constants of others

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self._outputs(1, op, *inputs, **attributes)[0]

    def _outputs(self, count: int, op: str, /, *inputs: str, **attributes: Any) -> list[str]:
        names = [f"v{len(self._nodes)}.{i}" for i in range(count)]
        self._nodes.append(Node(op, inputs, tuple(names), attributes))
        return names

    def constant(self, value: npt.NDArray[np.int64]) -> str:
        name = f"numbers {tuple(value.tolist())}"
        self._weights.constants[name] = value
        return name

    def _factor(self, number: float) -> str:
        name = f"factor {number}"
        self._weights.constants[name] = np.array(number, np.float32)
        return name

    def norm(self, x: str, weight: str) -> str:
        return self.op("RMSNormalization", x, weight, epsilon=self._d.epsilon)

    def product(self, x: str, weight: str, bias: str, order: str, residual: str = "") -> str:
        if order:
            x = self.gather(x, order, axis=1)
        attributes = self._activations(weight)
        if weight in self._weights.factors:
            attributes["alpha"] = self._weights.factors[weight]
        if residual:
            attributes["post_ops"] = (("residual",),)
        self.products[weight] = x
        return self.linear(x, weight, bias, residual, **attributes)

    def layer(self, layer: LayerConstants, x: str, slots: tuple[str, ...]) -> str:
        y = self._attention(layer, self._normed(layer, "attn_norm", x), slots)
        x = self._joined(layer, "post_attention_norm", x, y, layer.out)
        y = self._normed(layer, "ffn_norm", x)
        if layer.mixed:
            return self._mixture(layer, x, y)
        return self._joined(layer, "post_ffw_norm", x, self._gated(layer.gated, y),
                            layer.gated.down)  # fmt: skip

    def _gated(self, gated: GatedConstants, y: str, ends: str = "") -> str:
        """f(gate) · up, of each row or, with `ends`, of groups of rows by experts."""
        parts = [self._routed(y, up, ends) if ends else self.product(y, *up) for up in gated.up]
        return self.op("GatedUnit", self.concat(parts, axis=1), function=self._d.function)

    def _routed(self, x: str, weight: tuple[str, str, str], ends: str) -> str:
        name = weight[0]
        self.products[name] = x
        y = self.op("RoutedLinear", x, name, ends, **self._activations(name))
        factor = self._weights.factors.get(name, 1.0)
        return y if factor == 1 else self.mul(y, self._factor(factor))

    def _mixture(self, layer: LayerConstants, x: str, y: str) -> str:
        """x and, of y, what the experts of each row make, by their weights; and the shared one."""
        d, scores = self._d, self.linear(y, layer.router)
        if not d.experts_normalized:
            scores = self.op("Softmax", scores, axis=1)
        shares, experts = self._outputs(2, "TopK", scores, self.ints([d.experts_used]))
        if d.experts_normalized:
            shares = self.op("Softmax", shares, axis=1)
        rows, places, ends = self._outputs(3, "Route", experts, count=d.experts)
        each = self._gated(layer.gated, self.gather(y, rows), ends)
        x = self.op("RoutedSum", self._routed(each, layer.gated.down, ends), places, shares, x)
        if layer.shared is None:
            return x
        gate = self.op("Sigmoid", self.linear(y, layer.shared_gate))
        shared = self.product(self._gated(layer.shared, y), *layer.shared.down)
        return self.add(x, self.mul(shared, gate))

    def _activations(self, weight: str) -> dict[str, Any]:
        """What a product with a packed matrix does with rows."""
        packed = self._weights.constants[weight]
        if not isinstance(packed, PackedMatrix):
            return {}
        if packed.group_size is None:
            return {"activations": "dynamic"}
        return {"activations": self._weights.activations, "group_size": packed.group_size}

    def _normed(self, layer: LayerConstants, name: str, x: str) -> str:
        return self.norm(x, layer.norms[name]) if name in layer.norms else x

    def _joined(
        self, layer: LayerConstants, norm: str, x: str, y: str, weight: tuple[str, str, str]
    ) -> str:
        """x + y @ weightᵀ, with a norm of what is added, if there is one."""
        if norm not in layer.norms:
            return self.product(y, *weight, residual=x)
        return self.add(x, self.norm(self.product(y, *weight), layer.norms[norm]))

    def _attention(self, layer: LayerConstants, x: str, slots: tuple[str, ...]) -> str:
        d = self._d
        parts = [self.product(x, *weight) for weight in layer.qkv]
        if len(parts) == 1:
            sizes = self.ints([n * d.head_dim for n in (d.heads, d.key_heads, d.key_heads)])
            parts = self._outputs(3, "Split", parts[0], sizes, axis=1)
        named = zip(("attn_q_norm", "attn_k_norm", ""), parts, (d.heads, *[d.key_heads] * 2),
                    strict=True)  # fmt: skip
        q, k, v = (self._heads(layer.norms.get(name, ""), part, n) for name, part, n in named)
        straight, window = (
            d.straight and not (layer.number + 1) % d.straight,
            d.window(layer.number),
        )
        rotation = "no rotation" if straight else "rotation"
        if window and d.local_base:
            rotation = "local rotation"
        attributes = {"layer": layer.number, "scale": d.attention_scale, "window": window,
                      "cap": d.attention_cap}  # fmt: skip
        attributes = {key: value for key, value in attributes.items() if value or key == "layer"}
        inputs = (q, k, v, rotation, "positions", "cache", *slots)
        return self.reshape(
            self.op("CachedAttention", *inputs, **attributes), (0, d.heads * d.head_dim)
        )

    def _heads(self, norm: str, x: str, count: int) -> str:
        """[rows, count, head_dim], with a norm of all of a row or of each head."""
        size = self._d.head_dim
        each = bool(norm) and len(self._weights.constants[norm]) == size  # type: ignore[arg-type]
        if norm and not each:
            x = self.norm(x, norm)
        x = self.reshape(x, (0, count, size))
        return self.norm(x, norm) if each else x
