"""Kernels whose parameters are pointers and numbers, bound to an operation by their names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from lowbit.spec import Case, Sizes, TensorType, cases_of
from lowbit.spec.cases import tile_sets
from lowbit_lab.backends.backend import PLAIN, Request, Subject, Way
from lowbit_lab.backends.language import Language
from lowbit_lab.backends.vast import wrapping
from lowbit_lab.run.bind import Binding, Parameter, TensorArgument, bind
from lowbit_lab.run.findings import Finding, Severity
from lowbit_lab.run.memory import Memory
from lowbit_lab.run.outcome import Run, Trial, crash_of, most_steps, shuffled
from lowbit_lab.run.tensor import CheckedTensor, storage_dtype, strides_of, tensor_of
from lowbit_lab.run.trace import Grid, Program, corners_of, programs_of

_MOST_PROGRAMS = 65_535  # along the second and third axis (CUDA C++ Programming Guide)


@dataclass(frozen=True, kw_only=True)
class KernelBackend(Language):
    """A language whose kernels have pointers and numbers for parameters: an object is a kernel, not
    bound to anything yet, and says how it is run on a Memory.

    text: the function as it was written. description: what runs it, with its version. machinery:
    the folders whose frames are not a kernel's text. constants: values that the kernel has with it;
    alternatives: others that it says are as good, of which the best is found by launches; undone:
    the parameters of tensors that these launches change and that are set back to what they were,
    or, if False, to zero. on_gpu: whether `start` launches it. slow:
    whether a step takes so long that few cases must do. has_addresses: whether it computes them in
    integers of its own, which may be too short.
    """

    text: Callable[..., None]
    description: str
    parameters: tuple[Parameter, ...]
    machinery: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alternatives: tuple[Mapping[str, Any], ...] = ()
    undone: Mapping[str, bool] = field(default_factory=dict[str, bool])
    on_gpu: bool = False

    has_addresses: ClassVar[bool] = False
    slow: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.text.__name__

    @classmethod
    @abstractmethod
    def of(cls, kernel: Any) -> Self:
        """The kernel without its decorators. RuntimeError or ModuleNotFoundError, with what to do,
        if it cannot be run here."""

    @abstractmethod
    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run these programs in this order. Whatever the kernel raises comes out as it is."""

    @property
    def widths(self) -> tuple[int, ...]:
        """How wide the blocks are whose width is written in the text."""
        return ()

    def start(self, arguments: Mapping[str, Any], grid: Grid) -> None:
        """Launch it on a GPU, on torch tensors and numbers."""
        raise NotImplementedError

    def refused(self, arguments: Mapping[str, Any], dtypes: Mapping[str, str]) -> Finding | None:
        """That the compiler refuses it, with these arguments; dtypes: of the tensors."""
        return None

    @classmethod
    def interpret(cls, request: Request) -> KernelSubject:
        operation, output, initial = request.operation, request.output, request.initial
        if not isinstance(initial, (int, float, type(None))):
            raise TypeError(f"initial is {initial!r}; give a number, or None")
        known = [t.name for t in operation.inputs]
        if output is not None and output not in known:
            raise ValueError(f"output is {output!r}; it must be an input: {', '.join(known)}")
        kernel = cls.of(request.variant.kernel)
        grid = 1 if request.variant.grid is None else request.variant.grid
        request = request.launched(name=kernel.name, grid=grid)
        given = {**kernel.constants, **request.variant.constants}
        return KernelSubject(
            request=request,
            name=kernel.name,
            description=kernel.description,
            text=kernel.text,
            on_gpu=kernel.on_gpu,
            slow=kernel.slow,
            any_sizes=callable(grid),
            kernel=kernel,
            binding=bind(kernel.parameters, operation, given, output),
        )


