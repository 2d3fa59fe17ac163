"""What a benchmark of linear layers with 4-bit weights computes: plan, data, the right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowbit.bench.problem import gemm_case, parse_shape
from lowbit.bench.timing import Limits
from lowbit.numerics import QTensor, int_format
from lowbit.spec import Expected
from lowbit.spec.operations.grouped import linear_groups, linear_weight_only
from lowbit.weights.panels import group_refusal

Floats = NDArray[np.float32]

ACTIVATIONS = {"f32": "W4A32", "bf16": "W4A16", "int8": "W4A8"}
"""What lowbit's rows compute with, and how such a product is called."""

SHAPES = (
    "1x4096:4096x4096",
    "1x4096:4096x14336",
    "16x4096:4096x4096",
    "128x4096:4096x4096",
    "512x4096:4096x4096",
    "1024x4096:4096x4096",
)
DISTRIBUTION = (
    "4-bit weights uniform over 0 to 15, scales of the groups log-uniform from 1e-3 to 1e-2, zero "
    "point 8 or, where asked for, uniform; activations N(0, 1) cut to bfloat16, so that every type "
    "of activation holds the same numbers"
)

_MIDDLE = 8
_CHECKED_COLUMNS = 128  # each is a sum of its own, and the budget takes many times the work of one


