"""A network made ready for certain shapes: its steps, its memory, and the call that runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from lowbit.graph.graph import Graph, Tensor
from lowbit.graph.layer_tiling import sliced
from lowbit.graph.lower import FLAGS, Array, Lowering, Packed, channels_last, is_dense
from lowbit.graph.lowering.elementwise import compute, converted
from lowbit.graph.memory import arranged
from lowbit.graph.step import Step, reading_ahead
from lowbit.isa import InstructionSet
from lowbit.jit import verbose
from lowbit.jit.chain import chain
from lowbit.jit.entry import word
from lowbit.jit.workspace import aligned_empty
from lowbit.numerics.formats import dtype_of
from lowbit.product.arguments import allocation
from lowbit.registry.locks import Lock


@dataclass(frozen=True)
class Value:
    """An input or output as a caller sees it: its dtype and shape, and the buffer that it is."""

    name: str
    buffer: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Plan:
    """Steps, and where all buffers lie. Inputs and outputs are the caller's memory.

    `run` may be called from several threads at once: each call has an arena of its own. weights: of
    `Lowering`, for what plans of one network have in common.
    """

    def __init__(
        self, graph: Graph, isa: InstructionSet, threads: int, weights: Packed | None = None
    ) -> None:
        weights = weights or Packed(graph)
        lowering = Lowering(graph, isa, threads, weights)
        self.inputs = [_input(lowering, name) for name in graph.inputs]
        lowering.run(sliced(lowering))
        self.outputs = list[Value]()
        for name in graph.outputs:
            others = {one.buffer for one in (*self.inputs, *self.outputs)}
            self.outputs.append(_output(lowering, name, others))
        self._makers = [allocation(one.shape, one.dtype) for one in self.outputs]
        self.steps: Sequence[Step] = reading_ahead(lowering.steps, threads)
        self.threads = threads
        self._constants, self._kept = lowering.constants, lowering.kept
        shared = weights.holds()
        own = (one.nbytes for one in lowering.constants.values() if id(one) not in shared)
        self._own_bytes = sum(own)
        self.flags: Sequence[str] = lowering.flags
        outside = {one.buffer for one in (*self.inputs, *self.outputs)}
        named = [step.buffers() for step in lowering.steps]
        self.arena = arranged(named, lowering.buffers, outside)
        self.told = self._described(graph.name, isa)
        self._idle: list[_Instance] = []
        self._lock = Lock()

    def _described(self, name: str, isa: InstructionSet) -> str:
        dtypes = "+".join(one.dtype.name for one in self.inputs)
        shapes = (
            "+".join("x".join(map(str, one.shape)) for one in some)
            for some in (self.inputs, self.outputs)
        )
        steps = f"{len(self.steps)} steps"
        return verbose.line(
            f"network {name}", dtypes, ":".join(shapes), steps, isa.name, self.threads
        )

    @property
    def nbytes(self) -> int:
        """Of all memory that no other plan of the network shares, with one call at a time."""
        return self.peak_bytes + self._own_bytes

    def forget(self) -> None:
        """Give the memory between calls back."""
        with self._lock:
            self._idle.clear()

    @property
    def peak_bytes(self) -> int:
        """Of memory for what lies between inputs and outputs."""
        return self.arena.size

    def run(self, inputs: Sequence[Array], stamps: Array | None = None) -> list[Array]:
        """The outputs, in new arrays. inputs: of the dtypes and shapes of `inputs`, C-contiguous.

        stamps: int64 [1 + steps] is given the clock at the beginning and after each.
        IndexError: a kernel met an index that is out of range."""
        outputs = [make(*of) for make, of in self._makers]
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        if instance is None:
            instance = _Instance(self)
        instance.call(*inputs, *outputs, stamps)
        wrong = ""
        if self.flags and instance.flags.any():
            wrong = self.flags[int(instance.flags.argmax())]
            instance.flags[:] = 0
        with self._lock:
            self._idle.append(instance)
        if wrong:
            raise IndexError(wrong)
        return outputs

    def begins(self, arena: int, flags: int) -> dict[str, int]:
        """Where all buffers begin but those of a caller, in an arena and with flags there."""
        begins = {name: arena + offset for name, offset in self.arena.offsets.items()}
        begins |= {name: word(one) for name, one in self._constants.items()}
        return {**begins, FLAGS: flags}


class _Instance:
    """An arena, and the call that runs in it."""

    def __init__(self, plan: Plan) -> None:
        self._arena = aligned_empty((plan.arena.size,), np.uint8)
        names = [one.buffer for one in (*plan.inputs, *plan.outputs)]
        self.flags = np.zeros(len(plan.flags), np.int32)
        begins = plan.begins(word(self._arena), word(self.flags))
        call = chain(plan.steps, begins, names, plan.threads, (plan, self._arena, self.flags))
        self.call = _telling(plan, call) if verbose.LEVEL else call


def _telling(plan: Plan, call: Callable[..., None]) -> Callable[..., None]:
    """A plan's call that tells of itself, and of its steps at level 2: see jit.verbose."""

    def run(*given: Any) -> None:
        *arrays, stamps = given
        clock = np.zeros(1 + len(plan.steps), np.int64) if stamps is None else stamps
        begin = perf_counter()
        call(*arrays, clock)
        seconds = perf_counter() - begin
        ticks = np.maximum(np.diff(clock), 0) if verbose.LEVEL > 1 else ()
        for step, share in zip(plan.steps, np.divide(ticks, max(1, sum(ticks))), strict=False):
            told = step.program.told(plan.threads, step.words, step.node)
            verbose.executed(told, seconds * share, "step")
        verbose.executed(plan.told, seconds)

    return run


def _input(lowering: Lowering, name: str) -> Value:
    """Let an input be memory of the caller: of float32 where the graph has a format for it."""
    tensor = lowering.graph.tensors[name]
    given = Tensor("float32" if tensor.scale is not None else tensor.dtype, tensor.sizes)
    view = lowering.fresh(given, name=name)
    if tensor.scale is None:
        lowering.views[name] = view
    else:
        lowering.node = name
        order = None
        if len(tensor.shape) > 3:  # images are wanted with channels last
            order = channels_last(len(tensor.shape))
        lowering.views[name] = converted(lowering, view, tensor, order)
    return Value(name, view.place.buffer, dtype_of(given.dtype), given.sizes)


def _output(lowering: Lowering, name: str, others: Set[str]) -> Value:
    """Let an output be memory of the caller, by copying it where it is not, or not only, that, or
    where it is among the `others` of the caller."""
    view = lowering.view(name)
    dtype = "float32" if view.tensor.scale is not None else view.tensor.dtype
    lowering.node = name
    own = view.place.buffer in lowering.buffers and not view.place.offset
    used = [one.place.buffer for other, one in lowering.views.items() if other != name]
    size = math.prod(view.shape) * dtype_of(dtype).itemsize
    if not (own and is_dense(view) and view.tensor.scale is None
            and view.place.buffer not in {*others, *used}
            and lowering.buffers[view.place.buffer] == size):  # fmt: skip
        target = lowering.fresh(Tensor(dtype, view.shape), name=name)
        compute(lowering, target, [view], (0,))
        view = target
    return Value(name, view.place.buffer, dtype_of(dtype), view.shape)
