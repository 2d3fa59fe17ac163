"""What can be checked, and one run of it: a kernel bound to an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lowbit.lab.check_beyond import UnsupportedError
from lowbit.lab.check_bind import Binding, Parameter, TensorArgument
from lowbit.lab.check_judge import Lenience, judge
from lowbit.lab.check_memory import EndlessError, Memory
from lowbit.lab.check_numba import NumbaKernel
from lowbit.lab.check_tensor import CheckedTensor, Role, storage_dtype, strides_of, widened
from lowbit.lab.check_triton import TritonKernel
from lowbit.lab.record import Recorder
from lowbit.lab.report import Finding, Severity
from lowbit.lab.trace import Grid, Place, Program, grid_of, programs_of
from lowbit.spec import (
    Array,
    Block,
    Case,
    Expected,
    Layout,
    Operation,
    Sizes,
    TensorType,
    cases_of,
)

if TYPE_CHECKING:
    from lowbit.lab.view_page import View

GridLike = int | Sequence[int] | Callable[[dict[str, Any]], int | Sequence[int]]

_AXES = 3
# What a program may take, in steps of an interpreter: this much for each element of the space of
# all sizes, and this much besides.
_STEPS_OF_ONE, _STEPS = 100, 50_000


class Reading(Protocol):
    """A way to run one kernel on a Memory: by Triton's interpreter, lowbit's own, a simulator."""

    @property
    def name(self) -> str:
        """The kernel's name."""
        ...

    @property
    def text(self) -> Callable[..., None]:
        """The function as it was written."""
        ...

    @property
    def description(self) -> str:
        """What runs it, with its version."""
        ...

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The kernel's parameters."""
        ...

    @property
    def constants(self) -> Mapping[str, Any]:
        """Values that the kernel brings with it."""
        ...

    @property
    def alternatives(self) -> tuple[Mapping[str, Any], ...]:
        """Other values that it says are as good."""
        ...

    def machinery(self) -> tuple[str, ...]:
        """The folders whose frames are not a kernel's text."""
        ...

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        """Run these programs in this order."""
        ...


@dataclass(frozen=True)
class Tested(ABC):
    """Something bound to an operation: everything that a run needs besides a case."""

    operation: Operation
    seed: int

    @property
    @abstractmethod
    def name(self) -> str:
        """What reports call it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What runs it, with its version."""

    @abstractmethod
    def cases(self) -> tuple[list[Case], list[str]]:
        """What to try it on, and what to tell about the choice."""

    @abstractmethod
    def run(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        *,
        shuffled: bool = False,
        poisoned: bool = False,
    ) -> Run:
        """Run it once, its programs in order or shuffled."""

    @abstractmethod
    def tensors(self, case: Case, inputs: Mapping[str, Array]) -> list[CheckedTensor]:
        """Fresh tensors, those that are passed to it."""

    @abstractmethod
    def start(self, case: Case, given: Mapping[str, Any]) -> Any:
        """Run it on a GPU on these torch tensors, by their names; returns the result's."""

    @property
    def runs_on_gpu(self) -> bool:
        """Whether `start` can do it."""
        return True

    @property
    def slow(self) -> bool:
        """Whether the exercise is tried with one kind of data only."""
        return False

    def variants(self) -> list[tuple[str, Tested, Severity]]:
        """The same with other block sizes, in words; and how bad it is if that goes wrong."""
        return []

    def viewer(self, case: Case | None) -> Callable[[], View] | None:
        """What makes a view of a case, of the exercise if None; None if there is no such view."""
        return None

    def expected(self, case: Case, inputs: Mapping[str, Array]) -> Expected:
        """The reference's result for these inputs, as they are stored."""
        return case.expect(inputs, self.seed)

    def judge(
        self, case: Case, inputs: Mapping[str, Array], run: Run, expected: Expected
    ) -> list[Finding]:
        """What is wrong with the result of a run."""
        return judge(run, expected, Lenience.of(case, inputs, expected))


