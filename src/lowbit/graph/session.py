"""Running a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.graph.graph import Graph, naming_source
from lowbit.graph.lower import Packed
from lowbit.graph.passes.fold import with_constants
from lowbit.graph.passes.infer import decomposed, described, facts
from lowbit.graph.plan import Plan
from lowbit.jit.chain import ticks_per_second
from lowbit.jit.threads import checked, max_threads
from lowbit.numerics.formats import dtype_of
from lowbit.registry.locks import Lock

Array = npt.NDArray[Any]
# Plans are kept for combinations of shapes and threads: so many, with so many bytes of memory.
_PLANS, _BYTES = 256, 1 << 28


@dataclass(frozen=True)
class NodeTime:
    """How long a node took, in seconds, the median of the runs; the kernels of its steps. spread:
    the range of the middle half of the runs, divided by the median."""

    node: str
    kernels: tuple[str, ...]
    seconds: float
    spread: float = 0.0


class Session:
    """A network that runs as one call, with no Python between its nodes.

    Everything but numbers is decided when inputs of new shapes come: kernels, packings, memory.
    Plans are kept for later calls, those used last; they share packed weights. A session may be
    used from several threads at once.

    graph: from `lowbit.graph.load`, `lowbit.graph.from_onnx` or `lowbit.torch`. threads: how many;
    if left out, as many as a product may use. isa: the instruction set to use at most.

    NotImplementedError names operators that no kernel serves, before anything runs. Integers that
    the network computes with at run time (not those that it moves, or takes as indices) are exact
    up to 2^24.
    """

    def __init__(self, graph: Graph, *, threads: int | None = None, isa: str | None = None) -> None:
        self.graph = graph
        self._isa = instruction_sets.active(isa)
        self._threads = None if threads is None else checked(threads)
        self._plans: dict[Any, Plan] = {}  # the one used last is the last
        self._weights = Packed(graph)
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles make plans of their own."""
        return _session, (self.graph, self._threads, self._isa.name)

    def run(self, /, *positional: Any, **named: Any) -> dict[str, Array]:
        """The outputs by name, float32 where the network keeps integers that stand for numbers.

        The inputs, in the graph's order or by name: arrays of the graph's dtypes; where it keeps
        8-bit integers that stand for numbers, these numbers, float32. ValueError: an input is
        missing, unknown, of another shape, or of integers that its dtype does not hold. TypeError:
        of a dtype that does not convert safely.
        IndexError: an index that an input says is out of range.
        """
        arrays = self._arrays(positional, named)
        plan = self.plan(arrays)
        made = plan.run([arrays[one.name] for one in plan.inputs])
        return {one.name: array for one, array in zip(plan.outputs, made, strict=True)}

    def __call__(self, /, *positional: Any, **named: Any) -> Any:
        """`run`, with the output itself where there is one, else a tuple of them."""
        made = tuple(self.run(*positional, **named).values())
        return made[0] if len(made) == 1 else made

    def bind(self, /, *positional: Any, **named: Any) -> Callable[[], list[Array]]:
        """`run`, of what these arrays hold when the result is called: the outputs, in the graph's
        order. It checks nothing again, which takes Python longer than a small network the machine.

        Raises what `run` does; ValueError, too, for an input that would have to be converted."""
        arrays = self._arrays(positional, named)
        plan = self.plan(arrays)
        for one, given in (*zip(self.graph.inputs, positional, strict=False), *named.items()):
            if arrays[one] is not given:
                raise ValueError(f"{one} must be contiguous, of {arrays[one].dtype}, to be bound")
        held = [arrays[one.name] for one in plan.inputs]
        return lambda: plan.run(held)

    @property
    def threads(self) -> int:
        """How many a call uses now."""
        return max_threads() if self._threads is None else self._threads

    def plan(self, inputs: Mapping[str, Array]) -> Plan:
        """The plan for inputs of these shapes: the one made before, or a new one."""
        shapes = tuple((name, inputs[name].shape) for name in self.graph.inputs)
        threads = self.threads
        key = shapes, threads
        with self._lock:
            found = self._plans.pop(key, None)
            if found is None:
                with naming_source(self.graph.source):
                    found = self._planned(dict(shapes), threads)
                self._make_room(found.nbytes)
            self._plans[key] = found
        return found

    def _planned(self, shapes: Mapping[str, tuple[int, ...]], threads: int) -> Plan:
        bound = self.graph.bound(self.graph.sizes(shapes))
        tensors, known = facts(bound)
        settled = described(with_constants(bound, known), tensors)
        return Plan(decomposed(settled), self._isa, threads, self._weights)

    def _make_room(self, size: int) -> None:
        """Forget plans that were not used for long, for one with so many bytes."""
        while self._plans and (
            len(self._plans) >= _PLANS
            or size + sum(one.nbytes for one in self._plans.values()) > _BYTES
        ):
            self._plans.pop(next(iter(self._plans))).forget()

    def profile(self, /, *positional: Any, runs: int = 20, **named: Any) -> list[NodeTime]:
        """The time of every node: medians of `runs` runs of these inputs, after one more. An input
        that is called runs is given by its place."""
        arrays = self._arrays(positional, named)
        plan = self.plan(arrays)
        given = [arrays[one.name] for one in plan.inputs]
        return profile(plan, given, runs)

    def _arrays(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Array]:
        names = self.graph.inputs
        if len(positional) > len(names):
            raise ValueError(f"the inputs are {', '.join(names)}; got {len(positional)} arrays")
        given = dict(zip(names, positional, strict=False))
        twice = given.keys() & named.keys()
        given |= named
        wrong = sorted((given.keys() ^ set(names)) | twice)
        if wrong:
            raise ValueError(f"the inputs are {', '.join(names)}; {', '.join(wrong)} is not right")
        return {name: self._array(name, given[name]) for name in names}

    def _array(self, name: str, value: Any) -> Array:
        """An input as the plan takes it. Raises what `run` documents."""
        tensor = self.graph.tensors[name]
        wanted = dtype_of("float32" if tensor.scale is not None else tensor.dtype)
        array = np.asarray(value)
        if array.dtype != wanted:
            if not np.can_cast(array.dtype, wanted, "same_kind"):
                raise TypeError(f"{name} must be {wanted}, got {array.dtype}")
            _check_held(name, array, wanted)
            array = array.astype(wanted)
        return np.asarray(array, order="C")


