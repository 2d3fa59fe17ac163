"""A pool of threads: `GOMP_parallel` for a process without an OpenMP runtime to share.

Whoever calls never waits for a thread that holds no item of work. A call writes what it wants to
one of a few tasks, rings, and enters the kernel itself; workers enter as long as a task is open.
When all items are done it closes the task and returns, though a worker may just have lost its core
inside: such a worker finds no item left, and all that it still reads are the call's words (see
jit.area), of which the task holds a copy. Nothing touches the operands of a call that has returned,
whatever exception or Ctrl-C follows.

Workers spin for a quarter of a millisecond, then sleep on a futex; who wakes wakes others. They are
started when first needed, block all signals, and live as long as the process; a child after `fork`
starts its own. Where all tasks are taken, a call works alone.

Sources: futex(2), prctl(2); U. Drepper, "Futexes Are Tricky", 2011.
"""

from __future__ import annotations

import ctypes
import platform

from lowbit.isa import host
from lowbit.isa.types import Int, s32, s64, u8
from lowbit.jit.compile import Loaded
from lowbit.jit.function import Bit, Function, Int32, Words, compiled

THREAD = "lowbit"  # the name of its threads, as the system knows them
TASKS = 8  # calls that share the pool at the same time
# Bytes. What kernels need is far less; glibc keeps up to 40 MiB of stacks for the next threads.
_STACK = 1 << 20
# Pauses before a worker sleeps, some 250 µs, as far as calls that follow each other may be apart.
# PAUSE takes about 140 cycles on Intel's CPUs, 40 to 65 on AMD's, and YIELD on AArch64 hardly any.
_SPINS = 1 << 12 if host.vendor() == "GenuineIntel" else 1 << 14
_WOKEN = 4  # sleepers that a thread wakes
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT, FUTEX_WAKE, of memory that no other process sees
_ARM = platform.machine() == "aarch64"
_FUTEX = 98 if _ARM else 202  # the number of the system call
_SET_NAME = 15  # PR_SET_NAME
_INSIDE = 1 << 32

_SET_MASK, _DETACHED = 2, 1  # SIG_SETMASK, PTHREAD_CREATE_DETACHED
_ROOM = 128  # bytes, which hold any system's pthread_attr_t and sigset_t


