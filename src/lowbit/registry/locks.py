"""Locks and cached properties that a child of `fork` can use, whatever other threads did then.

A fork copies the memory of all threads, but only the thread that forks goes on in the child. A lock
that another thread holds would stay locked there for ever. So every lock of the library is one of
these, which are either renewed in the child or waited for before the fork.

`functools.cached_property` has such a lock on Python 3.11, one for all objects of a class.

Source: POSIX.1-2024, `fork`, "Rationale".
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

T = TypeVar("T")


class Lock:
    """A lock that one thread holds at a time, once; a context manager.

    In a child of `fork` it is free, unless the thread that forked holds it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0  # set after the lock is taken, and reset before it is free
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.release()

    def take_if_free(self) -> bool:
        """Whether it was free; then it is held, until `release`."""
        if not self._lock.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        return True

    def release(self) -> None:
        """Free it, by the thread that holds it."""
        self._owner = 0
        self._lock.release()

    def _renew(self) -> None:
        if self._owner != threading.get_ident():
            self._lock = threading.Lock()


_locks: WeakSet[Lock] = WeakSet()
_waited_for: list[AbstractContextManager[Any]] = []


def waited_for(lock: AbstractContextManager[Any]) -> None:
    """Let forks wait until no other thread holds this lock: what it guards cannot be left half
    done. Several are taken in the order in which they are named here, as everywhere."""
    _waited_for.append(lock)


class _Imports:
    """The threads that import modules in a call: a fork waits until they are done, since the locks
    of modules are Python's own, and stay locked in a child.

    Around such an import no lock is held, as modules wait for each other in any order.
    """

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()  # by thread
        self.change = threading.Condition(threading.Lock())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with self.change:
            self._begun[thread] += 1
        try:
            yield
        finally:
            with self.change:
                self._begun[thread] -= 1
                self.change.notify_all()

    def none(self) -> bool:
        """Whether no other thread imports. The caller holds `change`."""
        own = self._begun[threading.get_ident()]
        return self._begun.total() == own

    def renew(self) -> None:
        thread = threading.get_ident()
        self._begun = Counter({thread: self._begun[thread]})
        self.change = threading.Condition(threading.Lock())


importing = _Imports()
"""Around imports that happen in a call."""

_PATIENCE = 30.0  # seconds; an import may wait for what the thread that forks has


def _before_fork() -> None:
    """Take all locks at a time when nobody imports, who may need one of them."""
    until = monotonic() + _PATIENCE
    while True:
        with importing.change:
            importing.change.wait_for(importing.none, until - monotonic())
        for lock in _waited_for:
            lock.__enter__()
        importing.change.acquire()
        if importing.none() or monotonic() > until:
            return
        _after_fork()


def _after_fork() -> None:
    importing.change.release()
    for lock in reversed(_waited_for):
        lock.__exit__(None, None, None)


def _in_child() -> None:
    _after_fork()
    importing.renew()
    for lock in tuple(_locks):
        lock._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


class cached_property(Generic[T]):
    """A method whose result is kept in the object, as an attribute of its name.

    Threads that ask at the same time may each compute it: the first result stays.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self._name, self._function(instance))


# Modules that are imported when something of them is first used.


class Deferred:
    """Stands for a module that takes long to import and that many calls do without."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        with importing():
            value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found without this function from now on
        return value
