"""Functions of torch tensors that launch Triton kernels, as something that can be checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lowbit.lab.check_cuda import dtype_of
from lowbit.lab.check_host import Host, Poisoning
from lowbit.lab.check_memory import Memory
from lowbit.lab.check_subject import (
    Run,
    Tested,
    crash_of,
    most_steps,
    shuffle,
    tensor_of,
)
from lowbit.lab.check_tensor import CheckedTensor, storage_dtype
from lowbit.lab.check_triton import triton_modules
from lowbit.lab.report import Finding
from lowbit.lab.trace import Program
from lowbit.spec import Array, Case, Operation, cases_of


@dataclass(frozen=True)
class TestedFunction(Tested):
    """A function, bound to an operation: its parameters are the operation's inputs and `given`."""

    function: Callable[..., Any]
    given: Mapping[str, Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], operation: Operation, seed: int, given: Mapping[str, Any]
    ) -> TestedFunction:
        """ValueError if a parameter is no input, is not given, and has no default; and for a value
        that no parameter takes."""
        triton_modules()
        inputs = [tensor.name for tensor in operation.inputs]
        listed = inspect.signature(function).parameters
        name = function.__name__
        for parameter in (*inputs, *given):
            if parameter not in listed:
                raise ValueError(
                    f"{name} has no parameter {parameter!r}; it has {', '.join(listed) or 'none'}, "
                    f"and the inputs of {operation.name} are {', '.join(inputs)} (it is a function "
                    "that launches kernels; a kernel needs @triton.jit or @cuda.jit)"
                )
        for parameter in listed.values():
            known = parameter.name in inputs or parameter.name in given
            if not known and parameter.default is inspect.Parameter.empty:
                raise ValueError(
                    f"{name} takes {parameter.name!r}, which is no input of {operation.name} "
                    f"({', '.join(inputs)}); name the inputs like these and give others their "
                    f"value: check(..., {parameter.name}=...)"
                )
        return cls(operation, seed, function, dict(given))

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def description(self) -> str:
        triton = triton_modules()[0]
        return f"Triton {triton.__version__}, PyTorch {torch.__version__}"

    def cases(self) -> tuple[list[Case], list[str]]:
        blocks = [block for block in self.operation.blocks.values() if isinstance(block, int)]
        return cases_of(self.operation, blocks, True, True), []

    def tensors(self, case: Case, inputs: Mapping[str, Array]) -> list[CheckedTensor]:
        return [
            tensor_of(type_, inputs[type_.name], case.layout, "input")
            for type_ in self.operation.inputs
        ]

    def start(self, case: Case, given: Mapping[str, Any]) -> Any:
        with Poisoning():
            return self._called(case, given)

    def _called(self, case: Case, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        others = {
            n: value(case.sizes) if callable(value) else value for n, value in self.given.items()
        }
        result = self.function(**tensors, **others)
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"{self.name} returned a {type(result).__name__}; return one tensor, the result"
            )
        return result

    def run(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        *,
        shuffled: bool = False,
        poisoned: bool = False,
    ) -> Run:
        files = [triton_modules()[0].__file__, torch.__file__]
        machinery = [str(Path(file).parent) for file in files if file is not None]
        memory = Memory(
            [],
            machinery=(*machinery, "<string>"),
            poisoned=poisoned,
            most_steps=most_steps(case.sizes),
        )
        host = Host(memory, partial(_order, shuffled, self.seed))
        given = {one.name: host.give(one) for one in self.tensors(case, inputs)}
        output = self._nothing(case)
        try:
            with host.running():
                result = self._called(case, given)
            crash = self._unlike(result, output)
            if crash is None:
                output = host.output(result, self.operation.result)
        except Exception as error:
            program = memory.program if memory.kernel is not None and memory.programs else None
            crash = crash_of(error, memory, program)
        return Run(memory, output, crash, host.several)

    def _nothing(self, case: Case) -> CheckedTensor:
        """A result that was never written."""
        type_ = self.operation.result
        values = np.zeros(type_.shape(case.sizes), storage_dtype(type_.dtype))
        strides = [step // values.itemsize for step in values.strides]
        return CheckedTensor(type_, values, strides, "output", False)

    def _unlike(self, result: torch.Tensor, wanted: CheckedTensor) -> Finding | None:
        """The finding that a result has another shape or dtype."""
        dtype = dtype_of(result)
        if (dtype, tuple(result.shape)) == (wanted.type.dtype, wanted.shape):
            return None
        message = (
            f"{self.name} returns {dtype} {list(result.shape)}; {self.operation.name} is "
            f"{wanted.type.dtype} {list(wanted.shape)}"
        )
        return Finding("wrong-result", message, tensor=wanted.name)


def _order(shuffled: bool, seed: int, programs: list[Program]) -> list[Program]:
    return shuffle(programs, seed) if shuffled and len(programs) > 1 else programs
