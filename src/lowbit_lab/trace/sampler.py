"""Where threads are, from timers on each one's own processor time.

The kernel interrupts a thread after every so much time that it ran; a handler, machine code of
lowbit's own compiler, keeps the registers and a copy of the stack. It takes a microsecond or two
of every 4 ms, needs no permission to debug, and sees code without symbols as well as any other.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowbit import isa
from lowbit.isa.generic import minimum, select
from lowbit.jit.compile import Loaded, object_code
from lowbit.jit.function import Function, Int32, Text, Words, function_ir

CAPACITY = 2000
STACK_BYTES = 64 << 10
_MOST_THREADS = 1024
_INTERVAL_NS = 1_000_000  # the kernel looks at these clocks once a tick, mostly every 4 ms
_FIRST_SCAN_SECONDS, _SCAN_SECONDS = 0.005, 0.05

# Linux on x86-64: registers of `ucontext_t`, in the order of <sys/ucontext.h>, by DWARF's numbers.
_REGISTERS = 8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7, 16
_STACK_POINTER = _REGISTERS.index(7)
_SIGEV_THREAD_ID = 4
_THREAD_CLOCK = 6  # of another thread: its number, complemented and shifted by 3, and this


class _Thread(ctypes.Structure):
    _fields_ = (("stack_pointer", ctypes.c_int64), ("stack_end", ctypes.c_int64))


class _Record(ctypes.Structure):
    _fields_ = (
        ("thread", ctypes.c_int64), ("length", ctypes.c_int64),
        ("registers", ctypes.c_int64 * len(_REGISTERS)), ("stack", ctypes.c_uint8 * STACK_BYTES),
    )  # fmt: skip


class _Information(ctypes.Structure):
    """siginfo_t."""

    _fields_ = (("signal", ctypes.c_char * 24), ("value", ctypes.c_int64))


class _Context(ctypes.Structure):
    """ucontext_t."""

    _fields_ = (("flags", ctypes.c_char * 40), ("registers", ctypes.c_int64 * len(_REGISTERS)))


def _handler(threads: int, count: int, records: int) -> Text:
    """What the signal calls, with memory at these addresses."""

    def handler(k: Function, signal: Int32, info: _Information, context: _Context) -> None:
        thread = info.value & 0xFFFFFFFF
        own = k.view(_Thread, k.index(threads))[thread]
        pointer = own.stack_pointer = context.registers[_STACK_POINTER]
        mapped = own.stack_end - pointer
        # A thread's own data lie behind its stack. What comes then may be another's, and gone by
        # the time it is copied. The main thread's lie elsewhere.
        to_own = k.call("pthread_self") - pointer
        room = select((to_own > 0) & (to_own < mapped), to_own, mapped)
        k.return_unless(room > 0)
        number = k.fetch("add", k.view(Words, k.index(count)).pointer, 1, "monotonic")
        k.return_unless(number < CAPACITY)
        record = k.view(_Record, k.index(records))[number]
        record.thread = thread
        record.length = minimum(room, k.index(STACK_BYTES))
        k.copy(record.at("registers"), context.at("registers"), 8 * len(_REGISTERS))
        k.copy(record.at("stack"), pointer, record.length)

    return handler


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_long),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_ubyte * 44),
    )


@dataclass(frozen=True)
class Sample:
    """A thread where it was: its registers by DWARF's numbers (16: the next instruction's
    address), and the bytes of its stack from the stack pointer up."""

    thread: int
    registers: tuple[int, ...]
    stack: bytes

    @property
    def address(self) -> int:
        return self.registers[16]


@dataclass(frozen=True)
class Mapping:
    """A part of a process's memory; path is "" where it is no file's."""

    start: int
    end: int
    access: str
    offset: int
    path: str


def mappings() -> list[Mapping]:
    """Of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in place.split("-"))
        found.append(Mapping(start, end, access, int(offset, 16), path[0] if path else ""))
    return found