@dataclass(frozen=True)
class Subject(Tested):
    """A kernel, bound to an operation.

    `output` names the input that the kernel replaces by the result; `initial` is what the result
    is filled with before the kernel starts, None for poison.
    """

    reading: Reading
    binding: Binding
    grid: GridLike
    output: str | None
    initial: float | None
    given: Mapping[str, Block | float] = field(default_factory=dict[str, Block | float])

    @property
    def name(self) -> str:
        return self.reading.name

    @property
    def description(self) -> str:
        return self.reading.description

    @property
    def runs_on_gpu(self) -> bool:
        return isinstance(self.reading, TritonKernel)

    @property
    def slow(self) -> bool:
        # Numba's simulator makes each thread one of Python.
        return isinstance(self.reading, NumbaKernel)

    def cases(self) -> tuple[list[Case], list[str]]:
        strided = bool(self.binding.takes_strides)
        # A thousand blocks take too long in a slow one.
        cases = cases_of(self.operation, self.binding.blocks, strided, not self.slow)
        fixed = any(isinstance(value, int) and value > 1 for value in self.given.values())
        if callable(self.grid) or not (fixed or prod(self.grid_at(cases[0].sizes)) > 1):
            return cases, []
        exercise = cases[0].sizes
        few = [case for case in cases if case.sizes == exercise]
        return few, ["the grid is fixed, so only one set of sizes was tried"]

    def variants(self) -> list[tuple[str, Tested, Severity]]:
        """Block sizes that the kernel says are as good; or, where nobody has said which, all of
        them doubled, for a warning."""
        if not callable(self.grid):
            return []
        doubled = {name: 2 * size for name, size in self.binding.free_blocks.items()}
        choices: list[tuple[Mapping[str, Any], Severity]] = [
            (numbers, "error") for numbers in self.reading.alternatives
        ]
        if doubled:
            choices.append((doubled, "warning"))
        made: list[tuple[str, Tested, Severity]] = []
        for numbers, severity in choices:
            binding = replace(self.binding, numbers={**self.binding.numbers, **numbers})
            words = ", ".join(f"{name}={size}" for name, size in numbers.items())
            made.append((words, replace(self, binding=binding), severity))
        return made

    def viewer(self, case: Case | None) -> Callable[[], View] | None:
        return partial(_view, self, case)

    def grid_at(self, sizes: Sizes) -> Grid:
        """The grid at these sizes. ValueError if it is none."""
        numbers = self.binding.numbers_at(sizes)
        wanted = self.grid(numbers) if callable(self.grid) else self.grid
        several = isinstance(wanted, (tuple, list, np.ndarray))
        dims: list[Any] = list(wanted) if several else [wanted]
        if not 1 <= len(dims) <= _AXES or any(
            not isinstance(n, (int, np.integer)) or n < 0 for n in dims
        ):
            raise ValueError(
                f"the grid of {self.reading.name} is {wanted!r} at {dict(sizes)}; it must be one "
                "to three numbers, 0 or more, or a function of the sizes that returns them"
            )
        return grid_of(dims)

    def tensors(self, case: Case, inputs: Mapping[str, Array]) -> list[CheckedTensor]:
        """Fresh tensors that hold the inputs, and the result's."""
        result = self.operation.result
        strided = self.binding.takes_strides
        tensors: list[CheckedTensor] = []
        packed = {one.name: (name, one.pack) for name, one in self.binding.packed.items()}
        for type_ in self.operation.inputs:
            if type_.name in packed:
                name, pack = packed[type_.name]
                values = pack(inputs[type_.name])
                type_ = TensorType(name, values.dtype.name, tuple(map(str, values.shape)))
                tensors.append(tensor_of(type_, values, "contiguous", "input"))
                continue
            role: Role = "both" if type_.name == self.output else "input"
            layout = case.layout if type_.name in strided else "contiguous"
            tensors.append(tensor_of(type_, inputs[type_.name], layout, role))
        if self.output is None:
            shape = result.shape(case.sizes)
            strides = strides_of(shape, case.layout if result.name in strided else "contiguous")
            filled = np.full(shape, self.initial or 0, storage_dtype(result.dtype))
            tensors.append(
                CheckedTensor(result, filled, strides, "output", self.initial is not None)
            )
        return tensors

    def start(self, case: Case, given: Mapping[str, Any]) -> Any:
        assert isinstance(self.reading, TritonKernel)
        strides = {name: tensor.stride() for name, tensor in given.items()}
        arguments = self.reading.decided(self.binding.arguments(case.sizes, strides))
        values = {
            name: given[value.name] if isinstance(value, TensorArgument) else value
            for name, value in arguments.items()
        }
        self.reading.jitted[self.grid_at(case.sizes)](**values)
        return given[self.output or self.operation.result.name]

    def run(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        *,
        shuffled: bool = False,
        poisoned: bool = False,
        recorder: Recorder | None = None,
    ) -> Run:
        """Run the kernel once, its programs in order or shuffled."""
        tensors = self.tensors(case, inputs)
        memory = Memory(
            tensors,
            machinery=self.reading.machinery(),
            recorder=recorder,
            poisoned=poisoned,
            most_steps=most_steps(case.sizes),
        )
        strides = {one.name: one.strides for one in tensors}
        arguments = self.binding.arguments(case.sizes, strides)
        grid = self.grid_at(case.sizes)
        programs = programs_of(grid)
        several = len(programs) > 1
        if shuffled and several:
            programs = shuffle(programs, self.seed)
        crash = None
        try:
            self.reading.run(memory, arguments, programs, grid)
        except Exception as error:
            crash = crash_of(error, memory, memory.program if memory.programs else None)
        if crash is not None and crash.place is None and isinstance(self.reading, TritonKernel):
            # No line of a kernel takes part.
            raise RuntimeError(
                f"{self.description} is another one inside than the checker knows: {crash.message}"
            )
        output = memory.tensors[self.output or self.operation.result.name]
        return Run(memory, output, crash, several)


