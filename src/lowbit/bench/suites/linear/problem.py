"""What a benchmark of linear layers with 4-bit weights computes: data and the right answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowbit
from lowbit.bench.core.case import OURS, Case, Implementation, Problem
from lowbit.numerics import QTensor, int_format
from lowbit.registry.locks import cached_property
from lowbit.spec import Case as Stated
from lowbit.spec import Expected
from lowbit.spec.operations.products import linear_groups, linear_weight_only

Floats = NDArray[np.float32]

ACTIVATIONS = {"f32": "W4A32", "bf16": "W4A16", "int8": "W4A8"}
"""What lowbit's rows compute with, and how such a product is called."""

ACTIVATIONS_OF = {f"lowbit {name}": one for one, name in ACTIVATIONS.items()}
"""By the names of lowbit's rows."""

DISTRIBUTION = (
    "4-bit weights uniform over 0 to 15, scales of the groups log-uniform from 1e-3 to 1e-2, zero "
    "point 8 or, where asked for, uniform; activations N(0, 1) cut to bfloat16, so that every type "
    "of activation holds the same numbers"
)

_MIDDLE = 8
_CHECKED_COLUMNS = 128  # each is a sum of its own, and the budget takes many times the work of one


@dataclass(frozen=True)
class Layer(Case):
    """x [M, K] @ w [K, N], of which `group_size` k share a scale, 0 for all of them.

    zero_points: whether groups have zero points of their own.
    """

    group_size: int = 128
    zero_points: bool = False

    @property
    def groups(self) -> int:
        """How many there are along K."""
        return self.sizes["K"] // self.group_size if self.group_size else 1

    def stated(self, activations: str, columns: int) -> Stated:
        """The case of the specification, with so many columns of the weight."""
        spec = linear_groups if activations == "int8" else linear_weight_only
        each = self.sizes["K"] // self.groups
        sizes = {"M": self.sizes["M"], "G": self.groups, "S": each, "N": columns}
        floats = "bf16" if activations == "bf16" else "f32"
        return spec.case(sizes, dtypes=f"{floats}:u4:{floats}", without=("bias", "residual"))


@dataclass(frozen=True, eq=False)
class Task(Problem):
    """A product with its data: x float32 [M, K], values uint8 [K, N] from 0 to 15, scale float32
    and zero int32 [groups, N]."""

    case: Layer
    x: Floats
    values: NDArray[np.uint8]
    scale: Floats
    zero: NDArray[np.int32]

    @classmethod
    def make(cls, case: Layer, seed: int = 0) -> Task:
        """Draw the data as `DISTRIBUTION` says; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        m, n, k = (case.sizes[size] for size in "MNK")
        x = rng.standard_normal((m, k), np.float32)
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        values = rng.integers(0, 16, (k, n), np.uint8)
        each = case.groups, n
        scale = np.exp(rng.uniform(np.log(1e-3), np.log(1e-2), each)).astype(np.float32)
        zero = np.full(each, _MIDDLE, np.int32)
        if case.zero_points:
            zero = rng.integers(0, 16, each, np.int32)
        return cls(case, x, values, scale, zero)

    def quantized(self) -> QTensor:
        """The weight [K, N] as `lowbit.pack` takes it."""
        fmt = int_format("uint4")
        if not self.case.group_size:
            return QTensor(self.values, self.scale[0], self.zero[0], fmt, axis=1)
        groups = {"group_size": self.case.group_size, "group_axis": 0}
        return QTensor(self.values, self.scale, self.zero, fmt, axis=1, **groups)

    @cached_property
    def weight(self) -> Floats:
        """What the weight stands for, float32 [K, N]."""
        return self.quantized().dequantize()

    @cached_property
    def ideal(self) -> NDArray[np.float64]:
        """x @ weight in float64, [M, N], the weight dequantized in float64."""
        depth = self.case.sizes["K"] // self.case.groups
        weight = self.values.astype(np.float64)
        weight -= np.repeat(self.zero, depth, axis=0)
        weight *= np.repeat(self.scale, depth, axis=0)
        return self.x.astype(np.float64) @ weight

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The columns of the result that `expected` is for: all, or some that are spread evenly."""
        n = self.case.sizes["N"]
        return np.unique(np.linspace(0, n - 1, min(n, _CHECKED_COLUMNS)).astype(np.int64))

    def expected(self, activations: str) -> Expected:
        """Reference and budget of the specification in the chosen `columns`; for "bf16" with the
        rounding of the result to bfloat16."""
        stated = self.case.stated(activations, len(self.columns))
        m, groups, each = (stated.sizes[size] for size in "MGS")
        inputs = {
            "x": self.x.reshape(m, groups, each),
            "b": self.values[:, self.columns].reshape(groups, each, -1),
            "b_scale": self.scale[:, self.columns],
            "b_zero_point": self.zero[:, self.columns],
        }
        return stated.expect(inputs)

    def wrong(self, one: Implementation, result: NDArray[Any]) -> str | None:
        """Only lowbit's own must be within the budget of the specification."""
        if (reason := super().wrong(one, result)) or one.kind != OURS:
            return reason
        expected = self.expected(ACTIVATIONS_OF[one.name])
        # It was read as float32, which holds all of bfloat16.
        verdict = expected.check(result[:, self.columns].astype(expected.dtype.storage))
        return None if verdict.ok else verdict.message

    @cached_property
    def stated(self) -> Stated:
        return self.case.stated("f32", self.case.sizes["N"])

    @cached_property
    def weight_bytes(self) -> int:
        """Of lowbit's packed weight."""
        return lowbit.pack(self.quantized()).nbytes
