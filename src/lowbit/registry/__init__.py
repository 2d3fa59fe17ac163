"""Where things make themselves known: a decorator, one import loop, and no list kept by hand.

    micro_kernels: Registry[MicroKernel] = Registry("micro-kernel", "lowbit.kernels.cpu")

    @micro_kernels.register("tiles")
    class Tiles(MicroKernel): ...

The named modules, and every module below those that are packages, are imported when something is
first looked up, so a new file is found by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar, cast

from lowbit.registry.locks import importing

T = TypeVar("T")
S = TypeVar("S")


def meant(name: str, known: Iterable[str]) -> str:
    """What to add to a refusal of a name: the nearest of those that are known, if one is near."""
    from difflib import get_close_matches  # only where something went wrong

    nearest = get_close_matches(name, list(known), 1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


class Registry(Generic[T]):
    """Things of one kind, by name, in the order in which their files are imported."""

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._packages = packages
        self._things: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, thing: T) -> T:
        """Make `thing` known. ValueError: the name is taken."""
        if name in self._things:
            raise ValueError(f"there is a {self.kind} called {name!r} already")
        self._things[name] = thing
        return thing

    def register(self, name: str) -> Callable[[S], S]:
        """The decorator: `add` of what it stands above."""

        def add(thing: S) -> S:
            self.add(name, cast(T, thing))
            return thing

        return add

    def load(self) -> dict[str, T]:
        """All of them by name, after every module of the packages has been imported."""
        if not self._loaded:
            with importing():
                for package in self._packages:
                    module = importlib.import_module(package)
                    path = getattr(module, "__path__", ())
                    for found in pkgutil.walk_packages(path, f"{package}."):
                        importlib.import_module(found.name)
            self._loaded = True
        return self._things

    def get(self, name: str) -> T:
        """ValueError, with the names that there are, if none is called so."""
        things = self.load()
        if name not in things:
            known = ", ".join(things)
            raise ValueError(
                f"no {self.kind} is called {name!r}{meant(name, things)}; known: {known}"
            )
        return things[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self.load())

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self.load().values()))

    def __len__(self) -> int:
        return len(self.load())
