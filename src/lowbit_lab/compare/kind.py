"""The kinds of kernels that can be compared: each a file of `kinds/`."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

from lowbit.registry import Registry
from lowbit.registry.conflicts import conflict
from lowbit.spec import Array
from lowbit_lab.compare.code import Code
from lowbit_lab.compare.problem import Baseline, Checked, Problem, Variant
from lowbit_lab.compare.ptx.execute import Launch
from lowbit_lab.source import blamed

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Typed:
    """A variable with the type that a compiler inferred, and the line of its first assignment.
    why, where: what made it so wide, and on which line, if that is known."""

    name: str
    type: str
    line: int | None
    why: str = ""
    where: int | None = None


@dataclass(frozen=True)
class Built:
    """A variant as its compiler made it.

    lines, first_line, file: the text. types: of its variables. made_by: the compilers. ptx, entry:
    for a GPU, with the name of the kernel; threads: of a block; shared: bytes of dynamic shared
    memory; most_registers: that the kernel allows itself. code: for a CPU. stages: texts on the
    way, by name. widest: elements of the largest tensor that the threads of a block share; None
    where the text says what each thread does. missing: what could not be had.
    """

    lines: Sequence[str]
    first_line: int
    file: str
    types: tuple[Typed, ...] = ()
    made_by: str = ""
    ptx: str | None = None
    entry: str | None = None
    threads: int = 0
    shared: int = 0
    most_registers: int | None = None
    code: Code | None = None
    stages: Mapping[str, str] | None = None
    widest: int | None = None
    missing: tuple[str, ...] = ()


class Kind(ABC):
    """What is done to kernels of one kind. title: what people call it."""

    title: ClassVar[str]
    needs_grid: ClassVar[bool] = False
    needs_block: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a kernel of the kind. It must not need what the kind needs to run."""

    @classmethod
    @abstractmethod
    def function(cls, kernel: Any) -> FunctionType | None:
        """Its text as a function of Python; None if it is another language's."""

    @classmethod
    def name_of(cls, kernel: Any) -> str:
        """What the kernel calls itself."""
        function = cls.function(kernel)
        assert function is not None
        return function.__name__

    @classmethod
    def text(cls, kernel: Any) -> tuple[Sequence[str], int, str]:
        """The lines of its text, the number of the first, and the file."""
        function = cls.function(kernel)
        assert function is not None
        lines, first = inspect.getsourcelines(function)
        return [line.rstrip("\n") for line in lines], first, function.__code__.co_filename

    @abstractmethod
    def build(self, variant: Variant, problem: Problem, sm: int) -> Built:
        """Compile it for the sizes of a problem; for a GPU, for a compute capability. Raises what
        its compiler raises."""

    def words(self, error: Exception, kernel: Any, file: Path) -> str:
        """What its compiler says with an error, whole, and where it can with the line of the
        file."""
        return plain(str(error))

    def launch(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Array]
    ) -> Launch | None:
        """Its PTX with these arrays, to be interpreted; None for kernels that are for a CPU."""
        return None

    @abstractmethod
    def check(
        self, variant: Variant, built: Built, problem: Problem, first: Baseline | None
    ) -> tuple[Checked, Array | None]:
        """Run it on the CPU and judge the result."""

    @abstractmethod
    def call(
        self, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        """What is timed: on the CPU on arrays, on a GPU on its tensors, by name."""


kinds: Registry[type[Kind]] = Registry("kind of kernel", "lowbit_lab.compare.kinds")


def kind_of(kernel: Any) -> type[Kind]:
    """TypeError if the kernel is of no kind."""
    for kind in kinds:
        if kind.takes(kernel):
            return kind
    raise TypeError(
        f"cannot compare {kernel!r}; give a function under numba.cuda.jit, triton.jit or "
        "numba.njit, a lowbit kernel, or cuda_c('...')"
    )


def build(variant: Variant, problem: Problem, sm: int, file: Path) -> Built:
    """Compile a variant of a file. ValueError with all that its compiler says, as plain text."""
    kind = kind_of(variant.kernel)()
    try:
        with blamed(file):
            return kind.build(variant, problem, sm)
    except Exception as error:  # compilers fail in many ways
        said = conflict(error) or kind.words(error, variant.kernel, file).strip()
        raise ValueError(said or type(error).__name__) from error


def plain(text: str) -> str:
    """Without a terminal's escape codes."""
    return _ESCAPE.sub("", text)
