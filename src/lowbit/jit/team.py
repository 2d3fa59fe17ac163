"""A pool of threads: `GOMP_parallel` for a process without an OpenMP runtime to share.

Whoever calls never waits for a thread that holds no item of work. A call writes what it wants to
one of a few tasks, rings, and enters the kernel itself; workers enter as long as a task is open.
When all items are done it closes the task and returns, though a worker may just have lost its core
inside: such a worker finds no item left, and all that it still reads are the kernel's slots, of
which the task holds a copy. Nothing touches the operands of a call that has returned, whatever
exception or Ctrl-C follows.

Workers spin for a quarter of a millisecond, then sleep on a futex; who wakes wakes others. They are
started when first needed, block all signals, and live as long as the process; a child after `fork`
starts its own. Where all tasks are taken, a call works alone.

Sources: futex(2), prctl(2); U. Drepper, "Futexes Are Tricky", 2011.
"""

from __future__ import annotations

import platform

from lowbit.isa import get, host
from lowbit.jit.cache import load
from lowbit.jit.compile import Loaded

_NAME = "lowbit_team"
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
_PAUSE = "aarch64.hint(i32 1)" if _ARM else "x86.sse2.pause()"
_SET_NAME = 15  # PR_SET_NAME
_INSIDE = 1 << 32

