"""From nodes to steps: which kernels run, on which buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Graph, Tensor, numbers
from lowbit.graph.operator import naming, operators
from lowbit.graph.step import Place, Step, View, Word
from lowbit.isa import InstructionSet
from lowbit.jit.kernel import Program
from lowbit.numerics import QTensor

Array = npt.NDArray[Any]
P = TypeVar("P")
FLAGS = "flags"  # the buffer of what kernels complain of
ADVICE = (
    "take it out of the network and compute it outside, or use lowbit.graph.evaluate, which is slow"
)


class Packed:
    """The weights of a network as kernels read them: once for all of its plans."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph  # an id is one as long as what it names
        self._lasting = {id(one) for one in graph.constants.values()}
        self._made: dict[Any, Any] = {}

    def __call__(self, weight: object, pack: Callable[..., P], **how: Any) -> P:
        """pack(weight, **how); anew for what follows from a plan's sizes."""
        if id(weight) not in self._lasting:
            return pack(weight, **how)
        key = id(weight), pack, *how.items()
        if key not in self._made:
            self._made[key] = pack(weight, **how)
        return self._made[key]

    def holds(self) -> set[int]:
        """The ids of all arrays that are there for every plan."""
        made = (
            a for one in self._made.values() for a in (one if isinstance(one, tuple) else [one])
        )
        tables = (one.values for one in self._graph.constants.values() if isinstance(one, QTensor))
        return self._lasting.union(map(id, made), map(id, tables))


@dataclass
class Lowering:
    """A graph, of which every value's tensor is known, on its way to steps.

    - views: where values are. buffers: their sizes in bytes. constants: buffers that are known.
    - steps: launches in the order in which they run. kept: what must live as long as they.
    - flags: what is wrong where a kernel sets the flag of this number.
    - weights: as kernels read them; for all lowerings of a network to this instruction set.
    """

    graph: Graph
    isa: InstructionSet
    threads: int
    weights: Packed
    views: dict[str, View] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    node: str = ""  # the name of the one that is lowered now

    def run(self, first: int = 0) -> None:
        """Lower all nodes, or all from one on. NotImplementedError names operators that no kernel
        serves."""
        every = {node.op for node in self.graph.nodes}
        unknown = sorted(op for op in every if operators.get(op).lowering is None)
        if unknown:
            raise NotImplementedError(
                f"no kernel serves the operators {', '.join(unknown)}; {ADVICE}"
            )
        for node in self.graph.nodes[first:]:
            self.node = node.name or node.outputs[0]
            lowering = operators.get(node.op).lowering
            assert lowering is not None
            try:
                with naming(node, self.graph.described(node)):
                    lowering(self, node)
            except NotImplementedError as error:
                raise NotImplementedError(f"{node.op} {self.node!r}: {error}; {ADVICE}") from error

    def view(self, name: str) -> View:
        """Where a value is; constants are brought to memory."""
        if name not in self.views:
            self.views[name] = self.known_view(numbers(self.graph.constants[name]), name)
        return self.views[name]

    def constant_bias(self, name: str) -> Array | None:
        """The bias of a product, float32; None: "", it has none. NotImplementedError: it is no
        constant, as it is in graphs that are not simplified."""
        if name and name not in self.graph.constants:
            raise NotImplementedError("a bias is served where it is a constant")
        return np.asarray(self.graph.constants[name], np.float32) if name else None

    def known_view(self, value: Array, name: str = "") -> View:
        """Where an array is that every run reads."""
        value = np.asarray(value, order="C")
        tensor = Tensor(value.dtype.name, value.shape)
        return View(tensor, self.known(value, name), strides_of(value.shape))

    def known(self, value: Array, name: str = "") -> Place:
        """Where numbers are that every run reads."""
        buffer = f"constant {len(self.constants)} {name}"
        self.constants[buffer] = value
        return Place(buffer)

    def output(self, name: str, order: Sequence[int] | None = None) -> View:
        """Memory for a value that steps make. order: of its dimensions, the last contiguous."""
        made = self.views[name] = self.fresh(self.graph.tensors[name], order, name)
        return made

    def packed(self, weight: object, pack: Callable[..., P], **how: Any) -> P:
        """pack(weight, **how), which lives as long as the steps."""
        made = self.weights(weight, pack, **how)
        self.kept.append(made)
        return made

    def fresh(self, tensor: Tensor, order: Sequence[int] | None = None, name: str = "") -> View:
        """Memory for a tensor."""
        shape = tensor.sizes
        place = self.scratch(math.prod(shape) * tensor.itemsize, name)
        return View(tensor, place, strides_of(shape, order))

    def scratch(self, size: int, name: str = "") -> Place:
        """Memory, aligned to 64 bytes, from the first step that names it to the last."""
        buffer = f"buffer {len(self.buffers)} {name}"
        self.buffers[buffer] = size
        return Place(buffer)

    def flag(self, message: str) -> Place:
        """Where a kernel writes an s32 that is not 0, if a run cannot go on: an IndexError of this
        message then."""
        self.flags.append(f"{self.node}: {message}")
        return Place(FLAGS, 4 * (len(self.flags) - 1))

    def add(self, program: Program, words: Mapping[str, Word]) -> None:
        """Let a kernel run now."""
        self.steps.append(Step(program, words, self.node))


def strides_of(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements of a dense tensor whose dimensions lie in memory in this order."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order or range(len(shape))):
        strides[dimension] = step
        step *= shape[dimension]
    return tuple(strides)


def is_dense(view: View, order: Sequence[int] | None = None) -> bool:
    """Whether a view lies so; a dimension of one element lies in any way."""
    wanted = strides_of(view.shape, order)
    return all(
        size <= 1 or have == want
        for size, have, want in zip(view.shape, view.strides, wanted, strict=True)
    )


def order_of(view: View) -> tuple[int, ...]:
    """The order of its dimensions in memory, the last one the nearest."""
    places = range(len(view.shape))
    return tuple(sorted(places, key=lambda at: (-view.strides[at], at)))


def channels_last(rank: int) -> tuple[int, ...]:
    """The order of dimensions [N, C, *spatial] in which channels are the nearest."""
    return (0, *range(2, rank), 1)
