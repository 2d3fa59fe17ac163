"""Scratch memory for kernels: aligned, kept, and alive for as long as a call needs it."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest

from lowbit.jit import workspace as memory_of
from lowbit.jit.workspace import ALIGNMENT, Workspace, aligned_empty


def test_memory_is_aligned_and_kept() -> None:
    workspace = Workspace()
    memory, address = workspace.reserve(1000)
    assert len(memory) >= 1000
    assert address == memory.ctypes.data
    assert address % ALIGNMENT == 0
    assert workspace.reserve(10) is workspace.reserve(1000)
    assert workspace.reserve(1000)[1] == address


def test_what_one_call_holds_survives_another() -> None:
    """A signal handler may multiply matrices too, larger ones, before a call has begun."""
    workspace = Workspace()
    memory, address = workspace.reserve(1000)
    memory[:] = 77
    other, elsewhere = workspace.reserve(1 << 20)
    other[:] = 1
    assert elsewhere != address
    assert (memory == 77).all()


def test_small_arrays_that_last_share_large_pages() -> None:
    memory_of._slabs.clear()
    made = [aligned_empty((size,), np.uint8, lasting=True) for size in (1, 64, 1000, 1 << 20)]
    for i, one in enumerate(made):
        assert one.ctypes.data % ALIGNMENT == 0
        one[:] = i
    assert all((one == i).all() for i, one in enumerate(made))
    assert max(one.ctypes.data for one in made) - made[0].ctypes.data < 1 << 21


@pytest.mark.deep
def test_a_slab_is_gone_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of._slabs.clear()
    found: list[weakref.ref[Any]] = []
    real = mmap.mmap

    def noted(*args: Any) -> Any:
        found.append(weakref.ref(made := real(*args)))
        return made

    monkeypatch.setattr(memory_of.mmap, "mmap", noted)
    first, second = (aligned_empty((100,), np.uint8, lasting=True) for _ in range(2))
    memory_of._slabs.clear()
    del first
    gc.collect()
    assert found[0]() is not None
    del second
    gc.collect()
    assert found[0]() is None