# A task: how many threads may still enter (low half of the word) and how many are inside (high
# half), the caller among them: 0 is a free task; the kernel; its slots, and for how many there is
# memory. The slots that are given are preceded by their number. 128 bytes hold any system's
# pthread_attr_t and sigset_t.
_IR = f"""
%task = type {{ i64, ptr, ptr, i64, [32 x i8] }}
@tasks = internal global [{TASKS} x %task] zeroinitializer, align 64
@bell = internal global i32 0, align 64
@asleep = internal global i32 0, align 64
@wanted = internal global i64 0, align 64
@alive = internal global i64 0, align 8
@thread = internal constant [{len(THREAD) + 1} x i8] c"{THREAD}\\00"

declare i32 @pthread_attr_init(ptr)
declare i32 @pthread_attr_setstacksize(ptr, i64)
declare i32 @pthread_attr_setdetachstate(ptr, i32)
declare i32 @pthread_attr_destroy(ptr)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_sigmask(i32, ptr, ptr)
declare i32 @sigfillset(ptr)
declare i64 @syscall(i64, ...)
declare i32 @prctl(i32, ...)
declare ptr @realloc(ptr, i64)
declare void @llvm.{_PAUSE.replace("32 1", "32")}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define void @{_NAME}(ptr %kernel, ptr %slots, i32 %threads, i32 %flags) {{
  %several = icmp sgt i32 %threads, 1
  br i1 %several, label %look, label %alone
alone:
  call void %kernel(ptr %slots)
  ret void
look:
  %i = phi i64 [ 0, %0 ], [ %next, %look_on ]
  %task = getelementptr %task, ptr @tasks, i64 %i
  %claim = cmpxchg ptr %task, i64 0, i64 {_INSIDE} acquire monotonic
  %claimed = extractvalue {{ i64, i1 }} %claim, 1
  br i1 %claimed, label %measure, label %look_on
look_on:
  %next = add i64 %i, 1
  %more_tasks = icmp ult i64 %next, {TASKS}
  br i1 %more_tasks, label %look, label %alone
measure:
  %words_at = getelementptr i64, ptr %slots, i64 -1
  %words = load i64, ptr %words_at
  %bytes = shl i64 %words, 3
  %kernel_at = getelementptr %task, ptr %task, i64 0, i32 1
  %copy_at = getelementptr %task, ptr %task, i64 0, i32 2
  %room_at = getelementptr %task, ptr %task, i64 0, i32 3
  %room = load i64, ptr %room_at
  %fits = icmp ule i64 %bytes, %room
  br i1 %fits, label %fill, label %enlarge
enlarge:
  %old = load ptr, ptr %copy_at
  %new = call ptr @realloc(ptr %old, i64 %bytes)
  %failed = icmp eq ptr %new, null
  br i1 %failed, label %give_up, label %enlarged
give_up:
  store atomic i64 0, ptr %task release, align 8
  br label %alone
enlarged:
  store ptr %new, ptr %copy_at
  store i64 %bytes, ptr %room_at
  br label %fill
fill:
  %copy = load ptr, ptr %copy_at
  call void @llvm.memcpy.p0.p0.i64(ptr %copy, ptr %slots, i64 %bytes, i1 false)
  store ptr %kernel, ptr %kernel_at
  %wide = zext i32 %threads to i64
  %others = sub i64 %wide, 1
  %before = atomicrmw add ptr @wanted, i64 %others monotonic
  %all = add i64 %before, %others
  call void @start(i64 %all)
  %opened = atomicrmw add ptr %task, i64 %others release
  %rung = atomicrmw add ptr @bell, i32 1 seq_cst
  call void @wake()
  call void %kernel(ptr %copy)
  %closed = atomicrmw and ptr %task, i64 -{_INSIDE} monotonic
  %left = atomicrmw sub ptr %task, i64 {_INSIDE} release
  %after = atomicrmw sub ptr @wanted, i64 %others monotonic
  ret void
}}

define internal void @wake() {{
  %asleep = load atomic i32, ptr @asleep seq_cst, align 4
  %some = icmp ne i32 %asleep, 0
  br i1 %some, label %call, label %done
call:
  %woken = call i64 (i64, ...) @syscall(i64 {_FUTEX}, ptr @bell, i64 {_WAKE}, i64 {_WOKEN}, ptr null, ptr null, i64 0)
  br label %done
done:
  ret void
}}

define internal void @start(i64 %wanted) {{
  %thread = alloca i64
  %attributes = alloca [128 x i8], align 16
  %signals = alloca [128 x i8], align 16
  %before = alloca [128 x i8], align 16
  br label %look
look:
  %alive = load atomic i64, ptr @alive monotonic, align 8
  %enough = icmp uge i64 %alive, %wanted
  br i1 %enough, label %done, label %count
count:
  %more = add i64 %alive, 1
  %change = cmpxchg ptr @alive, i64 %alive, i64 %more monotonic monotonic
  %changed = extractvalue {{ i64, i1 }} %change, 1
  br i1 %changed, label %create, label %look
create:
  call i32 @sigfillset(ptr %signals)
  call i32 @pthread_sigmask(i32 2, ptr %signals, ptr %before)
  call i32 @pthread_attr_init(ptr %attributes)
  call i32 @pthread_attr_setstacksize(ptr %attributes, i64 {_STACK})
  call i32 @pthread_attr_setdetachstate(ptr %attributes, i32 1)
  %failed = call i32 @pthread_create(ptr %thread, ptr %attributes, ptr @work, ptr null)
  call i32 @pthread_attr_destroy(ptr %attributes)
  call i32 @pthread_sigmask(i32 2, ptr %before, ptr null)
  %started = icmp eq i32 %failed, 0
  br i1 %started, label %look, label %without
without:
  %fewer = atomicrmw sub ptr @alive, i64 1 monotonic
  br label %done
done:
  ret void
}}

define internal ptr @work(ptr %unused) {{
  %named = call i32 (i32, ...) @prctl(i32 {_SET_NAME}, ptr @thread)
  br label %begin
begin:
  %seen = load atomic i32, ptr @bell acquire, align 4
  br label %look
look:
  %i = phi i64 [ 0, %begin ], [ %i, %enter ], [ %next, %look_on ]
  %task = getelementptr %task, ptr @tasks, i64 %i
  %state = load atomic i64, ptr %task monotonic, align 8
  %open = and i64 %state, {_INSIDE - 1}
  %may = icmp ne i64 %open, 0
  br i1 %may, label %enter, label %look_on
look_on:
  %next = add i64 %i, 1
  %more_tasks = icmp ult i64 %next, {TASKS}
  br i1 %more_tasks, label %look, label %spin
enter:
  %entering = add i64 %state, {_INSIDE - 1}
  %entry = cmpxchg ptr %task, i64 %state, i64 %entering acquire monotonic
  %entered = extractvalue {{ i64, i1 }} %entry, 1
  br i1 %entered, label %run, label %look
run:
  %last = icmp eq i64 %open, 1
  br i1 %last, label %compute, label %share
share:
  call void @wake()
  br label %compute
compute:
  %kernel_at = getelementptr %task, ptr %task, i64 0, i32 1
  %slots_at = getelementptr %task, ptr %task, i64 0, i32 2
  %kernel = load ptr, ptr %kernel_at
  %slots = load ptr, ptr %slots_at
  call void %kernel(ptr %slots)
  %left = atomicrmw sub ptr %task, i64 {_INSIDE} release
  br label %begin
spin:
  %spins = phi i64 [ 0, %look_on ], [ %spun, %still ]
  %now = load atomic i32, ptr @bell acquire, align 4
  %same = icmp eq i32 %now, %seen
  br i1 %same, label %still, label %begin
still:
  call void @llvm.{_PAUSE}
  %spun = add i64 %spins, 1
  %tired = icmp ugt i64 %spun, {_SPINS}
  br i1 %tired, label %sleep, label %spin
sleep:
  %more_asleep = atomicrmw add ptr @asleep, i32 1 seq_cst
  %seen_wide = zext i32 %seen to i64
  %waited = call i64 (i64, ...) @syscall(i64 {_FUTEX}, ptr @bell, i64 {_WAIT}, i64 %seen_wide, ptr null, ptr null, i64 0)
  %fewer_asleep = atomicrmw sub ptr @asleep, i32 1 seq_cst
  br label %begin
}}
"""  # noqa: E501

_kept: list[Loaded] = []  # threads that race here load it twice


def address() -> int:
    """Of the function: void (kernel, its slots, number of threads, unused)."""
    if not _kept:
        _kept.append(load(_NAME, get("generic"), lambda: _IR))
    return _kept[0].address


def forget() -> None:
    """Start anew, in a child after `fork`, which has none of the threads."""
    _kept.clear()
