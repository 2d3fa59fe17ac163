"""Functions of torch tensors that launch Triton kernels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from lowbit.spec import Case, Sizes, cases_of
from lowbit_lab.backends.backend import PLAIN, Request, Subject, Way
from lowbit_lab.backends.language import Language, languages
from lowbit_lab.run.bind import is_of_sizes
from lowbit_lab.run.findings import Finding
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import Run, Trial, crash_of, most_steps
from lowbit_lab.run.tensor import CheckedTensor, dtype_of, tensor_of, unwritten
from lowbit_lab.run.triton import triton_modules


@languages.register("function")
class TensorFunction(Language):
    """Functions whose parameters are the operation's inputs, and what is given by name."""

    title = "PyTorch"
    written = "a function of tensors that launches kernels"

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, FunctionType)

    @classmethod
    def function(cls, kernel: Any) -> FunctionType:
        return kernel

    @classmethod
    def interpret(cls, request: Request) -> Subject:
        """ValueError if a parameter is no input, is not given, and has no default; and for a value
        that no parameter takes."""
        name = request.variant.kernel.__name__
        if (request.variant.grid, request.output, request.initial) != (None, None, None):
            raise ValueError(
                f"{name} is a function of tensors, which launches its kernels itself: "
                "leave out grid, output and initial (a kernel needs @triton.jit)"
            )
        _refuse_unfitting(request)
        triton = triton_modules()[0]
        import torch

        runner = f"Triton {triton.__version__}, PyTorch {torch.__version__}"
        return _Subject(request=request, name=name, description=runner, on_gpu=True)


@dataclass(frozen=True, kw_only=True)
class _Subject(Subject):
    """A function bound to an operation."""

    def cases(self) -> tuple[list[Case], list[str]]:
        blocks = [block for block in self.operation.blocks.values() if isinstance(block, int)]
        return cases_of(self.operation, blocks, True, True), []

    def tensors(self, trial: Trial) -> list[CheckedTensor]:
        return [
            tensor_of(type_, trial.inputs[type_.name], trial.case.layout, "input")
            for type_ in self.operation.inputs
        ]

    def start(self, sizes: Sizes, tensors: Mapping[str, Any]) -> Any:
        from lowbit_lab.backends.host import Poisoning

        with Poisoning():
            return self._called(sizes, tensors)

    def _called(self, sizes: Sizes, tensors: Mapping[str, Any]) -> Any:
        import torch

        given = self.request.variant.constants.items()
        others = {name: one(sizes) if is_of_sizes(one) else one for name, one in given}
        result = self.request.variant.kernel(**tensors, **others)
        if self.operation.part is not None:
            count = len(self.operation.beside) + 1
            if not isinstance(result, tuple | list) or len(result) != count:
                raise TypeError(
                    f"{self.name} must return {count} tensors, as {self.operation} does"
                )
            result = result[self.operation.part]
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"{self.name} returned a {type(result).__name__}; return one tensor, the result"
            )
        return result

    def run(self, trial: Trial, way: Way = PLAIN) -> Run:
        from lowbit_lab.backends.host import Host, machinery

        sizes = trial.case.sizes
        memory = Memory(
            [], machinery=machinery(), poisoned=way.poisoned, most_steps=most_steps(sizes)
        )
        host = Host(memory, way.seed)
        given = {one.name: host.give(one) for one in self.tensors(trial)}
        output = unwritten(self.operation.result, sizes)
        try:
            with host.running():
                result = self._called(sizes, given)
            crash = self._unlike(result, output)
            if crash is None:
                output = host.output(result, self.operation.result)
        except Exception as error:  # a function may raise anything
            crash = crash_of(error, memory)
        return Run(trial, memory, output, crash, host.several)

    def _unlike(self, result: Any, wanted: CheckedTensor) -> Finding | None:
        """The finding that a result has another shape or dtype."""
        dtype = dtype_of(result)
        if (dtype, tuple(result.shape)) == (wanted.type.dtype, wanted.shape):
            return None
        message = (
            f"{self.name} returns {dtype} {list(result.shape)}; {self.operation.name} is "
            f"{wanted.type.dtype} {list(wanted.shape)}"
        )
        return Finding("wrong-result", message, tensor=wanted.name)


def _refuse_unfitting(request: Request) -> None:
    function, operation = request.variant.kernel, request.operation
    given = request.variant.constants
    inputs = [tensor.name for tensor in operation.inputs]
    listed, name = inspect.signature(function).parameters, function.__name__
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