class _Task(ctypes.Structure):
    """`state`: how many threads may still enter (low half) and how many are inside (high half), the
    caller among them; 0 is a free task. Its slots are a copy, with memory for `room` bytes."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("state", "kernel", "slots", "room")),
        ("rest", ctypes.c_char * 32),
    )


class _Team(ctypes.Structure):
    """What all threads share: each number that many change in a cache line of its own."""

    _fields_ = (
        ("tasks", _Task * TASKS),
        ("bell", ctypes.c_int32), ("line_0", ctypes.c_char * 60),
        ("asleep", ctypes.c_int32), ("line_1", ctypes.c_char * 60),
        ("wanted", ctypes.c_int64), ("line_2", ctypes.c_char * 56),
        ("alive", ctypes.c_int64),
    )  # fmt: skip


def lowbit_team(k: Function, kernel: Int, slots: Words, threads: Int32, unused: Int32) -> None:
    """Run a kernel, with other threads where there is a task free. The number of its slots stands
    before them."""
    for _ in k.unless(k.call(_shared, kernel, slots, threads)):
        k.call(kernel, slots, returns=None)


def _shared(k: Function, kernel: Int, slots: Words, threads: Int32) -> Bit:
    """Whether the kernel was run with other threads."""
    k.return_unless(threads > 1, False)
    team = k.shared(_Team)
    for i in k.range(0, TASKS):
        task = team.tasks[i]
        for _ in k.when(k.replace(task.at("state"), 0, _INSIDE, "acquire")):
            for _ in k.unless(k.call(_filled, task, kernel, slots)):
                k.store_atomic(task.at("state"), 0, "release")
                k.returns(False)
            others = threads.to(s64) - 1
            before = k.fetch("add", team.at("wanted"), others, "monotonic")
            k.call(_start, before + others)
            k.fetch("add", task.at("state"), others, "release")
            k.fetch("add", team.at("bell"), 1, "seq_cst")
            k.call(_wake)
            k.call(kernel, task.slots, returns=None)
            k.fetch("and", task.at("state"), -_INSIDE, "monotonic")
            k.fetch("sub", task.at("state"), _INSIDE, "release")
            k.fetch("sub", team.at("wanted"), others, "monotonic")
            k.returns(True)
    return False


def _filled(k: Function, task: _Task, kernel: Int, slots: Words) -> Bit:
    """Put a call into a task, unless there is no memory."""
    size = slots[-1] * 8
    for _ in k.when(task.room < size):
        larger = k.call("realloc", task.slots, size)
        k.return_if(larger.equals(0), False)
        task.slots, task.room = larger, size
    k.copy(task.slots, slots, size)
    task.kernel = kernel
    return True


def _wake(k: Function) -> None:
    """Wake some of those that sleep."""
    team = k.shared(_Team)
    for _ in k.unless(k.load_atomic(team.at("asleep"), "seq_cst").equals(0)):
        k.call("syscall", _FUTEX, team.at("bell"), _WAKE, _WOKEN, 0, 0, 0, fixed=1)


def _start(k: Function, wanted: Int) -> None:
    """Create threads until as many as that live, or no more can be created."""
    alive_at = k.shared(_Team).at("alive")
    for _ in k.loop():
        alive = k.load_atomic(alive_at, "monotonic")
        k.return_unless(alive < wanted)
        for _ in k.when(k.replace(alive_at, alive, alive + 1, "monotonic")):
            for _ in k.unless(k.call(_created)):
                k.fetch("sub", alive_at, 1, "monotonic")
                k.returns()


def _created(k: Function) -> Bit:
    """Create a thread that blocks all signals."""
    thread = k.local(s64, 1)
    attributes, signals, before = (k.local(u8, _ROOM) for _ in range(3))
    block, detached = k.constant(_SET_MASK, s32), k.constant(_DETACHED, s32)
    k.call("sigfillset", signals, returns=s32)
    k.call("pthread_sigmask", block, signals, before, returns=s32)
    k.call("pthread_attr_init", attributes, returns=s32)
    k.call("pthread_attr_setstacksize", attributes, _STACK, returns=s32)
    k.call("pthread_attr_setdetachstate", attributes, detached, returns=s32)
    failed = k.call("pthread_create", thread, attributes, _work, 0, returns=s32)
    k.call("pthread_attr_destroy", attributes, returns=s32)
    k.call("pthread_sigmask", block, before, 0, returns=s32)
    return failed.equals(0)


def _work(k: Function, unused: Int) -> Int:
    """What a thread of the pool does."""
    k.call("prctl", k.constant(_SET_NAME, s32), k.text(THREAD), returns=s32, fixed=1)
    for _ in k.loop():
        seen = k.load_atomic(k.shared(_Team).at("bell"), "acquire")
        for _ in k.unless(k.call(_helped)):
            k.call(_wait, seen)
    return k.index(0)


def _helped(k: Function) -> Bit:
    """Whether there was an open task, whose kernel has been run."""
    for i in k.range(0, TASKS):
        task = k.shared(_Team).tasks[i]
        places = k.call(_entered, task)
        for _ in k.unless(places.equals(0)):
            for _ in k.when(places > 1):
                k.call(_wake)
            k.call(task.kernel, task.slots, returns=None)
            k.fetch("sub", task.at("state"), _INSIDE, "release")
            k.returns(True)
    return False


def _entered(k: Function, task: _Task) -> Int:
    """Enter a task: how many might, this thread among them. 0: it is not open."""
    for _ in k.loop():
        state = k.load_atomic(task.at("state"), "monotonic")
        places = state & (_INSIDE - 1)
        k.return_if(places.equals(0), 0)
        k.return_if(k.replace(task.at("state"), state, state + (_INSIDE - 1), "acquire"), places)
    return k.index(0)


def _wait(k: Function, seen: Int32) -> None:
    """Until the bell is another than was seen: awake for a while, then asleep."""
    team = k.shared(_Team)
    for _ in k.range(0, _SPINS + 1):
        k.return_unless(k.load_atomic(team.at("bell"), "acquire").equals(seen))
        if _ARM:
            k.call("llvm.aarch64.hint", k.constant(1, s32), returns=None)
        else:
            k.pause()
    k.fetch("add", team.at("asleep"), 1, "seq_cst")
    k.call("syscall", _FUTEX, team.at("bell"), _WAIT, seen.to(s64), 0, 0, 0, fixed=1)
    k.fetch("sub", team.at("asleep"), 1, "seq_cst")


_kept: list[Loaded] = []  # threads that race here load it twice


def address() -> int:
    """Of the function: void (kernel, its slots, number of threads, unused)."""
    if not _kept:
        _kept.append(compiled(lowbit_team))
    return _kept[0].address


def forget() -> None:
    """Start anew, in a child after `fork`, which has none of the threads."""
    _kept.clear()
