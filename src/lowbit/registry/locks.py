"""Locks and cached properties that a child of `fork` can use, whatever other threads did then.

A fork copies the memory of all threads, but only the thread that forks goes on in the child. A lock
that another thread holds would stay locked there for ever. So every lock of the library is one of
these, which are either renewed in the child or waited for before the fork.

`functools.cached_property` has such a lock on Python 3.11, one for all objects of a class.

Source: POSIX.1-2024, `fork`, "Rationale".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def _before_fork() -> None:
    for lock in _waited_for:
        lock.__enter__()


def _after_fork() -> None:
    for lock in reversed(_waited_for):
        lock.__exit__(None, None, None)


def _in_child() -> None:
    _after_fork()
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
