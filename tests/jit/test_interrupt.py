"""Ctrl-C in calls of several threads, without PyTorch: nothing goes on once a call has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

# Items of very different length: this thread is done, and interrupted, while others still work.
UNEVEN = """
import ctypes, os, signal, sys, threading, time
import numpy as np
from lowbit.isa import active
from lowbit.isa.types import Int, S32Pointer, s32
from lowbit.jit.kernel import kernel

@kernel
def uneven(k, out: S32Pointer, steps: Int) -> None:
    for item in k.parallel(k.index(4)):
        state = k.register(item.to(s32))
        for _ in k.range(0, steps * (item + 1)):
            state.value = (state.value ^ 0x55) * 1664525 + 1013904223
        (out + item).store(state.value)

program = uneven.program(active())
armed = False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
interrupted = changed = 0
while interrupted < 40:
    for after in (0.0005, 0.002, 0.004, 0.008):
        out = np.zeros(4, np.int32)
        signal.setitimer(signal.ITIMER_REAL, after)
        armed = True
        try:
            program(4, out, 1 << 20)
            armed = False
        except KeyboardInterrupt:
            out[:] = 77
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        if (out == 77).any():
            time.sleep(0.02)
            changed += (out != 77).any()
assert "torch" not in sys.modules
print(interrupted >= 40, changed)
"""

# Operands are unmapped as soon as the call has ended: whoever still reads them ends the process.
UNMAPPED = """
import itertools, mmap, signal
import numpy as np
import lowbit

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

armed = False
signal.signal(signal.SIGALRM, interrupt)
b = lowbit.pack(np.ones((512, 512), np.int8))
lowbit.matmul(np.ones((512, 512), np.uint8), b, threads=4)
interrupted = 0
for after in itertools.cycle(np.linspace(1e-4, 4e-3, 9).tolist()):
    if interrupted == 200:
        break
    memory, target = mmap.mmap(-1, 1 << 18), mmap.mmap(-1, 1 << 20)
    a = np.frombuffer(memory, np.uint8).reshape(512, 512)
    out = np.frombuffer(target, np.int32).reshape(512, 512)
    signal.setitimer(signal.ITIMER_REAL, after)
    armed = True
    try:
        for _ in range(50):
            lowbit.matmul(a, b, out=out, threads=4)
        armed = False
    except KeyboardInterrupt as error:
        interrupted += 1
        error.__traceback__ = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    del a, out
    memory.close()
    target.close()
print(interrupted == 200, 0)
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="the timers are Linux's")
@pytest.mark.parametrize("code", [UNEVEN, UNMAPPED], ids=["writes", "memory"])
def test_nothing_goes_on_after_an_interrupt(words: Callable[..., list[str]], code: str) -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
    ]
    try:
        assert words(code) == ["True", "0"]
    finally:
        for process in busy:
            process.kill()
            process.wait()