@dataclass(frozen=True, eq=False)
class Run:
    """What a run left behind. `several`: whether there were programs to shuffle."""

    memory: Memory
    output: CheckedTensor
    crash: Finding | None
    several: bool

    @property
    def result(self) -> Array:
        """The result in float64, int64 or bool."""
        return widened(self.output.values, self.output.type.dtype)

    def same_as(self, other: Run) -> bool:
        """Whether both left the same bits, NaN aside."""
        return bool(np.array_equal(self.result, other.result, self.output.type.is_float))


def tensor_of(type_: TensorType, values: Array, layout: Layout, role: Role) -> CheckedTensor:
    """A fresh tensor that holds these values, in this layout."""
    stored = values.view(storage_dtype(type_.dtype))
    return CheckedTensor(type_, stored, strides_of(values.shape, layout), role)


def most_steps(sizes: Sizes) -> int:
    """How many steps of an interpreter a program may take at these sizes."""
    return _STEPS + _STEPS_OF_ONE * prod(sizes.values())


def shuffle(programs: Sequence[Program], seed: int) -> list[Program]:
    """Several programs in another order."""
    order = np.random.default_rng(seed).permutation(len(programs))
    # Last first, and nothing where it was: a shuffle of two may shuffle nothing.
    return [programs[i] for i in (order if len(order) > 2 else (1, 0))]


def crash_of(error: Exception, memory: Memory, program: Program | None) -> Finding:
    """The finding that something stops with an error, at the last line that is no machinery's.

    UnsupportedError, with that line, if the error is one.
    """
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    place, frame = None, error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith(memory.machinery):
            place = Place(file, frame.tb_lineno)
        frame = frame.tb_next
    text = str(error).strip().splitlines()
    if isinstance(error, UnsupportedError):
        raise UnsupportedError(f"{text[0]} (at {place})") from error
    if isinstance(error, EndlessError):
        return Finding("endless", text[0], program=program, place=place, kernel=memory.kernel)
    message = f"{type(error).__name__}: {text[0] if text else 'without a message'}"
    return Finding("crash", message, program=program, place=place, kernel=memory.kernel)


def _view(subject: Subject, case: Case | None) -> View:
    from lowbit.lab.view_run import view_subject

    return view_subject(subject, case)
