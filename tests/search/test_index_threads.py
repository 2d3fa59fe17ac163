"""An index that several threads use at once, that is copied, and that a fork takes along."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit import VectorIndex

THREADS = 4
CALLS = 40
VECTORS = np.random.default_rng(0).standard_normal((THREADS, CALLS, 3, 12)).astype(np.float32)
EACH = VECTORS[0, 0].shape[0]


def _at_once(*calls: Callable[[], Any]) -> None:
    """Run them in threads, and raise what one of them raised."""
    errors: list[BaseException] = []
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        try:
            ready.wait()
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _adding(index: VectorIndex, thread: int) -> Callable[[], None]:
    def add() -> None:
        for part in VECTORS[thread]:
            index.add(part)

    return add


@pytest.mark.parametrize("scale", ["vector", "dimension"])
def test_no_vector_is_lost(scale: Any) -> None:
    index = VectorIndex(12, scale=scale, metric="cosine")
    _at_once(*(_adding(index, thread) for thread in range(THREADS)))
    assert len(index) == THREADS * CALLS * EACH
    flat = VECTORS.reshape(-1, 12)
    # Each vector is there once, and what a call has added has neighbouring ids.
    _, ids = index.search(flat, 1)
    if scale == "vector":
        assert sorted(ids[:, 0]) == list(range(len(flat)))
        assert (np.diff(ids.reshape(-1, EACH), axis=1) == 1).all()


def test_searching_saving_and_counting_while_vectors_are_added(tmp_path: Path) -> None:
    index = VectorIndex(12)
    done = threading.Event()

    def add() -> None:
        try:
            for part in VECTORS.reshape(-1, EACH, 12):
                index.add(part)
        finally:
            done.set()

    def search() -> None:
        while not done.is_set():
            before = len(index)
            _, ids = index.search(VECTORS[0, 0], 10_000)
            found = (ids >= 0).sum(axis=1)
            assert before <= found[0] <= len(index)
            assert (found == found[0]).all()
            assert found[0] % EACH == 0

    def save() -> None:
        while not done.is_set():
            before = len(index)
            index.save(tmp_path / "index")
            assert before <= len(VectorIndex.load(tmp_path / "index", verify=True)) <= len(index)
            assert index.nbytes > 0 or not before

    _at_once(add, search, save)
    assert len(index) == VECTORS.size // 12


def test_scales_that_are_trained_while_vectors_are_added_serve_all_of_them() -> None:
    index = VectorIndex(12, scale="dimension")
    trained = [False]

    def progress(done: int, count: int) -> None:
        if not trained[0]:  # between the coding of these vectors and their adding
            trained[0] = True
            index.train(100 * VECTORS[0, 0])

    index.add(VECTORS[0, 1], progress)
    other = VectorIndex(12, scale="dimension")
    other.train(100 * VECTORS[0, 0])
    other.add(VECTORS[0, 1])
    for a, b in zip(index.search(VECTORS[0, 2], 3), other.search(VECTORS[0, 2], 3), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i))]
)
def test_copies_are_indices_of_their_own(copied: Callable[[VectorIndex], VectorIndex]) -> None:
    index = VectorIndex(12)
    index.add(VECTORS[0, 0])
    other = copied(index)
    other.add(VECTORS[0, 1])
    assert (len(index), len(other)) == (EACH, 2 * EACH)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_can_add_though_another_thread_was_adding() -> None:
    index = VectorIndex(12)
    index.add(VECTORS[0, 0])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with index._lock:
            held.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            index.add(VECTORS[0, 1])
        finally:
            os._exit(len(index))
    done.set()
    other.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2 * EACH
