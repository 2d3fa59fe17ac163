"""Locks, properties and imports when a process forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lowbit.graph import Graph, Node, Session, Tensor
from lowbit.jit.compile import LOCK
from lowbit.registry.locks import Lock, cached_property, importing

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@contextmanager
def elsewhere(inside: Any) -> Iterator[threading.Event]:
    """Another thread is inside of a context until the event that is yielded is set."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with inside:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait(60)
    try:
        yield leave
    finally:
        leave.set()
        thread.join()


def in_child(call: Callable[[], bool]) -> bool:
    """Whether a call is true in a child, which ends if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        good = False
        try:
            good = call()
        finally:
            os._exit(0 if good else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    lock = Lock()

    def enters() -> bool:
        with lock, elsewhere(Lock()):
            return True

    with elsewhere(lock):
        assert in_child(enters)
    assert in_child(enters)


def test_a_lock_that_the_forking_thread_holds_stays_its_own() -> None:
    lock = Lock()
    with lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
    if not child:
        with lock:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class Slow:
    """Its property takes as long as the event is not set."""

    entered, leave = threading.Event(), threading.Event()

    @cached_property
    def answer(self) -> int:
        self.entered.set()
        self.leave.wait(60)
        return 42


def test_a_property_that_another_thread_computes() -> None:
    thread = threading.Thread(target=lambda: Slow().answer)
    thread.start()
    Slow.entered.wait(60)

    def computes() -> bool:
        Slow.leave.set()
        slow = Slow()
        return slow.answer == 42 and vars(slow) == {"answer": 42}

    assert in_child(computes)
    Slow.leave.set()
    thread.join()
    assert isinstance(Slow.answer, cached_property)


def test_a_session_that_another_thread_plans() -> None:
    weight = np.eye(8, dtype=np.float32)
    graph = Graph(
        inputs=("x",), outputs=("y",), constants={"w": weight},
        nodes=(Node("MatMul", ("x", "w"), ("y",)),),
        tensors={"x": Tensor("float32", ("rows", 8)), "w": Tensor("float32", (8, 8))},
    )  # fmt: skip
    session = Session(graph)
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    with elsewhere(session._lock):
        assert in_child(lambda: bool((session(x) == x).all()))


@pytest.mark.parametrize("held", [importing(), LOCK], ids=["an import", "a compilation"])
def test_a_fork_waits_for_what_cannot_be_left(held: Any) -> None:
    with elsewhere(held) as leave:
        threading.Timer(0.2, leave.set).start()
        assert in_child(leave.is_set)
