"""Every implementation, ours and foreign, behind one protocol.

What times or checks one thus does the same to all. Each allocates its own result, as a user's
call does. A new one is a class with the `implementation` decorator, in a file of `peers/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowbit.bench.problem import Problem
from lowbit.spec import Case

Array = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """An implementation with its weights packed: `call` is what is timed, `read` makes its
    result the array [M, N] that the case asks for, whatever it stopped at itself."""

    call: Callable[[], Any]
    read: Callable[[Any], Array] = np.asarray


class Implementation(Protocol):
    """Something that can multiply two matrices.

    name: unique, for the table. ours: whether it is lowbit's own. isolated: whether it is to be
    tried in a process of its own first, since it can crash. pool: the threads that it runs on,
    by the name of what keeps them.
    """

    name: str
    ours: bool
    isolated: bool
    pool: str

    def available(self, case: Case) -> str | None:
        """None if it can run this case here, else the reason."""
        ...

    def library(self) -> tuple[str, str]:
        """The library that does the work, and its version. Only after `available`."""
        ...

    def isa(self, case: Case) -> str | None:
        """The instruction set that it uses, None if it does not tell."""
        ...

    def note(self, case: Case) -> str:
        """What it does otherwise than the case asks, "" if nothing."""
        ...

    def prepare(self, problem: Problem, threads: int) -> Prepared:
        """Pack the weights; what this does is not timed."""
        ...


_REGISTRY: dict[str, Implementation] = {}


_Class = TypeVar("_Class", bound=Callable[[], Implementation])


def implementation(cls: _Class) -> _Class:
    """Register a class whose instances are `Implementation`s; it is made without arguments."""
    made = cls()
    if made.name in _REGISTRY:
        raise ValueError(f"two implementations are called {made.name!r}; rename one")
    _REGISTRY[made.name] = made
    return cls


@cache
def _import_all() -> None:
    from lowbit.bench import peers

    for module in pkgutil.iter_modules(peers.__path__):
        importlib.import_module(f"{peers.__name__}.{module.name}")


def implementations() -> tuple[Implementation, ...]:
    """Every registered implementation, ours first, after importing every file of `peers/`."""
    _import_all()
    return tuple(sorted(_REGISTRY.values(), key=lambda one: not one.ours))


def find(name: str) -> Implementation:
    """The implementation of that name; ValueError lists the known ones."""
    known = {one.name: one for one in implementations()}
    if name not in known:
        raise ValueError(f"no implementation {name!r}; known are {', '.join(known)}")
    return known[name]