@dataclass(frozen=True, kw_only=True)
class KernelSubject(Subject):
    """A kernel with pointers, bound to an operation."""

    kernel: KernelBackend
    binding: Binding

    def cases(self) -> tuple[list[Case], list[str]]:
        strided, blocks = bool(self.binding.strides_taken), self._blocks
        # A thousand blocks take too long in a slow one.
        cases = cases_of(self.operation, blocks, strided, not self.slow, self._single)
        untried = self.request.untried
        cases = [case for case in cases if case.fill not in untried]
        fixed = any(isinstance(n, int) and n > 1 for n in self.request.variant.constants.values())
        if self.any_sizes or not (fixed or prod(self.grid_at(cases[0].sizes)) > 1):
            said = "data was not tried: a specification with numbers for sizes says nothing of it"
            left_out = [f"{fill} {said}" for fill in untried]
            return cases, [*left_out, *self._too_long(cases[0].sizes)]
        exercise = cases[0].sizes
        few = [case for case in cases if case.sizes == exercise]
        return few, ["the grid is fixed, so only one set of sizes was tried"]

    def wide(self) -> list[Case]:
        found = tile_sets(self.operation, self._blocks, self._single)
        return [Case(self.operation, sizes) for sizes in found]

    def variants(self) -> list[tuple[str, Subject, Severity]]:
        """Block sizes that the kernel says are as good; or, where nobody has said which, all of
        them doubled, for a warning."""
        if not self.any_sizes:
            return []
        doubled = {name: 2 * size for name, size in self.binding.free_blocks.items()}
        choices: list[tuple[Mapping[str, Any], Severity]] = [
            *((numbers, "error") for numbers in self.kernel.alternatives),
            *([(doubled, "warning")] if doubled else []),
        ]
        made: list[tuple[str, Subject, Severity]] = []
        for numbers, severity in choices:
            binding = replace(self.binding, sources={**self.binding.sources, **numbers})
            words = ", ".join(f"{name}={size}" for name, size in numbers.items())
            made.append((words, replace(self, binding=binding), severity))
        return made

    def grid_at(self, sizes: Sizes) -> Grid:
        """As of the variant."""
        return self.request.variant.grid_at(self.binding.numbers_at(sizes))

    def arguments_at(self, sizes: Sizes) -> dict[str, Any]:
        """Of each parameter, with contiguous tensors."""
        tensors = (*self.operation.inputs, self.operation.result, *self.binding.scratch_at(sizes))
        strides = {t.name: strides_of(t.shape(sizes), "contiguous") for t in tensors}
        return self.binding.arguments(sizes, strides)

    @property
    def _blocks(self) -> tuple[int, ...]:
        """The widths of blocks: those that are parameters, then those that the text has besides."""
        known = tuple(self.binding.blocks.values())
        return (*known, *(width for width in self.kernel.widths if width not in known))

    @property
    def _single(self) -> list[str]:
        """The sizes for each index of which there is a program."""
        found = list[str]()
        for name in self.operation.names if self.any_sizes else ():
            sizes = self.operation.fitted(dict.fromkeys(self.operation.names, 64))
            more = self.operation.fitted({**sizes, name: sizes[name] + 1})
            try:
                few, many = prod(self.grid_at(sizes)), prod(self.grid_at(more))
            except Exception:  # somebody's own function, of sizes that nobody asks for
                continue
            if few * more[name] == many * sizes[name]:
                found.append(name)
        return found

    def _too_long(self, sizes: Sizes) -> Iterator[str]:
        """Which sizes are too long for a grid like this."""
        for name in self.operation.names if self.any_sizes else ():
            long = self.operation.fitted({**sizes, name: 4 * _MOST_PROGRAMS})
            try:
                grid = self.grid_at(long)
            except Exception:  # somebody's own function, of sizes that nobody asks for
                continue
            if max(grid[1:]) > _MOST_PROGRAMS:
                yield (
                    f"with {name}={long[name]} the grid is {grid}, and a GPU "
                    f"launches {_MOST_PROGRAMS} programs along the second and third axis"
                )

    def refusals(self, case: Case) -> list[Finding]:
        found, sizes = list[Finding | None](), case.sizes
        if not self.binding.packed:
            scratch = self.binding.scratch_at(sizes)
            tensors = (*self.operation.inputs, self.operation.result, *scratch)
            dtypes = {t.name: t.dtype for t in tensors}
            found.append(self.kernel.refused(self.arguments_at(sizes), dtypes))
            if self.kernel.has_addresses and self.any_sizes:
                found.append(wrapping(self))
        if self.kernel.alternatives:
            found.append(self._spoiled_by_trials(case))
        return [one for one in found if one is not None]

    def tensors(self, trial: Trial) -> list[CheckedTensor]:
        """Fresh tensors that hold the inputs, and the result's."""
        case = trial.case
        free, initial = self.binding.strides_taken, self.request.initial
        packed = {one.name: (name, one.pack) for name, one in self.binding.packed.items()}
        tensors: list[CheckedTensor] = []
        for type_ in self.operation.inputs:
            values = trial.inputs[type_.name]
            axes = free.get(type_.name, ())
            role = "both" if type_.name == self.request.output else "input"
            if type_.name in packed:
                name, pack = packed[type_.name]
                values = pack(values)
                type_ = TensorType(name, values.dtype.name, tuple(map(str, values.shape)))
            tensors.append(tensor_of(type_, values, case.layout, role, free=axes))
        if self.request.output is None:
            result = self.operation.result
            axes = free.get(result.name, ())
            filled = np.full(result.shape(case.sizes), initial or 0, storage_dtype(result.dtype))
            known = initial is not None
            tensors.append(tensor_of(result, filled, case.layout, "output", known, axes))
        numbers = self.binding.numbers_at(case.sizes) if self.binding.scratch else {}
        return [*tensors, *(one.tensor(n, numbers) for n, one in self.binding.scratch.items())]

    @property
    def _result(self) -> str:
        """The name of the tensor that the result is in."""
        return self.request.output or self.operation.result.name

    def start(self, sizes: Sizes, tensors: Mapping[str, Any]) -> Any:
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        arguments = self.binding.arguments(sizes, strides)
        values = {
            name: tensors[value.name] if isinstance(value, TensorArgument) else value
            for name, value in arguments.items()
        }
        self.kernel.start(values, self.grid_at(sizes))
        return tensors[self._result]

    def _spoiled_by_trials(self, case: Case) -> Finding | None:
        """That launches which look for the best configuration change what the last one reads."""
        trial = Trial.of(case, self.request.seed)
        tensors = {one.name: one for one in self.tensors(trial)}
        before = {name: one.storage.copy() for name, one in tensors.items()}
        first = self._run(trial, list(tensors.values()), PLAIN)
        if first.crash or first.wrong.any():
            return None
        for parameter, restored in self.kernel.undone.items():
            name = self.binding.sources[parameter].name
            tensors[name].storage[:] = before[name] if restored else 0
        for one in tensors.values():
            one.forget()
        wrong = self._run(trial, list(tensors.values()), PLAIN).wrong
        if not wrong.any():
            return None
        message = (
            "triton.autotune launches it several times before the launch that counts, and a second "
            f"launch leaves {int(wrong.sum())} of {wrong.size} elements wrong; name the tensors "
            "that it changes and reads in restore_value= or reset_to_zero="
        )
        return Finding("tuned-twice", message, sizes=trial.case.sizes)

    def run(self, trial: Trial, way: Way = PLAIN) -> Run:
        return self._run(trial, self.tensors(trial), way)

    def _run(self, trial: Trial, tensors: list[CheckedTensor], way: Way) -> Run:
        sizes = trial.case.sizes
        memory = Memory(
            tensors,
            machinery=self.kernel.machinery,
            recorder=way.recorder,
            poisoned=way.poisoned,
            most_steps=most_steps(sizes),
        )
        arguments = self.binding.arguments(sizes, {one.name: one.strides for one in tensors})
        grid = self.grid_at(sizes)
        programs = programs_of(grid)
        crash = None
        for some in [[one] for one in corners_of(grid)] if way.corners else [programs]:
            try:
                self.kernel.run(memory, arguments, shuffled(some, way.seed), grid)
            except Exception as error:  # a kernel may raise anything
                crash = crash_of(error, memory)
        return Run(trial, memory, memory.tensors[self._result], crash, len(programs) > 1)
