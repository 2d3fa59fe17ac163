"""A language of kernels is one class: what it is checked for and shown as follows from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest

from lowbit.spec.exercises import add_constant_blocks
from lowbit_lab import check, view
from lowbit_lab.backends.kernel import KernelBackend
from lowbit_lab.backends.language import language_of, languages
from lowbit_lab.run.bind import Parameter, TensorArgument
from lowbit_lab.run.memory import Lanes, Memory
from lowbit_lab.run.trace import Grid, Program


@dataclass(frozen=True)
class Scalar:
    """A function of a program's number, pointers and sizes, one element at a time."""

    function: Callable[..., None]


@dataclass(frozen=True)
class Pointer:
    """What such a function gets for a tensor."""

    memory: Memory
    name: str

    def _at(self, index: int) -> Lanes:
        tensor = self.memory.tensors[self.name]
        return Lanes(tensor, np.array([index * tensor.itemsize]))

    def load(self, index: int) -> Any:
        lanes = self._at(index)
        return self.memory.load(lanes, np.zeros(1, lanes.tensor.dtype))[0]

    def store(self, index: int, value: Any) -> None:
        lanes = self._at(index)
        self.memory.store(lanes, np.array([value], lanes.tensor.dtype))


class ScalarKernel(KernelBackend):
    """Runs them in Python."""

    title = "Python"
    written = "a Scalar"
    slow = True  # a step is one element

    @classmethod
    def takes(cls, kernel: Any) -> bool:
        return isinstance(kernel, Scalar)

    @classmethod
    def of(cls, kernel: Any) -> Self:
        names = list(inspect.signature(kernel.function).parameters)[1:]
        parameters = tuple(map(Parameter, names))
        return cls(text=kernel.function, description="Python", parameters=parameters)

    def run(
        self, memory: Memory, arguments: Mapping[str, Any], programs: Sequence[Program], grid: Grid
    ) -> None:
        given = {
            name: Pointer(memory, one.name) if isinstance(one, TensorArgument) else one
            for name, one in arguments.items()
        }
        for program in programs:
            memory.begin(program)
            self.text(program[0], **given)


def add(i: int, x: Pointer, z: Pointer, N0: int) -> None:
    z.store(i, x.load(i) + np.float32(10))


def add_the_next(i: int, x: Pointer, z: Pointer, N0: int) -> None:
    z.store(i, x.load(i + 1) + np.float32(10))


def add_to_the_first(i: int, x: Pointer, z: Pointer, N0: int) -> None:
    z.store(0, x.load(i) + np.float32(10))


def one_program_each(meta: Mapping[str, int]) -> int:
    return meta["N0"]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(languages.load(), "scalar", ScalarKernel)


@pytest.mark.parametrize(
    ("function", "finds"),
    [
        (add, set()),
        (add_the_next, {"out-of-bounds-load", "wrong-values"}),
        (add_to_the_first, {"write-conflict", "unwritten"}),
    ],
)
def test_a_new_language_is_checked(function: Callable[..., None], finds: set[str]) -> None:
    assert language_of(Scalar(function), "interpret") is ScalarKernel
    result = check(Scalar(function), add_constant_blocks, grid=one_program_each, stop=True)
    assert finds <= set(result.kinds), str(result)
    assert result.ok == (not finds)
    assert result.backend == "Python"


def test_a_new_language_is_shown() -> None:
    seen = view(Scalar(add), add_constant_blocks, grid=one_program_each, sizes={"N0": 3})
    assert [event["kind"] for event in seen.data["events"]] == ["load", "store"] * 3


def test_what_nothing_takes_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"cannot check 3; give .*a function under triton\.jit.* or a Scalar"
    ):
        check(3, add_constant_blocks)
