"""Scratch memory for kernels: aligned, kept, and alive for as long as a call needs it."""

from __future__ import annotations

from lowbit.jit.workspace import ALIGNMENT, Workspace


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
