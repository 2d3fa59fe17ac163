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
from lowbit.jit.compile import Loaded, object_code

CAPACITY = 2000
STACK_BYTES = 64 << 10
_MOST_THREADS = 1024
_HEADER, _STACK_AT = 16, 256  # of a record: its thread and its stack's length; the copy
_RECORD = _STACK_AT + STACK_BYTES
_INTERVAL_NS = 1_000_000  # the kernel looks at these clocks once a tick, mostly every 4 ms
_FIRST_SCAN_SECONDS, _SCAN_SECONDS = 0.005, 0.05

# Linux on x86-64: registers of `ucontext_t`, in the order of <sys/ucontext.h>, by DWARF's numbers.
_REGISTERS_AT, _REGISTERS = 40, (8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7, 16)
_SIGEV_THREAD_ID = 4
_THREAD_CLOCK = 6  # of another thread: its number, complemented and shifted by 3, and this

# A thread's own data lie behind its stack, where fs:0 points to them: what comes then may be
# another's, and gone by the time it is copied. The main thread's lie elsewhere.
_HANDLER = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define void @handler(i32 %signal, ptr %info, ptr %context) {{
  %value = getelementptr i8, ptr %info, i64 24
  %index = load i64, ptr %value
  %thread = and i64 %index, 4294967295
  %at = getelementptr i8, ptr %context, i64 160
  %sp = load i64, ptr %at
  %threads = inttoptr i64 {threads} to ptr
  %own = getelementptr [2 x i64], ptr %threads, i64 %thread
  store i64 %sp, ptr %own
  %top_at = getelementptr i64, ptr %own, i64 1
  %top = load i64, ptr %top_at
  %mapped = sub i64 %top, %sp
  %self = load i64, ptr addrspace(257) null
  %own_part = sub i64 %self, %sp
  %above = icmp sgt i64 %own_part, 0
  %less = icmp slt i64 %own_part, %mapped
  %inside = and i1 %above, %less
  %room = select i1 %inside, i64 %own_part, i64 %mapped
  %some = icmp sgt i64 %room, 0
  br i1 %some, label %known, label %done
known:
  %next = inttoptr i64 {count} to ptr
  %number = atomicrmw add ptr %next, i64 1 monotonic
  %fits = icmp ult i64 %number, {capacity}
  br i1 %fits, label %keep, label %done
keep:
  %short = icmp ult i64 %room, {stack_bytes}
  %length = select i1 %short, i64 %room, i64 {stack_bytes}
  %offset = mul i64 %number, {record}
  %records = inttoptr i64 {records} to ptr
  %one = getelementptr i8, ptr %records, i64 %offset
  store i64 %thread, ptr %one
  %length_at = getelementptr i8, ptr %one, i64 8
  store i64 %length, ptr %length_at
  %to = getelementptr i8, ptr %one, i64 {header}
  %from = getelementptr i8, ptr %context, i64 {registers_at}
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 136, i1 false)
  %stack_to = getelementptr i8, ptr %one, i64 {stack_at}
  %stack = inttoptr i64 %sp to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %stack_to, ptr %stack, i64 %length, i1 false)
  br label %done
done:
  ret void
}}
"""


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
        self._threads = np.zeros((_MOST_THREADS, 2), np.int64)  # stack pointer, end of the stack
        self._records = np.zeros(CAPACITY * _RECORD, np.uint8)
        text = _HANDLER.format(
            threads=self._threads.ctypes.data,
            count=self._count.ctypes.data,
            records=self._records.ctypes.data,
            capacity=CAPACITY,
            record=_RECORD,
            stack_bytes=STACK_BYTES,
            header=_HEADER,
            stack_at=_STACK_AT,
            registers_at=_REGISTERS_AT,
        )
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
        new = np.flatnonzero((self._threads[:, 0] != 0) & (self._threads[:, 1] == 0))
        if len(new):
            known = mappings()
            for index in new:
                place = self._threads[index, 0]
                found = (one.end for one in known if one.start <= place < one.end)
                self._threads[index, 1] = next(found, 0)

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
        records = self._records.reshape(CAPACITY, _RECORD)[: self.count]
        found = []
        for record in records:
            thread, length = record[:_HEADER].view(np.int64)
            values = record[_HEADER : _HEADER + 8 * 17].view(np.uint64)
            registers = [0] * 17
            for number, value in zip(_REGISTERS, values, strict=True):
                registers[number] = int(value)
            stack = record[_STACK_AT : _STACK_AT + length].tobytes()
            found.append(Sample(self._names[thread], tuple(registers), stack))
        return found