def _check_held(name: str, array: Array, wanted: np.dtype[Any]) -> None:
    """ValueError: an integer of the array is none of the dtype that is wanted."""
    if wanted.kind not in "iu" or array.dtype.kind not in "iu" or not array.size:
        return
    limits = np.iinfo(wanted)
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise ValueError(f"{name} must be {wanted}, which does not hold {number}")


def _session(graph: Graph, threads: int | None, isa: str) -> Session:
    return Session(graph, threads=threads, isa=isa)


def profile(plan: Plan, inputs: list[Array], runs: int) -> list[NodeTime]:
    """The median time of every node of a plan, from the processor's clock between its steps."""
    stamps = np.zeros((1 + runs, 1 + len(plan.steps)), np.int64)
    for clock in stamps:
        plan.run(inputs, clock)
    taken = np.maximum(np.diff(stamps[1:]), 0) / ticks_per_second()  # by run and step
    steps: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        steps.setdefault(step.node, []).append(number)
    found = []
    for node, numbers in steps.items():
        low, median, high = np.percentile(taken[:, numbers].sum(1), (25, 50, 75))
        kernels = tuple(plan.steps[number].program.name for number in numbers)
        spread = (high - low) / median if median else 0.0
        found.append(NodeTime(node, kernels, float(median), float(spread)))
    return found
