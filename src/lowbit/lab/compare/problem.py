"""What the variants of a file compute: their data, what has to come out, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lowbit.lab.run.bind import Parameter, TensorArgument, bind
from lowbit.spec import Array, Case, Expected, Operation

_UNWRITTEN = 0xA5
"""What the bytes of a result are before a run, so that nothing passes by luck."""


@dataclass(frozen=True)
class Checked:
    """Whether a result was right. ok: None where nothing was compared. against: with what. how:
    what ran the kernel."""

    ok: bool | None
    against: str
    how: str
    message: str


@dataclass(frozen=True)
class Problem:
    """One set of sizes. operation: the specification; without one, `make` gives the arrays by
    name, of which `output` is the result."""

    sizes: Mapping[str, int]
    operation: Operation | None = None
    make: Callable[[Mapping[str, int]], Mapping[str, Array]] | None = None
    output: str | None = None

    @cached_property
    def result(self) -> str:
        """The name of the result."""
        if self.output is not None:
            return self.output
        assert self.operation is not None
        return self.operation.result.name

    @cached_property
    def _case(self) -> Case:
        assert self.operation is not None
        return Case(self.operation, dict(self.sizes))

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """All arrays as they are before a run, but for a result that is nobody's input."""
        if self.operation is not None:
            return dict(self._case.inputs(0))
        assert self.make is not None
        return {name: np.ascontiguousarray(one) for name, one in self.make(self.sizes).items()}

    @cached_property
    def expected(self) -> Expected | None:
        """What has to come out; None without a specification."""
        return None if self.operation is None else self._case.expect(self.inputs)

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of all arrays."""
        found = {str(one.dtype) for one in self.inputs.values()}
        return frozenset(found if self.operation is None else found | {self.operation.result.dtype})

    @property
    def operations(self) -> int | None:
        """Additions and multiplications; None if nobody said."""
        return None if self.operation is None else self._case.operations

    @property
    def least_bytes(self) -> int:
        """Bytes that have to be moved: each array once."""
        if self.operation is not None:
            return self._case.bytes_moved
        return sum(one.nbytes for one in self.inputs.values())

    def arrays(self) -> dict[str, Array]:
        """Fresh arrays, those that are passed: the result holds nothing of use."""
        made = {name: np.array(one, order="C") for name, one in self.inputs.items()}
        if self.operation is not None and self.result not in made:
            type_ = self.operation.result
            made[self.result] = np.zeros(type_.shape(self.sizes), type_.format.storage)
        if self.operation is not None or self.output not in self.inputs:
            made[self.result].view(np.uint8)[...] = _UNWRITTEN
        return made

    def arguments(
        self, names: Sequence[str], arrays: Mapping[str, Any], constants: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The argument of each parameter: an array, or a number. ValueError for a parameter that
        stands for nothing."""
        if self.operation is not None:
            given = {name: one for name, one in constants.items() if name in names}
            parameters = [Parameter(name) for name in names]
            output = self.output if self.output in self.inputs else None
            binding = bind(parameters, self.operation, given, output)
            strides = {name: _strides(one.shape) for name, one in arrays.items()}
            made = binding.arguments(self.sizes, strides)
            return {
                n: arrays[v.name] if isinstance(v, TensorArgument) else v for n, v in made.items()
            }
        known = {**arrays, **self.sizes, **constants}
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(
                f"the parameter {missing[0]!r} stands for nothing; inputs, sizes and constants are "
                f"{', '.join(known)}"
            )
        return {n: known[n](self.sizes) if callable(known[n]) else known[n] for n in names}

    def judge(self, result: Array, first: Array | None, how: str) -> Checked:
        """Hold a result against the specification, or against the first variant's."""
        expected = self.expected
        if expected is not None:
            verdict = expected.check(result)
            assert self.operation is not None
            return Checked(
                verdict.ok, f"the specification {self.operation.name}", how, verdict.message
            )
        if first is None:
            return Checked(None, "nothing", how, "the first: others are held against it")
        if result.dtype != first.dtype or result.shape != first.shape:
            return Checked(False, "the first variant", how, f"{result.dtype}{list(result.shape)}")
        off = np.abs(result.astype(np.float64) - first.astype(np.float64))
        same = np.array_equal(result, first, equal_nan=result.dtype.kind == "f")
        largest = float(np.nanmax(off)) if off.size else 0.0
        share = largest / (float(np.nanmax(np.abs(first.astype(np.float64)))) or 1.0)
        text = (
            "the same bits"
            if same
            else f"differs by {largest:.3g} at most, {share:.1e} of the largest"
        )
        whole = result.dtype.kind != "f"
        # How far floats may differ, only a specification says.
        return Checked(
            same if whole or same or not np.isfinite(largest) else None,
            "the first variant",
            how,
            text,
        )


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous array, in elements."""
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