@dataclass(frozen=True)
class LinearShape:
    """Sizes of x [M, K] @ w [K, N], of which `group_size` k share a scale, 0 for all of them.

    zero_points: whether groups have zero points of their own.
    """

    m: int
    k: int
    n: int
    group_size: int
    zero_points: bool = False

    def __str__(self) -> str:
        return f"{self.m}x{self.k}:{self.k}x{self.n}"

    @property
    def groups(self) -> int:
        """How many there are along K."""
        return self.k // self.group_size if self.group_size else 1

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True)
class LinearPlan:
    """What to run: shapes `MxK:KxN`, with some numbers of threads.

    activations: which of `ACTIVATIONS` lowbit is to compute with. group_size: how many k share a
    scale, a multiple of 8 that divides every K; 0: all. zero_points: whether groups have zero
    points of their own. peers: whether to run other libraries. cold: whether to time with weights
    from memory too. ValueError for anything that cannot be.
    """

    shapes: Sequence[str] = SHAPES
    activations: Sequence[str] = tuple(ACTIVATIONS)
    group_size: int = 128
    zero_points: bool = False
    threads: Sequence[int] = (1,)
    peers: bool = True
    cold: bool = True
    seed: int = 0
    limits: Limits = field(default_factory=lambda: Limits(least_rounds=5))

    def __post_init__(self) -> None:
        for name in ("shapes", "activations", "threads"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        for one in self.activations:
            if one not in ACTIVATIONS:
                known = ", ".join(ACTIVATIONS)
                raise ValueError(f"activations {one!r} are not known; known are {known}")
        if self.group_size and (refusal := group_refusal("uint4", self.group_size)):
            raise ValueError(f"{refusal}; 0 is one scale a column")
        for text in self.shapes:
            gemm_case(text, "f32:s8:f32")  # which refuses what this machine cannot hold
            k = parse_shape(text)["K"]
            if self.group_size and k % self.group_size:
                raise ValueError(
                    f"shape {text!r}: K = {k} must be a multiple of the group size, "
                    f"{self.group_size}; change either, or give group size 0"
                )
        for threads in self.threads:
            if threads < 1:
                raise ValueError(f"threads is {threads}; it must be at least 1")

    @cached_property
    def sizes(self) -> tuple[LinearShape, ...]:
        """The shapes, each once."""
        parsed = (parse_shape(text) for text in dict.fromkeys(self.shapes))
        groups = self.group_size, self.zero_points
        return tuple(LinearShape(each["M"], each["K"], each["N"], *groups) for each in parsed)


@dataclass(frozen=True, eq=False)
class LinearTask:
    """A product with its data: x float32 [M, K], values uint8 [K, N] from 0 to 15, scale float32
    and zero int32 [groups, N]."""

    shape: LinearShape
    x: Floats
    values: NDArray[np.uint8]
    scale: Floats
    zero: NDArray[np.int32]

    @classmethod
    def make(cls, shape: LinearShape, seed: int = 0) -> LinearTask:
        """Draw the data as `DISTRIBUTION` says; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((shape.m, shape.k), np.float32)
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        values = rng.integers(0, 16, (shape.k, shape.n), np.uint8)
        each = shape.groups, shape.n
        scale = np.exp(rng.uniform(np.log(1e-3), np.log(1e-2), each)).astype(np.float32)
        zero = np.full(each, _MIDDLE, np.int32)
        if shape.zero_points:
            zero = rng.integers(0, 16, each, np.int32)
        return cls(shape, x, values, scale, zero)

    def quantized(self) -> QTensor:
        """The weight [K, N] as `lowbit.pack` takes it."""
        fmt = int_format("uint4")
        if not self.shape.group_size:
            return QTensor(self.values, self.scale[0], self.zero[0], fmt, axis=1)
        groups = {"group_size": self.shape.group_size, "group_axis": 0}
        return QTensor(self.values, self.scale, self.zero, fmt, axis=1, **groups)

    @cached_property
    def weight(self) -> Floats:
        """What the weight stands for, float32 [K, N]."""
        return self.quantized().dequantize()

    @cached_property
    def ideal(self) -> NDArray[np.float64]:
        """x @ weight in float64, [M, N], the weight dequantized in float64."""
        depth = self.shape.k // self.shape.groups
        weight = self.values.astype(np.float64)
        weight -= np.repeat(self.zero, depth, axis=0)
        weight *= np.repeat(self.scale, depth, axis=0)
        return self.x.astype(np.float64) @ weight

    def error(self, result: NDArray[Any]) -> float:
        """The largest |result - ideal|, as a share of the largest |ideal|.

        ValueError if the result has another shape.
        """
        ideal = self.ideal
        if result.shape != ideal.shape:
            raise ValueError(f"the result has the shape {result.shape}; expected {ideal.shape}")
        largest = float(np.abs(ideal).max()) or 1.0
        return float(np.abs(result.astype(np.float64) - ideal).max()) / largest

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The columns of the result that `expected` is for: all, or some that are spread evenly."""
        n = self.shape.n
        return np.unique(np.linspace(0, n - 1, min(n, _CHECKED_COLUMNS)).astype(np.int64))

    def expected(self, activations: str) -> Expected:
        """Reference and budget of the specification in the chosen `columns`; for "bf16" with the
        rounding of the result to bfloat16."""
        shape = self.shape
        grouped = shape.groups, shape.k // shape.groups
        inputs = {
            "x": self.x.reshape(shape.m, *grouped),
            "b": self.values[:, self.columns].reshape(*grouped, -1),
            "b_scale": self.scale[:, self.columns],
            "b_zero_point": self.zero[:, self.columns],
        }
        spec = linear_groups if activations == "int8" else linear_weight_only
        sizes = {"M": shape.m, "G": grouped[0], "S": grouped[1], "N": len(self.columns)}
        floats = "bf16" if activations == "bf16" else "f32"
        case = spec.case(sizes, dtypes=f"{floats}:u4:{floats}", without=("bias", "residual"))
        return case.expect(inputs)


Call = Callable[[], Any]


@dataclass(frozen=True)
class Ready:
    """An implementation with its weights packed.

    call: what is timed. nbytes: the weights that it reads. again: makes such a call on a copy of
    the weights at another place in memory. read: makes the result of a call an array [M, N].
    """

    call: Call
    nbytes: int
    again: Callable[[], Call]
    read: Callable[[Any], NDArray[Any]] = np.asarray


class Linear(Protocol):
    """Something that computes a linear layer.

    name: unique. activations: of `ACTIVATIONS` for lowbit's own rows, "" for what they are
    compared with. isolated: whether to try it in a process of its own first, since it can crash.
    fallback: whether its library has nothing but a plain loop for it on some processors.
    """

    name: str
    activations: str
    isolated: bool
    fallback: bool

    def available(self) -> str | None:
        """None if its library is here, else the reason."""
        ...

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version. Only after `available`."""
        ...

    def note(self) -> str:
        """What is to be known of it, "" if nothing."""
        ...

    def prepare(self, task: LinearTask, threads: int) -> Ready:
        """Pack the weights, which is not timed. ValueError or RuntimeError if it takes no such
        product."""
        ...