class Sampler:
    """Samples of this process's threads while it is used as a context; those that it meets later
    are watched from then on."""

    def __init__(self) -> None:
        self._count = np.zeros(1, np.int64)
        self._threads = np.zeros(_MOST_THREADS, _Thread)
        self._records = np.zeros(CAPACITY, _Record)
        memory = (self._threads, self._count, self._records)
        text = function_ir(_handler(*(array.ctypes.data for array in memory)))
        # Without vectors: the thread that is interrupted may be anywhere.
        self._code = Loaded(object_code(text, isa.GENERIC), "handler", isa.GENERIC)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timers: dict[int, ctypes.c_void_p] = {}  # by thread
        self._names: list[int] = []
        self._stacks: Counter[tuple[tuple[str, int, str], ...]] = Counter()
        self.own_seconds = 0.0  # of the processor, that watching took besides the handler

    @property
    def count(self) -> int:
        return min(int(self._count[0]), CAPACITY)

    @contextmanager
    def running(self) -> Iterator[Sampler]:
        """RuntimeError if the system refuses the timers."""
        action, before = _Action(self._code.address), _Action()
        action.flags = 0x14000004  # SA_SIGINFO, SA_ONSTACK, SA_RESTART: no call fails by it
        self._libc.sigaction(signal.SIGPROF, ctypes.byref(action), ctypes.byref(before))
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        self._scan(set())
        # The main thread may be all that runs: it does not wait for the watch to find its stack.
        stack = next((one.end for one in mappings() if one.path == "[stack]"), 0)
        self._threads["stack_end"][self._names.index(os.getpid())] = stack
        watch.start()
        try:
            yield self
        finally:
            ended.set()
            watch.join()
            for timer in self._timers.values():
                self._libc.timer_delete(timer)
            # One that is on its way must find something that takes it.
            action.handler, action.flags = signal.SIG_IGN, 0
            self._libc.sigaction(signal.SIGPROF, ctypes.byref(action), None)

    def _watch(self, ended: threading.Event) -> None:
        own = {threading.get_native_id()}
        while not ended.wait(_SCAN_SECONDS if self.count else _FIRST_SCAN_SECONDS):
            self._scan(own)
            self._look()
            self.own_seconds = time.thread_time()

    def _look(self) -> None:
        """At the Python functions of the main thread, which is at work."""
        frame, found = sys._current_frames().get(threading.main_thread().ident or 0), []
        while frame is not None:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self._stacks[tuple(found)] += 1

    def python(self, below: str, caller: str) -> tuple[tuple[str, int, str], ...]:
        """File, line and name of the functions that the main thread was seen in most often, the
        innermost first, as far as they were called by a function of a file."""
        seen: Counter[tuple[tuple[str, int, str], ...]] = Counter()
        for stack, count in self._stacks.items():
            own = [number for number, frame in enumerate(stack) if frame[0] == below]
            if own and stack[own[0]][2] == caller:  # not what the file calls for itself
                seen[stack[: own[0]]] += count
        seen.pop((), None)  # between two calls
        return seen.most_common(1)[0][0] if seen else ()

    def _scan(self, skip: set[int]) -> None:
        """Set timers for new threads, and find the stacks of those that were met once."""
        for name in os.listdir("/proc/self/task"):
            thread = int(name)
            if thread not in self._timers and thread not in skip:
                self._set_timer(thread)
        places, ends = self._threads["stack_pointer"], self._threads["stack_end"]
        new = np.flatnonzero((places != 0) & (ends == 0))
        if len(new):
            known = mappings()
            for index in new:
                found = (one.end for one in known if one.start <= places[index] < one.end)
                ends[index] = next(found, 0)

    def _set_timer(self, thread: int) -> None:
        if len(self._names) == _MOST_THREADS:
            return
        event = _Event(len(self._names), signal.SIGPROF, _SIGEV_THREAD_ID, thread)
        timer = ctypes.c_void_p()
        clock = ctypes.c_int(~thread << 3 | _THREAD_CLOCK)
        if self._libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)):
            if Path(f"/proc/self/task/{thread}").exists():
                why = os.strerror(ctypes.get_errno())
                raise RuntimeError(f"no timer for a thread's own time: timer_create says {why!r}")
            return
        self._names.append(thread)
        self._timers[thread] = timer
        every = (ctypes.c_long * 4)(0, _INTERVAL_NS, 0, _INTERVAL_NS)
        self._libc.timer_settime(timer, 0, every, None)

    def samples(self) -> list[Sample]:
        """What was kept, once it has ended."""
        found = []
        for record in self._records[: self.count]:
            registers = [0] * len(_REGISTERS)
            for number, value in zip(_REGISTERS, record["registers"].view(np.uint64), strict=True):
                registers[number] = int(value)
            stack = record["stack"][: record["length"]].tobytes()
            found.append(Sample(self._names[record["thread"]], tuple(registers), stack))
        return found
