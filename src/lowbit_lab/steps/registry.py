"""Where steps make themselves known, and how each takes its operands, is compiled and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit import isa as instruction_sets
from lowbit.isa import InstructionSet
from lowbit.jit.kernel import Kernel
from lowbit.registry import Registry
from lowbit.spec import Operation

Array = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """How a step takes its operands.

    text: in words. operation: what it computes of the ladder's operands, or where `stated`, of
    those that are arranged. arrange: makes these of the ladder's; ValueError or TypeError for what
    no step can multiply. columns: N of the ladder's b.
    """

    text: str
    operation: Operation
    arrange: Callable[[Array, Array], tuple[Array, Array]]
    stated: bool = False
    columns: Callable[[Array], int] = lambda b: b.shape[1]


@dataclass(frozen=True)
class Step:
    """A kernel of a ladder.

    number: its place, from 1. kernel: a function under numba.njit of a, b and out, which it fills;
    or a kernel in lowbit's language of a, b, out, the elements between rows of out, M, N and the
    length of a row of a; or a function that launches kernels on a GPU, of tensors there. isas: the
    instruction sets that a kernel of lowbit's is written for.
    """

    ladder: str
    number: int
    kernel: Any
    layout: Layout
    isas: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.kernel.name if isinstance(self.kernel, Kernel) else self.kernel.__name__

    @property
    def text(self) -> str:
        """The docstring: the idea, what is moved, and what the limit is."""
        return inspect.cleandoc(self.kernel.__doc__ or "")

    @property
    def idea(self) -> str:
        """The first line of the docstring, without its full stop."""
        return self.text.partition("\n")[0].rstrip(".")

    def serving(self, isa: str | None = None) -> InstructionSet | None:
        """The set that it is compiled for: the best that it is written for among those of `isa`, or
        of the one that runs here. None for a step of another compiler.

        RuntimeError: it is written for none of them.
        """
        if not self.isas:
            return None
        have = instruction_sets.chain(instruction_sets.active(isa))
        found = next((one for one in have if one.name in self.isas), None)
        if found is None:
            raise RuntimeError(
                f"{self.name} is written for {' and '.join(self.isas)}, and this is {have[0].name}"
            )
        return found

    def run(self, a: Any, b: Any, out: Any, isa: str | None = None) -> None:
        """Fill out [M, N], whose rows are contiguous, from operands as the layout arranges them:
        arrays, or tensors on a GPU."""
        self.bound(a, b, isa)(out)

    def bound(self, a: Any, b: Any, isa: str | None = None) -> Callable[[Any], None]:
        """`run` for these operands as a function of the output."""
        chosen = self.serving(isa)
        if chosen is None:
            return partial(self.kernel, a, b)
        program = self.kernel.program(chosen)

        def call(out: Any) -> None:
            program(1, a, b, out, out.strides[0] // out.itemsize, *out.shape, a.shape[-1])

        return call

    def prepare(self, a: Array, b: Array) -> Callable[[], Array]:
        """The product as a call: arranges the operands now; Numba compiles when it is first called.

        a [M, K] and b as the ladder has them. The call returns a new [M, N]. ValueError or
        TypeError for what the layout refuses; RuntimeError as `serving`.
        """
        dtype = np.float32 if a.dtype.kind == "f" else np.int32
        fill = self.bound(*self.layout.arrange(a, b))
        return partial(_filled, fill, (len(a), self.layout.columns(b)), dtype)


def _filled(fill: Callable[[Array], None], shape: tuple[int, int], dtype: Any) -> Array:
    out = np.empty(shape, dtype)
    fill(out)
    return out


LADDERS = {
    "uint4": Registry[Step]("step of uint4 products", "lowbit_lab.steps.uint4"),
    "cpu-int8": Registry[Step]("step of int8 products", "lowbit_lab.steps.int8"),
    "cpu-float32": Registry[Step]("step of float32 products", "lowbit_lab.steps.float32"),
    "gpu": Registry[Step]("step of products on a GPU", "lowbit_lab.steps.gpu"),
}


ON_CPU = ("uint4", "cpu-int8", "cpu-float32")
"""Ladders whose steps take NumPy arrays, and one thread."""


def step(ladder: str, number: int, layout: Layout, *isas: str) -> Callable[[Any], Any]:
    """Register a kernel as a step. isas: what a kernel in lowbit's language is written for.

    ValueError if the number is taken by another one.
    """

    def register(kernel: Any) -> Any:
        LADDERS[ladder].add(str(number), Step(ladder, number, kernel, layout, isas))
        return kernel

    return register


def steps(ladder: str) -> tuple[Step, ...]:
    """All steps of a ladder from the lowest. ValueError, with the names that there are, for an
    unknown one. ModuleNotFoundError if what it is written in is not installed."""
    if ladder not in LADDERS:
        raise ValueError(f"no steps are called {ladder!r}; known: {', '.join(LADDERS)}")
    return tuple(sorted(LADDERS[ladder], key=lambda one: one.number))
