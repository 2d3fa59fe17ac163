"""Languages of kernels: each a file of `lowbit_lab/languages`, in one registry.

A language is a class under `@languages.register(...)`. It says which kernels are written in it and
what can be done with these: `interpret` binds a kernel to an operation, to be run on memory that
sees every access (check, view); `compile` gives machine code with the text's lines (compare,
anatomy), `launch` its PTX to be interpreted, `call` what is timed. A language defines what it can;
whoever needs an ability asks for it (`language_of`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Literal

from lowbit.registry import Registry
from lowbit.spec import Array
from lowbit_lab.backends.backend import Request, Subject, Variant
from lowbit_lab.compare.built import Built, plain
from lowbit_lab.compare.problem import Problem, idea_of
from lowbit_lab.compare.ptx.execute import Launch

Ability = Literal["interpret", "compile"]

_WORDS: Mapping[Ability, str] = {"interpret": "check", "compile": "compare"}
"""What people call the use of an ability."""


class Language(ABC):
    """A language of kernels.

    title: what people call it. written: how a kernel is written in it, as a hint. needs_grid:
    whether somebody has to say how many programs there are; needs_block: how many threads a block
    has. for_gpu: whether a kernel is compiled for a GPU. simulated: whether kernels are interpreted
    in a process of its own only, which compiles nothing.
    """

    title: ClassVar[str]
    written: ClassVar[str]
    needs_grid: ClassVar[bool] = False
    needs_block: ClassVar[bool] = False
    for_gpu: ClassVar[bool] = False
    simulated: ClassVar[bool] = False

    @classmethod
    def can(cls, ability: Ability) -> bool:
        """Whether the language defines it."""
        return next(base for base in cls.__mro__ if ability in vars(base)) is not Language

    # What a kernel is.

    @classmethod
    @abstractmethod
    def takes(cls, kernel: Any) -> bool:
        """Whether this is a kernel of the language. It must not need what the language needs to
        run."""

    @classmethod
    def function(cls, kernel: Any) -> FunctionType | None:
        """Its text as a function of Python; None if it is another language's."""
        return None

    @classmethod
    def name_of(cls, kernel: Any) -> str:
        """What the kernel calls itself."""
        function = cls.function(kernel)
        assert function is not None
        return function.__name__

    @classmethod
    def idea(cls, kernel: Any) -> str:
        """What it does, in a line."""
        return idea_of(cls.function(kernel))

    @classmethod
    def names(cls, kernel: Any) -> Sequence[str]:
        """The names of its parameters."""
        function = cls.function(kernel)
        assert function is not None
        return [*inspect.signature(function).parameters]

    @classmethod
    def source(cls, kernel: Any) -> tuple[Sequence[str], int, str]:
        """The lines of its text, the number of the first, and the file."""
        function = cls.function(kernel)
        assert function is not None
        lines, first = inspect.getsourcelines(function)
        return [line.rstrip("\n") for line in lines], first, function.__code__.co_filename

    # Run on memory that sees every access.

    @classmethod
    def interpret(cls, request: Request) -> Subject:
        """Bind a kernel that it takes. ValueError or TypeError if the request does not fit, and
        what the lack of a package or a GPU raises."""
        raise NotImplementedError

    @classmethod
    def request(cls, variant: Variant, problem: Problem) -> Request:
        """A variant as a request. ValueError without a specification."""
        if problem.operation is None:
            raise ValueError(f"{variant.name}: a {cls.title} kernel needs `spec`, a specification")
        names = cls.names(variant.kernel)
        given = {name: one for name, one in variant.constants.items() if name in names}
        grid = variant.grid if cls.for_gpu else None
        launched = replace(variant, grid=grid, constants=given)
        return Request(launched, problem.operation, problem.output)

    # Compiled.

    @classmethod
    def compile(cls, variant: Variant, problem: Problem, sm: int) -> Built:
        """Compile it for the sizes of a problem; for a GPU, for a compute capability. Raises what
        its compiler raises."""
        raise NotImplementedError

    @classmethod
    def words(cls, error: Exception, kernel: Any, file: Path) -> str:
        """What its compiler says with an error, whole, and where it can with the line of the
        file."""
        return plain(str(error))

    @classmethod
    def launch(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Array]
    ) -> Launch:
        """Its PTX with these arrays, to be interpreted: of a language that is `for_gpu`."""
        raise NotImplementedError

    @classmethod
    def call(
        cls, variant: Variant, built: Built, problem: Problem, arrays: Mapping[str, Any]
    ) -> Callable[[], object]:
        """What is timed: on the CPU on arrays, on a GPU on its tensors, by name."""
        raise NotImplementedError

    @classmethod
    def arguments(
        cls, variant: Variant, problem: Problem, arrays: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The argument of each parameter."""
        given = problem.arguments(cls.names(variant.kernel), arrays, variant.constants)
        return {
            name: one.reshape(-1) if variant.flat and getattr(one, "shape", ()) else one
            for name, one in given.items()
        }


languages: Registry[type[Language]] = Registry("language of kernels", "lowbit_lab.languages")


def languages_that_can(ability: Ability) -> tuple[type[Language], ...]:
    """The languages with an ability."""
    return tuple(one for one in languages if one.can(ability))


def language_of(kernel: Any, ability: Ability) -> type[Language]:
    """The language of a kernel. TypeError if none takes it that has the ability."""
    able = languages_that_can(ability)
    for language in able:
        if language.takes(kernel):
            return language
    listed = " or ".join(one.written for one in able)
    raise TypeError(f"cannot {_WORDS[ability]} {kernel!r}; give {listed}")


def bound(request: Request) -> Subject:
    """The kernel of a request, bound to its operation by its language.

    ValueError or TypeError if what is given does not fit together, or no language interprets it.
    """
    return language_of(request.variant.kernel, "interpret").interpret(request)
